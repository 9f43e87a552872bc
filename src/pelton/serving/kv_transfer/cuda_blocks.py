# SPDX-License-Identifier: Apache-2.0
"""Blocks in a GPU's memory: how they are copied and digested there.

Digests are taken on a stream of their own, beside the steps that were launched. `copy_in` is
ordered on the stream that the engine computes on: after those steps, before those that will be.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from pelton.kernels.sum_words import count_parts, sum_words
from pelton.kernels.triton_runtime import next_power_of_2
from pelton.serving.kv_transfer.transport import DIGEST_BYTES, DIGEST_LANES

_PINNED_WORDS = 2**14
"""Enough for 900 blocks."""
_WORDS = {8: torch.uint64, 4: torch.uint32, 2: torch.uint16, 1: torch.uint8}


class BlockSums:
    """What a digest is made of, on its way to the host."""

    def __init__(
        self, sums: Int[Tensor, "S B L"], event: torch.cuda.Event, free: Callable[[], None]
    ) -> None:
        """`sums` are in pinned memory, and complete after `event`: not to be dropped before.
        `free` takes them back."""
        self._sums, self._event, self._free = sums, event, free

    @property
    def is_here(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """For the device."""
        self._event.synchronize()

    def digest(self, key: bytes) -> bytes:
        """Waits for the device. May be called once."""
        self.wait()
        digest = blake2b(key, digest_size=DIGEST_BYTES)
        digest.update(add_parts(self._sums))
        self._free()
        return digest.digest()


def add_parts(sums: Int[Tensor, "S B L"]) -> memoryview:
    """`sums` are on the host."""
    total: npt.NDArray[np.int64] = sums.numpy().sum(0)
    return total.data


class CudaBlocks:
    """A pool: the blocks of each group."""

    segment = "VRAM"
    may_copy_aside = False
    """The stream to order copies on is that of the engine's thread."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        """`caches` have blocks first."""
        self.caches = caches
        self._words = [_as_words(cache) for cache in caches]
        device = caches[0].device
        self.device = torch.cuda.current_device() if device.index is None else device.index
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """Beside the engine's."""
        self._pinned: list[Tensor] = []
        """That nobody uses: taking some anew would be a third of what a read takes of the host."""
        for group in range(len(caches)):
            # No prompt waits for a kernel's first call. The null block is copied onto itself.
            self.digest(group, [0], b"")
            self.start_copies(group, [0], [0], self.addresses[group]).digest(b"")

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of each group: blocks, bytes of a block."""
        return [(cache.shape[0], cache[0].nbytes) for cache in self.caches]

    @property
    def addresses(self) -> list[int]:
        return [cache.data_ptr() for cache in self.caches]

    def digest(self, group: int, block_ids: Sequence[int], key: bytes) -> bytes:
        """Waits for the device, though not for the steps that are under way there: the results of
        those that wrote the blocks must have come to the host."""
        return self._start(group, [block_ids], None).digest(key)

    def start_copies(
        self, group: int, target_ids: Sequence[int], source_ids: Sequence[int], address: int
    ) -> BlockSums:
        """From another pool of such blocks at `address`. After the steps that were launched; those
        that will be do not wait for it."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return self._start(group, [target_ids, source_ids], address)

    def _start(
        self, group: int, block_ids: Sequence[Sequence[int]], address: int | None
    ) -> BlockSums:
        words, count = self._words[group], len(block_ids[0])
        shape = (count_parts(count), count, words.shape[2])
        num_sums, num_ids = math.prod(shape), len(block_ids) * count
        host = self._take_pinned(num_sums + num_ids)
        sums, ids = host[:num_sums].view(shape), host[num_sums : num_sums + num_ids]
        ids = ids.view(len(block_ids), count)
        ids.numpy()[:] = block_ids
        with torch.cuda.stream(self.stream):
            sum_words(words, ids, sums, address)
        return BlockSums(sums, self.stream.record_event(), partial(self._pinned.append, host))

    def _take_pinned(self, num_words: int) -> Tensor:
        """At least so many 64-bit words that the device reads and writes."""
        while self._pinned:
            host = self._pinned.pop()
            if len(host) >= num_words:  # else it is dropped: a larger one comes back instead
                return host
        num_words = max(next_power_of_2(num_words), _PINNED_WORDS)
        return torch.empty(num_words, dtype=torch.int64, pin_memory=True)

    def copy_in(
        self, source: Tensor, first: int, group: int, first_target: int, count: int, digest: blake2b
    ) -> None:
        """Copies blocks that follow each other on both sides, and adds the copies to `digest`.
        Waits for the device."""
        targets = self._words[group][first_target : first_target + count]
        targets.copy_(source[first : first + count].view(targets.dtype).view(targets.shape))
        ids = torch.arange(count, device=targets.device).view(1, count)
        shape = (count_parts(count), count, targets.shape[2])
        sums = targets.new_empty(shape, dtype=torch.int64)
        sum_words(targets, ids, sums)
        digest.update(add_parts(sums.cpu()))

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
    lanes = math.gcd(block_bytes // word_bytes, DIGEST_LANES)
    flat = cache.view(torch.uint8).flatten(1).view(_WORDS[word_bytes])
    return flat.view(cache.shape[0], -1, lanes)
