# SPDX-License-Identifier: Apache-2.0
"""Blocks in a CPU's memory: how they are copied, and digested while still in its cache.

A digest is BLAKE2b over sums of each block's 64-bit words in lanes: as fast as memory, and it
changes with every word. Imports no torch.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from pelton.serving.kv_transfer.transport import DIGEST_BYTES, find_runs

_PIECE_BYTES = 2**18
"""Copied at once, then summed: stays in the processor's cache in between."""
_MAX_LANES = 512

Blocks = npt.NDArray[np.uint8]
"""[blocks, bytes of a block]"""


class HostBlocks:
    """A pool: the blocks of each group."""

    segment, device = "DRAM", 0

    def __init__(self, groups: Sequence[Blocks]) -> None:
        self.groups = groups

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of each group: blocks, bytes of a block."""
        return [(blocks.shape[0], blocks.shape[1]) for blocks in self.groups]

    @property
    def addresses(self) -> list[int]:
        return [blocks.ctypes.data for blocks in self.groups]

    def digest(self, group: int, block_ids: Sequence[int], key: bytes) -> bytes:
        blocks = self.groups[group]
        digest = blake2b(key, digest_size=DIGEST_BYTES)
        for first, _, count in find_runs(block_ids, block_ids):
            _walk(None, blocks[first : first + count], digest)
        return digest.digest()

    def copy_in(
        self, source: Blocks, first: int, group: int, first_target: int, count: int, digest: blake2b
    ) -> None:
        """Copies blocks that follow each other on both sides, and adds the copies to `digest`."""
        targets = self.groups[group][first_target : first_target + count]
        _walk(source[first : first + count], targets, digest)

    def make_landing(self, num_bytes: int) -> Blocks:
        """Memory that blocks arrive in on their way: [bytes]. Every page is there already."""
        return np.ones(num_bytes, np.uint8)

    @staticmethod
    def as_blocks(landing: Blocks, block_bytes: int) -> Blocks:
        count = len(landing) // block_bytes
        return landing[: count * block_bytes].reshape(count, block_bytes)

    @staticmethod
    def find_address(landing: Blocks) -> int:
        return landing.ctypes.data


def _walk(sources: Blocks | None, targets: Blocks, digest: blake2b) -> None:
    """Copies piece by piece, if there is something to copy, and adds each block's sums."""
    num_blocks, block_bytes = targets.shape
    words = targets.view(f"u{math.gcd(block_bytes, 8)}")
    lanes = math.gcd(words.shape[1], _MAX_LANES)
    rows = words.reshape(num_blocks, -1, lanes)
    row_bytes = block_bytes // rows.shape[1]
    num_rows = max(1, _PIECE_BYTES // row_bytes)
    per_piece = max(1, _PIECE_BYTES // block_bytes)
    source_rows = None if sources is None else sources.view(words.dtype).reshape(rows.shape)
    for first in range(0, num_blocks, per_piece):
        sums = None
        for row in range(0, rows.shape[1], num_rows):
            piece = slice(first, first + per_piece), slice(row, row + num_rows)
            if source_rows is not None:
                np.copyto(rows[piece], source_rows[piece])
            part = rows[piece].sum(axis=1, dtype=np.uint64)
            sums = part if sums is None else sums + part
        if sums is not None:
            digest.update(sums.tobytes())
