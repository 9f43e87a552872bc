# SPDX-License-Identifier: Apache-2.0
"""Tool calls, reasoning and the Responses API over HTTP; the engine says what it is told."""

import dataclasses
import json
from typing import Any

import pytest
from in_memory import Reply, Server, load_text_side, running_server

from pelton.core.config import EngineConfig, ModelConfig
from pelton.core.request import FinishReason, GenerateRequest, RequestOutput
from pelton.serving.parsers.formats import OutputFormat, ToolUse
from pelton.serving.stand_in import StandInEngine, parse_stand_in

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class ScriptedEngine(StandInEngine):
    """Every request gets the same text, then an end."""

    def __init__(self, text: str) -> None:
        name = "stand-in:none"
        super().__init__(EngineConfig(model=ModelConfig(model=name)), parse_stand_in(name))
        self.script = load_text_side()[0].encode(text, add_special_tokens=False)
        self.requests: list[GenerateRequest] = []

    def add(self, request: GenerateRequest) -> None:
        self.requests.append(request)
        free = dataclasses.replace(request.sampling, grammar=None)
        super().add(dataclasses.replace(request, sampling=free))

    def _advance(self, choice: Any, now_s: float) -> RequestOutput:
        token = self.script[choice.num_generated]
        choice.num_generated += 1
        is_last = choice.num_generated == len(self.script)
        is_cut = choice.num_generated == choice.max_tokens
        reason = FinishReason.STOP if is_last else FinishReason.LENGTH if is_cut else None
        return RequestOutput(choice.request.request_id, choice.index, [token], finish_reason=reason)


async def ask(server: Server, **fields: Any) -> tuple[Reply, Reply]:
    body = {"messages": HELLO, **fields}
    return await server.post(CHAT, body), await server.post(CHAT, {**body, "stream": True})


def joined(reply: Reply) -> dict[str, Any]:
    """A streamed message put together as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for event in reply.events:
        [choice] = event["choices"]
        delta = choice["delta"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", []):
            function = call["function"]
            if "id" in call:
                assert call["index"] == len(message["calls"])
                message["calls"].append([function["name"], ""])
            message["calls"][call["index"]][1] += function.get("arguments", "")
        message["reason"] = choice["finish_reason"]
    return message


def whole(reply: Reply) -> dict[str, Any]:
    [choice] = reply.json["choices"]
    message = choice["message"]
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls", [])
    ]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": calls,
        "reason": choice["finish_reason"],
    }


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("Hi.", {}, ("Hi.", "", [], "stop")),
        (CALL, {}, ("", "", [["add", '{"a": 12}']], "tool_calls")),
        (f"I add.\n{CALL}", {}, ("I add.", "", [["add", '{"a": 12}']], "tool_calls")),
        (f"{CALL}\n{CALL}", {}, ("", "", [["add", '{"a": 12}']] * 2, "tool_calls")),
        (CALL, {"tool_choice": "none"}, (CALL, "", [], "stop")),
        ("<tool_call>no</tool_call>", {}, ("<tool_call>no</tool_call>", "", [], "stop")),
        ("<think>\nhm\n</think>\n\nHi.", {}, ("Hi.", "hm", [], "stop")),
        (f"<think>hm</think>{CALL}", {}, ("", "hm", [["add", '{"a": 12}']], "tool_calls")),
    ],
)
async def test_message_is_the_same_streamed_and_whole(text, fields, expected) -> None:
    keys = ("content", "reasoning_content", "calls", "reason")
    settings = {"tool_parser": "hermes", "reasoning_parser": "deepseek"}
    async with running_server(engine=ScriptedEngine(text), **settings) as server:
        for one, many in [
            await ask(server, tools=[TOOL], **fields),
            await ask(server, tools=[TOOL], stream_interval=3, **fields),
        ]:
            assert whole(one) == dict(zip(keys, expected, strict=True))
            assert joined(many) == whole(one)


async def test_a_call_whose_arguments_break_is_content_and_counted() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1 2}}</tool_call>'
    async with running_server(engine=ScriptedEngine(text), tool_parser="hermes") as server:
        one, many = await ask(server, tools=[TOOL])
        assert whole(one) == {
            "content": text, "reasoning_content": "", "calls": [], "reason": "stop"
        }  # fmt: skip
        assert joined(many)["reason"] == "stop"
        metrics = (await server.get("/metrics")).body.decode()
        assert "pelton_tool_calls_broken_total 2.0" in metrics


async def test_a_call_cut_by_max_tokens_ends_with_length() -> None:
    async with running_server(engine=ScriptedEngine(CALL), tool_parser="hermes") as server:
        one, many = await ask(server, tools=[TOOL], max_tokens=15)
        assert whole(one)["reason"] == joined(many)["reason"] == "length"


@pytest.mark.parametrize("parser", ["hermes", "llama3", "deepseek", "harmony"])
@pytest.mark.parametrize("choice", ["required", {"function": {"name": "add"}}], ids=str)
async def test_a_required_call_is_forced_by_a_grammar_that_its_parser_reads(
    parser: str, choice: Any
) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "other"}}]
    engine = ScriptedEngine("x")
    async with running_server(engine=engine, tool_parser=parser, reasoning_parser="none") as server:
        reply = await server.post(CHAT, {"messages": HELLO, "tools": tools, "tool_choice": choice})
        assert reply.status == 200, reply.body
        grammar = engine.requests[0].sampling.grammar
        assert grammar is not None
        tokenizer = server.frontend.tokenizer
        matcher = server.frontend.grammars.compile(grammar).make_matcher()
        texts = {
            "hermes": CALL,
            "llama3": '{"name": "add", "parameters": {"a": 12}}',
            "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
            "```json\n"
            '{"a": 12}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "harmony": "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
            '{"a": 12}',
        }
        matcher.advance(tokenizer.encode(texts[parser], add_special_tokens=False))
        assert not matcher.error
        parsed = server.frontend.output_format.make_parser(
            ToolUse(functions=(), choice="auto"), [1]
        )
        if parser != "llama3":
            delta = parsed.push(texts[parser], is_end=True)
            assert [call.name for call in delta.tool_calls if call.name] == ["add"]


@pytest.mark.parametrize(
    ("functions", "param", "part"),
    [
        ([{"name": "a b"}], "tools[0]", "no spaces"),
        ([{"name": "a\n```"}], "tools[0]", "no spaces"),
        ([{"name": "<|call|>"}], "tools[0]", "angle brackets"),
        ([{"name": "a" * 129}], "tools[0]", "at most 128"),
        ([{"name": "f"}, {"name": "g"}, {"name": "f"}], "tools[2]", "of an earlier one"),
        ([{"name": "f", "parameters": {"type": "string"}}], "tools[0]", "of type 'object'"),
    ],
)
async def test_tools_that_no_format_can_carry_are_refused(functions, param, part) -> None:
    async with running_server(tool_parser="hermes") as server:
        tools = [{"type": "function", "function": function} for function in functions]
        for choice in ("auto", "required", "none"):
            body = {"messages": HELLO, "tools": tools, "tool_choice": choice}
            reply = await server.post(CHAT, body)
            assert (reply.status, reply.error["param"]) == (400, param)
            assert part in reply.error["message"]


async def test_tools_whose_schemas_spell_out_too_much_are_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a{999}){999}"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    async with running_server(tool_parser="hermes") as server:
        body = {"messages": HELLO, "tools": [tool], "tool_choice": "required"}
        reply = await server.post(CHAT, body)
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "more than 10000 places" in reply.error["message"]


async def test_earlier_calls_reach_the_template_as_objects() -> None:
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "17"},
    ]
    template = "{{ messages[1].tool_calls[0].function.arguments.a + 1 }}{{ messages[2].content }}"
    async with running_server(tool_parser="hermes") as server:
        body = {"messages": messages, "chat_template": template}
        tokens = (await server.post("/tokenize", body)).json["tokens"]
        assert server.frontend.tokenizer.decode(tokens) == "617"
        broken = [{"role": "assistant", "content": "", "tool_calls": [{"function": 1}]}]
        reply = await server.post(CHAT, {"messages": broken})
        assert reply.error["param"] == "messages[0].tool_calls[0]"


@pytest.mark.parametrize(("fields", "stops"), [({}, (7,)), ({"ignore_eos": True}, ())], ids=str)
async def test_tokens_that_end_a_message_end_the_output_unless_ends_are_ignored(
    fields: Any, stops: tuple[int, ...]
) -> None:
    engine = ScriptedEngine("x")
    async with running_server(engine=engine) as server:
        server.frontend.output_format.stop_token_ids = (7,)
        await server.post(CHAT, {"messages": HELLO, **fields})
        assert engine.requests[0].sampling.stop_token_ids == stops


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=str,
)
async def test_calls_and_a_grammar_of_ones_own_exclude_each_other(fields: Any, param: str) -> None:
    async with running_server(tool_parser="hermes") as server:
        reply = await server.post(CHAT, {"messages": HELLO, "tools": [TOOL], **fields})
        assert (reply.status, reply.error["param"]) == (400, param)
        assert "cannot be combined" in reply.error["message"]


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("... <tool_call> ...", "hermes", "none"),
        ("<tool_call> <think>", "hermes", "deepseek"),
        ("<｜tool▁calls▁begin｜> </think>", "deepseek", "deepseek"),
        ("<|python_tag|>", "llama3", "none"),
        ("<|channel|>", "harmony", "harmony"),
        (None, "none", "none"),
    ],
)
def test_auto_finds_the_format_in_the_template(template, tools, reasoning) -> None:
    found = OutputFormat("auto", "auto", template, load_text_side()[0])

    assert (found.tools, found.reasoning) == (tools, reasoning)


@pytest.mark.parametrize(
    ("end", "good", "bad"),
    [
        ("<think>\n", ['I {think}\n</think>\n\n{"a": 1}'], ["I think</think>no"]),
        (
            "",
            ['<think>I {think}</think>\n{"a": 1}', '{"a": 1}', "<think>I think, {"],
            ["<think>x</think>no", "no", "</think>"],
        ),
        ("<think>\n\n</think>\n\n", ['{"a": 1}'], ["<think>x</think>{}", "x</think>{}"]),
        ("</think>", ['{"a": 1}'], ["<think>"]),
    ],
)
async def test_a_response_format_waits_for_the_reasoning_to_end(
    end: str, good: list[str], bad: list[str]
) -> None:
    engine = ScriptedEngine("x")
    async with running_server(engine=engine, reasoning_parser="deepseek") as server:
        body = {"messages": HELLO, "chat_template": TEMPLATE + end}
        await server.post(CHAT, {**body, "response_format": {"type": "json_object"}})
        grammar = engine.requests[0].sampling.grammar
        assert grammar is not None
        matcher = server.frontend.grammars.compile(grammar).make_matcher()
        for text in good + bad:
            ids = server.frontend.tokenizer.encode(text, add_special_tokens=False)
            matcher = server.frontend.grammars.compile(grammar).make_matcher()
            matcher.advance(ids)
            assert bool(matcher.error) == (text in bad), text


@pytest.mark.parametrize("end", ["<think>\n", ""])
async def test_a_required_call_may_be_thought_about_first(end: str) -> None:
    engine = ScriptedEngine("x")
    settings = {"tool_parser": "hermes", "reasoning_parser": "deepseek"}
    async with running_server(engine=engine, **settings) as server:
        body = {"messages": HELLO, "chat_template": TEMPLATE + end, "tools": [TOOL]}
        await server.post(CHAT, {**body, "tool_choice": "required"})
        grammar = engine.requests[0].sampling.grammar
        assert grammar is not None
        matcher = server.frontend.grammars.compile(grammar).make_matcher()
        thought = "" if end else "<think>"
        text = f"{thought}I add.</think>\n\n{CALL}"
        matcher.advance(server.frontend.tokenizer.encode(text, add_special_tokens=False))
        assert not matcher.error


class TestResponses:
    async def test_events_build_up_the_whole_response(self) -> None:
        text = f"<think>hm</think>I add.\n{CALL}"
        settings = {"tool_parser": "hermes", "reasoning_parser": "deepseek"}
        async with running_server(engine=ScriptedEngine(text), **settings) as server:
            tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
            body = {"input": "hello", "instructions": "Be brief.", "tools": [tool]}
            one = await server.post(RESPONSES, body)
            many = await server.post(RESPONSES, {**body, "stream": True})
        assert one.status == 200, one.body
        frames = [frame.split("\n") for frame in many.body.decode().split("\n\n")[:-1]]
        events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
        assert [name for name, _ in frames] == [f"event: {event['type']}" for event in events]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        done = events[-1]["response"]
        for reply in (one.json, done):
            reasoning, message, call = reply["output"]
            assert reasoning["content"][0]["text"] == "hm"
            assert message["content"][0]["text"] == "I add."
            assert (call["name"], call["arguments"]) == ("add", '{"a": 12}')
            assert reply["status"] == "completed"
            assert not reply["store"]
            usage = reply["usage"]
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
            assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
        deltas = {"response.output_text.delta": "", "response.function_call_arguments.delta": ""}
        for event in events:
            if event["type"] in deltas:
                deltas[event["type"]] += event["delta"]
        assert list(deltas.values()) == ["I add.", '{"a": 12}']

    async def test_items_become_messages(self) -> None:
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "4"},
            {"type": "message", "role": "assistant", "content": "It is 4."},
            {"role": "user", "content": "Sure?"},
        ]
        engine = ScriptedEngine("Yes.")
        async with running_server(engine=engine) as server:
            reply = await server.post(RESPONSES, {"input": items, "max_output_tokens": 1})
            assert reply.json["status"] == "incomplete"
            text = server.frontend.tokenizer.decode(engine.requests[0].prompt_token_ids)
        for part in ("2+2?", "4", "It is 4.", "Sure?"):
            assert part in text

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"background": True}, "background"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"prompt": {"id": "p"}}, "prompt"),
            (
                {"input": [{"type": "function_call", "name": "f", "arguments": 5}]},
                "input[0].arguments",
            ),
            ({"tools": [{"type": "web_search"}]}, "tools[0]"),
            ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
            ({"text": {"format": {"type": "json_schema", "schema": False}}}, "text.format"),
            ({"input": [{"type": "image"}]}, "input[0].type"),
            ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
            ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
            ({"reasoning": {"effort": 5}}, "reasoning.effort"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ],
    )
    async def test_what_is_not_there_is_refused(self, fields, param) -> None:
        async with running_server() as server:
            reply = await server.post(RESPONSES, {"input": "x", **fields})
            assert reply.status == 400
            assert param is None or reply.error["param"] == param

    async def test_a_missing_schema_is_asked_for_where_it_belongs(self) -> None:
        async with running_server() as server:
            fields = {"text": {"format": {"type": "json_schema"}}}
            reply = await server.post(RESPONSES, {"input": "x", **fields})
            assert "in text.format.schema" in reply.error["message"]
