# SPDX-License-Identifier: Apache-2.0
"""The longest hit over groups together, against trying every length."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.engine.kv.blocks import NULL_BLOCK, BlockPool
from pelton.engine.kv.prefix_index import find_longest_hit, first_visible_block

NAMES = [bytes([index]) for index in range(12)]


def pool_with(indices: Sequence[int]) -> BlockPool:
    pool = BlockPool(len(NAMES) + 1)
    for index in indices:
        pool.publish(pool.allocate(), NAMES[index])
    return pool


def is_hit(
    length: int, cached: Sequence[Sequence[int]], windows: Sequence[int], block_size: int
) -> bool:
    """By definition: every token that the one at `length * block_size` sees must be cached."""
    position = length * block_size
    for indices, window in zip(cached, windows, strict=True):
        first = max(0, position - window + 1) if window else 0
        if any(seen // block_size not in indices for seen in range(first, position)):
            return False
    return True


def test_a_full_group_needs_every_block() -> None:
    hit = find_longest_hit([pool_with([0, 1, 3])], [0], 4, NAMES)
    assert hit.blocks == [[1, 2]]


def test_a_window_group_needs_only_what_its_window_still_sees() -> None:
    hit = find_longest_hit([pool_with([3, 4])], [5], 4, NAMES[:6])
    assert hit.num_blocks == 5
    assert hit.blocks == [[NULL_BLOCK] * 4 + [2]]


def test_a_window_of_one_token_needs_no_block_at_all() -> None:
    hit = find_longest_hit([pool_with([])], [1], 4, NAMES)
    assert hit.blocks == [[NULL_BLOCK] * len(NAMES)]


def test_no_hash_is_no_hit() -> None:
    assert find_longest_hit([pool_with([0])], [0], 4, []).num_blocks == 0


def test_a_missing_window_block_shortens_the_hit_of_all_groups() -> None:
    pools = [pool_with(range(8)), pool_with([2, 3, 4, 6, 7])]
    hit = find_longest_hit(pools, [0, 10], 4, NAMES[:8])
    assert hit.num_blocks == 5
    assert hit.blocks[1] == [NULL_BLOCK] * 2 + [1, 2, 3]


@given(
    block_size=st.integers(1, 4),
    groups=st.lists(
        st.tuples(st.integers(0, 14), st.sets(st.integers(0, 11)) | st.just(set(range(12)))),
        min_size=1,
        max_size=3,
    ),
    num_hashes=st.integers(0, 12),
)
@settings(max_examples=200, deadline=None)
def test_the_longest_hit_is_the_longest_by_definition(
    block_size: int, groups: list[tuple[int, set[int]]], num_hashes: int
) -> None:
    windows = [window for window, _ in groups]
    cached = [sorted(indices) for _, indices in groups]
    pools = [pool_with(indices) for indices in cached]
    hit = find_longest_hit(pools, windows, block_size, NAMES[:num_hashes])
    lengths = [n for n in range(num_hashes + 1) if is_hit(n, cached, windows, block_size)]
    assert hit.num_blocks == max(lengths)
    for pool, window, blocks in zip(pools, windows, hit.blocks, strict=True):
        first = first_visible_block(hit.num_blocks * block_size, window, block_size)
        named = [pool.find(name) for name in NAMES[: hit.num_blocks]]
        assert blocks == [NULL_BLOCK] * first + named[first:]
