# SPDX-License-Identifier: Apache-2.0
"""A worker's part in moving KV, by its role: what it lets others read, and what it reads."""

import os
from typing import TYPE_CHECKING

import zmq

from pelton.core.config import Role
from pelton.core.kv_transfer import KVLayout
from pelton.serving.kv_transfer.decode import DecodeSide
from pelton.serving.kv_transfer.shared_memory import SharedMemoryTransport
from pelton.serving.kv_transfer.transport import KVTransport, PoolHandle

if TYPE_CHECKING:
    from pelton.engine.kv.pool import KVPool  # imports torch


class KVLink:
    """Made before the engine, which is built with `connect`."""

    def __init__(self, role: Role, poller: zmq.Poller) -> None:
        """`poller` gets the sockets that messages about KV arrive on."""
        self.role = role
        self._poller = poller
        self._decode: DecodeSide | None = None
        self._shared: tuple[KVLayout, KVTransport] | None = None

    def connect(self, pool: "KVPool", layout: KVLayout) -> DecodeSide | None:
        """What brings KV into `pool`, for a worker that decodes."""
        groups = pool.as_bytes()
        transport = SharedMemoryTransport(groups, pool.memory, os.getpid())
        self._shared = layout, transport
        if self.role is Role.DECODE:
            block_bytes = [blocks.shape[1] for blocks in groups]
            self._decode = DecodeSide(layout, transport, block_bytes, self._poller)
        return self._decode

    def handle(self) -> PoolHandle | None:
        """Of the pool that others may read."""
        return self.shared[1].handle()

    @property
    def shared(self) -> tuple[KVLayout, KVTransport]:
        """Once connected."""
        assert self._shared is not None, "no engine was built with it"
        return self._shared

    def read_idle(self) -> None:
        """Reads what other workers say while this one has no request."""
        if self._decode is not None:
            results = self._decode.poll()
            assert not results, f"pulls without requests: {results}"
