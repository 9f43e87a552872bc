# SPDX-License-Identifier: Apache-2.0
"""What an output must look like, and the port through which the engine enforces it.

A grammar is plain data that crosses process borders. `engine.grammar` compiles it; a compiled
grammar makes one matcher for each choice of a request.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pelton.core.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    TokenMasks: TypeAlias = npt.NDArray[np.int32]

MAX_GRAMMAR_CHARS = 2**17
"""Of a schema as JSON, a regular expression or a Lark grammar."""
MAX_ALTERNATIVES = 4096


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Made by the constructors below, which raise `InvalidRequestError` for what is too large."""

    kind: GrammarKind
    text: str
    """The schema as JSON, the regular expression, or Lark rules whose first is `start`."""
    is_strict: bool = True
    """Of a schema: keywords that cannot be enforced are an error, not ignored."""
    param: str = "grammar"
    """The request field that errors are about."""
    preamble: str = ""
    """Lark rules for what comes before (a `preamble` rule among them), such as reasoning."""

    def __post_init__(self) -> None:
        num_chars = len(self.text)
        if num_chars > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"{self.param} must have at most {MAX_GRAMMAR_CHARS} characters, got {num_chars}.",
                param=self.param,
            )

    def after(self, preamble: str) -> "Grammar":
        """The same, after what the rule `preamble` of these Lark rules describes."""
        return replace(self, preamble=preamble)

    @classmethod
    def json_schema(
        cls,
        schema: Mapping[str, Any] | bool | str,
        *,
        is_strict: bool = True,
        param: str = "grammar",
    ) -> "Grammar":
        """A JSON value that follows `schema`, which may be given as its JSON text."""
        try:
            text = json.dumps(json.loads(schema) if isinstance(schema, str) else schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"{param} is not a JSON schema: {error}.", param=param
            ) from error
        return cls(kind=GrammarKind.JSON_SCHEMA, text=text, is_strict=is_strict, param=param)

    @classmethod
    def json_object(cls, *, param: str = "grammar") -> "Grammar":
        return cls.json_schema({"type": "object"}, param=param)

    @classmethod
    def regex(cls, pattern: str, *, param: str = "grammar") -> "Grammar":
        """The whole output matches `pattern` (Rust's syntax: no look-around, no references)."""
        return cls(kind=GrammarKind.REGEX, text=pattern, param=param)

    @classmethod
    def lark(cls, rules: str, *, param: str = "grammar") -> "Grammar":
        """A Lark grammar whose start rule is `start`."""
        return cls(kind=GrammarKind.LARK, text=rules, param=param)

    @classmethod
    def choice(cls, texts: Sequence[str], *, param: str = "grammar") -> "Grammar":
        """One of `texts`, exactly."""
        if not texts or not all(texts) or len(texts) > MAX_ALTERNATIVES:
            raise InvalidRequestError(
                f"{param} must hold between 1 and {MAX_ALTERNATIVES} texts, none of them empty.",
                param=param,
            )
        alternatives = " | ".join(lark_text(text) for text in dict.fromkeys(texts))
        # A terminal of its own is one automaton; as alternatives of a rule all of them are open.
        return cls.lark(f"start: CHOICE\nCHOICE: {alternatives}", param=param)


def lark_text(text: str) -> str:
    """`text` as a Lark string literal."""
    return json.dumps(text, ensure_ascii=False)


class TokenMatcher(Protocol):
    """Where one output is in its grammar. Its owner is the request; the executor moves it."""

    def restart(self, token_ids: Sequence[int]) -> None:
        """Goes to where the output `token_ids` leads."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes in tokens that the output gained."""
        ...

    def fill_masks(self, masks: "TokenMasks", drafts: Sequence[int] = ()) -> int:
        """`masks` [1 + len(drafts), words], words = ceil(V / 32): bit i % 32 of word i // 32 of row
        r says whether token i may follow the output and the first r drafts. Rows after a draft
        that is not allowed allow everything: nothing there can be accepted. The matcher stays
        where it was. Returns the number of rows, or the first that drafts may lead to and no token
        can follow: it and those after it say nothing then."""
        ...

    @property
    def error(self) -> str:
        """A sentence once the grammar cannot be followed any further; else empty."""
        ...


class CompiledGrammar(Protocol):
    def make_matcher(self) -> TokenMatcher:
        """At the start of an output. Cheap."""
        ...
