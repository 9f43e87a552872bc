# SPDX-License-Identifier: Apache-2.0
"""Drafting through the real server: what is answered, counted in usage and told in metrics."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, running_server

from tolerance import LOGIT_ABS

TEXT = "The red fox ran. The blue fox ran. The red fox ran. The blue fox ran. The red fox"
FIELDS: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "seed": 1}
OPTIONS = ("--dtype", "float32", "--max-model-len", "512")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("smollm2", *OPTIONS, "--speculative", "ngram:4") as server:
        yield server


def post(server: ServerProcess, path: str, **fields: Any) -> Any:
    reply = httpx.post(f"{server.url}{path}", json={"model": "smollm2", **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_usage_and_metrics_count_the_same_drafts(server: ServerProcess) -> None:
    before = server.metrics()
    message = [{"role": "user", "content": f"Repeat this text for ever: {TEXT}"}]
    usages = [
        post(server, "/v1/completions", prompt=TEXT, max_tokens=24, **FIELDS)["usage"],
        post(server, "/v1/chat/completions", messages=message, max_tokens=24, **FIELDS)["usage"],
        post(server, "/v1/completions", prompt=[TEXT] * 2, max_tokens=12, n=2, seed=3)["usage"],
    ]
    details = [usage.get("completion_tokens_details") or {} for usage in usages]
    reply = post(server, "/v1/responses", input=TEXT, max_output_tokens=16, temperature=0)
    usages.append(reply["usage"])
    details.append(reply["usage"]["output_tokens_details"])
    after = server.metrics()

    accepted = sum(detail.get("accepted_prediction_tokens") or 0 for detail in details)
    rejected = sum(detail.get("rejected_prediction_tokens") or 0 for detail in details)
    places = range(1, 5)

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    told_drafts = [gained(f'pelton_drafts_total{{place="{place}"}}') for place in places]
    told_accepted = [gained(f'pelton_drafts_accepted_total{{place="{place}"}}') for place in places]
    assert sum(told_accepted) == accepted > 5
    assert sum(told_drafts) == accepted + rejected
    assert told_drafts == sorted(told_drafts, reverse=True)
    assert told_accepted == sorted(told_accepted, reverse=True)
    assert details[0]["accepted_prediction_tokens"] >= 1
    assert details[0]["reasoning_tokens"] == 0
    num_tokens, num_rows = gained("pelton_decode_tokens_total"), gained("pelton_decode_rows_total")
    num_choices = 1 + 1 + 2 * 2 + 1
    assert num_tokens == sum(u.get("completion_tokens") or u["output_tokens"] for u in usages) - (
        num_choices
    )
    assert num_rows < num_tokens <= num_rows + sum(told_accepted)


def test_texts_are_those_of_a_server_that_drafts_nothing(server: ServerProcess) -> None:
    asked: list[dict[str, Any]] = [
        {"max_tokens": 24, **FIELDS},
        {"max_tokens": 16, "temperature": 0.8, "seed": 3, "n": 2},
        {"max_tokens": 24, "temperature": 0, "stop": ["blue", "dog"]},
        {"max_tokens": 18, "temperature": 0, "guided_regex": "( The (red|blue) fox ran\\.){1,9}"},
        {"max_tokens": 9, "temperature": 0, "frequency_penalty": 0.5, "logprobs": 1},
    ]

    def answers(server: ServerProcess) -> list[Any]:
        replies = [post(server, "/v1/completions", prompt=TEXT, **fields) for fields in asked]
        return [
            [(choice["text"], choice["finish_reason"]) for choice in reply["choices"]]
            for reply in replies
        ]

    drafted = answers(server)
    with running_server("smollm2", *OPTIONS) as plain:
        assert drafted == answers(plain)
        usage = post(plain, "/v1/completions", prompt=TEXT, max_tokens=4, **FIELDS)["usage"]
        assert "completion_tokens_details" not in usage
        reply = post(plain, "/v1/responses", input=TEXT, max_output_tokens=4)
        assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
        assert not [name for name in plain.metrics() if name.startswith("pelton_drafts")]


def test_drafts_are_counted_in_every_event_of_a_stream(server: ServerProcess) -> None:
    fields = {"prompt": TEXT, "max_tokens": 12, "stream": True, **FIELDS}
    options = {"stream_options": {"include_usage": True}}
    reply = httpx.post(
        f"{server.url}/v1/completions", json={"model": "smollm2", **fields, **options}, timeout=60
    )
    assert '"accepted_prediction_tokens":' in reply.text


def test_log_likelihoods_are_where_lm_eval_looks_for_them(server: ServerProcess) -> None:
    """Token ids in, echoed with log-probabilities; of one token too many the last is dropped."""
    contexts, endings = ["The sky is", "One, two,"], [" blue today", " three"]
    ids = []
    for text in (contexts[0], contexts[0] + endings[0], contexts[1], contexts[1] + endings[1]):
        ids.append(post(server, "/tokenize", prompt=text)["tokens"])
    asked = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    reply = post(server, "/v1/completions", prompt=[ids[1], ids[3]], **asked)
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    sums = []
    for choice, context, whole in zip(choices, ids[::2], ids[1::2], strict=True):
        found = choice["logprobs"]
        assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(whole) + 1
        assert found["token_logprobs"][0] is None
        logprobs = found["token_logprobs"][len(context) : -1]
        tops = found["top_logprobs"][len(context) : -1]
        assert all(max(top.values()) >= value for value, top in zip(logprobs, tops, strict=True))
        sums.append(sum(logprobs))
    assert all(-20 < value < 0 for value in sums)
    alone = post(server, "/v1/completions", prompt=[ids[3]], **asked)["choices"][0]
    again = sum(alone["logprobs"]["token_logprobs"][len(ids[2]) : -1])
    assert again == pytest.approx(sums[1], abs=LOGIT_ABS * len(ids[3]))
