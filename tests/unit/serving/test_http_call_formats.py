# SPDX-License-Identifier: Apache-2.0
"""Every published way to write tool calls, over HTTP, whole and streamed, one byte a token."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from in_memory import Reply, load_text_side, running_server
from test_http_tools import CHAT, HELLO, RESPONSES, ScriptedEngine, ask, joined, whole

from pelton.serving.parsers.formats import Function, OutputFormat, ToolUse

FIRST = {"q": 'Zoë "日本" 🎈 </tool_call> <|call|> \\ {]'}
SECOND: dict[str, Any] = {}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"q": {"type": "string"}},
                "additionalProperties": False,
            },
        },
    }
    for name in ("look_up", "add")
]
BEGIN, END, CALL, END_CALL, SEP = (
    f"<｜tool▁{word}｜>" for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)


class ByteEngine(ScriptedEngine):
    """Says its text in tokens of one byte each, so that nothing comes whole."""

    def __init__(self, text: str) -> None:
        super().__init__("x")
        table = load_text_side()[0].token_bytes
        self.script = [table.index(bytes([byte])) for byte in text.encode()]


@dataclass(frozen=True)
class Written:
    """How a model writes a call, several, and one that does not parse."""

    parser: str
    call: str
    """With {name} and {arguments}."""
    between: str = ""
    before: str = ""
    after: str = ""
    reasoning: str = "deepseek"

    def calls(self, *calls: tuple[str, Any]) -> str:
        texts = []
        for name, arguments in calls:
            text = arguments if isinstance(arguments, str) else dump(arguments)
            texts.append(self.call.replace("{name}", name).replace("{arguments}", text))
        return self.before + self.between.join(texts) + self.after


def dump(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


HARMONY = "<|start|>assistant<|channel|>"
FORMATS = {
    "hermes": Written(
        "hermes",
        '<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>',
        between="\n",
    ),
    "hermes-arguments-first": Written(
        "hermes",
        '<tool_call>\n{"arguments": {arguments}, "name": "{name}"}\n</tool_call>',
        between=" ",
    ),
    "llama3": Written("llama3", '{"name": "{name}", "parameters": {arguments}}', between="; "),
    "llama3-typed": Written(
        "llama3",
        '{"type": "function", "name": "{name}", "parameters": {arguments}}',
        between="; ",
        before="<|python_tag|>",
    ),
    "deepseek-v3": Written(
        "deepseek",
        f"{CALL}function{SEP}{{name}}\n```json\n{{arguments}}\n```{END_CALL}",
        between="\n",
        before=BEGIN,
        after=END,
    ),
    "deepseek-v3.1": Written(
        "deepseek", f"{CALL}{{name}}{SEP}{{arguments}}{END_CALL}", before=BEGIN, after=END
    ),
}


async def both(text: str, parser: str, reasoning: str, **fields: Any) -> dict[str, Any]:
    """The message, once it is known to be the same whole and streamed at any interval."""
    settings = {"tool_parser": parser, "reasoning_parser": reasoning}
    async with running_server(engine=ByteEngine(text), **settings) as server:
        one, many = await ask(server, tools=TOOLS, **fields)
        _, few = await ask(server, tools=TOOLS, stream_interval=7, **fields)
    assert whole(one) == joined(many) == joined(few)
    return whole(one)


@pytest.mark.parametrize("name", FORMATS)
async def test_parallel_calls_with_hard_arguments(name: str) -> None:
    written = FORMATS[name]
    text = written.calls(("look_up", FIRST), ("add", SECOND))
    message = await both(f"<think>Hm {{}}</think>\n\n{text}", written.parser, "deepseek")
    assert message == {
        "content": "",
        "reasoning_content": "Hm {}",
        "calls": [["look_up", dump(FIRST)], ["add", "{}"]],
        "reason": "tool_calls",
    }


async def test_a_harmony_call_after_a_preamble() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm {}.<|end|>"
        f"{HARMONY}commentary<|message|>I look.<|end|>"
        f"{HARMONY}commentary to=functions.look_up <|constrain|>json<|message|>"
        f"{dump({'q': FIRST['q'].replace('<|call|>', '')})}<|call|>"
    )
    message = await both(text, "harmony", "harmony")
    assert message["reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm {}.")
    [(name, arguments)] = message["calls"]
    assert name == "look_up"
    assert json.loads(arguments)["q"].startswith('Zoë "日本" 🎈')


@pytest.mark.parametrize("name", FORMATS)
async def test_no_call_is_read_where_none_may_be_made(name: str) -> None:
    text = FORMATS[name].calls(("add", {"q": "x"}))
    message = await both(text, FORMATS[name].parser, "none", tool_choice="none")
    assert (message["content"], message["calls"], message["reason"]) == (text, [], "stop")


@pytest.mark.parametrize("name", FORMATS)
async def test_a_call_that_does_not_parse_is_content_and_the_next_request_is_untouched(
    name: str,
) -> None:
    written = FORMATS[name]
    text = written.calls(("add", '{"q": 1 2}'))
    settings = {"tool_parser": written.parser, "reasoning_parser": "none"}
    engine = ByteEngine(text)
    async with running_server(engine=engine, **settings) as server:
        one, many = await ask(server, tools=TOOLS)
        engine.script = ByteEngine(written.calls(("add", {}))).script
        after, _ = await ask(server, tools=TOOLS)
        metrics = (await server.get("/metrics")).body.decode()
    assert (whole(one)["content"], whole(one)["calls"]) == (text, [])
    assert whole(one)["reason"] == joined(many)["reason"] == "stop"
    assert whole(after)["calls"] == [["add", "{}"]]
    is_counted = "pelton_tool_calls_broken_total 2.0" in metrics
    # A bare object that is no call may be an answer in JSON.
    assert is_counted or name == "llama3-typed" or written.parser == "llama3"


@pytest.mark.parametrize("num_tokens", [3, 12, 30])
async def test_reasoning_cut_by_its_length_is_reasoning(num_tokens: int) -> None:
    thought = "<think>I think about it for a long time."
    message = await both(thought, "hermes", "deepseek", max_tokens=num_tokens)
    assert message["reason"] == "length"
    assert message["content"] + message["reasoning_content"] in thought
    assert message["calls"] == []
    if num_tokens > 7:
        assert message["reasoning_content"] == thought[7:num_tokens]
    harmony = "<|channel|>analysis<|message|>I think for long."
    message = await both(harmony, "harmony", "harmony", max_tokens=30 + num_tokens // 3)
    assert message["reasoning_content"] == harmony[30 : 30 + num_tokens // 3]
    assert message["content"] == ""


@pytest.mark.parametrize("name", FORMATS)
async def test_the_responses_api_has_the_same_calls(name: str) -> None:
    written = FORMATS[name]
    text = f"<think>Hm</think>{written.calls(('look_up', FIRST), ('add', SECOND))}"
    settings = {"tool_parser": written.parser, "reasoning_parser": "deepseek"}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    async with running_server(engine=ByteEngine(text), **settings) as server:
        body = {"input": "hello", "tools": tools}
        one = await server.post(RESPONSES, body)
        many = await server.post(RESPONSES, {**body, "stream": True})
    for output in (one.json["output"], last_response(many)["output"]):
        assert [(item["name"], item["arguments"]) for item in output[1:]] == [
            ("look_up", dump(FIRST)),
            ("add", "{}"),
        ]
        assert output[0]["content"][0]["text"] == "Hm"


def last_response(reply: Reply) -> Any:
    frame = reply.body.decode().split("\n\n")[-2]
    return json.loads(frame.partition("data: ")[2])["response"]


@pytest.mark.parametrize("name", FORMATS)
async def test_a_forced_call_is_written_as_the_template_of_the_model_does(name: str) -> None:
    written = FORMATS[name]
    template = "" if name == "deepseek-v3.1" else "```json"
    tokenizer = load_text_side()[0]
    found = OutputFormat(written.parser, "none", template + BEGIN, tokenizer)
    function = TOOLS[0]["function"]
    schema = function["parameters"]  # type: ignore[index]
    use = ToolUse(
        functions=(Function(name="look_up", parameters=schema, is_strict=True),), choice="required"
    )
    grammar = found.make_grammar(use, None, [])
    assert grammar is not None
    async with running_server() as server:
        matcher = server.frontend.grammars.compile(grammar).make_matcher()
    matcher.advance(
        tokenizer.encode(
            written.calls(("look_up", {"q": "x"}), ("look_up", {"q": "日"})),
            add_special_tokens=False,
        )
    )
    # The grammar has one way, of those that are read.
    assert bool(matcher.error) == (name in ("hermes-arguments-first", "llama3-typed"))


async def test_a_tool_that_is_not_strict_may_have_any_schema() -> None:
    odd = {"type": "object", "properties": {"q": {"type": "array", "uniqueItems": True}}}
    engine = ScriptedEngine("x")
    async with running_server(engine=engine, tool_parser="hermes") as server:
        for strict, status in ((False, 200), (True, 400)):
            tool = {"name": "odd", "parameters": odd, "strict": strict}
            body = {"messages": HELLO, "tools": [{"type": "function", "function": tool}]}
            reply = await server.post(CHAT, {**body, "tool_choice": "required"})
            assert reply.status == status, reply.body
