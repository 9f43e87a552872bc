# SPDX-License-Identifier: Apache-2.0
"""Another worker's pool, read by NIXL: how many transfers are under way, and what follows each.

    unsent ── posted ──► under way ── has landed ──► copied into this pool ──► here

What open reads want comes in the order in which they were made, and each `next` of any of them
moves all on, so the network does not wait between two reads. On a CPU a thread makes the copies:
within one host UCX moves a transfer's bytes in the call that posts it, and would wait for them.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from pelton.serving.kv_transfer.silence import Silence
from pelton.serving.kv_transfer.transport import DIGEST_BYTES, Read, check_ids, find_runs

if TYPE_CHECKING:
    from nixl_cu13 import nixl_xfer_handle

    from pelton.serving.kv_transfer.nixl import NixlTransport

PATIENCE_S = 10.0
"""Without a byte for this long, the other worker counts as lost."""
_MAX_COPY_S = 60.0
"""A copy out of a landing takes a millisecond: one that does not end is a fault of this worker."""
_MAX_LANDINGS = 8
"""That one peer may have in use, beside the one that is copied from: more are of no use to a
network of 25 GB/s and steps of 1 ms."""

L = TypeVar("L")


class Payload(msgspec.Struct, array_like=True, frozen=True):
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


@dataclass(frozen=True, slots=True)
class Transfer(Generic[L]):
    peer: str
    handle: "nixl_xfer_handle"
    landing: L


@dataclass(eq=False, slots=True)
class _Part(Generic[L]):
    """Blocks of one read that share a landing."""

    group: int
    source_ids: Sequence[int]
    target_ids: Sequence[int]
    digest: blake2b
    """Of the read."""
    transfer: Transfer[L] | None = None
    """Once it is posted."""
    is_started: bool = False
    """Its copy, by the thread that makes them."""
    is_dropped: bool = False
    is_copied: bool = False
    error: BaseException | None = None
    """Of the copy."""
    is_here: bool = False


class _Copier(Generic[L]):
    """A thread that copies parts in order. An executor's futures would take the two threads a
    twentieth of the time of a transfer within one host."""

    def __init__(self, copy: Callable[[_Part[L]], None]) -> None:
        self._copy = copy
        self._queue: SimpleQueue[_Part[L] | None] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None

    def submit(self, part: _Part[L]) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="kv-copy", daemon=True)
            self._thread.start()
        self._queue.put(part)

    def drop(self, part: _Part[L]) -> None:
        """Its copy does not start any more, or has ended."""
        with self._lock:
            part.is_dropped = True
        deadline_s = time.monotonic() + _MAX_COPY_S
        while part.is_started and not part.is_copied:
            assert time.monotonic() < deadline_s, part
            time.sleep(0.0002)

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_MAX_COPY_S)

    def _run(self) -> None:
        while (part := self._queue.get()) is not None:
            with self._lock:
                part.is_started = not part.is_dropped
            if part.is_started:
                try:
                    self._copy(part)
                except BaseException as error:  # the engine's thread raises it
                    part.error = error
                part.is_copied = True


class NixlPool(Generic[L]):
    """Implements `RemotePool`."""

    def __init__(self, payload: Payload, transport: "NixlTransport[L]") -> None:
        self.payload, self._transport = payload, transport
        self._is_open = True
        self._unsent: deque[_Part[L]] = deque()
        self._under_way: deque[_Part[L]] = deque()
        self._landed: deque[_Part[L]] = deque()
        self._copier: _Copier[L] | None = None
        if transport.blocks.may_copy_aside:
            self._copier = _Copier(self._copy)
        self._silence = Silence()
        """Nothing has landed, though something was under way."""

    @property
    def num_landings(self) -> int:
        """In use by open reads."""
        return len(self._under_way) + len(self._landed)

    def read(
        self, group: int, source_ids: Sequence[int], target_ids: Sequence[int], key: bytes
    ) -> Read:
        """The first transfers are under way when it returns, unless earlier reads have all
        landings. Raises as the read does."""
        num_blocks, block_bytes = self.payload.shapes[group]
        check_ids(source_ids, num_blocks)
        digest = blake2b(key, digest_size=DIGEST_BYTES)
        per_landing = self._transport.landing_bytes // block_bytes
        starts = range(0, len(source_ids), per_landing)
        slices = [slice(start, start + per_landing) for start in starts]
        parts: deque[_Part[L]] = deque(
            _Part(group, source_ids[s], target_ids[s], digest) for s in slices
        )
        self._unsent += parts
        read = self._read(parts, block_bytes, digest)
        next(read)
        return read

    def _read(self, parts: deque[_Part[L]], block_bytes: int, digest: blake2b) -> Read:
        try:
            self._post_more()
            yield 0
            while parts:
                self._post_more()
                if self._landed and self._copier is None:
                    self._copy(self._landed[0])
                    self._finish()
                num_blocks = 0
                while parts and parts[0].is_here:
                    num_blocks += len(parts.popleft().target_ids)
                yield num_blocks * block_bytes
            return digest.digest()
        finally:
            self._transport.want_none(self)
            for part in reversed(parts):  # no copy starts while another is waited for
                if not part.is_here:
                    self._drop(part)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            if self._copier is not None:
                self._copier.close()
            self._transport.leave(self.payload.name)

    def _post_more(self) -> None:
        """Before the next copy is made here, not to leave the network idle."""
        self._look()
        if not self._under_way:
            self._silence.end()
        elif self._silence.look() > PATIENCE_S:
            raise ConnectionError(f"nothing has come for {PATIENCE_S:g} s")
        for _ in range(_MAX_LANDINGS + bool(self._landed) - self.num_landings):
            landing = self._transport.try_take_landing(self) if self._unsent else None
            if landing is None:
                break
            part = self._unsent[0]
            part.transfer = self._post(landing, part)
            self._under_way.append(self._unsent.popleft())
            # Within one host it has landed, and the one before may be free and still in the cache.
            self._look()

    def _look(self) -> None:
        """For what has landed, and what has been copied by now."""
        while self._under_way and not self._is_under_way(self._under_way[0]):
            self._silence.end()
            part = self._under_way.popleft()
            self._landed.append(part)
            if self._copier is not None:
                self._copier.submit(part)
        while self._landed and self._landed[0].is_copied:
            error = self._landed[0].error
            if error is not None:
                raise error
            self._finish()

    def _is_under_way(self, part: _Part[L]) -> bool:
        assert part.transfer is not None, part
        return self._transport.is_under_way(part.transfer)

    def _copy(self, part: _Part[L]) -> None:
        """Into this worker's pool."""
        assert part.transfer is not None, part
        blocks, target_ids = self._transport.blocks, part.target_ids
        source = blocks.as_blocks(part.transfer.landing, self.payload.shapes[part.group][1])
        for first, first_target, count in find_runs(range(len(target_ids)), target_ids):
            blocks.copy_in(source, first, part.group, first_target, count, part.digest)

    def _finish(self) -> None:
        """The first one that had landed is copied."""
        part = self._landed.popleft()
        assert part.transfer is not None, part
        self._transport.release(part.transfer)
        part.is_here = True

    def _drop(self, part: _Part[L]) -> None:
        """Its read is closed: its targets are not written to any more."""
        if part.transfer is None:
            self._unsent.remove(part)
        elif part in self._under_way:
            self._under_way.remove(part)
            self._transport.give_up(part.transfer)
        else:
            if self._copier is not None:
                self._copier.drop(part)
            self._landed.remove(part)
            self._transport.release(part.transfer)

    def _post(self, landing: L, part: _Part[L]) -> Transfer[L]:
        transport, payload = self._transport, self.payload
        landing_address = transport.blocks.find_address(landing)
        size, start = payload.shapes[part.group][1], payload.addresses[part.group]
        local, remote = [], []
        for source_id, place, count in find_runs(part.source_ids, range(len(part.source_ids))):
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
        transfer = Transfer(payload.name, handle, landing)
        try:
            agent.transfer(handle)  # what it returns is asked for again
        except transport.errors as error:
            transport.give_up(transfer)
            raise ConnectionError(f"NIXL posts no transfer ({error})") from error
        return transfer
