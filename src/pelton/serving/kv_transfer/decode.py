# SPDX-License-Identifier: Apache-2.0
"""The part of a worker that decodes what others prefill: orders prompts, copies their blocks in.

    pull ──► Prefill            to the worker that the request names
    poll <── Blocks             start to read; copy what is there, compare digests; after the last
                                ones EndLease
    drop ──► EndLease           the request ended here, or lost its blocks

Every way in which a pull can go wrong ends it with an error, and the engine computes the prompt
itself: the other worker is gone, silent, of another layout or out of memory; a message is missing;
blocks are not what they were. Only messages about an open lease count, and a lease's id is never
used twice, so nothing that arrives late can do harm.
"""

import logging
import time
import uuid
from collections import deque
from dataclasses import replace

import zmq

from pelton.core.kv_transfer import KVLayout, PullOrder, PullResult
from pelton.serving import messages
from pelton.serving.kv_transfer.keys import hash_tokens, make_key
from pelton.serving.kv_transfer.peer import GONE, Peer
from pelton.serving.kv_transfer.transport import KVTransport, Read, RemotePool
from pelton.serving.time_left import find_time_left
from pelton.serving.wire_keys import WireKeys

KEEP_INTERVAL_S = 5.0
"""Leases are extended so often: several times in `leases.LEASE_S`."""
MAX_WAIT_S = 120.0
"""Without a block for this long, a prompt is computed here, however much time the request has."""
_MAX_BYTES_PER_POLL = 64 * 2**20
"""Copied between two steps, more or less: a copy delays the decodes that run here."""
_log = logging.getLogger("pelton.serving")


class _Pull:
    __slots__ = (
        "address",
        "copies_since_s",
        "copy_s",
        "last",
        "lease_id",
        "num_bytes",
        "num_named",
        "order",
        "prompt",
        "reads",
        "waits_since_s",
    )

    def __init__(self, order: PullOrder, lease_id: str, address: str) -> None:
        self.order = order
        self.lease_id = lease_id
        self.address = address
        self.prompt = hash_tokens(order.request.prompt_token_ids)
        self.num_named = [0] * len(order.ranges)
        """Blocks of each group that the other has said can be read."""
        self.reads: deque[tuple[messages.BlockRun, Read]] = deque()
        """Of them, those that are not all here, oldest first."""
        self.last: messages.Blocks | None = None
        self.num_bytes = 0
        self.copy_s = self.copies_since_s = 0.0
        """How long there were reads, before now and since when."""
        self.waits_since_s = time.monotonic()


class DecodeSide:
    """Implements `core.ports.KVConnector`."""

    def __init__(
        self,
        layout: KVLayout,
        transport: KVTransport,
        poller: zmq.Poller,
        keys: WireKeys | None = None,
    ) -> None:
        """`poller` gets the sockets to wait on."""
        self._keys = keys
        self._layout = layout
        self._transport = transport
        self._poller = poller
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: dict[str, Peer] = {}
        self._pulls: dict[str, _Pull] = {}
        """By lease."""
        self._lease_ids: dict[str, str] = {}
        """By request."""
        self._name = uuid.uuid4().hex[:12]
        self._num_leases = 0
        self._next_keep_s = 0.0

    @property
    def is_reading(self) -> bool:
        """Whether blocks may arrive without a message."""
        return any(pull.reads for pull in self._pulls.values())

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    def pull(self, order: PullOrder) -> None:
        request = order.request
        assert request.prefill_at is not None, request
        address = request.prefill_at.address
        self._num_leases += 1
        lease_id = f"{self._name}-{self._num_leases}"
        self._pulls[lease_id] = _Pull(order, lease_id, address)
        self._lease_ids[request.request_id] = lease_id
        peer = self._find_peer(address)
        if not peer.silence:  # else the next poll fails it, whatever it hears
            first_entries = [item.first_entry for item in order.ranges]
            time_left_s = find_time_left(request, shares_clock=self._keys is None)
            peer.send(messages.Prefill(lease_id, request, first_entries, time_left_s))

    def drop(self, request_id: str) -> None:
        lease_id = self._lease_ids.get(request_id)
        if lease_id is not None:
            self._end(self._pulls[lease_id])

    @property
    def is_due(self) -> bool:
        return any(self._peers[pull.address].silence for pull in self._pulls.values())

    def poll(self) -> list[PullResult]:
        results: list[PullResult] = []
        for address, peer in self._peers.items():
            if peer.silence:  # nothing was sent to it, though it may speak now
                results += self._fail_all(address, peer.silence)
            for message in peer.receive():
                pull = self._pulls.get(message.lease_id)
                if pull is not None:  # else it ended here before this was sent
                    results += self._take(pull, peer, message)
        room = _MAX_BYTES_PER_POLL
        for pull in list(self._pulls.values()):
            if room <= 0:
                break
            before = pull.num_bytes
            results += self._go_on(pull, room)
            room -= pull.num_bytes - before
        for address, peer in list(self._peers.items()):
            if peer.error is not None:
                results += self._lose(address, peer)
            elif peer.silence:
                results += self._fail_all(address, peer.silence)
        now_s = time.monotonic()
        late_s = now_s - MAX_WAIT_S
        for pull in [p for p in self._pulls.values() if p.waits_since_s <= late_s]:
            results.append(self._fail(pull, f"No block came for {MAX_WAIT_S:g} s."))
        if now_s >= self._next_keep_s:
            self._next_keep_s = now_s + KEEP_INTERVAL_S
            self._keep_leases()
        return results

    def close(self) -> None:
        """Lets go of all other workers."""
        for pull in list(self._pulls.values()):
            self._end(pull)
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._context.term()

    def _take(self, pull: _Pull, peer: Peer, message: messages.FromPrefill) -> list[PullResult]:
        if isinstance(message, messages.PrefillFailed):
            return [self._fail(pull, message.error)]
        assert peer.pool is not None, "blocks before a welcome"
        for run in message.runs:
            error = self._start(pull, peer.pool, run)
            if error is not None:
                return [self._fail(pull, error)]
        pull.waits_since_s = time.monotonic()
        if message.is_last:
            if pull.num_named != [len(item.block_ids) for item in pull.order.ranges]:
                return [self._fail(pull, "Blocks are missing.")]
            pull.last = message
        return []

    def _start(self, pull: _Pull, pool: RemotePool, run: messages.BlockRun) -> str | None:
        """What is wrong with the message, if anything is."""
        group, count = run.group, len(run.block_ids)
        if not 0 <= group < len(pull.order.ranges):
            return f"There is no KV group {group}."
        wanted, done = pull.order.ranges[group], pull.num_named[group]
        targets = wanted.block_ids[done : done + count]
        if run.first_entry != wanted.first_entry + done or len(targets) != count:
            return f"Entry {run.first_entry} of group {group} is not the next one."
        key = make_key(pull.prompt, group, run.first_entry)
        if not pull.reads:
            pull.copies_since_s = time.monotonic()
        try:
            read = pool.read(group, run.block_ids, targets, key)
        except OSError as error:
            return self._explain(pull, error)
        pull.reads.append((run, read))
        pull.num_named[group] = done + count
        return None

    def _go_on(self, pull: _Pull, room: int) -> list[PullResult]:
        """Copies what is there, `room` bytes of it or a little more."""
        while pull.reads and room > 0:
            run, read = pull.reads[0]
            try:
                num_bytes = next(read)
            except StopIteration as end:
                if end.value != run.digest:
                    text = "The blocks that arrived are not those that were computed."
                    return [self._fail(pull, text)]
                pull.reads.popleft()
                if not pull.reads:
                    pull.copy_s += time.monotonic() - pull.copies_since_s
                continue
            except OSError as error:
                return [self._fail(pull, self._explain(pull, error))]
            if not num_bytes:
                return []
            pull.num_bytes += num_bytes
            pull.waits_since_s = time.monotonic()
            room -= num_bytes
        if pull.reads or pull.last is None:
            return []
        self._end(pull)
        num_cached, request_id = pull.last.num_cached_tokens, pull.order.request.request_id
        phases = [replace(phase, is_remote=True) for phase in pull.last.phases]
        return [PullResult(request_id, None, num_cached, pull.num_bytes, pull.copy_s, phases)]

    def _explain(self, pull: _Pull, error: OSError) -> str:
        """Also gives the peer up, if it is the connection that broke."""
        text = f"Its KV cannot be read: {error}."
        if isinstance(error, ConnectionError):
            self._peers[pull.address].error = text
        return text

    def _fail(self, pull: _Pull, error: str) -> PullResult:
        request_id = pull.order.request.request_id
        _log.warning(
            "event=prefill_fallback request_id=%s prefill_at=%s error=%r",
            *(request_id, pull.address, error),
        )
        self._end(pull)
        return PullResult(request_id, error)

    def _end(self, pull: _Pull) -> None:
        for _, read in pull.reads:
            read.close()
        pull.reads.clear()
        del self._pulls[pull.lease_id]
        del self._lease_ids[pull.order.request.request_id]
        peer = self._peers.get(pull.address)
        if peer is not None:
            peer.send(messages.EndLease(pull.lease_id))

    def _lose(self, address: str, peer: Peer) -> list[PullResult]:
        """Ends all that the peer had to do, and lets go of its memory."""
        assert peer.error is not None, address
        del self._peers[address]
        results = self._fail_all(address, peer.error)
        if peer.error == GONE and not results:  # nothing was lost; the server knows whether it died
            _log.info("event=prefill_worker_gone address=%s", address)
        else:
            _log.warning("event=prefill_worker_lost address=%s error=%r", address, peer.error)
        peer.close()
        return results

    def _fail_all(self, address: str, error: str) -> list[PullResult]:
        pulls = [pull for pull in self._pulls.values() if pull.address == address]
        return [self._fail(pull, error) for pull in pulls]

    def _keep_leases(self) -> None:
        for address, peer in self._peers.items():
            lease_ids = [p.lease_id for p in self._pulls.values() if p.address == address]
            if lease_ids:
                peer.send(messages.KeepLeases(lease_ids))

    def _find_peer(self, address: str) -> Peer:
        peer = self._peers.get(address)
        if peer is None:
            arguments = (self._context, self._poller, address, self._layout, self._transport)
            peer = self._peers[address] = Peer(*arguments, self._keys)
        return peer
