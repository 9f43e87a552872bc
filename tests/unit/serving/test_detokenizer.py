# SPDX-License-Identifier: Apache-2.0
import random
from pydoc_data.topics import topics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.core.request import FinishReason, SamplingParams
from pelton.models.checkpoint import open_checkpoint
from pelton.serving.detokenizer import OutputDetokenizer
from pelton.serving.tokenizer import Tokenizer

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
TEXTS = [
    "plain text, nothing more",
    "👩‍👩‍👧‍👦🇨🇭❤️ family and flag",
    "汉字かな한국어ไทยالعربية",
    "Ze\u0301\u0351\u036b combining\u0308",
    "mixed é 🎉 x\n\n\ty",
]


@pytest.fixture(scope="session")
def tokenizers(smollm2_checkpoint, tiny_llama) -> list[Tokenizer]:
    return [
        Tokenizer.load(smollm2_checkpoint),
        Tokenizer.load(open_checkpoint(str(tiny_llama.single))),
    ]


@pytest.fixture(scope="session")
def smollm2(tokenizers) -> Tokenizer:
    return tokenizers[0]


def stream(
    tokenizer: Tokenizer,
    ids: list[int],
    *,
    prompt: str = "x",
    chunk: int = 1,
    reason: FinishReason = LENGTH,
    **sampling: object,
) -> tuple[list[str], OutputDetokenizer]:
    """The pieces that pushing `chunk` tokens at a time gives, the last push with the reason."""
    params = SamplingParams(**sampling)
    detokenizer = OutputDetokenizer(tokenizer, tokenizer.encode(prompt), params)
    chunks = [ids[start : start + chunk] for start in range(0, len(ids), chunk)] or [[]]
    pieces = []
    for index, tokens in enumerate(chunks):
        is_last = index == len(chunks) - 1
        pieces.append(detokenizer.push(tokens, reason if is_last else None))
    return pieces, detokenizer


@pytest.mark.parametrize("chunk", [1, 2, 7])
@pytest.mark.parametrize("stop", [(), ("never in there", "\n\n\n\n\n")])
def test_pieces_join_to_the_full_decode(tokenizers, chunk: int, stop) -> None:
    for tokenizer in tokenizers:
        for text in [*TEXTS, topics["strings"][:2000]]:
            ids = tokenizer.encode(text)
            pieces, detokenizer = stream(tokenizer, ids, chunk=chunk, stop=stop)
            assert "".join(pieces) == tokenizer.decode(ids) == text
            assert "\ufffd" not in "".join(pieces)
            assert detokenizer.num_tokens == len(ids)


def test_pieces_of_any_tokens_join_to_the_full_decode(smollm2) -> None:
    """Broken byte sequences in the middle become U+FFFD, the same ones as at once."""
    for _ in range(300):
        ids = random.choices(range(17, 300), k=30)
        for stop in ((), ("q" * 40,)):
            pieces, _ = stream(smollm2, ids, stop=stop)
            assert "".join(pieces) == smollm2.decode(ids)


def test_every_cut_in_a_character_ends_in_one_replacement(tokenizers) -> None:
    """As max_tokens does: nothing is held back for ever, and no U+FFFD comes before the end."""
    for tokenizer in tokenizers:
        ids = tokenizer.encode(TEXTS[1])
        for length in range(len(ids) + 1):
            pieces, _ = stream(tokenizer, ids[:length])
            assert "".join(pieces) == tokenizer.decode(ids[:length])
            assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_a_character_begun_by_the_prompt_is_completed(smollm2) -> None:
    ids = smollm2.encode("👍!")
    assert len(ids) > 3
    detokenizer = OutputDetokenizer(smollm2, ids[:2], SamplingParams())
    assert detokenizer.push(ids[2:], LENGTH) == "👍!"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (b"ab", b""),
        (b"\xf0\x9f\x91", b"\xf0\x9f\x91"),
        (b"a\xe6\xb1", b"\xe6\xb1"),
        (b"ab\xc3", b"\xc3"),
        ("é".encode(), b""),
        (b"\x91\x8d\x8d", b""),
        (b"", b""),
    ],
)
def test_incomplete_ends_of_prompts(smollm2, end: bytes, expected: bytes) -> None:
    from pelton.serving.detokenizer import _incomplete_end

    by_byte = {raw: token_id for token_id, raw in enumerate(smollm2.token_bytes) if len(raw) == 1}
    ids = [by_byte[bytes([byte])] for byte in end]
    assert _incomplete_end(smollm2, ids) == expected


def tokens_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """One token for each piece."""
    by_text = {raw: token_id for token_id, raw in enumerate(tokenizer.token_bytes)}
    return [by_text[piece.encode()] for piece in pieces]


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize(("is_included", "expected"), [(False, "The "), (True, "The class of")])
def test_a_stop_string_across_three_tokens(
    smollm2, chunk: int, is_included: bool, expected: str
) -> None:
    ids = tokens_of(smollm2, "The", " ", "class", " of", " five")
    pieces, detokenizer = stream(
        smollm2, ids, chunk=chunk, stop=("class of",), include_stop_str_in_output=is_included
    )
    assert "".join(pieces) == expected
    assert detokenizer.stop_string == "class of"
    assert detokenizer.num_tokens == 4
    assert detokenizer.push(ids, LENGTH) == ""


@pytest.mark.parametrize(("is_included", "expected"), [(False, "The c"), (True, "The clas")])
def test_a_stop_string_inside_a_token(smollm2, is_included: bool, expected: str) -> None:
    ids = tokens_of(smollm2, "The", " class", " of")
    pieces, detokenizer = stream(
        smollm2, ids, stop=("las",), include_stop_str_in_output=is_included
    )
    assert ("".join(pieces), detokenizer.num_tokens) == (expected, 2)


def test_what_may_become_a_stop_string_is_held_until_it_cannot(smollm2) -> None:
    ids = tokens_of(smollm2, "one", " class", " of", "two")
    pieces, detokenizer = stream(smollm2, ids, stop=("class of five",))
    assert pieces == ["one", " ", "", "class oftwo"]
    assert detokenizer.stop_string is None


def test_held_text_comes_out_at_the_end(smollm2) -> None:
    ids = tokens_of(smollm2, "one", " class")
    pieces, _ = stream(smollm2, ids, stop=("class of",))
    assert pieces == ["one", " class"]


def test_the_stop_string_that_ends_first_wins_and_of_two_the_longer(smollm2) -> None:
    ids = tokens_of(smollm2, "The", " class", " of")
    pieces, detokenizer = stream(smollm2, ids, stop=("class of", "ass", "lass", "of"))
    assert ("".join(pieces), detokenizer.stop_string) == ("The c", "lass")


def test_a_stop_string_of_several_bytes_a_character(smollm2) -> None:
    ids = smollm2.encode("yes 🎉 no")
    pieces, detokenizer = stream(smollm2, ids, stop=("🎉",))
    assert ("".join(pieces), detokenizer.stop_string) == ("yes ", "🎉")


def test_no_stop_string_ends_the_output_before_min_tokens(smollm2) -> None:
    ids = tokens_of(smollm2, "a", "b", "a", "b", "a", "b")
    for min_tokens, num_tokens in ((0, 2), (2, 2), (3, 4), (5, 6)):
        _, detokenizer = stream(smollm2, ids, stop=("ab",), min_tokens=min_tokens)
        assert detokenizer.num_tokens == num_tokens
    pieces, detokenizer = stream(smollm2, ids, stop=("aba",), min_tokens=4)
    assert ("".join(pieces), detokenizer.num_tokens) == ("ab", 5)


def test_special_tokens_are_left_out_unless_wanted(smollm2) -> None:
    ids = [1, *smollm2.encode("user"), 2]
    assert "".join(stream(smollm2, ids)[0]) == "user"
    pieces, _ = stream(smollm2, ids, skip_special_tokens=False)
    assert "".join(pieces) == "<|im_start|>user<|im_end|>"


@pytest.mark.parametrize("stop", [(), ("zzz",)])
@pytest.mark.parametrize(("is_included", "expected"), [(False, "hi"), (True, "hi!")])
def test_the_token_that_stopped_is_left_out_unless_wanted(
    smollm2, stop, is_included: bool, expected: str
) -> None:
    ids = tokens_of(smollm2, "hi", "!")
    params = SamplingParams(
        stop=stop, stop_token_ids=(ids[1],), include_stop_str_in_output=is_included
    )
    detokenizer = OutputDetokenizer(smollm2, [5], params)
    pieces = [detokenizer.push(ids[:1]), detokenizer.push(ids[1:], STOP, ids[1])]
    assert ("".join(pieces), detokenizer.num_tokens) == (expected, 2)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=12), min_size=1, max_size=4),
    data=st.data(),
)
def test_stops_are_found_as_by_a_plain_search(text: str, stops: list[str], data) -> None:
    """Whatever the chunks: the text is cut at the occurrence that ends first (the longest of
    those), and no character that belongs to it was handed out."""
    detokenizer = OutputDetokenizer(_Letters(), [], SamplingParams(stop=tuple(stops)))
    pieces, rest = [], [ord(char) for char in text]
    while rest:
        size = data.draw(st.integers(1, 5))
        pieces.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
    pieces.append(detokenizer.push([], LENGTH))
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in set(stops) if stop in text]
    if not ends:
        assert ("".join(pieces), detokenizer.stop_string) == (text, None)
        return
    end, _, stop = min(ends)
    assert ("".join(pieces), detokenizer.stop_string) == (text[: end - len(stop)], stop)
    assert detokenizer.num_tokens == end


class _Letters:
    """A tokenizer with one token a byte."""

    token_bytes = plain_token_bytes = [bytes([byte]) for byte in range(256)]  # noqa: RUF012
