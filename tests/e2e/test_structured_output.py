# SPDX-License-Identifier: Apache-2.0
"""Structured output and tool calls of the real model, through the real server and client."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest
from server_process import running_server

from pelton import LLM, Grammar, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ASK: Any = [{"role": "user", "content": "Describe Ada Lovelace as JSON."}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 16}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    options = ("--dtype", "float32", "--max-model-len", "1024", "--tool-parser", "hermes")
    with (
        running_server("smollm2", *options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client,
    ):
        yield client


@pytest.mark.slow
def test_json_schema_output_always_parses_and_validates() -> None:
    sampling = SamplingParams(
        max_tokens=160, n=2, temperature=1.0, seed=5, grammar=Grammar.json_schema(PERSON)
    )
    options = {"dtype": "float32", "kv_memory_bytes": 2**27, "max_model_len": 512}
    with LLM("smollm2", overlap=True, **options) as llm:
        results = llm.chat([ASK] * 3, sampling, progress=False)
    for choice in [choice for result in results for choice in result.choices]:
        assert choice.finish_reason.value == "stop"
        jsonschema_rs.validate(PERSON, json.loads(choice.text))


def test_response_format_through_the_client(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smollm2",
        messages=ASK,
        seed=1,
        max_tokens=160,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        },
    )
    assert reply.choices[0].finish_reason == "stop"
    jsonschema_rs.validate(PERSON, json.loads(reply.choices[0].message.content or ""))


def test_guided_fields_of_completions(client: openai.OpenAI) -> None:
    def complete(**extra: Any) -> str:
        reply = client.completions.create(
            model="smollm2", prompt="Yes or no?", max_tokens=24, seed=1, extra_body=extra
        )
        return reply.choices[0].text

    assert complete(guided_choice=["yes", "no"]) in ("yes", "no")
    assert complete(guided_regex="[0-9]{3}-[0-9]{2}")[3] == "-"
    assert complete(guided_grammar='start: "<" /[a-z]{1,4}/ ">"').startswith("<")


def test_a_required_tool_is_called(client: openai.OpenAI) -> None:
    fields: Any = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Weather in Paris?"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 80,
    }
    reply = client.chat.completions.create(**fields)
    assert reply.choices[0].finish_reason == "tool_calls"
    [call] = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}

    streamed = ""
    for chunk in client.chat.completions.create(**fields, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.function is not None
            streamed += delta.function.arguments or ""
    assert streamed == call.function.arguments


def test_responses_through_the_client(client: openai.OpenAI) -> None:
    fields: Any = {"model": "smollm2", "input": "What is the capital of France?"}
    fields |= {"max_output_tokens": 24, "temperature": 0}
    reply = client.responses.create(**fields)
    assert "Paris" in reply.output_text
    assert reply.usage is not None
    assert reply.usage.output_tokens > 0
    with client.responses.stream(**fields) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        final = stream.get_final_response()
    assert text == final.output_text == reply.output_text


def test_responses_follow_a_text_format(client: openai.OpenAI) -> None:
    reply = client.responses.create(
        model="smollm2",
        input="Ada Lovelace as JSON",
        max_output_tokens=160,
        text={"format": {"type": "json_schema", "name": "p", "schema": PERSON, "strict": True}},
        extra_body={"seed": 2},
    )
    jsonschema_rs.validate(PERSON, json.loads(reply.output_text))
