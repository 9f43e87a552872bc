# SPDX-License-Identifier: Apache-2.0
"""What spells out too much is refused before anything generates, and nothing compiles forever."""

import contextlib
import itertools
import json

import numpy as np
import pytest
from test_grammar import VOCAB_SIZE, make_byte_compiler, make_compiler, masks_of

from pelton.core.errors import InvalidGrammarError
from pelton.core.grammar import MAX_ALTERNATIVES, Grammar
from pelton.engine.grammar_limits import (
    MAX_PATTERN_CHARS,
    MAX_UNFOLDED,
    count_unfolded,
    find_excess,
)

COMPILER = make_compiler()


def chain(count: int, link: str, end: str) -> str:
    """`count` Lark rules that each lead to the next, `link` holding {} for its name."""
    names = ["start", *(f"r{i}" for i in range(count))]
    links = [f"{a}: {link.format(b)}" for a, b in itertools.pairwise(names)]
    return "\n".join([*links, f"{names[-1]}: {end}"])


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("", 0),
        ("abc", 3),
        ("a|b*c+?", 3),
        ("a{3}", 3),
        ("a{2,5}b{3,}", 8),
        ("a{0}", 1),
        ("(ab{3}|c){4}", 20),
        ("((a{10}){10}){10}", 1000),
        ("a{10}{10}", 100),
        (r"\{3}[{3}]\p{L}{2}", 6),
        (r"[]x{9}]{2}[^]{9}a]", 3),
        ("[[:alpha:]{9}]", 1),
        ("a{ 2 , 3 }", 3),
        ("(?:a(?i)b)", 4),
        (")))((", 3),
        ("{5}", 0),
        ("a{x}", 4),
    ],
)
def test_counted_repetitions_are_written_out(pattern: str, count: int) -> None:
    assert count_unfolded(pattern) == count


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("a{100000}{100000}", param="field"),
        Grammar.regex("(a{1000}b){1000}", param="field"),
        Grammar.regex("(((a{30}){30}){30}){30}", param="field"),
        Grammar.regex("x" + "(a?){20000}", param="field"),
        Grammar.regex("a*" * MAX_PATTERN_CHARS, param="field"),
        Grammar.json_schema({"type": "string", "pattern": "^(a{999}){999}$"}, param="field"),
        Grammar.json_schema(
            {"items": [{"patternProperties": {"(a{999}){999}": True}}]}, param="field"
        ),
        Grammar.lark("start: /a{100000}{100000}/", param="field"),
        Grammar.lark('start: ("a"{0,100000}){0,100000}', param="field"),
        Grammar.lark('start: %json {"type": "string", "pattern": "a{99999}"}', param="field"),
        Grammar.lark('start: x{1000}\nx: y{1000}\ny: "a"', param="field"),
    ],
    ids=lambda grammar: grammar.text[:24],
)
def test_too_many_repetitions_are_refused_by_the_name_of_the_field(grammar: Grammar) -> None:
    with pytest.raises(InvalidGrammarError, match="field cannot be compiled") as caught:
        COMPILER.compile(grammar)

    assert caught.value.param == "field"


@pytest.mark.parametrize(
    ("rule", "is_refused"),
    [
        ('start: x %json {"pattern": "a{99999}"} "b"\nx: "a"', True),
        ('start: %json {"a": {"pattern": "a{99999}"}}', True),
        ('start: %json{"b": 1}\nx: %json\t {"pattern": "a{99999}"}', True),
        ('start: "}" %json {"pattern": "a{99999}" "b"', False),
        ('start: %json {"pattern":\n"a{99999}"}', False),
        ("start: " + "%json {" * 18_000, True),
    ],
    ids=["between", "nested", "second-line", "open", "two-lines", "many-open"],
)
def test_schemas_in_rules_end_with_the_last_brace_of_their_line(
    rule: str, is_refused: bool
) -> None:
    assert bool(find_excess(Grammar.lark(rule))) is is_refused


def test_what_stays_below_the_limits_compiles() -> None:
    for grammar in (
        Grammar.regex(f"a{{1,{MAX_UNFOLDED}}}"),
        Grammar.regex("(?:[a-c]{3}|b){1,400}"),
        Grammar.choice([f"a{i:o}" for i in range(MAX_ALTERNATIVES)]),
        Grammar.lark('start: item{2,40}\nitem: "a" ("b" | /[ab]{1,9}/)*  // {99999}'),
        Grammar.json_schema({"type": "array", "items": {"pattern": "^[a-z]{2,64}$"}}),
    ):
        assert not find_excess(grammar)
    # Of these the tiny vocabulary can write some.
    COMPILER.compile(Grammar.regex(f"a{{1,{MAX_UNFOLDED}}}"))
    COMPILER.compile(Grammar.choice(["ab" * i for i in range(1, 200)]))


def test_as_many_choices_as_may_be_are_followed_to_their_end() -> None:
    texts = ["".join(letters) for letters in itertools.product("ab", repeat=12)]
    assert len(texts) == MAX_ALTERNATIVES
    matcher = COMPILER.compile(Grammar.choice(texts)).make_matcher()
    for _ in range(12):
        [allowed] = masks_of(matcher)
        matcher.advance([min(allowed)])
        assert not matcher.error


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.lark(chain(9000, "{}", '"a"')),
        Grammar.lark(chain(7000, '"a" {}', '"b"')),
        Grammar.lark(chain(4000, '("b" | ["c" {}])', '"a"')),
        Grammar.lark(chain(7000, '"a" {}', '"b"').replace("r", "R").replace("staRt", "start")),
        Grammar.json_schema(
            {
                "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3800)}
                | {"3800": {"const": "a"}},
                "$ref": "#/$defs/0",
            }
        ),
        Grammar.json_schema(
            {
                "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(2600)}
                | {"2600": {"const": "a"}},
                "$ref": "#/$defs/0",
            }
        ),
        Grammar.json_schema(json.dumps({"const": json.loads("[" * 100 + "]" * 100)})),
        Grammar.lark("start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
    ],
    ids=["rules", "recursive", "options", "terminals", "references", "items", "nested", "groups"],
)
def test_no_depth_of_rules_or_references_ends_the_process(grammar: Grammar) -> None:
    """Recursion of the compiler beyond a common stack ended the process."""
    with contextlib.suppress(InvalidGrammarError):
        matcher = COMPILER.compile(grammar).make_matcher()
        matcher.advance([4])
        del matcher

    COMPILER.compile(Grammar.regex("ab"))


def test_ambiguity_ends_the_output_and_not_the_machine() -> None:
    grammar = Grammar.lark('start: start start start | start start | "a"', param="field")
    matcher = COMPILER.compile(grammar).make_matcher()
    for _ in range(400):
        matcher.advance([4])
        if matcher.error:
            break

    assert "(field)" in matcher.error
    assert "less ambiguous" in matcher.error


def test_what_fails_in_drafts_alone_fails_nothing() -> None:
    grammar = Grammar.lark('start: start start start | start start | "a" | "b"')
    compiled = COMPILER.compile(grammar)
    matcher = compiled.make_matcher()
    num_good = 0
    while not matcher.error:
        matcher.advance([4])
        num_good += not matcher.error
    matcher.restart([4] * (num_good - 2))
    [before] = masks_of(matcher)

    words = np.zeros((9, -(-VOCAB_SIZE // 32)), np.int32)
    dead_end = matcher.fill_masks(words, [4] * 8)

    assert 0 < dead_end < 9
    assert not matcher.error
    assert masks_of(matcher) == [before]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("address", ["http://example.com/s.json", "file:///etc/passwd", "s.json"])
def test_references_to_elsewhere_are_never_followed(address: str, strict: bool) -> None:
    grammar = Grammar.json_schema({"$ref": address}, is_strict=strict, param="field")
    with pytest.raises(InvalidGrammarError, match="field cannot be compiled"):
        COMPILER.compile(grammar)


def test_more_open_alternatives_than_can_be_followed_do_not_compile() -> None:
    compiler = make_byte_compiler()
    properties = {f"p{i}": {"type": "integer"} for i in range(1500)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    with pytest.raises(InvalidGrammarError, match="more than 400 properties not required"):
        compiler.compile(Grammar.json_schema({"items": schema}))
    rules = f"start: %json {json.dumps(schema)}"
    with pytest.raises(InvalidGrammarError, match="more than 400 properties not required"):
        compiler.compile(Grammar.lark(rules))
    compiler.compile(Grammar.json_schema({**schema, "required": list(properties)}))
    with pytest.raises(InvalidGrammarError, match="more than 400"):
        compiler.compile(Grammar.json_schema({**schema, "required": 5}))
    names = " | ".join(f"r{i}" for i in range(1200))
    rules = "\n".join([f"start: {names}", *(f'r{i}: "x" r{i}?' for i in range(1200))])
    with pytest.raises(InvalidGrammarError, match="too many alternatives are open"):
        compiler.compile(Grammar.lark(rules))
