# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup proposes what followed the last tokens, and nothing where they are new."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.engine.speculative.ngram import propose_ngram


def propose(tokens: list[int], max_drafts: int) -> list[int]:
    return propose_ngram(tokens, bytearray(), max_drafts)


def test_what_followed_the_last_tokens_is_proposed() -> None:
    assert propose([1, 2, 3, 70000, 5, 6, 1, 2, 3], 4) == [70000, 5, 6, 1]


@pytest.mark.parametrize("tokens", [[], [7], [7, 7, 7], [1, 2, 3, 4, 5, 6], [1, 2, 9, 1, 2]])
def test_nothing_is_proposed_after_tokens_that_are_new_together(tokens: list[int]) -> None:
    assert propose(tokens, 3) == []


def test_the_longest_match_counts_and_of_those_the_newest() -> None:
    longest = [1, 2, 3, 4, 5, 60, 0, 2, 3, 4, 5, 61, 0, 3, 4, 5, 62, 1, 2, 3, 4, 5]
    assert propose(longest, 1) == [60]
    newest = [1, 2, 3, 60, 0, 1, 2, 3, 61, 0, 1, 2, 3]
    assert propose(newest, 1) == [61]


def test_a_match_that_overlaps_the_end_goes_on_with_its_own_guesses() -> None:
    assert propose([9, 9, 9, 9], 5) == [9] * 5
    assert propose([1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_bytes_that_match_across_ids_are_no_match() -> None:
    shifted = [2**24 + 2**16, 2**24, 2**24, 2**24, 5]
    assert propose([*shifted, 1, 1, 1], 2) == []


def by_definition(tokens: list[int], max_drafts: int) -> list[int]:
    for length in (5, 4, 3):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                known = list(tokens)
                for place in range(max_drafts):
                    known.append(known[start + length + place])
                return known[len(tokens) :]
    return []


@given(tokens=st.lists(st.integers(0, 2), max_size=40), cuts=st.lists(st.integers(0, 40)))
def test_the_proposal_is_the_defined_one_however_the_tokens_arrived(
    tokens: list[int], cuts: list[int]
) -> None:
    packed = bytearray()
    for cut in sorted(cuts):
        propose_ngram(tokens[:cut], packed, 4)

    assert propose_ngram(tokens, packed, 4) == by_definition(tokens, 4)
