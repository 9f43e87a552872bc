# SPDX-License-Identifier: Apache-2.0
"""Reasoning models through the real server: what they think, say and call, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, running_server

from scripted_model import save_harmony_model, save_r1_model

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [12, 34]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "sum", "schema": PARAMETERS}}
THOUGHTS = {"harmony": " I think so", "r1": " hmm ok"}
ANSWERS = {"harmony": "Hello there", "r1": "Hi all"}


HARMONY, R1 = [("harmony", "off"), ("harmony", "ngram:3")], [("r1", "off"), ("r1", "mtp:2")]


@pytest.fixture(scope="module", params=HARMONY + R1, ids="-".join)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ServerProcess]]:
    family, drafts = request.param
    folder = tmp_path_factory.mktemp(family)
    (save_harmony_model if family == "harmony" else save_r1_model)(folder)
    options = ("--dtype", "float32", "--speculative", drafts, "--kv-memory-bytes", str(2**26))
    parser = "harmony" if family == "harmony" else "deepseek"
    options += ("--max-model-len", "1024", "--tool-parser", parser)
    with running_server(str(folder), *options) as server:
        yield family, server


def chat(server: ServerProcess, text: str = "hello", **fields: Any) -> dict[str, Any]:
    """The message, once it is known to be the same whole and streamed."""
    url, body = f"{server.url}/v1/chat/completions", {"temperature": 0, "max_tokens": 60, **fields}
    body["messages"] = [{"role": "user", "content": text}]
    reply = httpx.post(url, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    message = choice["message"]
    whole = {
        "reasoning": message.get("reasoning_content", ""),
        "content": message["content"] or "",
        "calls": [list(call["function"].values()) for call in message.get("tool_calls", [])],
        "reason": choice["finish_reason"],
    }
    for interval in (1, 5):
        assert _streamed(url, {**body, "stream": True, "stream_interval": interval}) == whole
    return whole


def _streamed(url: str, body: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    reply = httpx.post(url, json=body, timeout=60)
    frames = reply.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    for frame in frames[:-2]:
        [choice] = json.loads(frame.removeprefix("data: "))["choices"]
        delta = choice["delta"]
        message["reasoning"] += delta.get("reasoning_content") or ""
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"].get("arguments", "")
        message["reason"] = choice["finish_reason"]
    return message


def test_reasoning_is_apart_from_the_answer(served: tuple[str, ServerProcess]) -> None:
    family, server = served
    assert chat(server) == {
        "reasoning": THOUGHTS[family], "content": ANSWERS[family], "calls": [], "reason": "stop"
    }  # fmt: skip


def test_what_max_tokens_cuts_off_is_reasoning(served: tuple[str, ServerProcess]) -> None:
    family, server = served
    found = chat(server, max_tokens={"harmony": 4, "r1": 1}[family])
    first = THOUGHTS[family].split(" ")[1]
    assert found == {"reasoning": f" {first}", "content": "", "calls": [], "reason": "length"}


def test_a_grammar_holds_once_the_reasoning_is_over(served: tuple[str, ServerProcess]) -> None:
    family, server = served
    digits, sums = chat(server, guided_regex="[0-9]{3}"), chat(server, response_format=SCHEMA)
    assert len(digits["content"]) == 3
    assert digits["content"].isdigit()
    assert json.loads(sums["content"])["a"] in (12, 34)
    for found in (digits, sums):
        assert (found["reasoning"], found["reason"]) == (THOUGHTS[family], "stop")


def test_a_required_call_comes_after_the_reasoning(served: tuple[str, ServerProcess]) -> None:
    family, server = served
    found = chat(server, tools=TOOLS, tool_choice="required", max_tokens=120)
    assert (found["reasoning"], found["content"], found["reason"]) == (
        THOUGHTS[family], "", "tool_calls"
    )  # fmt: skip
    [[name, arguments]] = found["calls"]
    assert name == "add"
    assert json.loads(arguments)["a"] in (12, 34)


@pytest.mark.parametrize("served", HARMONY, indirect=True, ids="-".join)
def test_a_call_of_the_models_own(served: tuple[str, ServerProcess]) -> None:
    _, server = served
    found = chat(server, "1+", tools=TOOLS)
    assert found == {
        "reasoning": "", "content": "", "calls": [["add", '{"a": 12}']], "reason": "tool_calls"
    }  # fmt: skip


def test_responses_have_a_reasoning_item(served: tuple[str, ServerProcess]) -> None:
    family, server = served
    body = {"input": "hello", "max_output_tokens": 60, "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).json()
    reasoning, message = reply["output"]
    assert reasoning["content"][0]["text"] == THOUGHTS[family]
    assert message["content"][0]["text"] == ANSWERS[family]
    details = reply["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < reply["usage"]["output_tokens"]
