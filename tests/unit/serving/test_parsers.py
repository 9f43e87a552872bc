# SPDX-License-Identifier: Apache-2.0
"""Parsers of outputs: however a text is cut, they say the same."""

import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.serving.parsers.harmony import HarmonyParser
from pelton.serving.parsers.message import MessageBuilder, Parser, PlainParser
from pelton.serving.parsers.reasoning import ThinkParser
from pelton.serving.parsers.tool_calls import DEEPSEEK, HERMES, LLAMA3, ToolCallParser

NAMES = ("get_weather", "add", "ü")
ARGUMENTS = '{"city": "Pa\\"r}is", "deep": {"x": [1, {"y": "é"}]}}'


def hermes() -> Parser:
    return ToolCallParser(HERMES, NAMES)


def llama3() -> Parser:
    return ToolCallParser(LLAMA3, NAMES)


def deepseek() -> Parser:
    return ToolCallParser(DEEPSEEK, NAMES)


def thinking() -> Parser:
    return ThinkParser(hermes(), is_open=True)


def closed() -> Parser:
    return ThinkParser(PlainParser(), is_open=False)


D = "<｜tool▁{}｜>".format
BEGIN, END, CALL, END_CALL, SEP = map(
    D, ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
CASES: list[tuple[Callable[[], Parser], str, str, str, list[tuple[str, str]]]] = [
    (hermes, "Just text, 1 < 2.", "", "Just text, 1 < 2.", []),
    (
        hermes,
        f'Look:\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        "",
        "Look:",
        [("get_weather", ARGUMENTS)],
    ),
    (
        hermes,
        '<tool_call>{"name":"add","arguments":{}}</tool_call>\n'
        '<tool_call>\n{"name": "\\u00fc", "arguments": {"a": 1}}\n</tool_call>\nDone.',
        "",
        "Done.",
        [("add", "{}"), ("ü", '{"a": 1}')],
    ),
    (hermes, '<tool_call>{"name": "add"}</tool_call>', "", "", [("add", "{}")]),
    (  # as Hermes 2 Pro's template writes it
        hermes,
        f'<tool_call>\n{{ "arguments": {ARGUMENTS}, "name": "get_weather"}}\n</tool_call> ',
        "",
        "",
        [("get_weather", json.dumps(json.loads(ARGUMENTS), ensure_ascii=False))],
    ),
    (
        hermes,
        '<tool_call>{"arguments": {"a": "</tool_call>\\"}"}, "name": "add"}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call> <tool_call>"}}</tool_call>',
        "",
        "",
        [("add", '{"a": "</tool_call>\\"}"}'), ("add", '{"a": "</tool_call> <tool_call>"}')],
    ),
    (  # arguments as a string of JSON
        hermes,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        "",
        [("add", '{"a": 1}')],
    ),
    (
        hermes,
        '<tool_call>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}'
        "</tool_call>",
        "",
        "",
        [("add", '{"a": 1}')],
    ),
    (
        hermes,
        '<tool_call>{"arguments": [1], "name": "add"}</tool_call>!',
        "",
        '<tool_call>{"arguments": [1], "name": "add"}</tool_call>!',
        [],
    ),
    (
        hermes,
        '<tool_call>{"id": </tool_call> and on',
        "",
        '<tool_call>{"id": </tool_call> and on',
        [],
    ),
    (
        llama3,
        '{"type": "function", "name": "add", "parameters": {"a": "é; {"}}; '
        '{"parameters": {}, "name": "add"}',
        "",
        "",
        [("add", '{"a": "é; {"}'), ("add", "{}")],
    ),
    (llama3, '{"type": "cat", "name": "Tom"}', "", '{"type": "cat", "name": "Tom"}', []),
    (llama3, '<|python_tag|>print("x")', "", '<|python_tag|>print("x")', []),
    (hermes, "<tool_call>not json</tool_call> x", "", "<tool_call>not json</tool_call> x", []),
    (hermes, "<tool_ca", "", "<tool_ca", []),
    (
        llama3,
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
        "",
        "",
        [("get_weather", ARGUMENTS)],
    ),
    (
        llama3,
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}',
        "",
        "",
        [("add", '{"a": 1}'), ("add", "{}")],
    ),
    (
        llama3,
        '{"name": "unknown", "parameters": {}}',
        "",
        '{"name": "unknown", "parameters": {}}',
        [],
    ),
    (llama3, '{"answer": 42}', "", '{"answer": 42}', []),
    (llama3, "A sentence.", "", "A sentence.", []),
    (
        deepseek,
        f"I look.{BEGIN}{CALL}function{SEP}get_weather\n```json\n{ARGUMENTS}\n```{END_CALL}\n"
        f"{CALL}function{SEP}add\n```json\n{{}}\n```{END_CALL}{END}",
        "",
        "I look.",
        [("get_weather", ARGUMENTS), ("add", "{}")],
    ),
    (
        deepseek,
        f'{BEGIN}{CALL}add{SEP}{{"a": 1}}{END_CALL}{CALL}add{SEP}{{}}{END_CALL}{END}',
        "",
        "",
        [("add", '{"a": 1}'), ("add", "{}")],
    ),
    (thinking, "\nI think\n\nso.\n</think>\n\nYes.", "I think\n\nso.", "Yes.", []),
    (thinking, "never closed", "never closed", "", []),
    (
        thinking,
        'hm</think>\n<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        "hm",
        "",
        [("add", "{}")],
    ),
    (closed, "<think>\na</think>b", "a", "b", []),
    (closed, " <thin", "", " <thin", []),
    (closed, "no <think>x</think>", "", "no <think>x</think>", []),
    (
        HarmonyParser,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        "Hm.",
        "Yes",
        [],
    ),
    (
        HarmonyParser,
        "<|channel|>analysis<|message|>Call.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}",
        "Call.",
        "",
        [("get_weather", ARGUMENTS)],
    ),
    (
        HarmonyParser,
        " to=functions.add<|channel|>commentary json<|message|>{}<|call|>",
        "",
        "",
        [("add", "{}")],
    ),
    (  # no space before the type of the arguments
        HarmonyParser,
        "<|channel|>commentary to=functions.add<|constrain|>json<|message|>{}<|call|>",
        "",
        "",
        [("add", "{}")],
    ),
    (
        HarmonyParser,
        '<|channel|>analysis to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        "",
        "",
        [("add", '{"a": 1}')],
    ),
    (
        HarmonyParser,
        "<|channel|>analysis to=browser.search code<|message|>x<|end|><|start|>assistant"
        "<|channel|>final<|message|>y<|return|>",
        "x",
        "y",
        [],
    ),
    (
        HarmonyParser,
        "<|channel|>commentary<|message|>First I look.<|end|><|start|>assistant<|channel|>final"
        "<|message|>1 <| 2",
        "",
        "First I look.1 <| 2",
        [],
    ),
]


def said(parser: Parser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    message = MessageBuilder()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.push("", is_end=True))
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.reasoning, message.content, calls


@pytest.mark.parametrize(("make", "text", "reasoning", "content", "calls"), CASES)
def test_a_text_says_the_same_however_it_is_cut(make, text, reasoning, content, calls) -> None:
    expected = (reasoning, content, calls)
    assert said(make(), [text]) == expected
    assert said(make(), list(text)) == expected
    for cut in range(len(text) + 1):
        assert said(make(), [text[:cut], text[cut:]]) == expected, cut
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("make", "text", "reasoning", "content", "calls"), CASES)
def test_names_come_before_arguments_and_each_call_has_an_id(
    make, text, reasoning, content, calls
) -> None:
    parser = make()
    deltas = [d for char in text for d in parser.push(char).tool_calls]
    deltas += parser.push("", is_end=True).tool_calls
    starts = [delta for delta in deltas if delta.name]
    assert [delta.index for delta in starts] == list(range(len(calls)))
    assert len({delta.call_id for delta in starts}) == len(calls)
    assert parser.num_calls == len(calls)


def test_arguments_are_told_as_they_come() -> None:
    parser = hermes()
    parser.push('<tool_call>\n{"name": "add", "arguments": {"a": 1')

    assert [delta.arguments for delta in parser.push("23").tool_calls] == ["23"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (hermes, '<tool_call>{"name": "add", "arguments": {"a": 1 2}}</tool_call>'),
        (hermes, '<tool_call>{"name": "add", "arguments": {"a": '),
        (hermes, '<tool_call>{"name": "add", "arguments": {}} x </tool_call>'),
        (hermes, "<tool_call>nothing</tool_call>"),
        (deepseek, f"{BEGIN}{CALL}add{SEP}{{nothing}}{END_CALL}{END}"),
        (HarmonyParser, "<|channel|>commentary to=functions.add<|message|>{"),
    ],
)
def test_a_call_that_does_not_parse_is_counted(make, text: str) -> None:
    for pieces in ([text], list(text)):
        parser = make()
        said(parser, pieces)
        assert parser.num_broken == 1


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", BEGIN, END, CALL),
        *(END_CALL, SEP, "<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>"),
        *("assistant", "commentary to=functions.add ", "<|constrain|>json", "function", "add"),
        *('{"name": "add", "arguments": ', '{"name": "add", "parameters": ', "{}", '{"a": "}"}'),
        *('{"type": "function", "name": "add", ', '"parameters": {}', '{"arguments": {"a": 1}, '),
        *('"name": "add"}', '{"function": {"name": "add"'),
        *("}", "{", "\n", " ", "; ", "```", "```json\n", "x", "<", '"', "\\", "é", '{"name":'),
    ]
)


@pytest.mark.parametrize(
    "make", [hermes, llama3, deepseek, thinking, closed, HarmonyParser], ids=lambda f: f.__name__
)
@settings(max_examples=150, deadline=None)
@given(fragments=st.lists(FRAGMENTS, max_size=14), data=st.data())
def test_no_text_says_more_or_less_when_cut(make, fragments: list[str], data) -> None:
    text = "".join(fragments)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    ends = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
    whole = make()
    expected = said(whole, [text])
    for parts in (pieces, list(text)):
        parser = make()
        assert said(parser, parts) == expected
        assert parser.num_broken == whole.num_broken
