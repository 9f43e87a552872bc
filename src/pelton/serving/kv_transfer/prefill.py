# SPDX-License-Identifier: Apache-2.0
"""The part of a worker that computes prompts for others: takes orders, tells what can be read.

    Prefill ──► a lease and a prefill-only request in the engine
                after each step: Blocks (which can be read now, with their digests), PrefillFailed
    KeepLeases ──► extends          EndLease ──► cancels, and gives the blocks back

A client that is gone, or that does not extend its leases, has them ended.
"""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pelton.core.errors import PeltonError
from pelton.core.kv_transfer import KVLayout, LeaseNews, explain_mismatch
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.core.trace import Phase
from pelton.engine.engine import Engine
from pelton.serving import messages
from pelton.serving.kv_transfer.keys import hash_tokens, make_key
from pelton.serving.kv_transfer.transport import KVTransport
from pelton.serving.time_left import set_deadline

_NOTHING_SAMPLED = SamplingParams(temperature=0.0, max_tokens=1)
_log = logging.getLogger("pelton.serving")

SendMessage = Callable[[bytes, messages.FromWorker], None]


class PrefillSide:
    def __init__(
        self, engine: Engine, layout: KVLayout, transport: KVTransport, send: SendMessage
    ) -> None:
        self._engine = engine
        self._layout = layout
        self._transport = transport
        self._send = send
        self._prompt_hashes: dict[str, bytes] = {}
        """By lease."""
        self._phases: dict[str, list[Phase]] = {}
        """By lease, of those whose requests are traced."""

    def refuse(self, theirs: KVLayout) -> str | None:
        """Why KV cannot go to a worker of this layout."""
        return explain_mismatch(theirs, self._layout)

    def receive(self, client: bytes, message: messages.ToPrefill) -> None:
        match message:
            case messages.Prefill(lease_id):
                try:
                    self._start(client, message)
                except PeltonError as error:
                    self._send(client, messages.PrefillFailed(lease_id, error.message))
            case messages.KeepLeases(lease_ids):
                self._engine.leases.extend(client, lease_ids)
            case messages.EndLease(lease_id):
                if self._engine.leases.close(lease_id, client):
                    self._forget(lease_id)

    def tell(self, phases: Mapping[str, list[Phase]] = MappingProxyType({})) -> None:
        """Sends what became of leases since the last call. `phases`: by lease, those that have
        ended since."""
        for lease_id in phases.keys() & self._phases.keys():
            self._phases[lease_id] += phases[lease_id]
        for news in self._engine.leases.take_news():
            self._send(news.owner, self._describe(news))

    def expire(self) -> None:
        """Ends the leases whose owners have stopped extending them."""
        for lease_id in self._engine.leases.fail_expired():
            _log.warning("event=lease_expired lease=%s", lease_id)
            self._forget(lease_id)
        self.tell()

    def forget_client(self, client: bytes) -> None:
        """The client is gone: nobody will read what it leased."""
        for lease_id in self._engine.leases.close_owner(client):
            self._forget(lease_id)

    def _start(self, client: bytes, order: messages.Prefill) -> None:
        lease_id, ordered = order.lease_id, set_deadline(order.request, order.time_left_s)
        self._engine.leases.open(lease_id, client, order.first_entries)
        request = GenerateRequest(
            request_id=lease_id,
            prompt_token_ids=ordered.prompt_token_ids,
            sampling=_NOTHING_SAMPLED,
            seed=0,
            priority=ordered.priority,
            deadline_s=ordered.deadline_s,
            cache_salt=ordered.cache_salt,
            is_prefill_only=True,
            traceparent=ordered.traceparent,
        )
        self._prompt_hashes[lease_id] = hash_tokens(request.prompt_token_ids)
        if request.traceparent:
            self._phases[lease_id] = []
        try:
            self._engine.add(request)
        except PeltonError:
            self._engine.leases.close(lease_id, client)
            self._forget(lease_id)
            raise

    def _describe(self, news: LeaseNews) -> messages.FromWorker:
        if news.error is not None:
            self._forget(news.lease_id)
            return messages.PrefillFailed(news.lease_id, news.error)
        prompt_hash = self._prompt_hashes.get(news.lease_id)
        if prompt_hash is None:  # ended since the step
            return messages.PrefillFailed(news.lease_id, "The lease has ended.")
        runs = []
        for g, item in enumerate(news.ranges):
            if item.block_ids:
                key = make_key(prompt_hash, g, item.first_entry)
                digest = self._transport.digest(g, item.block_ids, key)
                runs.append(messages.BlockRun(g, item.first_entry, item.block_ids, digest))
        phases = self._phases.get(news.lease_id, []) if news.is_last else []
        return messages.Blocks(news.lease_id, runs, news.is_last, news.num_cached_tokens, phases)

    def _forget(self, lease_id: str) -> None:
        self._prompt_hashes.pop(lease_id, None)
        self._phases.pop(lease_id, None)
        self._engine.cancel(lease_id)
