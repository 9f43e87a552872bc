# SPDX-License-Identifier: Apache-2.0
"""Bad input: each is refused with OpenAI's error body, naming the field and what it may be."""

import asyncio
from typing import Any

import pytest
from in_memory import running_server
from starlette.requests import Request

from pelton.core.errors import DeadlineExceededError
from pelton.serving.http.parse import read_body
from pelton.serving.http.replies import Exchange
from pelton.serving.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 2, **fields}


def complete(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": 2, **fields}


# path, body, param, a part of the message
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
REFUSED: list[tuple[str, Any, str | None, str]] = [
    (CHAT, b"{", None, "not valid JSON"),
    (CHAT, b"", None, "not valid JSON"),
    (CHAT, b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', None, "UTF-8"),
    (CHAT, b'{"temperature": NaN, "messages": []}', None, "not valid JSON"),
    (CHAT, b'{"x":' + b"[" * 100_000, None, "n"),
    (COMPLETE, b'{"prompt": "a", "x": "\xff"}', None, "UTF-8"),
    (CHAT, b"[]", None, "object"),
    (CHAT, {}, "messages", "required"),
    (CHAT, {"messages": []}, "messages", "length >= 1"),
    (CHAT, {"messages": "hello"}, "messages", "must be an array, not a string"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role", "one of system"),
    (CHAT, {"messages": [{"role": "judge", "content": "a"}]}, "messages[0].role", "'judge'"),
    (CHAT, {"messages": [*HELLO, {"role": "user"}]}, "messages[1].content", "required"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "type 'text'",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "string",
    ),
    (CHAT, chat(chat_template="{{ raise_exception('no') }}"), "chat_template", "no"),
    (CHAT, chat(chat_template="{% for %}"), "chat_template", "line 1"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "field of its own"),
    (CHAT, chat(response_format={"type": ["x" * 99]}), "response_format", "must have the type"),
    (CHAT, chat(temperature="hot"), "temperature", "must be a number or null, not a string"),
    (CHAT, chat(temperature=-0.1), "temperature", ">= 0"),
    (CHAT, chat(temperature=101), "temperature", "<= 100"),
    (CHAT, chat(top_p=0), "top_p", "> 0"),
    (CHAT, chat(top_p=1.1), "top_p", "<= 1"),
    (CHAT, chat(top_k=-2), "top_k", ">= -1"),
    (CHAT, chat(min_p=2), "min_p", "<= 1"),
    (CHAT, chat(repetition_penalty=1e-9), "repetition_penalty", ">= 0.01"),
    (CHAT, chat(presence_penalty=-3), "presence_penalty", ">= -2"),
    (CHAT, chat(n=0), "n", ">= 1"),
    (CHAT, chat(n=129), "n", "<= 128"),
    (CHAT, chat(n=True), "n", "integer"),
    (CHAT, chat(max_tokens=0), "max_tokens", "at least 1"),
    (CHAT, chat(max_tokens=2**40), "max_tokens", "<= 2147483647"),
    (CHAT, chat(max_completion_tokens=-1), "max_completion_tokens", ">= 1"),
    (CHAT, chat(min_tokens=3), "min_tokens", "between 0 and 2"),
    (CHAT, chat(stop=""), "stop", "length >= 1"),
    (CHAT, chat(stop=["a"] * 17), "stop", "length <= 16"),
    (CHAT, chat(stop=["a", 1]), "stop[1]", "string"),
    (CHAT, chat(stop_token_ids=[49152]), "stop_token_ids", "between 0 and 49151"),
    (CHAT, chat(logit_bias={"x": 1}), "logit_bias", "token ids as keys"),
    (CHAT, chat(logit_bias={"60000": 1}), "logit_bias", "49151"),
    (CHAT, chat(logit_bias={"1": 101}), "logit_bias[...]", "<= 100"),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias", "<= 1024"),
    (CHAT, chat(top_logprobs=2), "top_logprobs", "needs logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "<= 20"),
    (CHAT, chat(seed=2**63), "seed", "<= 9223372036854775807"),
    (CHAT, chat(timeout_s=0), "timeout_s", "> 0"),
    (CHAT, chat(stream_interval=0), "stream_interval", ">= 1"),
    (CHAT, chat(stream_options=[]), "stream_options", "object"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools[0]", "have a function with a name"),
    (CHAT, chat(tools=[{"type": "x", "name": "f"}]), "tools[0]", "of type 'function'"),
    (CHAT, chat(tools=[TOOL]), "tools", "start the server with --tool-parser"),
    (CHAT, chat(tools=[TOOL], tool_choice="maybe"), "tool_choice", "'auto', 'required'"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "needs tools"),
    (CHAT, chat(tools=[TOOL], tool_choice={"name": "g"}), "tool_choice", "not among the tools"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format", "needs its schema"),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}),
        "response_format",
        "cannot be compiled to a grammar: Invalid type: x",
    ),
    (CHAT, chat(guided_regex="("), "guided_regex", "unclosed group"),
    (CHAT, chat(guided_regex=r"[^\s\S]"), "guided_regex", "no text can follow"),
    (CHAT, chat(guided_grammar="start: start"), "guided_grammar", "only lead to themselves"),
    (CHAT, chat(guided_json={"$ref": "#"}), "guided_json", "only lead to themselves"),
    (CHAT, chat(guided_regex="a" * 200_000), "guided_regex", "at most 131072 characters"),
    (CHAT, chat(guided_regex="a{100000}{100000}"), "guided_regex", "more than 10000 places"),
    (CHAT, chat(guided_regex="a*" * 9000), "guided_regex", "more than 16384 characters"),
    (
        CHAT,
        chat(guided_json={"properties": {f"p{i}": {} for i in range(1500)}}),
        "guided_json",
        "more than 400 properties not required",
    ),
    (CHAT, chat(guided_json={"enum": list(range(100_000))}), "guided_json", "at most 131072"),
    (CHAT, chat(guided_json={"$ref": "http://a/b.json"}), "guided_json", "not present"),
    (CHAT, chat(guided_choice=[]), "guided_choice", "between 1 and 4096"),
    (CHAT, chat(guided_grammar="start: x"), "guided_grammar", "unknown name"),
    (CHAT, chat(guided_json="{"), "guided_json", "not a JSON schema"),
    (CHAT, chat(guided_regex="a", guided_choice=["a"]), "guided_choice", "exclude each other"),
    (CHAT, chat(guided_regex="a", min_tokens=1), "min_tokens", "cannot be combined"),
    (COMPLETE, {}, "prompt", "required"),
    (COMPLETE, complete(prompt=[]), "prompt", "must not be empty"),
    (COMPLETE, complete(prompt=[[]]), "prompt", "at least one token"),
    (COMPLETE, complete(prompt=["a", 1]), "prompt", "must not mix"),
    (COMPLETE, complete(prompt=[1.5]), "prompt[0]", "number"),
    (COMPLETE, complete(prompt=[-1]), "prompt", "between 0 and 49151"),
    (COMPLETE, complete(prompt=[[1], [49152]]), "prompt", "got 49152"),
    (COMPLETE, complete(prompt=[10**30]), "prompt", "between 0 and 49151"),
    (COMPLETE, complete(prompt=[1] * 9000), "prompt", "9000 tokens"),
    (COMPLETE, complete(prompt=["a"] * 5), "prompt", "at most 4 prompts"),
    (COMPLETE, complete(suffix="x"), "suffix", "not supported"),
    (COMPLETE, complete(best_of=2), "best_of", "not supported"),
    (COMPLETE, complete(logprobs=21), "logprobs", "<= 20"),
    (COMPLETE, complete(echo=True, logprobs=1, n=2), "n", "must be 1"),
    ("/tokenize", {}, "prompt", "either prompt or messages"),
    ("/tokenize", {"messages": []}, "messages", "must not be empty"),
    ("/detokenize", {"tokens": [10**9]}, "tokens", "between 0 and"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "integer"),
]


@pytest.mark.parametrize(("path", "body", "param", "part"), REFUSED)
async def test_bad_input_is_refused_by_name(
    path: str, body: Any, param: str | None, part: str
) -> None:
    async with running_server(max_queue=4) as server:
        reply = await server.post(path, body)
        assert reply.status == 400, reply.body
        assert reply.error["param"] == param, reply.error
        assert part in reply.error["message"]
        assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_refused_stream_is_a_status_too(is_streamed: bool) -> None:
    async with running_server() as server:
        reply = await server.post(COMPLETE, complete(prompt=[1] * 9000, stream=is_streamed))
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a " * 20_000}]}),
        (COMPLETE, {"prompt": "a" * 40_000}),
        (COMPLETE, {"prompt": ["a", "a" * 40_000]}),
        ("/tokenize", {"prompt": "a" * 40_000}),
    ],
)
async def test_a_text_far_too_long_is_refused_without_tokenising_it(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_server("?max_model_len=100") as server:
        monkeypatch.delattr(Tokenizer, "encode")
        reply = await server.post(path, body)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


async def test_too_many_prompts_are_refused_without_tokenising_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_server(max_queue=4) as server:
        monkeypatch.delattr(Tokenizer, "encode")
        assert (await server.post(COMPLETE, complete(prompt=["a"] * 5))).status == 400


async def test_a_body_that_does_not_come_is_a_timeout() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0 if pieces else 60)
        return pieces.pop()

    pieces = [{"type": "http.request", "body": b"{", "more_body": True}]
    exchange = Exchange.of(Request({"type": "http", "headers": []}, receive))
    with pytest.raises(DeadlineExceededError):
        await read_body(exchange, 1024, 0.01)
    assert exchange.has_unread_body


async def test_null_fields_take_their_defaults() -> None:
    names = ("temperature", "n", "stop", "seed", "stream", "logit_bias", "tools", "top_p")
    async with running_server() as server:
        reply = await server.post(CHAT, chat(**dict.fromkeys(names)))
        assert reply.status == 200


async def test_unknown_model_is_404() -> None:
    async with running_server() as server:
        reply = await server.post(CHAT, chat(model="gpt-9"))
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("name", ["stand-in", "smollm2"])
async def test_served_name_and_model_argument_are_both_known(name: str) -> None:
    async with running_server() as server:
        assert (await server.post(CHAT, chat(model=name))).status == 200


async def test_declared_size_is_refused_without_reading() -> None:
    async with running_server(max_body_bytes=1024) as server:
        reply = await server.post(CHAT, b"{}", headers={"content-length": "1000000"})
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        assert reply.headers["connection"] == "close"


async def test_undeclared_size_is_refused_when_reached() -> None:
    async with running_server(max_body_bytes=1024) as server:
        reply = await server.post(CHAT, b" " * 2000)
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")


async def test_unknown_fields_are_named_in_a_header_and_once_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_server() as server:
        for _ in range(2):
            reply = await server.post(CHAT, chat(user="me", **{"odd,näme\r\n": 1}))
        assert reply.status == 200
        assert reply.headers["x-pelton-ignored-fields"] == "user,odd%2Cn%C3%A4me%0D%0A"
        assert sum("field='user'" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("HEAD", CHAT, 405),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_unknown_routes_and_methods_have_the_same_error_body(
    method: str, path: str, status: int
) -> None:
    async with running_server() as server:
        reply = await server.call(method, path, b"")
        assert reply.status == status
        assert set(reply.error) == {"message", "type", "param", "code"}


LONE = ('"\\ud800"', '"a\\udfffb"', '"\\ud800\\u0041"', '"\\\\\\udbff"', '"\\ud83d\\ud83d\\ude00"')


@pytest.mark.parametrize("text", LONE)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, '{"messages": [{"role": "user", "content": %s}]}'),
        (CHAT, '{"messages": [{"role": %s, "content": "a"}]}'),
        (CHAT, '{"messages": [{"role": "user", "content": "a", "name": {"x": [%s]}}]}'),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "chat_template": %s}'),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "stop": ["a", %s]}'),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "no_such_field": %s}'),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], %s: 1}'),
        (COMPLETE, '{"prompt": %s}'),
        (COMPLETE, '{"prompt": "a", "cache_salt": %s}'),
        (COMPLETE, '{"prompt": "a", "logit_bias": {%s: 1}}'),
        ("/tokenize", '{"prompt": %s}'),
        ("/detokenize", '{"tokens": [1], "model": %s}'),
    ],
)
async def test_half_of_a_surrogate_pair_is_refused_in_every_field(
    path: str, body: str, text: str
) -> None:
    async with running_server() as server:
        reply = await server.post(path, (body % text).encode())
        assert reply.status == 400, reply.body
        assert reply.error["code"] == "invalid_json"
        assert "half of a surrogate pair" in reply.error["message"]


async def test_whole_surrogate_pairs_and_escaped_backslashes_are_text() -> None:
    async with running_server() as server:
        reply = await server.post("/tokenize", rb'{"prompt": "\ud83d\ude00 \\ud800"}')
        text = await server.post("/detokenize", {"tokens": reply.json["tokens"]})
        assert text.json["prompt"] == "\U0001f600 \\ud800"
