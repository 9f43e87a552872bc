# SPDX-License-Identifier: Apache-2.0
"""Blocks in a CPU's memory: how they are copied and digested, in one pass.

A digest is BLAKE2b over sums of each block's 64-bit words in lanes: as fast as memory, and it
changes with every word. Imports no torch.
"""

import importlib.util
import math
import mmap
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pelton.serving.kv_transfer.transport import DIGEST_BYTES, DIGEST_LANES, find_runs

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
"""There where the kernel knows advice about them."""
_LANES = 64
"""Wide rows are added up faster; then they are folded."""
Blocks = npt.NDArray[np.uint8]
"""[blocks, bytes of a block]"""
CopyAndSum = Callable[[Blocks | None, Blocks], npt.NDArray[np.uint64]]
"""Copies from the first to the second, if there is a first. Returns the second's sums: [blocks,
lanes], of a multiple of a digest's lanes."""


class HostBlocks:
    """A pool: the blocks of each group."""

    segment, device, may_copy_aside = "DRAM", 0, True

    def __init__(self, groups: Sequence[Blocks]) -> None:
        self.groups = groups
        self._copy_and_sum = [find_copy_and_sum(blocks) for blocks in groups]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of each group: blocks, bytes of a block."""
        return [(blocks.shape[0], blocks.shape[1]) for blocks in self.groups]

    @property
    def addresses(self) -> list[int]:
        return [blocks.ctypes.data for blocks in self.groups]

    def digest(self, group: int, block_ids: Sequence[int], key: bytes) -> bytes:
        blocks, copy_and_sum = self.groups[group], self._copy_and_sum[group]
        digest = blake2b(key, digest_size=DIGEST_BYTES)
        for first, _, count in find_runs(block_ids, block_ids):
            digest.update(_fold(copy_and_sum(None, blocks[first : first + count])))
        return digest.digest()

    def copy_in(
        self, source: Blocks, first: int, group: int, first_target: int, count: int, digest: blake2b
    ) -> None:
        """Copies blocks that follow each other on both sides, and adds the copies to `digest`."""
        targets = self.groups[group][first_target : first_target + count]
        digest.update(_fold(self._copy_and_sum[group](source[first : first + count], targets)))

    def make_landing(self, num_bytes: int) -> Blocks:
        """Memory that blocks arrive in on their way: [bytes]. Every page is there already, and huge
        where the system has such. It starts with a page: within one host the kernel copies half as
        fast to memory that does not."""
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if _HUGE_PAGES.exists():
            memory.madvise(mmap.MADV_HUGEPAGE)
        landing = np.frombuffer(memory, np.uint8)
        landing.fill(1)
        return landing

    @staticmethod
    def as_blocks(landing: Blocks, block_bytes: int) -> Blocks:
        count = len(landing) // block_bytes
        return landing[: count * block_bytes].reshape(count, block_bytes)

    @staticmethod
    def find_address(landing: Blocks) -> int:
        return landing.ctypes.data


def _fold(sums: npt.NDArray[np.uint64]) -> memoryview:
    """Into the lanes of a digest."""
    num_blocks, lanes = sums.shape
    folded: npt.NDArray[np.uint64]
    folded = sums.reshape(num_blocks, -1, math.gcd(lanes, DIGEST_LANES)).sum(1)
    return folded.data


def find_copy_and_sum(blocks: Blocks) -> CopyAndSum:
    """The compiled one, if it can write to these blocks."""
    if importlib.util.find_spec("numba") is not None:
        from pelton.kernels.native import sum_words

        if sum_words.can_take(blocks):
            return sum_words.copy_and_sum
    return copy_and_sum_in_numpy


def copy_and_sum_in_numpy(sources: Blocks | None, targets: Blocks) -> npt.NDArray[np.uint64]:
    """For blocks of any size."""
    num_blocks, block_bytes = targets.shape
    if sources is not None:
        np.copyto(targets, sources)
    words = targets.view(f"u{math.gcd(block_bytes, 8)}")
    lanes = math.gcd(words.shape[1], _LANES)
    sums: npt.NDArray[np.uint64] = words.reshape(num_blocks, -1, lanes).sum(1, dtype=np.uint64)
    return sums
