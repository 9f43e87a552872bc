# SPDX-License-Identifier: Apache-2.0
"""The compiled copy of blocks: byte for byte, with the sums that NumPy takes."""

import mmap

import numpy as np
import pytest

from pelton.kernels.native import sum_words
from pelton.serving.kv_transfer.host_blocks import (
    Blocks,
    HostBlocks,
    copy_and_sum_in_numpy,
    find_copy_and_sum,
)
from pelton.serving.kv_transfer.transport import DIGEST_LANES


def make_blocks(num_blocks: int, block_bytes: int, start: int = 0) -> Blocks:
    """Random bytes, `start` bytes into a page."""
    memory = mmap.mmap(-1, start + num_blocks * block_bytes + 64)
    blocks = np.frombuffer(memory, np.uint8, num_blocks * block_bytes, start)
    blocks[:] = np.random.default_rng(start).integers(0, 256, len(blocks), np.uint8)
    return blocks.reshape(num_blocks, block_bytes)


@pytest.mark.parametrize("start", [0, 8, 16, 32, 40])
@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(1, 512), (5, 1536), (3, 65536)])
def test_one_pass_copies_and_sums_as_numpy_does(
    num_blocks: int, block_bytes: int, start: int
) -> None:
    assert sum_words.LANES % DIGEST_LANES == 0
    sources = make_blocks(num_blocks, block_bytes, start)
    targets, others = make_blocks(num_blocks + 2, block_bytes, 64), sources.copy()
    around = targets[[0, -1]].copy()
    expected = copy_and_sum_in_numpy(sources, others)
    sums = sum_words.copy_and_sum(sources, targets[1:-1])
    np.testing.assert_array_equal(targets[1:-1], sources)
    np.testing.assert_array_equal(targets[[0, -1]], around)
    np.testing.assert_array_equal(sums, expected)
    np.testing.assert_array_equal(sum_words.copy_and_sum(None, sources), expected)


def test_sums_wrap_around() -> None:
    blocks = np.full((1, 1024), 0xFF, np.uint8)
    assert (sum_words.copy_and_sum(None, blocks) == 2**64 - 2).all()


def test_every_word_that_changes_on_the_way_changes_the_digest() -> None:
    blocks = make_blocks(2, 1024)
    pool = HostBlocks([blocks])
    assert find_copy_and_sum(blocks) is sum_words.copy_and_sum
    digests = {pool.digest(0, [0, 1], b"")}
    for word in range(256):
        blocks.reshape(-1)[8 * word + word % 8] ^= 1 << word % 8
        digests.add(pool.digest(0, [0, 1], b""))
    assert len(digests) == 257


def test_a_digest_is_the_same_whoever_sums() -> None:
    blocks = make_blocks(3, 1536, 64)
    shifted = make_blocks(3, 1536, 72)
    shifted[:] = blocks
    assert find_copy_and_sum(shifted) is copy_and_sum_in_numpy
    digests = {HostBlocks([pool]).digest(0, [2, 0, 1], b"key") for pool in (blocks, shifted)}
    assert len(digests) == 1


@pytest.mark.parametrize(("block_bytes", "start"), [(1024, 8), (1024, 16), (1032, 0), (256, 0)])
def test_blocks_that_it_cannot_write_to_are_copied_by_numpy(block_bytes: int, start: int) -> None:
    blocks = make_blocks(3, block_bytes, start)
    assert find_copy_and_sum(blocks) is copy_and_sum_in_numpy
