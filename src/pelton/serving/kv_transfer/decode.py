# SPDX-License-Identifier: Apache-2.0
"""The part of a worker that decodes what others prefill: orders prompts, copies their blocks in.

    pull ──► Prefill            to the worker that the request names
    poll <── Blocks             copy, compare digests; after the last ones EndLease
    drop ──► EndLease           the request ended here, or lost its blocks

Every way in which a pull can go wrong ends it with an error, and the engine computes the prompt
itself: the other worker is gone, silent, of another layout or out of memory; a message is missing;
blocks are not what they were. Only messages about an open lease count, and a lease's id is never
used twice, so nothing that arrives late can do harm.
"""

import logging
import time
import uuid
from dataclasses import replace

import zmq

from pelton.core.kv_transfer import KVLayout, PullOrder, PullResult
from pelton.serving import messages
from pelton.serving.kv_transfer.keys import hash_tokens, make_key
from pelton.serving.kv_transfer.peer import Peer
from pelton.serving.kv_transfer.transport import KVTransport, RemotePool

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
        "lease_id",
        "num_bytes",
        "num_copied",
        "order",
        "prompt",
        "waits_since_s",
    )

    def __init__(self, order: PullOrder, lease_id: str, address: str) -> None:
        self.order = order
        self.lease_id = lease_id
        self.address = address
        self.prompt = hash_tokens(order.request.prompt_token_ids)
        self.num_copied = [0] * len(order.ranges)
        self.num_bytes = 0
        self.waits_since_s = time.monotonic()


class DecodeSide:
    """Implements `core.ports.KVConnector`."""

    def __init__(
        self,
        layout: KVLayout,
        transport: KVTransport,
        block_bytes: list[int],
        poller: zmq.Poller,
    ) -> None:
        """`block_bytes`: of a block of each group. `poller` gets the sockets to wait on."""
        self._layout = layout
        self._transport = transport
        self._block_bytes = block_bytes
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
        if not peer.silence:  # else the next poll fails it
            first_entries = [item.first_entry for item in order.ranges]
            peer.send(messages.Prefill(lease_id, request, first_entries))

    def drop(self, request_id: str) -> None:
        lease_id = self._lease_ids.get(request_id)
        if lease_id is not None:
            self._end(self._pulls[lease_id])

    @property
    def is_due(self) -> bool:
        return any(self._peers[pull.address].silence for pull in self._pulls.values())

    def poll(self) -> list[PullResult]:
        results: list[PullResult] = []
        room = _MAX_BYTES_PER_POLL
        for address, peer in list(self._peers.items()):
            for message in peer.receive():
                pull = self._pulls.get(message.lease_id)
                if pull is None:
                    continue  # ended here before it was sent
                before = pull.num_bytes
                results += self._take(pull, peer, message)
                room -= pull.num_bytes - before
                if room <= 0:
                    break
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
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._context.term()

    def _take(self, pull: _Pull, peer: Peer, message: messages.FromPrefill) -> list[PullResult]:
        if isinstance(message, messages.PrefillFailed):
            return [self._fail(pull, message.error)]
        assert peer.pool is not None, "blocks before a welcome"
        for run in message.runs:
            error = self._copy(pull, peer.pool, run)
            if error is not None:
                return [self._fail(pull, error)]
        pull.waits_since_s = time.monotonic()
        if not message.is_last:
            return []
        if pull.num_copied != [len(item.block_ids) for item in pull.order.ranges]:
            return [self._fail(pull, "Blocks are missing.")]
        self._end(pull)
        request_id = pull.order.request.request_id
        phases = [replace(phase, is_remote=True) for phase in message.phases]
        return [PullResult(request_id, None, message.num_cached_tokens, pull.num_bytes, phases)]

    def _copy(self, pull: _Pull, pool: RemotePool, run: messages.BlockRun) -> str | None:
        """What is wrong with the blocks, if anything is."""
        group, count = run.group, len(run.block_ids)
        if not 0 <= group < len(pull.order.ranges):
            return f"There is no KV group {group}."
        wanted, done = pull.order.ranges[group], pull.num_copied[group]
        targets = wanted.block_ids[done : done + count]
        if run.first_entry != wanted.first_entry + done or len(targets) != count:
            return f"Entry {run.first_entry} of group {group} is not the next one."
        key = make_key(pull.prompt, group, run.first_entry)
        try:
            digest = pool.read(group, run.block_ids, targets, key)
        except OSError as error:
            return f"Its KV cannot be read: {error}."
        if digest != run.digest:
            return "The blocks that arrived are not those that were computed."
        pull.num_copied[group] = done + count
        pull.num_bytes += count * self._block_bytes[group]
        return None

    def _fail(self, pull: _Pull, error: str) -> PullResult:
        request_id = pull.order.request.request_id
        _log.warning(
            "event=prefill_fallback request_id=%s prefill_at=%s error=%r",
            *(request_id, pull.address, error),
        )
        self._end(pull)
        return PullResult(request_id, error)

    def _end(self, pull: _Pull) -> None:
        del self._pulls[pull.lease_id]
        del self._lease_ids[pull.order.request.request_id]
        peer = self._peers.get(pull.address)
        if peer is not None:
            peer.send(messages.EndLease(pull.lease_id))

    def _lose(self, address: str, peer: Peer) -> list[PullResult]:
        """Ends all that the peer had to do, and lets go of its memory."""
        assert peer.error is not None, address
        _log.warning("event=prefill_worker_lost address=%s error=%r", address, peer.error)
        del self._peers[address]
        peer.close()
        return self._fail_all(address, peer.error)

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
            peer = self._peers[address] = Peer(*arguments)
        return peer
