# SPDX-License-Identifier: Apache-2.0
"""The longest cached prefix of a chain of block hashes, over all KV groups together.

A hit of n blocks means that computation can go on at token n * block_size. For that a full
attention group needs every one of the n blocks; a window group needs only those that the token
at n * block_size still sees. So a longer hit may exist where a shorter one does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pelton.core.block_hash import BlockHash
from pelton.engine.kv.blocks import NULL_BLOCK, BlockPool


@dataclass(frozen=True, slots=True)
class PrefixHit:
    num_blocks: int
    blocks: list[list[int]]
    """For each group, `num_blocks` block ids; the null block where the group needs none. Valid
    until the next allocation."""


def first_visible_block(position: int, window: int, block_size: int) -> int:
    """The first block that a token at `position` or later can attend to."""
    return max(0, position - window + 1) // block_size if window else 0


def find_longest_hit(
    pools: Sequence[BlockPool],
    windows: Sequence[int],
    block_size: int,
    hashes: Sequence[BlockHash],
) -> PrefixHit:
    """`hashes` are those of the blocks that may be reused: leave out the prompt's last token."""
    length = len(hashes)
    for pool, window in zip(pools, windows, strict=True):
        if not window:
            length = _count_leading(pool, hashes[:length])
    shortened = True
    while shortened:
        shortened = False
        for pool, window in zip(pools, windows, strict=True):
            if window:
                fitting = _shorten(pool, window, block_size, hashes, length)
                shortened = shortened or fitting < length
                length = fitting
    return PrefixHit(
        length,
        [
            _collect(
                pool, first_visible_block(length * block_size, window, block_size), length, hashes
            )
            for pool, window in zip(pools, windows, strict=True)
        ],
    )


def _count_leading(pool: BlockPool, hashes: Sequence[BlockHash]) -> int:
    for index, block_hash in enumerate(hashes):
        if pool.find(block_hash) is None:
            return index
    return len(hashes)


def _shorten(
    pool: BlockPool, window: int, block_size: int, hashes: Sequence[BlockHash], length: int
) -> int:
    """The longest hit of at most `length` blocks for one window group. A missing block rules out
    every length whose window reaches it, so the search goes on at the missing block itself."""
    candidate = index = length
    while index > first_visible_block(candidate * block_size, window, block_size):
        index -= 1
        if pool.find(hashes[index]) is None:
            candidate = index
    return candidate


def _collect(pool: BlockPool, first: int, length: int, hashes: Sequence[BlockHash]) -> list[int]:
    blocks = [NULL_BLOCK] * min(first, length)
    for block_hash in hashes[len(blocks) : length]:
        block = pool.find(block_hash)
        assert block is not None, "a block vanished during a lookup"
        blocks.append(block)
    return blocks
