# SPDX-License-Identifier: Apache-2.0
"""Grammars compiled for a tiny vocabulary, beside a matcher that tries everything."""

import gc
import itertools
import json

import numpy as np
import pytest
from engine_harness import Harness, make_config, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.core.clock import ManualClock
from pelton.core.errors import InvalidGrammarError, InvalidRequestError
from pelton.core.grammar import MAX_GRAMMAR_CHARS, Grammar
from pelton.core.request import GenerateRequest, RequestOutput, SamplingParams
from pelton.engine.grammar import MAX_CACHED, GrammarCompiler, TokenVocabulary
from pelton.engine.grammar_queue import GrammarQueue

EOS, OTHER_EOS, SPECIAL, ABSENT = 0, 1, 2, 3
TEXTS = ["a", "b", "c", "ab", "ba", "abc", "cc", "aab", "é", " "]
TOKENS = [b"</s>", b"<end>", b"ab", b"", *(text.encode() for text in TEXTS)]
FIRST = 4
VOCAB_SIZE = len(TOKENS) + 21
"""With ids that have no token, up to the second word of a mask."""


def encode(text: str) -> list[int]:
    """As a tokenizer that puts a space first: never usable as it is."""
    return [
        TEXTS.index(" ") + FIRST,
        *(TEXTS.index(char) + FIRST for char in text if char in TEXTS),
    ]


def make_compiler() -> GrammarCompiler:
    return GrammarCompiler(
        lambda: TokenVocabulary(
            token_bytes=TOKENS,
            special_token_ids=frozenset({EOS, OTHER_EOS, SPECIAL}),
            eos_token_ids=(EOS, OTHER_EOS),
            encode=encode,
            vocab_size=VOCAB_SIZE,
        )
    )


COMPILER = make_compiler()


def make_byte_compiler() -> GrammarCompiler:
    """One token for each printable ASCII character."""
    tokens = [b"</s>", *(bytes([byte]) for byte in range(32, 127))]
    vocabulary = TokenVocabulary(
        token_bytes=tokens,
        special_token_ids=frozenset({EOS}),
        eos_token_ids=(EOS,),
        encode=lambda text: [1 + byte - 32 for byte in text.encode()],
        vocab_size=len(tokens),
    )
    return GrammarCompiler(lambda: vocabulary)


def masks_of(matcher, drafts=()) -> list[set[int]]:
    words = np.zeros((1 + len(drafts), -(-VOCAB_SIZE // 32)), np.int32)
    matcher.fill_masks(words, drafts)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def allowed_by(language: set[str], prefix: str) -> set[int]:
    """Tries every token at the end of `prefix`."""
    allowed = {EOS, OTHER_EOS} if prefix in language else set()
    for token_id, text in enumerate(TEXTS, FIRST):
        if any(word.startswith(prefix + text) for word in language):
            allowed.add(token_id)
    return allowed


def is_forced(language: set[str], prefix: str) -> bool:
    """Whether only one byte can follow: then the tokenizer's own tokens are the only ones."""
    rests = [word.encode().removeprefix(prefix.encode()) for word in language
             if word.startswith(prefix)]  # fmt: skip
    return len({rest[:1] for rest in rests}) == 1


WORDS = st.text(alphabet="abcé ", min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(language=st.sets(WORDS, min_size=1, max_size=6), data=st.data())
def test_masks_allow_what_trying_everything_allows(language: set[str], data) -> None:
    matcher = COMPILER.compile(Grammar.choice(sorted(language))).make_matcher()
    prefix = ""
    while True:
        [allowed] = masks_of(matcher)
        expected = allowed_by(language, prefix)
        if is_forced(language, prefix):
            assert allowed
            assert allowed <= expected
        else:
            assert allowed == expected
        token_id = data.draw(st.sampled_from(sorted(allowed)))
        if token_id in (EOS, OTHER_EOS):
            return
        matcher.advance([token_id])
        prefix += TEXTS[token_id - FIRST]


@settings(max_examples=60, deadline=None)
@given(
    language=st.sets(WORDS, min_size=1, max_size=5),
    drafts=st.lists(st.integers(0, len(TOKENS) - 1), max_size=4),
)
def test_masks_at_drafts_are_those_after_them_and_the_matcher_stays(
    language: set[str], drafts: list[int]
) -> None:
    compiled = COMPILER.compile(Grammar.choice(sorted(language)))
    matcher = compiled.make_matcher()

    masks = masks_of(matcher, drafts)

    reached = compiled.make_matcher()
    for mask, draft in itertools.zip_longest(masks, drafts):
        assert [mask] == masks_of(reached)
        if draft is None or draft not in mask:
            break
        reached.advance([draft])
    assert masks_of(matcher) == masks[:1]


def test_rows_after_a_draft_that_is_not_allowed_allow_everything() -> None:
    matcher = COMPILER.compile(Grammar.choice(["ab"])).make_matcher()

    masks = masks_of(matcher, [FIRST + 1, FIRST])

    assert masks[1] == masks[2] == set(range(64))


def test_a_matcher_restarts_at_any_output() -> None:
    compiled = COMPILER.compile(Grammar.regex("(ab|c)+"))
    matcher, fresh = compiled.make_matcher(), compiled.make_matcher()
    matcher.advance([FIRST + 3, FIRST + 2])
    fresh.advance([FIRST])

    matcher.restart([FIRST])

    assert masks_of(matcher) == masks_of(fresh) == [{FIRST + 1, FIRST + 4}]


def test_only_end_of_sequence_may_follow_it() -> None:
    matcher = COMPILER.compile(Grammar.regex("a*")).make_matcher()

    matcher.advance([FIRST, EOS, EOS])

    assert masks_of(matcher, [EOS]) == [{EOS, OTHER_EOS}] * 2
    assert not matcher.error


def test_a_preamble_comes_first_and_is_free() -> None:
    rules = 'preamble: TEXT "c"\nTEXT: /[ab]*/'
    grammar = Grammar.regex("é+")
    grammar = Grammar(kind=grammar.kind, text=grammar.text, preamble=rules)
    matcher = COMPILER.compile(grammar).make_matcher()

    matcher.advance([FIRST, FIRST + 4, FIRST + 2])

    assert masks_of(matcher) == [{TEXTS.index("é") + FIRST}]


def test_a_token_the_grammar_does_not_allow_is_an_error_of_its_matcher_only() -> None:
    compiled = COMPILER.compile(Grammar.regex("a+"))
    broken, whole = compiled.make_matcher(), compiled.make_matcher()

    broken.advance([FIRST + 1])

    assert "cannot follow its grammar" in broken.error
    assert not whole.error


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.regex("a("), "unclosed group"),
        (Grammar.regex("(?=a)b"), "look-around"),
        (Grammar.lark("start: nothing"), "nothing"),
        (Grammar.json_schema({"type": "thing"}), "thing"),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json_schema(False), "nsatisfiable"),
        (Grammar.regex("\ud800"), "surrogates"),
    ],
    ids=lambda value: (
        value.text[:20].encode(errors="replace").decode() if isinstance(value, Grammar) else None
    ),
)
def test_what_does_not_compile_is_refused_in_the_compilers_words(grammar, reason) -> None:
    with pytest.raises(InvalidGrammarError, match=reason) as caught:
        COMPILER.compile(grammar)
    assert caught.value.param == "grammar"


def test_a_schema_that_is_not_strict_leaves_out_what_cannot_be_enforced() -> None:
    schema = {"type": "array", "uniqueItems": True}
    make_byte_compiler().compile(Grammar.json_schema(schema, is_strict=False))


def test_too_large_is_refused_with_the_limit() -> None:
    with pytest.raises(InvalidRequestError, match=str(MAX_GRAMMAR_CHARS)):
        Grammar.regex("a" * (MAX_GRAMMAR_CHARS + 1))
    with pytest.raises(InvalidRequestError, match="4096"):
        Grammar.choice(["x"] * 5000)
    deep: object = {}
    for _ in range(400):
        deep = {"properties": {"a": deep}}
    with pytest.raises(InvalidGrammarError, match="recursion limit"):
        COMPILER.compile(Grammar.json_schema(json.dumps(deep)))


def test_min_tokens_cannot_overrule_a_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens cannot be combined with grammar"):
        SamplingParams(grammar=Grammar.regex("a"), min_tokens=2)


def test_the_cache_keeps_the_newest() -> None:
    compiler = make_compiler()
    grammars = [Grammar.regex("a" * (i + 1)) for i in range(MAX_CACHED + 1)]
    for grammar in grammars:
        compiler.compile(grammar)

    assert compiler.cached(grammars[0]) is None
    assert compiler.cached(grammars[-1]) is compiler.compile(grammars[-1])


def test_a_model_without_an_end_token_cannot_be_held_to_a_grammar() -> None:
    compiler = GrammarCompiler(
        lambda: TokenVocabulary(
            token_bytes=TOKENS,
            special_token_ids=frozenset(),
            eos_token_ids=(),
            encode=encode,
            vocab_size=14,
        )
    )
    with pytest.raises(InvalidGrammarError, match="no end-of-sequence token"):
        compiler.compile(Grammar.regex("a"))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar.json_schema({"$ref": "#"}, param="field"), "only lead to themselves"),
        (
            Grammar.json_schema(
                {
                    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                    "$ref": "#/$defs/a",
                },
                param="field",
            ),
            "only lead to themselves",
        ),
        (Grammar.lark("start: start", param="field"), "only lead to themselves"),
        (Grammar.lark("start: a\na: b\nb: a", param="field"), "only lead to themselves"),
        (Grammar.regex(r"[^\s\S]", param="field"), "no text can follow"),
    ],
)
def test_grammars_that_stop_before_the_first_token_do_not_compile(
    grammar: Grammar, words: str
) -> None:
    with pytest.raises(InvalidGrammarError, match=words) as caught:
        make_compiler().compile(grammar)

    assert caught.value.param == "field"
    assert caught.value.message.startswith("field cannot be compiled")
    assert "verbose" not in caught.value.message


def test_an_output_that_gets_stuck_names_the_field_of_its_grammar() -> None:
    grammar = Grammar.lark('start: "aaaaaaaaaa" x\nx: x', param="field")
    matcher = make_compiler().compile(grammar).make_matcher()
    matcher.advance([TEXTS.index("a") + FIRST] * 10)
    masks_of(matcher)

    assert "(field)" in matcher.error
    assert "only lead to themselves" in matcher.error


@pytest.mark.parametrize(
    "rules",
    ['start[stop="b"]: /[abc ]*/', 'start: words "é"\nwords[max_tokens=4]: /[a-c ]*/'],
    ids=["stop", "max_tokens"],
)
def test_rules_that_cannot_be_taken_back_allow_drafts_and_restarts(rules: str) -> None:
    compiled = COMPILER.compile(Grammar.lark(rules))
    a, c = FIRST, FIRST + 2
    plain, drafted = compiled.make_matcher(), compiled.make_matcher()

    for token in (a, c, a):
        rows = masks_of(drafted, [token, c, a])
        assert rows[0] == masks_of(plain)[0]
        for matcher in (plain, drafted):
            matcher.advance([token])
        assert rows[1] == masks_of(plain)[0]
    drafted.restart([a, c, a])

    assert masks_of(drafted) == masks_of(plain)
    assert not drafted.error


def test_a_request_whose_grammar_does_not_compile_is_gone_without_the_cyclic_collector() -> None:
    harness = Harness(make_config())
    queue = GrammarQueue(make_compiler(), ManualClock())
    gc.collect()
    gc.disable()
    try:
        queue.push(make_request("gone", [1], grammar=Grammar.regex("a(")))
        outputs: list[RequestOutput] = []
        while queue.has_work:
            outputs += queue.settle(harness.engine._scheduler)
        requests = [item for item in gc.get_objects() if type(item) is GenerateRequest]
    finally:
        gc.enable()
    assert [output.error_code for output in outputs] == ["invalid_grammar"]
    assert "gone" not in {request.request_id for request in requests}
