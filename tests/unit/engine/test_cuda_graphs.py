# SPDX-License-Identifier: Apache-2.0
"""The ladder of graph sizes and the memory arithmetic, which need no GPU."""

import pytest

from pelton.core.errors import CapacityError
from pelton.engine.gpu_memory import MemoryUse
from pelton.engine.step_padding import decode_ladder, make_padding


def test_ladder_is_dense_where_padding_would_hurt() -> None:
    assert decode_ladder(300)[:8] == (1, 2, 4, 8, 16, 24, 32, 40)
    assert decode_ladder(300)[-4:] == (128, 192, 256, 300)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 16, 100, 128, 129, 192, 512])
def test_every_step_has_a_graph_that_holds_it(max_rows: int) -> None:
    ladder = decode_ladder(max_rows)
    padded_rows = make_padding(ladder)

    assert ladder[-1] == max_rows
    for num_rows in range(1, max_rows + 1):
        assert num_rows <= padded_rows(num_rows) <= max_rows
        assert padded_rows(num_rows) in ladder


def make_use(resident_bytes: int, landing_bytes: int = 0) -> MemoryUse:
    return MemoryUse(
        total_bytes=1000,
        allowed_bytes=900,
        resident_bytes=resident_bytes,
        step_bytes=150,
        graph_bytes=50,
        landing_bytes=landing_bytes,
    )


def test_kv_gets_what_is_left_of_the_allowed_share() -> None:
    assert make_use(300).kv_bytes == 400
    assert make_use(300, landing_bytes=100).kv_bytes == 300


def test_a_card_with_nothing_left_is_refused_with_the_figures() -> None:
    with pytest.raises(CapacityError, match=r"allows 900 of .* 1,000 bytes, and 900 are needed"):
        _ = make_use(700).kv_bytes
