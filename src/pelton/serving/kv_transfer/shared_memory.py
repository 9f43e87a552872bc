# SPDX-License-Identifier: Apache-2.0
"""Moves blocks between processes of one host: the reader maps the other's pool and copies.

One copy from pool to pool, nothing in between, and the digest is taken of each piece while it is
still in the processor's cache. A digest is BLAKE2b over sums of the blocks' 64-bit words in lanes:
as fast as memory, and it changes with every word. Imports no torch.
"""

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt

from pelton.engine.kv.shared_memory import PAGE_BYTES, SharedMemory, map_shared_memory
from pelton.serving.kv_transfer.transport import PoolHandle, find_runs

KIND = "shared-memory"
_DIGEST_BYTES = 16
_PIECE_BYTES = 2**18
"""Copied at once, then digested: stays in the cache in between. Part of what a digest is."""
_MAX_LANES = 512

Blocks = npt.NDArray[np.uint8]
"""[blocks, bytes of a block]"""


class _Payload(msgspec.Struct, array_like=True, frozen=True):
    pid: int
    fd: int
    name: str
    shapes: list[tuple[int, int]]
    """Of each group: blocks, bytes of a block."""


class SharedMemoryTransport:
    def __init__(self, groups: Sequence[Blocks], memory: SharedMemory | None, pid: int) -> None:
        """`groups` are this pool's; `memory` is what they lie in, if others may read them."""
        self._groups = groups
        self._memory = memory
        self._pid = pid

    def handle(self) -> PoolHandle | None:
        if self._memory is None:
            return None
        shapes = [(blocks.shape[0], blocks.shape[1]) for blocks in self._groups]
        payload = _Payload(self._pid, self._memory.fd, self._memory.name, shapes)
        return PoolHandle(KIND, msgspec.msgpack.encode(payload))

    def digest(self, group: int, block_ids: Sequence[int], key: bytes) -> bytes:
        blocks = self._groups[group]
        digest = blake2b(key, digest_size=_DIGEST_BYTES)
        for first, _, count in find_runs(block_ids, block_ids):
            for piece in _cut(count, blocks.shape[1]):
                digest.update(_lane_sums(blocks[first : first + count][piece]))
        return digest.digest()

    def open(self, handle: PoolHandle) -> "SharedPool":
        if handle.kind != KIND:
            raise OSError(f"a pool of kind {handle.kind!r} is not in shared memory")
        payload = msgspec.msgpack.decode(handle.payload, type=_Payload)
        if [shape[1] for shape in payload.shapes] != [b.shape[1] for b in self._groups]:
            raise OSError("its blocks have other sizes")
        return SharedPool(payload, self._groups)


class SharedPool:
    """Implements `RemotePool`: another process's pool, mapped to read from."""

    def __init__(self, payload: _Payload, targets: Sequence[Blocks]) -> None:
        starts = [0]
        for num_blocks, block_bytes in payload.shapes:
            end = starts[-1] + num_blocks * block_bytes
            starts.append(-(-end // PAGE_BYTES) * PAGE_BYTES)
        self._targets = targets
        self._mapped = map_shared_memory(payload.pid, payload.fd, payload.name, starts[-1])
        self._sources: list[Blocks] = [
            np.frombuffer(self._mapped, np.uint8, shape[0] * shape[1], start).reshape(shape)
            for shape, start in zip(payload.shapes, starts[:-1], strict=True)
        ]

    def read(
        self, group: int, source_ids: Sequence[int], target_ids: Sequence[int], key: bytes
    ) -> bytes:
        source, target = self._sources[group], self._targets[group]
        if source_ids and not 0 < min(source_ids) <= max(source_ids) < len(source):
            raise OSError(f"blocks {source_ids[:3]} are not among its {len(source)}")
        digest = blake2b(key, digest_size=_DIGEST_BYTES)
        for source_id, target_id, count in find_runs(source_ids, target_ids):
            originals = source[source_id : source_id + count]
            copies = target[target_id : target_id + count]
            for piece in _cut(count, source.shape[1]):
                np.copyto(copies[piece], originals[piece])
                digest.update(_lane_sums(copies[piece]))
        return digest.digest()

    def close(self) -> None:
        self._sources = []
        self._mapped.close()


def _cut(num_blocks: int, block_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Blocks and bytes of each piece: several whole blocks, or a part of one."""
    size = max(1, _PIECE_BYTES // block_bytes)
    for first in range(0, num_blocks, size):
        for start in range(0, block_bytes, _PIECE_BYTES):
            yield slice(first, first + size), slice(start, start + _PIECE_BYTES)


def _lane_sums(blocks: Blocks) -> bytes:
    """[blocks, lanes]: sums of the words that are `lanes` apart, modulo 2^64. `blocks` may be parts
    of blocks."""
    num_bytes = blocks.shape[1]
    word_bytes = math.gcd(num_bytes, 8)
    words = blocks.view(f"u{word_bytes}")
    lanes = math.gcd(words.shape[1], _MAX_LANES)
    sums: npt.NDArray[np.uint64] = words.reshape(len(blocks), -1, lanes).sum(
        axis=1, dtype=np.uint64
    )
    return sums.tobytes()
