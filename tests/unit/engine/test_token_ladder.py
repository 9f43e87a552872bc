# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import pytest

from pelton.engine.token_ladder import token_ladder


@pytest.mark.parametrize("max_tokens", [1, 7, 16, 17, 512, 2048, 3000])
def test_ladder_is_short_and_wastes_little(max_tokens: int) -> None:
    ladder = token_ladder(max_tokens)

    assert ladder[-1] == max_tokens
    assert len(ladder) <= 5 + 4 * max_tokens.bit_length()
    for below, above in pairwise(ladder):
        assert below < above
        assert above <= max(2 * below, 16) if below < 16 else above <= 1.25 * below


def test_usual_lengths_are_steps() -> None:
    assert {1, 16, 32, 64, 128, 256, 512, 1024, 2048} <= set(token_ladder(2048))
