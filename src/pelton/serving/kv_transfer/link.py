# SPDX-License-Identifier: Apache-2.0
"""A worker's part in moving KV, by its role: what it lets others read, and what it reads."""

import os
from typing import TYPE_CHECKING

import zmq

from pelton.core.config import KVTransportName, Role
from pelton.core.errors import ConfigError
from pelton.core.kv_transfer import KVLayout
from pelton.serving.kv_transfer.decode import DecodeSide
from pelton.serving.kv_transfer.host_blocks import HostBlocks
from pelton.serving.kv_transfer.nixl import (
    MAX_LANDINGS_OF_ALL,
    NixlTransport,
    find_landing_bytes,
    require_nixl,
)
from pelton.serving.kv_transfer.shared_memory import SharedMemoryTransport
from pelton.serving.kv_transfer.transport import KVTransport, PoolHandle
from pelton.serving.wire_keys import WireKeys

if TYPE_CHECKING:
    from pelton.engine.kv.pool import KVPool  # imports torch


class KVLink:
    """Made before the engine, which is built with `connect`."""

    def __init__(
        self,
        role: Role,
        poller: zmq.Poller,
        transport: KVTransportName = "auto",
        keys: WireKeys | None = None,
    ) -> None:
        """`poller` gets the sockets that messages about KV arrive on; `keys` are needed to reach
        workers over a network. Raises `ConfigError` for a
        transport whose package is missing."""
        if transport == "nixl" and role is not Role.MIXED:
            require_nixl()
        self.role = role
        self.layout: KVLayout | None = None
        """Of the engine's KV, once there is an engine that has any."""
        self.read_interval_s = 0.001
        """How often to look for KV that arrives without a message."""
        self._poller = poller
        self._transport_name = transport
        self._keys = keys
        self._decode: DecodeSide | None = None
        self._transport: KVTransport | None = None

    def connect(self, pool: "KVPool", layout: KVLayout) -> DecodeSide | None:
        """What brings KV into `pool`, for a worker that only decodes. Raises `ConfigError` for a
        transport that does not reach its memory."""
        self.layout = layout
        if self.role is not Role.MIXED:
            self._transport = self._make_transport(pool)
        if self.role is Role.DECODE:
            self._decode = DecodeSide(layout, self.shared[1], self._poller, self._keys)
        return self._decode

    def find_landing_bytes(self, block_bytes: int) -> int:
        """What KV takes at most beside the pool on its way in, for blocks of so many bytes."""
        if self._transport_name != "nixl" or self.role is not Role.DECODE:
            return 0
        return MAX_LANDINGS_OF_ALL * find_landing_bytes(block_bytes)

    def _make_transport(self, pool: "KVPool") -> KVTransport:
        name, is_cuda = self._transport_name, pool.caches[0].is_cuda
        if name == ("shared-memory" if is_cuda else "cuda-ipc"):
            raise ConfigError(
                f"--kv-transport {name} does not move KV between {'GPUs' if is_cuda else 'CPUs'}:"
                " use auto, or nixl between hosts.",
                param="kv_transport",
            )
        is_shared = self.role is Role.PREFILL
        if is_cuda:
            from pelton.serving.kv_transfer.cuda_blocks import CudaBlocks  # imports torch
            from pelton.serving.kv_transfer.cuda_ipc import CudaTransport

            if name == "nixl":
                return NixlTransport(CudaBlocks(pool.caches), is_shared=is_shared)
            self.read_interval_s = 0.0  # a copy takes less than a wait would
            return CudaTransport(pool.caches, is_shared=is_shared)
        blocks = HostBlocks(pool.as_bytes())
        if name == "nixl":
            return NixlTransport(blocks, is_shared=is_shared)
        return SharedMemoryTransport(blocks, pool.memory, os.getpid())

    @property
    def is_reading(self) -> bool:
        """Whether blocks may arrive without a message."""
        return self._decode is not None and self._decode.is_reading

    @property
    def num_peers(self) -> int:
        """Workers whose KV is mapped, or being asked for."""
        return 0 if self._decode is None else self._decode.num_peers

    def handle(self) -> PoolHandle | None:
        """Of the pool that others may read."""
        return None if self._transport is None else self._transport.handle()

    @property
    def shared(self) -> tuple[KVLayout, KVTransport]:
        """Of a connected worker with a part in moving KV."""
        assert self.layout is not None, "no engine was built with it"
        assert self._transport is not None, self.role
        return self.layout, self._transport

    def read_idle(self) -> None:
        """Reads what other workers say while this one has no request."""
        if self._decode is not None:
            results = self._decode.poll()
            assert not results, f"pulls without requests: {results}"

    def close(self) -> None:
        """Lets go of all other workers."""
        if self._decode is not None:
            self._decode.close()
