# SPDX-License-Identifier: Apache-2.0
"""The harmony format: prompts as the published guide writes them, and outputs held to it."""

from datetime import date

import pytest
import tokenizers

from pelton.core.errors import InvalidRequestError
from pelton.core.grammar import Grammar
from pelton.engine.grammar import GrammarCompiler
from pelton.serving.parsers.formats import Function, OutputFormat, ToolUse
from pelton.serving.parsers.harmony import MARKERS
from pelton.serving.parsers.harmony_prompt import render_harmony
from pelton.serving.parsers.typescript import render_type
from pelton.serving.tokenizer import Tokenizer

DAY = date(2025, 6, 28)
SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2025-06-28\n\nReasoning: high\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
TOOLS = [
    {"type": "function", "function": {"name": "get_place", "description": "Where the user is."}},
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name."},
                    "unit": {"enum": ["c", "f"], "default": "c"},
                    "days": {"type": "array", "items": {"type": ["integer", "null"]}},
                },
                "required": ["city"],
            },
        },
    },
]
DEVELOPER = """<|start|>developer<|message|># Instructions

Be kind.

# Tools

## functions

namespace functions {

// Where the user is.
type get_place = () => any;

type get_weather = (_: {
// Its name.
city: string,
unit?: "c" | "f", // default: c
days?: (number | null)[],
}) => any;

} // namespace functions<|end|>"""
ASKED = "<|start|>user<|message|>Weather?<|end|>"
CALLED = {
    "role": "assistant",
    "reasoning_content": "I need the tool.",
    "content": None,
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
        }
    ],
}


def test_a_tool_with_everything_a_schema_may_say() -> None:
    properties = {
        "place": {
            "type": "string",
            "title": "PLACE",
            "description": "Where to go.",
            "examples": ["Rome", "Oslo"],
        },
        "note": {"type": "string", "nullable": True, "default": "none"},
        "days": {"type": "integer", "default": 3},
        "when": {
            "oneOf": [
                {"type": "string", "default": "now"},
                {"type": "number", "description": "In\nseconds."},
            ],
            "description": "Or never.",
            "default": 20,
        },
        "any": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
    }
    parameters = {"type": "object", "description": "The trip.", "properties": properties}
    tool = {"type": "function", "function": {"name": "book", "parameters": parameters}}
    text = render_harmony([{"role": "user", "content": "x"}], tools=[tool], today=DAY)

    assert (
        """
type book = (_: // The trip.
{
// PLACE
//
// Where to go.
// Examples:
// - "Rome"
// - "Oslo"
place?: string,
note?: string | null, // default: "none"
days?: number, // default: 3
// Or never.
// default: 20
when?:
    | string // default: "now"
    | number // In seconds.
,
any?: string | boolean,
}) => any;
"""
        in text
    )


def test_a_plain_question() -> None:
    text = render_harmony([{"role": "user", "content": "Weather?"}], effort="high", today=DAY)

    assert text == f"{SYSTEM}<|end|>{ASKED}<|start|>assistant"


def test_tools_calls_and_their_results() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        CALLED,
        {"role": "tool", "tool_call_id": "c1", "content": "Sun."},
    ]
    text = render_harmony(messages, tools=TOOLS, effort="high", today=DAY)

    assert text == (
        f"{SYSTEM}\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>"
        f"{DEVELOPER}{ASKED}"
        "<|start|>assistant<|channel|>analysis<|message|>I need the tool.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        '<|message|>{"city": "Rome"}<|call|>'
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>Sun.<|end|>"
        "<|start|>assistant"
    )


def test_reasoning_of_turns_that_are_over_is_left_out() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        CALLED,
        {"role": "tool", "tool_call_id": "c1", "content": "Sun."},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "Easy."},
        {"role": "user", "content": "Thanks."},
    ]
    text = render_harmony(messages, today=DAY)

    assert "I need the tool." not in text
    assert "Easy." not in text
    assert "<|start|>assistant<|channel|>final<|message|>Sunny.<|end|>" in text


def test_a_response_format_ends_the_developer_message() -> None:
    messages = [{"role": "user", "content": "x"}]
    text = render_harmony(messages, response_schema={"type": "object"}, today=DAY)

    assert '# Response Formats\n\n## response\n\n{"type":"object"}<|end|>' in text


def test_what_cannot_be_rendered_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="low, medium, high"):
        render_harmony([{"role": "user", "content": "x"}], effort="huge")
    with pytest.raises(InvalidRequestError, match="tool_call_id is unknown"):
        render_harmony([{"role": "tool", "tool_call_id": "?", "content": "x"}])


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ({"type": "integer"}, "number"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string | null"),
        ({"const": "a"}, '"a"'),
        ({"type": "array", "items": {"type": "boolean"}}, "boolean[]"),
        ({"type": "object"}, "object"),
        ({"$ref": "#/x"}, "any"),
        (None, "any"),
    ],
)
def test_types_are_typescript(schema, shown) -> None:
    assert render_type(schema) == shown


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Single bytes and harmony's special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(MARKERS))
    return Tokenizer(
        backend,
        vocab_size=300,
        special_tokens={},
        add_bos=False,
        bos_token_id=None,
        eos_token_ids=[backend.token_to_id("<|return|>"), backend.token_to_id("<|call|>")],
    )


class TestGrammars:
    """`follows` takes an output without its last token."""

    @pytest.fixture
    def output_format(self, tokenizer: Tokenizer) -> OutputFormat:
        found = OutputFormat("auto", "auto", None, tokenizer)
        assert (found.tools, found.reasoning, found.is_harmony) == ("harmony", "harmony", True)
        return found

    def follows(self, tokenizer: Tokenizer, grammar: Grammar | None, text: str) -> str:
        """ "broken", "open" or, where it may end, "done"."""
        import numpy as np

        assert grammar is not None
        matcher = GrammarCompiler(tokenizer.vocabulary).compile(grammar).make_matcher()
        matcher.advance(tokenizer.encode(text, add_special_tokens=False))
        if matcher.error:
            return "broken"
        masks = np.zeros((1, 10), np.int32)
        matcher.fill_masks(masks)
        eos = tokenizer.eos_token_ids[0]
        return "done" if masks[0, eos >> 5] >> (eos & 31) & 1 else "open"

    @pytest.mark.parametrize(
        ("text", "state"),
        [
            ("<|channel|>analysis<|message|>Any {text}.", "open"),
            ('<|channel|>final<|message|>{"a": 1}', "done"),
            ("<|channel|>final<|message|>no", "broken"),
            (
                "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>analysis"
                '<|message|>y<|end|><|start|>assistant<|channel|>final<|message|>{"a": 1}',
                "done",
            ),
            ("<|channel|>analysis<|message|>x<|return|>", "open"),
        ],
    )
    def test_a_schema_holds_in_the_final_channel(
        self, tokenizer, output_format, text: str, state: str
    ) -> None:
        wanted = Grammar.json_schema({"type": "object"})
        grammar = output_format.make_grammar(ToolUse(), wanted, [])
        if text.endswith("<|return|>"):  # never allowed there
            assert self.follows(tokenizer, grammar, text.removesuffix("<|return|>")) == "open"
        else:
            assert self.follows(tokenizer, grammar, text) == state

    @pytest.mark.parametrize(
        ("text", "state"),
        [
            ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "open"),
            (
                "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
                '{"x": "<|call|>"}'.replace("<|call|>", "y"),
                "done",
            ),
            ("<|channel|>commentary to=functions.g", "broken"),
            ("<|channel|>final", "broken"),
        ],
    )
    def test_a_required_call_comes_after_analysis(
        self, tokenizer, output_format, text: str, state: str
    ) -> None:
        parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
        function = Function(name="f", parameters=parameters, is_strict=True)
        use = ToolUse(functions=(function,), choice="required")
        grammar = output_format.make_grammar(use, None, [])
        assert self.follows(tokenizer, grammar, text) == state

    def test_calls_end_the_output(self, tokenizer, output_format) -> None:
        ends = {tokenizer.token_id("<|call|>"), tokenizer.token_id("<|return|>")}
        assert set(output_format.stop_token_ids) == ends

    def test_markers_reach_the_parser_though_they_are_special(
        self, tokenizer, output_format
    ) -> None:
        channel = tokenizer.token_id("<|channel|>")
        assert output_format.token_table[channel] == b"<|channel|>"
        assert tokenizer.plain_token_bytes[channel] == b""
