# SPDX-License-Identifier: Apache-2.0
"""A server with --api-key over real sockets and through the real `openai` client."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_process import ServerProcess, running_server

KEY = "right-key"
HELLO: Any = [{"role": "user", "content": "Say hello."}]
WRONG = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer right-key-and-more"},
    {"authorization": "bearer right-key"},
    {"authorization": "right-key"},
    {"authorization": "Bearer"},
    {"authorization": "Bearer \xe9\xff".encode("latin-1")},
    {"x-api-key": KEY},
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("stand-in:smollm2?step_ms=1", "--api-key", KEY) as process:
        yield process


@pytest.mark.parametrize("headers", WRONG)
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_wrong_key_is_401_with_the_error_body(
    server: ServerProcess, path: str, is_streamed: bool, headers: Any
) -> None:
    body = {"prompt": "a", "messages": HELLO, "stream": is_streamed}
    reply = httpx.post(server.url + path, json=body, headers=headers)
    assert reply.status_code == 401
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["error"] == {
        "message": "This server needs its API key in the header 'Authorization: Bearer KEY'.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/dashboard/data"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ],
)
def test_the_other_routes_need_the_key_too(server: ServerProcess, method: str, path: str) -> None:
    reply = httpx.request(method, server.url + path, json={"prompt": "a", "tokens": [1]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_need_no_key(server: ServerProcess, path: str) -> None:
    assert httpx.get(server.url + path).status_code == 200


def test_a_refused_request_keeps_the_connection_and_its_body_is_not_the_next_request(
    server: ServerProcess,
) -> None:
    with httpx.Client(base_url=server.url) as client:
        body = {"prompt": "a" * 100_000, "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 401
        body["prompt"] = "a"
        right = {"authorization": f"Bearer {KEY}"}
        assert client.post("/v1/completions", json=body, headers=right).status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_openai_client_raises_its_own_error(server: ServerProcess, is_streamed: bool) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as raised,
    ):
        client.chat.completions.create(model="any", messages=HELLO, stream=is_streamed)
    assert raised.value.code == "invalid_api_key"


def test_the_openai_client_with_the_key_is_served(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        [model] = client.models.list().data
        fields: Any = {"model": model.id, "messages": HELLO, "max_tokens": 3}
        assert client.chat.completions.create(**fields).choices[0].message.content
        chunks = list(client.chat.completions.create(**fields, stream=True))
        assert chunks[-1].choices[0].finish_reason == "length"
