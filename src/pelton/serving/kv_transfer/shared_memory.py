# SPDX-License-Identifier: Apache-2.0
"""Moves blocks between processes of one host: the reader maps the other's pool and copies.

One copy from pool to pool, nothing in between. Imports no torch.
"""

from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import numpy as np

from pelton.engine.kv.shared_memory import PAGE_BYTES, SharedMemory, map_shared_memory
from pelton.serving.kv_transfer.host_blocks import Blocks, HostBlocks
from pelton.serving.kv_transfer.transport import (
    DIGEST_BYTES,
    PoolHandle,
    Read,
    check_ids,
    find_runs,
)

KIND = "shared-memory"


class _Payload(msgspec.Struct, array_like=True, frozen=True):
    pid: int
    fd: int
    name: str
    shapes: list[tuple[int, int]]
    """Of each group: blocks, bytes of a block."""


class SharedMemoryTransport:
    def __init__(self, blocks: HostBlocks, memory: SharedMemory | None, pid: int) -> None:
        """`blocks` are this pool's; `memory` is what they lie in, if others may read them."""
        self._blocks = blocks
        self._memory = memory
        self._pid = pid

    def handle(self) -> PoolHandle | None:
        if self._memory is None:
            return None
        payload = _Payload(self._pid, self._memory.fd, self._memory.name, self._blocks.shapes)
        return PoolHandle(KIND, msgspec.msgpack.encode(payload))

    def digest(self, group: int, block_ids: Sequence[int], key: bytes) -> bytes:
        return self._blocks.digest(group, block_ids, key)

    def open(self, handle: PoolHandle) -> "SharedPool":
        if handle.kind != KIND:
            raise OSError(f"a pool of kind {handle.kind!r} is not in shared memory")
        payload = msgspec.msgpack.decode(handle.payload, type=_Payload)
        if [size for _, size in payload.shapes] != [size for _, size in self._blocks.shapes]:
            raise OSError("its blocks have other sizes")
        return SharedPool(payload, self._blocks)


class SharedPool:
    """Implements `RemotePool`: another process's pool, mapped to read from."""

    def __init__(self, payload: _Payload, targets: HostBlocks) -> None:
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
    ) -> Read:
        source = self._sources[group]
        check_ids(source_ids, len(source))
        digest = blake2b(key, digest_size=DIGEST_BYTES)
        for first, first_target, count in find_runs(source_ids, target_ids):
            self._targets.copy_in(source, first, group, first_target, count, digest)
            yield count * source.shape[1]
        return digest.digest()

    def close(self) -> None:
        self._sources = []
        self._mapped.close()
