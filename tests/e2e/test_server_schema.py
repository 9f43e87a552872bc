# SPDX-License-Identifier: Apache-2.0
"""The server against its own OpenAPI document, by schemathesis: generated requests that fit it must
be answered or refused as documented, and those that do not must be refused.
"""

from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from server_process import ServerProcess, running_server

ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/debug/route"),
    ("GET", "/metrics"),
    ("GET", "/dashboard/data"),
]
# Only a body can be wrong, and only POST routes take one.
CASES = [
    pytest.param(method, path, mode, id=f"{method}-{path}-{mode.value}")
    for method, path in ROUTES
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or method == "POST"
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("stand-in:smollm2?scheduled=1", "--request-timeout-s", "1") as process:
        yield process


@pytest.fixture(scope="module")
def schema(server: ServerProcess) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_route_is_tested(schema: schemathesis.BaseSchema) -> None:
    documented = [result.ok() for result in schema.get_all_operations()]
    assert {(o.method.upper(), o.path) for o in documented} == set(ROUTES)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
    ],
)
def test_streams_are_as_documented(
    schema: schemathesis.BaseSchema, path: str, prompt: dict[str, object]
) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**prompt, limit: 5, "stream": True, "timeout_s": 60}
    case = schema[path]["POST"].Case(body=body)

    response = case.call_and_validate(timeout=60)

    assert response.status_code == 200
    assert response.headers["content-type"][0].startswith("text/event-stream")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_replies_are_as_documented(
    schema: schemathesis.BaseSchema, method: str, path: str, mode: GenerationMode
) -> None:
    operation = schema[path][method]

    @hypothesis.settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        # A schema cannot say what depends on the model or on two fields together (lengths,
        # templates, the vocabulary), so a body that fits it may still be refused.
        case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=60)

    check()
