# SPDX-License-Identifier: Apache-2.0
"""The fields of a body that say what the output must look like, to one grammar that compiles."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from pelton.core.errors import InvalidGrammarError, InvalidRequestError, OverloadedError
from pelton.core.grammar import Grammar
from pelton.serving.http.frontend import Frontend
from pelton.serving.http.schema import GenerationFields

COMPILE_TIMEOUT_S = 10.0


def read_grammar(body: GenerationFields, format_param: str = "response_format") -> Grammar | None:
    """`format_param` is what the client calls `response_format`. Raises `InvalidRequestError` for
    fields that are malformed or that exclude each other."""
    grammars = list(_read_guided(body))
    wanted = read_response_format(body.response_format, format_param)
    if wanted is not None:
        grammars.insert(0, wanted)
    if len(grammars) > 1:
        names = " and ".join(grammar.param for grammar in grammars[:2])
        raise InvalidRequestError(
            f"{names} exclude each other: give one of them.", param=grammars[1].param
        )
    return grammars[0] if grammars else None


def read_response_format(given: Mapping[str, Any] | None, param: str) -> Grammar | None:
    """Of `{"type": "text" | "json_object" | "json_schema", ...}`."""
    kind = given.get("type") if given else None
    if given is None or kind in (None, "text"):
        return None
    if kind == "json_object":
        return Grammar.json_object(param=param)
    if kind != "json_schema":
        raise InvalidRequestError(
            f"{param} must have the type 'text', 'json_object' or 'json_schema', got {kind!r:.64}.",
            param=param,
        )
    # The Responses API has the schema beside the type, chat completions one level below.
    holder = given.get("json_schema", given)
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if not isinstance(schema, (Mapping, bool)):
        place = "json_schema.schema" if param == "response_format" else "schema"
        raise InvalidRequestError(
            f"{param} of type 'json_schema' needs its schema, an object or a boolean, in"
            f" {param}.{place}.",
            param=param,
        )
    is_strict = holder.get("strict") is True
    return Grammar.json_schema(schema, is_strict=is_strict, param=param)


def _read_guided(body: GenerationFields) -> Iterator[Grammar]:
    """The fields that other servers have for the same thing."""
    if body.guided_json is not None:
        yield Grammar.json_schema(body.guided_json, is_strict=False, param="guided_json")
    if body.guided_regex is not None:
        yield Grammar.regex(body.guided_regex, param="guided_regex")
    if body.guided_choice is not None:
        yield Grammar.choice(body.guided_choice, param="guided_choice")
    if body.guided_grammar is not None:
        yield Grammar.lark(body.guided_grammar, param="guided_grammar")


async def check_grammar(frontend: Frontend, grammar: Grammar | None) -> None:
    """Compiles `grammar` in a thread. Raises `InvalidRequestError` with the compiler's words, and
    `OverloadedError` if it never came to it."""
    if grammar is None or frontend.grammars.cached(grammar) is not None:
        return
    compiling = frontend.grammars.compile_in_background(grammar)
    try:
        async with asyncio.timeout(COMPILE_TIMEOUT_S):
            await asyncio.wrap_future(compiling)
    except TimeoutError:
        if compiling.cancelled():  # it was still waiting for its turn
            raise OverloadedError(
                "Too many grammars are waiting to be compiled; try again later."
            ) from None
        raise InvalidGrammarError(
            f"{grammar.param} takes longer than {COMPILE_TIMEOUT_S:g} s to compile: simplify it.",
            param=grammar.param,
        ) from None
