# SPDX-License-Identifier: Apache-2.0
"""Limits on what a grammar may spell out, found in its text before it is compiled.

The compiler bounds its own work at each step, so a pattern that unfolds into a million places
compiles, and only the output that meets it fails. Counting them first refuses it at the edge.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from pelton.core.grammar import Grammar, GrammarKind

MAX_PATTERN_CHARS = 2**14
"""Of one regular expression: compiling takes time quadratic in it."""
MAX_UNFOLDED = 10_000
"""Places in a pattern or a rule once its counted repetitions are written out."""
MAX_OPTIONAL = 400
"""Properties of one object that may be left out: wherever one may come, so may all after it."""

_COUNT = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|.)", re.S)
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]", re.S)
_LARK_PIECE = re.compile(
    r'(?P<text>"(?:\\.|[^"\\\n])*")|(?P<comment>//[^\n]*)|/(?P<pattern>(?:\\.|[^/\\\n])+)/', re.S
)

_INLINE_SCHEMA = re.compile(r"%json[ \t]*(?=\{)")
"""In Lark rules, up to the last brace of the line."""
_TOO_LONG = (
    f"has more than {MAX_UNFOLDED} places when its counted repetitions are written out: repeat"
    " less, or use * and +"
)


def find_excess(grammar: Grammar) -> str:
    """Which limit the grammar is beyond, in words that follow its name; empty: none."""
    for schema in _schemas(grammar):
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict) and len(properties) > MAX_OPTIONAL:
            names = {str(name) for name in required} if isinstance(required, list) else set()
            if len(properties.keys() - names) > MAX_OPTIONAL:
                return f"an object in it has more than {MAX_OPTIONAL} properties not required"
    for pattern in _patterns(grammar):
        if len(pattern) > MAX_PATTERN_CHARS:
            return f"a pattern in it has more than {MAX_PATTERN_CHARS} characters"
        if count_unfolded(pattern) > MAX_UNFOLDED:
            return f"a pattern in it {_TOO_LONG}"
    rules = _rules(grammar.text) if grammar.kind is GrammarKind.LARK else ()
    if any(count_unfolded(rule) > MAX_UNFOLDED for rule in rules):
        return f"a rule in it {_TOO_LONG}"
    return ""


def count_unfolded(pattern: str) -> int:
    """How many characters, classes and groups' contents `pattern` has with its counted repetitions
    written out. Never raises: what is malformed is the compiler's to refuse."""
    sizes = [0]
    """Of the open groups, the innermost last."""
    last = 0
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "{" and (count := _COUNT.match(pattern, at)):
            most = max(1, *(int(number) for number in count.groups() if number))
            sizes[-1] += last * (most - 1)
            last *= most
            at = count.end()
            continue
        if char == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif char == "(":
            sizes.append(0)
            last = 0
        elif char not in "|*+?":
            piece = {"\\": _ESCAPE, "[": _CLASS}.get(char)
            match = piece.match(pattern, at) if piece else None
            last = 1
            sizes[-1] += 1
            at = match.end() if match else at + 1
            continue
        at += 1
    return sum(sizes)


def _patterns(grammar: Grammar) -> Iterator[str]:
    if grammar.kind is GrammarKind.REGEX:
        yield grammar.text
    elif grammar.kind is GrammarKind.LARK:
        for piece in _LARK_PIECE.finditer(_split_schemas(grammar.text)[0]):
            if piece["pattern"]:
                yield piece["pattern"]
    for schema in _schemas(grammar):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        if isinstance(schema.get("patternProperties"), dict):
            yield from schema["patternProperties"]


def _schemas(grammar: Grammar) -> Iterator[dict[str, Any]]:
    """Every object in the schemas of a grammar, whether or not it is a schema itself."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        yield from _objects(json.loads(grammar.text))
    elif grammar.kind is GrammarKind.LARK:
        for schema in _split_schemas(grammar.text)[1]:
            try:
                yield from _objects(json.loads(schema))
            except ValueError:
                continue  # the compiler says what is wrong with it


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            yield value
            rest += value.values()
        elif isinstance(value, list):
            rest += value


def _rules(text: str) -> Iterator[str]:
    """The lines of a Lark grammar in the form of patterns: one character a symbol."""
    text = _LARK_PIECE.sub("x", _split_schemas(text)[0])
    for rule in text.replace("[", "(").replace("]", ")").split("\n"):
        _, _, body = rule.partition(":")
        yield "".join(re.sub(r"(?<![{,\w])[a-zA-Z_]\w*", "x", body).split())


def _split_schemas(text: str) -> tuple[str, list[str]]:
    """Lark rules with an x for each schema, and the schemas. A pattern from brace to brace would
    look through the rest of the line at each `%json`, where there is none: for seconds."""
    lines, schemas = [], []
    for line in text.split("\n"):
        begin, end = _INLINE_SCHEMA.search(line), line.rfind("}") + 1
        if begin is not None and begin.end() < end:
            schemas.append(line[begin.end() : end])
            line = f"{line[: begin.start()]}x{line[end:]}"
        lines.append(line)
    return "\n".join(lines), schemas
