# SPDX-License-Identifier: Apache-2.0
"""Blocks in a GPU's memory: how they are copied and digested there.

Both happen on a stream of their own, beside the steps that are launched later. Copies wait for the
steps that were launched before; digests do not, in a worker that copies nothing in.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pelton.kernels.sum_words import SumWords, count_parts
from pelton.kernels.triton_runtime import next_power_of_2
from pelton.serving.kv_transfer.transport import DIGEST_BYTES, DIGEST_LANES

_PINNED_WORDS = 2**14
"""Enough for 900 blocks."""
_WORDS = {8: torch.uint64, 4: torch.uint32, 2: torch.uint16, 1: torch.uint8}


class _Pinned:
    """Memory of the host that a kernel reads and writes, and an event to know when it has."""

    def __init__(self, num_words: int) -> None:
        """Of 64 bits."""
        self.words = torch.empty(num_words, dtype=torch.int64, pin_memory=True)
        self.numbers: npt.NDArray[np.int64] = self.words.numpy()
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]


class BlockSums:
    """What a digest is made of, on its way to the host."""

    def __init__(
        self, sums: npt.NDArray[np.int64], event: torch.cuda.Event, free: Callable[[], None]
    ) -> None:
        """`sums` [parts, blocks, lanes] are in pinned memory, and complete after `event`: not to be
        dropped before. `free` takes both back."""
        self._sums, self._event, self._free = sums, event, free
        self._is_read = False

    @property
    def is_here(self) -> bool:
        # Once it is read, the event may be another's.
        return self._is_read or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """For the device."""
        if not self._is_read:
            self._event.synchronize()

    def add_to(self, digest: blake2b) -> None:
        """Waits for the device. May be called once."""
        assert not self._is_read
        self.wait()
        digest.update(self._sums.sum(0).data)
        self._is_read = True
        self._free()

    def digest(self, key: bytes) -> bytes:
        """As `add_to`."""
        digest = blake2b(key, digest_size=DIGEST_BYTES)
        self.add_to(digest)
        return digest.digest()


class CudaBlocks:
    """A pool: the blocks of each group."""

    segment = "VRAM"
    may_copy_aside = False
    """The stream to order copies on is that of the engine's thread."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        """`caches` have blocks first, and lie on the current device."""
        self.caches = caches
        device = caches[0].device
        self.device = torch.cuda.current_device()
        assert device.index in (None, self.device), (device, self.device)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """Beside the engine's."""
        self._launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        """Recorded behind the steps that a copy waits for."""
        self._sum_words = [SumWords(_as_words(cache)) for cache in caches]
        self._pinned: list[_Pinned] = []
        """That nobody uses: taking some anew takes the host tens of microseconds."""
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
        self._launched.record(torch.cuda.current_stream(self.device))
        self.stream.wait_event(self._launched)
        return self._start(group, [target_ids, source_ids], address)

    def _start(
        self, group: int, block_ids: Sequence[Sequence[int]], address: int | None
    ) -> BlockSums:
        sum_words, count = self._sum_words[group], len(block_ids[0])
        shape = (count_parts(count), count, sum_words.lanes)
        num_ids = len(block_ids) * count
        start = num_ids + num_ids % 2  # the sums begin at a multiple of 16 bytes
        end = start + math.prod(shape)
        host = self._take_pinned(end)
        host.numbers[:num_ids].reshape(len(block_ids), count)[:] = block_ids
        ids = host.words[:num_ids].view(len(block_ids), count)
        sum_words(ids, host.words[start:end].view(shape), address, self.stream.cuda_stream)
        host.event.record(self.stream)
        free = partial(self._pinned.append, host)
        return BlockSums(host.numbers[start:end].reshape(shape), host.event, free)

    def _take_pinned(self, num_words: int) -> _Pinned:
        while self._pinned:
            host = self._pinned.pop()
            if len(host.numbers) >= num_words:  # else it is dropped: a larger one comes back
                return host
        return _Pinned(max(next_power_of_2(num_words), _PINNED_WORDS))

    def copy_in(
        self, source: Tensor, first: int, group: int, first_target: int, count: int, digest: blake2b
    ) -> None:
        """Copies blocks that follow each other on both sides, and adds the copies to `digest`.
        Waits for the device."""
        target_ids = range(first_target, first_target + count)
        source_ids = range(first, first + count)
        self.start_copies(group, target_ids, source_ids, source.data_ptr()).add_to(digest)

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
