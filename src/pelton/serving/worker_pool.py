# SPDX-License-Identifier: Apache-2.0
"""The workers behind one frontend: who is up, and which of them takes a request.

Each worker says a few times a second what it owes and what its prefix cache gained and lost; the
router reads that beside its own bookings. A worker that has said nothing for a while gets no new
request as long as another has; whether it is hung, its client decides later.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from pelton.core.block_hash import BlockHash, hash_prompt, make_request_salt
from pelton.core.clock import MonotonicClock
from pelton.core.config import Role
from pelton.core.errors import PeltonError, UnavailableError, WorkerLostError
from pelton.core.request import GenerateRequest, PrefillSource
from pelton.core.stats import EngineStats
from pelton.serving import messages
from pelton.serving.admission_gate import AdmissionGate
from pelton.serving.messages import WorkerInfo
from pelton.serving.placement import Placement, Seat
from pelton.serving.remote_prefill import book_prefill
from pelton.serving.request_stream import RequestStream
from pelton.serving.router.admission import RateMeter
from pelton.serving.router.booking import Booking
from pelton.serving.router.router import Router
from pelton.serving.router.types import Decision, Policy, RouterConfig, RouteRequest, WorkerView
from pelton.serving.tracing import Trace
from pelton.serving.worker_client import Report

_LONG_PROMPT = 16_384
"""Tokens whose hashing takes milliseconds, which a thread may take."""
_MIN_WAITING = 8
"""Requests beyond its slots that a worker gets before others wait in the frontend, or as many as
it has slots: enough that it never runs dry before the next ones arrive."""


class WorkerPort(Protocol):
    """What a frontend needs of `WorkerClient`."""

    on_report: Callable[[Report], None]

    @property
    def info(self) -> WorkerInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def lost(self) -> asyncio.Event: ...
    @property
    def is_quiet(self) -> bool: ...
    def carry(self, stream: RequestStream, request: GenerateRequest) -> None: ...
    def replay_cache_events(self, from_sequence: int) -> None: ...
    def cancel_all(self, error: PeltonError) -> None: ...


@dataclass(slots=True)
class WorkerState:
    """One worker, whichever process it is now."""

    client: WorkerPort | None = None
    generation: int = 0
    """How many processes there have been; 0: none yet."""
    num_routed: int = 0
    """Requests that were sent to it, whichever process it was."""
    num_indexed_blocks: int = 0
    """Blocks that its events say it has cached."""
    prefill_rate: RateMeter = field(default_factory=RateMeter)
    finish_rate: RateMeter = field(default_factory=RateMeter)

    @property
    def is_up(self) -> bool:
        return self.client is not None and not self.client.lost.is_set()

    @property
    def stats(self) -> EngineStats:
        """All zeros while it is not up."""
        return self.client.stats if self.client is not None and self.is_up else EngineStats()


class WorkerPool:
    def __init__(
        self,
        num_workers: int,
        policy: Policy,
        max_losses: int = 0,
        *,
        min_remote_prefill: int | None = None,
    ) -> None:
        """A request fails when it has lost more than `max_losses` workers. With
        `min_remote_prefill`, prompts of that many tokens are computed by workers of their own."""
        self._min_remote_prefill = min_remote_prefill
        self._need = Role.MIXED if min_remote_prefill is None else Role.DECODE
        self.states = [WorkerState() for _ in range(num_workers)]
        self.is_kv_aware = policy is Policy.KV_AWARE and num_workers > 1
        """Whether routing reads what workers have cached."""
        # One frontend sends all requests there are, so a report can miss none of them but young
        # ones, which its own bookings count.
        config = RouterConfig(policy=policy, report_delay_s=0.0)
        self._router = Router(config, MonotonicClock())
        self.gate = AdmissionGate(self._route, self._check_wait)
        self.max_losses = max_losses
        self.num_migrated = 0
        """How often a request went on elsewhere because its worker was lost."""
        self.num_predicted_tokens = 0
        """Prompt tokens that workers were believed to have cached when they got them."""

    @property
    def recent(self) -> Sequence[Decision]:
        """The newest decisions, oldest first."""
        return self._router.recent

    @property
    def num_up(self) -> int:
        return sum(state.is_up for state in self.states)

    @property
    def info(self) -> WorkerInfo | None:
        """Of the worker with the shortest context, so that any can take what fits; None while no
        worker is up that decodes."""
        infos = [state.client.info for state in self.states if state.client and state.is_up]
        infos = [info for info in infos if info.role is not Role.PREFILL]
        return min(infos, key=lambda info: info.max_model_len, default=None)

    def use(self, index: int, client: WorkerPort | None, generation: int) -> None:
        """Sends requests to `client`; None: there is none in this place now."""
        state = self.states[index]
        state.client, state.generation = client, generation
        state.num_indexed_blocks = 0
        if client is None:
            self._router.remove(str(index))
            return
        state.prefill_rate, state.finish_rate = RateMeter(), RateMeter()
        info = client.info
        view = WorkerView(
            id=str(index),
            generation=generation,
            num_slots=info.max_num_requests,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            publishes_events=self.is_kv_aware,
            role=info.role,
            max_waiting=max(_MIN_WAITING, info.max_num_requests),
        )
        self._router.update([view])
        client.on_report = partial(self._take_report, view)
        self.gate.pump()

    def place(
        self, requests: Sequence[GenerateRequest], session: str = "", trace: Trace | None = None
    ) -> Placement:
        """For requests that are answered together. Requests of one `session` go to one worker
        while it can take them."""
        return Placement(self, requests, session, trace)

    async def describe(self, request: GenerateRequest, session: str) -> RouteRequest:
        """What routing needs to know. Takes a while for a long prompt, which a thread hashes."""
        token_ids = request.prompt_token_ids
        if request.resumed:
            token_ids = token_ids + max(request.resumed.values(), key=len)
        return RouteRequest(
            request_id=request.request_id,
            num_prompt_tokens=len(token_ids),
            block_hashes=await self._hash(token_ids, request.cache_salt, self.info),
            num_choices=len(request.choices),
            priority=request.priority,
            deadline_s=request.deadline_s,
            session=f"{request.cache_salt}/{session}" if session else "",
        )

    async def book(
        self, request: GenerateRequest, route: RouteRequest, *, has_begun: bool
    ) -> Seat | None:
        """`AdmissionGate.book`. What is left of a reply that has begun waits for a worker to come
        up, if losing one ends no reply: the loss of all of them then costs it no more. Raises
        `UnavailableError` while none is up and the request does not wait."""
        is_patient = has_begun and self.max_losses > 0
        if self.info is None and not is_patient:
            raise UnavailableError("The model is being loaded; try again shortly.")
        booking = await self.gate.book(route, is_patient=is_patient, has_begun=has_begun)
        if booking is None:
            return None
        # A resumed request has no prompt to compute apart from its output.
        prefill = None if request.resumed else self._book_prefill(route, booking.decision)
        return Seat(booking, prefill)

    def send(self, seat: Seat, stream: RequestStream, request: GenerateRequest) -> None:
        """Sends the request to the worker that it is booked on. Raises `WorkerLostError`."""
        if seat.prefill is not None:
            request = self._send_prompt(request, seat.prefill)
        state = self.states[int(seat.booking.worker_id)]
        if state.client is None:
            raise WorkerLostError("The worker for this request is gone; send the request again.")
        state.client.carry(stream, request)
        state.num_routed += 1
        if not request.resumed:
            self.num_predicted_tokens += seat.booking.decision.cached_tokens

    def cancel_all(self, error: PeltonError) -> None:
        """Ends every request in flight with `error`."""
        self.gate.refuse_all(error)
        for state in self.states:
            if state.client is not None:
                state.client.cancel_all(error)

    async def _hash(
        self, token_ids: list[int], cache_salt: str, info: WorkerInfo | None
    ) -> list[BlockHash]:
        if info is None or not (self.is_kv_aware and info.shares_prefixes):
            return []
        salt = make_request_salt(info.model, cache_salt)
        if len(token_ids) < _LONG_PROMPT:
            return hash_prompt(token_ids, info.block_size, salt)
        return await asyncio.to_thread(hash_prompt, token_ids, info.block_size, salt)

    def _route(self, request: RouteRequest) -> Booking:
        route = replace(request, excluded=self._find_unusable(self._need))
        return self._router.route(route, self._need)

    def _check_wait(self, request: RouteRequest, num_ahead: int) -> None:
        route = replace(request, excluded=self._find_unusable(self._need))
        self._router.check_wait(route, num_ahead)

    def _take_report(self, view: WorkerView, report: Report) -> None:
        """What the process said that `view` introduced."""
        router, worker_id, generation = self._router, view.id, view.generation
        state = self.states[int(worker_id)]
        if state.generation != generation or state.client is None:
            return
        wanted = None
        match report:
            case messages.Heartbeat():
                router.update([_report_load(view, state, report)])
                self.gate.pump()
                if self.is_kv_aware:
                    wanted = router.expect_events(worker_id, generation, report.next_event)
            case messages.CacheEvents(events):
                wanted = router.apply_events(worker_id, generation, events)
            case messages.CacheContents(dump):
                router.load_dump(worker_id, generation, dump)
        state.num_indexed_blocks = router.num_indexed_blocks(worker_id)
        if wanted is not None:
            state.client.replay_cache_events(wanted.from_sequence)

    def _book_prefill(self, route: RouteRequest, decode: Decision) -> Booking | None:
        if self._min_remote_prefill is None:
            return None
        route = replace(route, excluded=self._find_unusable(Role.PREFILL))
        return book_prefill(self._router, route, decode, self._min_remote_prefill)

    def _send_prompt(self, request: GenerateRequest, prefill: Booking) -> GenerateRequest:
        """The request with its prompt to be computed where `prefill` is booked."""
        assert self._min_remote_prefill is not None
        state = self.states[int(prefill.worker_id)]
        assert state.client is not None
        state.num_routed += 1
        address = state.client.info.address
        source = PrefillSource(address=address, min_tokens=self._min_remote_prefill)
        return replace(request, prefill_at=source)

    def _find_unusable(self, need: Role) -> frozenset[str]:
        """Workers for `need` that are lost, and quiet ones unless all are; and all others."""
        up = {
            str(i): state
            for i, state in enumerate(self.states)
            if state.client is not None and state.is_up and state.client.info.role is need
        }
        quiet = {i for i, state in up.items() if state.client and state.client.is_quiet}
        lost = {str(i) for i in range(len(self.states))} - set(up)
        return frozenset(lost if len(quiet) == len(up) else lost | quiet)


def _report_load(view: WorkerView, state: WorkerState, report: messages.Heartbeat) -> WorkerView:
    """Also keeps the worker's rates. Blocks are counted as one group of the model sees them."""
    stats, prefill, at_s = report.stats, report.prefill, report.at_s
    is_prefilling, has_queue = prefill.num_pending_tokens > 0, stats.num_waiting > 0
    state.prefill_rate.sample(at_s, prefill.num_computed_total, is_prefilling)
    state.finish_rate.sample(at_s, stats.finished_total, has_queue)
    return replace(
        view,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_used_blocks=view.num_blocks * stats.num_used_blocks // (stats.num_blocks or 1),
        num_pending_prefill_tokens=prefill.num_pending_tokens,
        prefill_tokens_per_s=state.prefill_rate.per_s,
        requests_per_s=state.finish_rate.per_s,
        reported_at_s=at_s,
    )
