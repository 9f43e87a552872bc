# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars and follows them token by token, with llguidance.

A grammar over bytes becomes, at each position, the set of tokens whose bytes can go on. Special
tokens stand for no bytes, so no grammar of text ever allows one; end-of-sequence tokens are allowed
exactly where the grammar may end. Compiling is bounded (`MAX_GRAMMAR_CHARS`, `grammar_limits`, and
the library's limits on its own work). It releases Python's lock, and it recurses as deeply as rules
and references lead to each other, so it has a thread of its own with a stack for the worst of them.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import llguidance
import numpy as np

from pelton.core.errors import InvalidGrammarError
from pelton.core.grammar import CompiledGrammar, Grammar, GrammarKind
from pelton.engine.grammar_limits import find_excess

if TYPE_CHECKING:
    from pelton.core.grammar import TokenMasks

MAX_CACHED = 128
"""Compiled grammars kept; the least recently used goes first."""
_MAX_MESSAGE_CHARS = 1000
_STACK_BYTES = 2**28
"""Of the compiling thread: address space, of which only what recursion touches becomes memory."""
_NUM_TRIED_TOKENS = 6
"""A grammar is followed so far before it counts as compiled."""
_LARK_ITEMS, _SCHEMA_ITEMS = (1000, 10_000), (2000, 50_000)
"""Alternatives followed at one place and in one step. An ambiguous grammar costs each step time
cubic in what it leaves open: every other request's time. Schemas are hardly ever ambiguous, and
keep the library's own limits."""
_NOT_VERBOSE = "<non-verbose/>"
"""What llguidance ends a message with when it was told to keep it short."""
_WHITESPACE = r"[ \n\r\t]{0,64}"
"""Between the tokens of JSON. Bounded: small models may never stop writing line breaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenVocabulary:
    """What tokens stand for."""

    token_bytes: Sequence[bytes]
    """By token id; empty where an id has no token."""
    special_token_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]
    """Text to token ids, without special tokens around it."""
    vocab_size: int
    """Of the logits: ids past `token_bytes` are never allowed."""


class _Tokens:
    """A vocabulary as llguidance wants to see it.

    Where the grammar leaves only one text, its tokens are the tokenizer's own for it: those that
    the model was trained on.
    """

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(vocabulary.special_token_ids)
        tokens = list(vocabulary.token_bytes[: vocabulary.vocab_size])
        self.tokens = tokens + [b""] * (vocabulary.vocab_size - len(tokens))
        self._encode = vocabulary.encode
        self._ids: dict[bytes, int] = {}

    def __call__(self, text: bytes) -> list[int]:
        ids = self._encode(text.decode())
        if b"".join([self.tokens[token_id] for token_id in ids]) == text:
            return ids
        return self._encode_greedily(text)  # a tokenizer that adds a space, for one

    def _encode_greedily(self, text: bytes) -> list[int]:
        """The longest token that fits, from left to right."""
        if not self._ids:
            special = frozenset(self.special_token_ids)
            pairs = reversed(list(enumerate(self.tokens)))
            self._ids = {token: i for i, token in pairs if token and i not in special}
        ids, start = [], 0
        longest = max(map(len, self._ids), default=1)
        while start < len(text):
            pieces = (text[start : start + n] for n in range(longest, 0, -1))
            piece = next((piece for piece in pieces if piece in self._ids), None)
            if piece is None:
                break
            ids.append(self._ids[piece])
            start += len(piece)
        return ids


class GrammarCompiler:
    """Thread safe. Compiled grammars are cached."""

    def __init__(self, load_vocabulary: Callable[[], TokenVocabulary]) -> None:
        """`load_vocabulary` is called once, by the first grammar."""
        self._load_vocabulary = load_vocabulary
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._num_words = 0
        self._lock = threading.Lock()
        self._cache: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    def cached(self, grammar: Grammar) -> CompiledGrammar | None:
        return self._cache.get(grammar)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises `InvalidGrammarError` with the compiler's own words."""
        return self.compile_in_background(grammar).result()

    def compile_in_background(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """In a thread of its own, one grammar after the other."""
        with self._lock:
            if self._thread is None:
                self._thread = _start_thread()
            return self._thread.submit(self._find_or_compile, grammar)

    def _find_or_compile(self, grammar: Grammar) -> CompiledGrammar:
        compiled = self._cache.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            self._cache[grammar] = compiled
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(grammar)
        return compiled

    def _compile(self, grammar: Grammar) -> "_Compiled":
        if self._tokenizer is None:
            vocabulary = self._load_vocabulary()
            self._tokenizer, self._eos_token_ids = _make_tokenizer(vocabulary)
            self._num_words = -(-vocabulary.vocab_size // 32)
        if excess := find_excess(grammar):
            raise _unusable(grammar, excess)
        compiled = self._make(grammar)
        # What comes before is free text: the part that can fail is tried without it.
        tried = self._make(replace(grammar, preamble="")) if grammar.preamble else compiled
        self._try(grammar, tried.make_matcher())
        return compiled

    def _make(self, grammar: Grammar) -> "_Compiled":
        assert self._tokenizer is not None
        row, step = _LARK_ITEMS if grammar.kind is GrammarKind.LARK else _SCHEMA_ITEMS
        limits = llguidance.LLParserLimits(
            verbose_errors=False, max_items_in_row=row, step_max_items=step
        )
        try:
            matcher = llguidance.LLMatcher(
                self._tokenizer, _source(grammar), log_level=0, limits=limits
            )
        except (ValueError, UnicodeError) as error:
            raise _unusable(grammar, str(error)) from error
        if matcher.is_error():
            raise _unusable(grammar, _reason(matcher))
        return _Compiled(matcher, self._eos_token_ids, grammar.param)

    def _try(self, grammar: Grammar, matcher: "GrammarMatcher") -> None:
        """Some that compile stop at a first token: rules that only lead to themselves, sets of
        characters with none in them, more alternatives than can be followed."""
        masks = np.zeros((1, self._num_words), np.int32)
        for _ in range(_NUM_TRIED_TOKENS):
            matcher.fill_masks(masks)
            if matcher.error:
                raise _unusable(grammar, matcher.reason)
            bits = np.unpackbits(masks.view(np.uint8)[0], bitorder="little")
            bits[list(self._eos_token_ids)] = 0
            if not bits.any():
                return
            matcher.advance([int(bits.argmax())])


def _start_thread() -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
    size = threading.stack_size(_STACK_BYTES)
    try:
        executor.submit(int).result()  # its thread starts here
    finally:
        threading.stack_size(size)
    return executor


def _make_tokenizer(vocabulary: TokenVocabulary) -> tuple[llguidance.LLTokenizer, frozenset[int]]:
    eos = vocabulary.eos_token_ids
    if not eos:
        raise InvalidGrammarError(
            "This model has no end-of-sequence token, without which no output can be held to a"
            " grammar.",
            param="grammar",
        )
    tokens = llguidance.TokenizerWrapper(_Tokens(vocabulary))
    tokenizer = llguidance.LLTokenizer(tokens, n_vocab=vocabulary.vocab_size, eos_token=list(eos))
    return tokenizer, frozenset(eos)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's JSON form."""
    body: dict[str, object] = {"name": "body"}
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            body["json_schema"] = _with_options(json.loads(grammar.text), not grammar.is_strict)
        case GrammarKind.REGEX:
            pattern = llguidance.regex_to_lark(grammar.text, use_ascii="")
            body["lark_grammar"] = f"start: /{pattern}/"
        case GrammarKind.LARK:
            body["lark_grammar"] = grammar.text
    grammars = [body]
    if grammar.preamble:
        rules = f"start: preamble @body\n{grammar.preamble}"
        grammars = [{"name": "all", "lark_grammar": rules}, body]
    return json.dumps({"grammars": grammars})


def _with_options(schema: object, is_lenient: bool) -> object:
    options = {"whitespace_pattern": _WHITESPACE, "lenient": is_lenient}
    if isinstance(schema, dict):
        return {**schema, "x-guidance": options}
    return {"allOf": [schema], "x-guidance": options}


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Why `matcher` cannot go on, in words that a user can act on."""
    reason = str(matcher.get_error()).removesuffix(_NOT_VERBOSE).strip()
    if reason == "NoExtensionBias":
        return "no text can follow it; look for rules or references that only lead to themselves"
    if "Current row has" in reason or "Too many items" in reason:
        return (
            "too many alternatives are open at one place; have fewer optional properties and"
            " alternatives, or rules that are less ambiguous"
        )
    if "too many expressions" in reason or "fuel exhausted" in reason:
        return "a pattern in it is too complex; repeat less in it"
    return reason


def _unusable(grammar: Grammar, reason: str) -> InvalidGrammarError:
    reason = " ".join(reason.split())[:_MAX_MESSAGE_CHARS]
    return InvalidGrammarError(
        f"{grammar.param} cannot be compiled to a grammar: {reason.rstrip('.')}.",
        param=grammar.param,
    )


class _Compiled:
    """Implements `core.grammar.CompiledGrammar`: a matcher at the start, to copy."""

    def __init__(
        self, matcher: llguidance.LLMatcher, eos_token_ids: frozenset[int], param: str
    ) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._param = param

    def make_matcher(self) -> "GrammarMatcher":
        return GrammarMatcher(self._matcher, self._eos_token_ids, self._param)


class GrammarMatcher:
    """Implements `core.grammar.TokenMatcher`.

    An output that goes on after its end-of-sequence token (`ignore_eos`) may repeat only that.
    """

    def __init__(
        self, start: llguidance.LLMatcher, eos_token_ids: frozenset[int], param: str
    ) -> None:
        """`start`: at the start of an output; stays there."""
        self._start = start
        self._matcher = start.deep_copy()
        self._consumed: list[int] = []
        self._eos_token_ids = eos_token_ids
        self._param = param
        self._has_ended = False

    @property
    def error(self) -> str:
        if not self._matcher.is_error():
            return ""
        reason = " ".join(self.reason.split())[:_MAX_MESSAGE_CHARS]
        return f"The output cannot follow its grammar ({self._param}) any further: {reason}."

    @property
    def reason(self) -> str:
        """Of an error, by itself."""
        return _reason(self._matcher)

    def restart(self, token_ids: Sequence[int]) -> None:
        # Not `reset`: a matcher that has failed, or whose rules have `stop=`, cannot go back.
        self._matcher = self._start.deep_copy()
        self._consumed = []
        self._has_ended = False
        self.advance(token_ids)

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._has_ended or self._matcher.is_error():
                return
            if token_id in self._eos_token_ids:
                # Not consumed: a grammar that has ended has nothing to take in.
                self._has_ended = True
            else:
                self._matcher.consume_token(token_id)
                self._consumed.append(token_id)

    def fill_masks(self, masks: "TokenMasks", drafts: Sequence[int] = ()) -> int:
        assert masks.shape[0] == 1 + len(drafts), (masks.shape, len(drafts))
        assert masks.strides[1] == masks.itemsize, masks.strides
        num_consumed, dead_end = 0, 1 + len(drafts)
        for row in range(1 + len(drafts)):
            if self._has_ended:
                self._allow_eos_only(masks)
                break
            words = masks[row]
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error() or not words.any():
                dead_end = row  # which the output may not come to
                break
            if row == len(drafts):
                break
            draft = drafts[row]
            is_allowed = words[draft >> 5] >> (draft & 31) & 1
            if not is_allowed:
                masks[row + 1 :] = -1
                break
            if draft in self._eos_token_ids:
                self._allow_eos_only(masks[row + 1 :])
                break
            self._matcher.consume_token(draft)
            num_consumed += 1
        if num_consumed:
            self._matcher.rollback(num_consumed)
            if self._matcher.is_error():
                self.restart(self._consumed)
        return dead_end

    def _allow_eos_only(self, masks: "TokenMasks") -> None:
        masks[:] = 0
        for token_id in self._eos_token_ids:
            masks[:, token_id >> 5] |= _bit(token_id)


def _bit(token_id: int) -> int:
    bit = 1 << (token_id & 31)
    return bit - 2**32 if bit >= 2**31 else bit
