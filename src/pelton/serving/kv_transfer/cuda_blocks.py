# SPDX-License-Identifier: Apache-2.0
"""Blocks in a GPU's memory: how they are copied and digested there.

Everything is ordered on the stream that the engine computes on: after the steps that were launched,
before those that will be.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from pelton.serving.kv_transfer.transport import DIGEST_BYTES, MAX_LANES, find_runs

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class CudaBlocks:
    """A pool: the blocks of each group."""

    segment = "VRAM"
    may_copy_aside = False
    """The stream to order copies on is that of the engine's thread."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        """`caches` have blocks first."""
        self.caches = caches
        self._words = [_as_words(cache) for cache in caches]
        index = caches[0].device.index
        self.device = torch.cuda.current_device() if index is None else index

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of each group: blocks, bytes of a block."""
        return [(cache.shape[0], cache[0].nbytes) for cache in self.caches]

    @property
    def addresses(self) -> list[int]:
        return [cache.data_ptr() for cache in self.caches]

    def digest(self, group: int, block_ids: Sequence[int], key: bytes) -> bytes:
        """Waits for the device."""
        words = self._words[group]
        sums = [
            words[first : first + count].sum(dim=1, dtype=torch.int64)
            for first, _, count in find_runs(block_ids, block_ids)
        ]
        digest = blake2b(key, digest_size=DIGEST_BYTES)
        if sums:
            digest.update(torch.cat(sums).cpu().numpy().tobytes())
        return digest.digest()

    def copy_in(
        self, source: Tensor, first: int, group: int, first_target: int, count: int, digest: blake2b
    ) -> None:
        """Copies blocks that follow each other on both sides, and adds the copies to `digest`.
        Waits for the device."""
        targets = self._words[group][first_target : first_target + count]
        targets.copy_(source[first : first + count].view(targets.dtype).view(targets.shape))
        digest.update(targets.sum(dim=1, dtype=torch.int64).cpu().numpy().tobytes())

    def make_landing(self, num_bytes: int) -> Tensor:
        """Memory that blocks arrive in on their way: [bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.caches[0].device)

    @staticmethod
    def as_blocks(landing: Tensor, block_bytes: int) -> Tensor:
        count = len(landing) // block_bytes
        return landing[: count * block_bytes].view(count, block_bytes)

    @staticmethod
    def find_address(landing: Tensor) -> int:
        return landing.data_ptr()


def _as_words(cache: Tensor) -> Tensor:
    """[blocks, rows, lanes] of the largest words that a block's bytes are a multiple of."""
    block_bytes = cache[0].nbytes
    word_bytes = math.gcd(block_bytes, 8)
    lanes = math.gcd(block_bytes // word_bytes, MAX_LANES)
    flat = cache.view(torch.uint8).flatten(1).view(_WORDS[word_bytes])
    return flat.view(cache.shape[0], -1, lanes)
