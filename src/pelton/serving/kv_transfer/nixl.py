# SPDX-License-Identifier: Apache-2.0
"""Moves blocks between hosts with NIXL, over whatever UCX finds: RDMA, shared memory, TCP.

    the other's pool ── READ ──► a landing here ── copied and digested ──► this pool

A transfer cannot be called back: what is posted may still write after its peer was silent for a
minute, whatever was released meanwhile. So blocks arrive in landings, memory of this transport's
own, and are copied from there once they are complete; a landing whose transfer was given up is not
used again until the transfer has ended. Several are under way at once, so the network does not
wait for the copies.
"""

import importlib
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from pelton.core.errors import ConfigError
from pelton.serving.kv_transfer.transport import (
    DIGEST_BYTES,
    PoolHandle,
    Read,
    check_ids,
    find_runs,
)

if TYPE_CHECKING:
    from nixl_cu13 import nixl_agent, nixl_xfer_handle

KIND = "nixl"
PATIENCE_S = 10.0
"""Without a byte for this long, the other worker counts as lost."""
_LANDING_BYTES = 4 * 2**20
_PROGRESS_INTERVAL_US = 1000
"""NIXL's thread looks for work so often, beside being woken by it. In whole milliseconds."""
_MAX_LANDINGS = 8
"""That one peer may have under way, beside the one that is copied from: more are of no use to a
network of 25 GB/s and steps of 1 ms."""
MAX_LANDINGS_OF_ALL = 64
"""That there are, whoever uses them: on a GPU they are set aside before its pool is sized."""

_log = logging.getLogger("pelton.serving")

L = TypeVar("L")


class LocalBlocks(Protocol[L]):
    """A pool of this process: `host_blocks.HostBlocks` or `cuda_blocks.CudaBlocks`."""

    segment: str
    """NIXL's word for the kind of memory."""
    device: int

    @property
    def shapes(self) -> list[tuple[int, int]]: ...
    @property
    def addresses(self) -> list[int]: ...
    def digest(self, group: int, block_ids: Sequence[int], key: bytes) -> bytes: ...
    def copy_in(
        self, source: L, first: int, group: int, first_target: int, count: int, digest: blake2b
    ) -> None: ...
    def make_landing(self, num_bytes: int) -> L: ...
    def as_blocks(self, landing: L, block_bytes: int) -> L: ...
    def find_address(self, landing: L) -> int: ...


class _Payload(msgspec.Struct, array_like=True, frozen=True):
    name: str
    """Of the agent: another for each process, so a worker that was restarted is never taken for
    the one before."""
    metadata: bytes
    """NIXL's own: where the agent is reached, keys to its memory."""
    segment: str
    device: int
    addresses: list[int]
    shapes: list[tuple[int, int]]
    """Of each group: blocks, bytes of a block."""


@dataclass(slots=True)
class _Transfer(Generic[L]):
    peer: str
    handle: "nixl_xfer_handle"
    landing: L
    target_ids: Sequence[int]


def find_landing_bytes(block_bytes: int) -> int:
    """Of a landing for blocks of at most so many bytes."""
    return max(_LANDING_BYTES, block_bytes)


def require_nixl() -> None:
    """Raises `ConfigError` where the package is missing or does not load."""
    try:
        import nixl_cu13  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Moving KV between hosts needs NIXL, which cannot be imported ({error}): run"
            " pip install 'pelton[kv]'.",
            param="kv_transport",
        ) from error


class NixlTransport(Generic[L]):
    """Implements `KVTransport`."""

    def __init__(self, blocks: LocalBlocks[L], *, is_shared: bool) -> None:
        """`blocks` are this pool's; `is_shared`: others may read them."""
        require_nixl()
        self.blocks = blocks
        self.agent, self.errors = _make_agent()
        self._is_shared = is_shared
        self.landing_bytes = find_landing_bytes(max(size for _, size in blocks.shapes))
        self._free: list[L] = []
        self._num_landings = 0
        """That there are, free ones and others."""
        self._without: set[NixlPool[L]] = set()
        """That have found none, and have none: each gets its first before another its next."""
        self._users: Counter[str] = Counter()
        """Of each agent that is known: pools, and transfers that were given up. One that is
        forgotten any earlier takes the state of its transfers along."""
        self._given_up: list[_Transfer[L]] = []
        if is_shared:
            for address, (count, size) in zip(blocks.addresses, blocks.shapes, strict=True):
                self._share(address, count * size)

    def handle(self) -> PoolHandle | None:
        if not self._is_shared:
            return None
        blocks = self.blocks
        payload = _Payload(
            self.agent.name,
            self.agent.get_agent_metadata(),
            blocks.segment,
            blocks.device,
            blocks.addresses,
            blocks.shapes,
        )
        return PoolHandle(KIND, msgspec.msgpack.encode(payload))

    def digest(self, group: int, block_ids: Sequence[int], key: bytes) -> bytes:
        return self.blocks.digest(group, block_ids, key)

    def open(self, handle: PoolHandle) -> "NixlPool[L]":
        if handle.kind != KIND:
            raise OSError(f"a pool of kind {handle.kind!r} is not reached by NIXL")
        payload = msgspec.msgpack.decode(handle.payload, type=_Payload)
        if [size for _, size in payload.shapes] != [size for _, size in self.blocks.shapes]:
            raise OSError("its blocks have other sizes")
        self._reclaim()
        if not self._users[payload.name]:
            try:
                self.agent.add_remote_agent(payload.metadata)
            except self.errors as error:
                raise OSError(f"NIXL does not reach it ({error})") from error
        self._users[payload.name] += 1
        return NixlPool(payload, self)

    def leave(self, name: str) -> None:
        """The agent has one user less."""
        self._users[name] -= 1
        if self._users[name]:
            return
        del self._users[name]
        try:
            self.agent.remove_remote_agent(name)
        except self.errors as error:
            _log.warning("event=kv_peer_not_removed error=%r", str(error))

    def try_take_landing(self, pool: "NixlPool[L]") -> L | None:
        """To read from `pool`. None: all that there may be are in use, or are for others."""
        if pool.num_landings and self._without:
            return None
        self._reclaim()
        if not self._free and self._num_landings == MAX_LANDINGS_OF_ALL:
            if not pool.num_landings:
                self._without.add(pool)
            return None
        self._without.discard(pool)
        if self._free:
            return self._free.pop()
        landing = self.blocks.make_landing(self.landing_bytes)
        self.register(self.blocks.find_address(landing), self.landing_bytes)
        self._num_landings += 1
        return landing

    def return_landing(self, landing: L) -> None:
        self._free.append(landing)

    def want_none(self, pool: "NixlPool[L]") -> None:
        """A read from `pool` has ended; one that goes on asks again."""
        self._without.discard(pool)

    def give_up(self, transfer: _Transfer[L]) -> None:
        """Nobody wants what the transfer brings."""
        self._users[transfer.peer] += 1
        self._given_up.append(transfer)
        self._reclaim()

    def is_under_way(self, transfer: _Transfer[L]) -> bool:
        """Raises `ConnectionError` for one that has failed."""
        try:
            state = self.agent.check_xfer_state(transfer.handle)
        except self.errors as error:
            raise ConnectionError(f"the connection broke ({error})") from error
        if state == "ERR":
            raise ConnectionError("the connection broke")
        return bool(state == "PROC")

    def _reclaim(self) -> None:
        """Takes back the landings of transfers that have ended since they were given up."""
        waiting, self._given_up = self._given_up, []
        for transfer in waiting:
            try:
                if self.is_under_way(transfer):
                    self._given_up.append(transfer)
                    continue
            except ConnectionError as error:
                _log.debug("event=transfer_failed error=%r", str(error))
            self.agent.release_xfer_handle(transfer.handle)
            self._free.append(transfer.landing)
            self.leave(transfer.peer)

    def _share(self, address: int, num_bytes: int) -> None:
        try:
            self.register(address, num_bytes)
        except OSError as error:
            raise ConfigError(
                f"Other hosts cannot reach the KV cache: {error}. What NIXL says of it is above;"
                " within one host use --kv-transport auto.",
                param="kv_transport",
            ) from error

    def register(self, address: int, num_bytes: int) -> None:
        """Raises `OSError`."""
        memory = [(address, num_bytes, self.blocks.device, "")]
        try:
            self.agent.register_memory(memory, self.blocks.segment)
        except self.errors as error:
            raise OSError(f"NIXL does not take its memory ({error})") from error


def _make_agent() -> "tuple[nixl_agent, tuple[type[Exception], ...]]":
    """Also the classes of its errors, which have no base of their own."""
    from nixl_cu13 import nixl_agent, nixl_agent_config

    # A compiled module, which the package does not declare.
    bindings: Any = importlib.import_module("nixl_cu13._bindings")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    errors = (
        bindings.nixlBackendError,
        bindings.nixlCancelledError,
        bindings.nixlInvalidParamError,
        bindings.nixlMismatchError,
        bindings.nixlNotAllowedError,
        bindings.nixlNotFoundError,
        bindings.nixlNotSupportedError,
        bindings.nixlRemoteDisconnectError,
        bindings.nixlUnknownError,
    )
    agent = nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=[]))
    # The package lets its thread look for work without end, which takes a core from the engine
    # even while nothing moves; and its own settings do not say otherwise.
    settings = bindings.nixlAgentConfig()
    settings.useProgThread = True
    settings.pthrDelay = _PROGRESS_INTERVAL_US
    agent.agent = bindings.nixlAgent(agent.name, settings)
    try:
        # Without it, transfers from a worker that died would never end.
        agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    except errors as error:
        raise ConfigError(
            f"NIXL finds no network that it can use ({error}): look at UCX_TLS and UCX_NET_DEVICES,"
            " if they are set.",
            param="kv_transport",
        ) from error
    return agent, errors


class NixlPool(Generic[L]):
    """Implements `RemotePool`."""

    def __init__(self, payload: _Payload, transport: NixlTransport[L]) -> None:
        self.payload, self._transport = payload, transport
        self._is_open = True
        self.num_landings = 0
        """In use by open reads."""
        self._num_unsent = 0
        """Transfers that open reads have yet to post."""
        self._heard_s = 0.0
        """When something came last, for whichever read."""

    def read(
        self, group: int, source_ids: Sequence[int], target_ids: Sequence[int], key: bytes
    ) -> Read:
        """The first transfers are under way when it returns, unless an earlier read has some to
        post: reads may go on one after the other. Raises as the read does."""
        check_ids(source_ids, self.payload.shapes[group][0])
        read = self._read(group, source_ids, target_ids, key)
        next(read)
        return read

    def _read(
        self, group: int, source_ids: Sequence[int], target_ids: Sequence[int], key: bytes
    ) -> Read:
        block_bytes = self.payload.shapes[group][1]
        digest = blake2b(key, digest_size=DIGEST_BYTES)
        per_landing = self._transport.landing_bytes // block_bytes
        unsent = deque(range(0, len(source_ids), per_landing))
        posted: deque[_Transfer[L]] = deque()
        began_s = time.monotonic()
        is_next = not self._num_unsent
        self._num_unsent += len(unsent)
        try:
            if not is_next:
                yield 0
            while True:
                has_landed = bool(posted) and not self._transport.is_under_way(posted[0])
                # What comes next is asked for before the copy, not to leave the network idle.
                while unsent and self.num_landings < _MAX_LANDINGS + has_landed:
                    landing = self._transport.try_take_landing(self)
                    if landing is None:
                        break
                    part = slice(unsent[0], unsent.popleft() + per_landing)
                    self._num_unsent -= 1
                    posted.append(self._post(landing, group, source_ids[part], target_ids[part]))
                if has_landed:
                    self._heard_s = time.monotonic()
                    transfer = posted.popleft()
                    self._land(transfer, group, digest)
                    yield len(transfer.target_ids) * block_bytes
                elif not self.num_landings:  # reads from others hold all that there may be
                    began_s = time.monotonic()
                    yield 0
                elif time.monotonic() - max(began_s, self._heard_s) > PATIENCE_S:
                    # Other reads may hold all landings, and get what comes meanwhile.
                    raise ConnectionError(f"nothing has come for {PATIENCE_S:g} s")
                else:
                    yield 0
                if not unsent and not posted:
                    return digest.digest()
        finally:
            self._num_unsent -= len(unsent)
            self._transport.want_none(self)
            for transfer in posted:
                self.num_landings -= 1
                self._transport.give_up(transfer)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._transport.leave(self.payload.name)

    def _post(
        self, landing: L, group: int, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> _Transfer[L]:
        transport, payload = self._transport, self.payload
        landing_address = transport.blocks.find_address(landing)
        size, start = payload.shapes[group][1], payload.addresses[group]
        local, remote = [], []
        for source_id, place, count in find_runs(source_ids, range(len(source_ids))):
            remote.append((start + source_id * size, count * size, payload.device))
            local.append((landing_address + place * size, count * size, transport.blocks.device))
        agent = transport.agent
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, transport.blocks.segment),
                agent.get_xfer_descs(remote, payload.segment),
                payload.name,
            )
        except transport.errors as error:
            transport.return_landing(landing)
            raise ConnectionError(f"NIXL makes no transfer ({error})") from error
        transfer = _Transfer(payload.name, handle, landing, target_ids)
        try:
            agent.transfer(handle)  # what it returns is asked for again
        except transport.errors as error:
            transport.give_up(transfer)
            raise ConnectionError(f"NIXL posts no transfer ({error})") from error
        self.num_landings += 1
        return transfer

    def _land(self, transfer: _Transfer[L], group: int, digest: blake2b) -> None:
        """Copies what has arrived into this worker's pool."""
        transport, size = self._transport, self.payload.shapes[group][1]
        source = transport.blocks.as_blocks(transfer.landing, size)
        target_ids = transfer.target_ids
        for first, first_target, count in find_runs(range(len(target_ids)), target_ids):
            transport.blocks.copy_in(source, first, group, first_target, count, digest)
        transport.agent.release_xfer_handle(transfer.handle)
        transport.return_landing(transfer.landing)
        self.num_landings -= 1
