# SPDX-License-Identifier: Apache-2.0
"""Moves blocks between hosts with NIXL, over whatever UCX finds: RDMA, shared memory, TCP.

    the other's pool ── READ ──► a landing here ── copied and digested ──► this pool

A transfer cannot be called back: what is posted may still write after its peer was silent for a
minute, whatever was released meanwhile. So blocks arrive in landings, memory of this transport's
own, and are copied from there once they are complete; a landing whose transfer was given up is not
used again until the transfer has ended. `nixl_pool` says what is under way when.
"""

import importlib
import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from pelton.core.errors import ConfigError
from pelton.serving.kv_transfer.nixl_pool import NixlPool, Payload, Transfer
from pelton.serving.kv_transfer.transport import PoolHandle

if TYPE_CHECKING:
    from nixl_cu13 import nixl_agent

KIND = "nixl"
_LANDING_BYTES = 4 * 2**20
_PROGRESS_INTERVAL_US = 1000
"""NIXL's thread looks for work so often, beside being woken by it. In whole milliseconds."""
MAX_LANDINGS_OF_ALL = 64
"""That there are, whoever uses them: on a GPU they are set aside before its pool is sized."""

_log = logging.getLogger("pelton.serving")

L = TypeVar("L")


class LocalBlocks(Protocol[L]):
    """A pool of this process: `host_blocks.HostBlocks` or `cuda_blocks.CudaBlocks`."""

    segment: str
    """NIXL's word for the kind of memory."""
    device: int
    may_copy_aside: bool
    """`copy_in` may be called in another thread, beside the engine's steps."""

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
        self._given_up: list[Transfer[L]] = []
        if is_shared:
            for address, (count, size) in zip(blocks.addresses, blocks.shapes, strict=True):
                self._share(address, count * size)

    def handle(self) -> PoolHandle | None:
        if not self._is_shared:
            return None
        blocks = self.blocks
        payload = Payload(
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

    def open(self, handle: PoolHandle) -> NixlPool[L]:
        if handle.kind != KIND:
            raise OSError(f"a pool of kind {handle.kind!r} is not reached by NIXL")
        payload = msgspec.msgpack.decode(handle.payload, type=Payload)
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

    def try_take_landing(self, pool: NixlPool[L]) -> L | None:
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

    def release(self, transfer: Transfer[L]) -> None:
        """It has ended, and its landing may be used again."""
        self.agent.release_xfer_handle(transfer.handle)
        self._free.append(transfer.landing)

    def want_none(self, pool: NixlPool[L]) -> None:
        """A read from `pool` has ended; one that goes on asks again."""
        self._without.discard(pool)

    def give_up(self, transfer: Transfer[L]) -> None:
        """Nobody wants what the transfer brings."""
        self._users[transfer.peer] += 1
        self._given_up.append(transfer)
        self._reclaim()

    def is_under_way(self, transfer: Transfer[L]) -> bool:
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
            self.release(transfer)
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
