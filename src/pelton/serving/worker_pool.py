# SPDX-License-Identifier: Apache-2.0
"""Which worker takes a request, and how the request gets there."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from pelton.core.block_hash import BlockHash, hash_prompt, make_request_salt
from pelton.core.clock import MonotonicClock
from pelton.core.config import Role
from pelton.core.errors import PeltonError, UnavailableError, WorkerLostError
from pelton.core.request import GenerateRequest, PrefillSource
from pelton.serving.admission_gate import AdmissionGate
from pelton.serving.messages import WorkerInfo
from pelton.serving.placement import Placement, Seat
from pelton.serving.remote_prefill import book_prefill
from pelton.serving.request_stream import RequestStream
from pelton.serving.router.booking import Booking
from pelton.serving.router.router import Router
from pelton.serving.router.types import Decision, RouterConfig, RouteRequest
from pelton.serving.tracing import Trace
from pelton.serving.worker_roster import WorkerRoster

_LONG_PROMPT = 16_384
"""Tokens whose hashing takes milliseconds, which a thread may take."""


class WorkerPool:
    def __init__(
        self,
        roles: Sequence[Role],
        config: RouterConfig,
        max_losses: int = 0,
        *,
        min_remote_prefill: int | None = None,
    ) -> None:
        """`roles`: of the workers there will be at first. Where another decodes, a request fails
        when it has lost more than `max_losses` workers. With `min_remote_prefill`, prompts of that
        many tokens are computed by workers of their own."""
        self._min_remote_prefill = min_remote_prefill
        self._need = Role.MIXED if min_remote_prefill is None else Role.DECODE
        self._router = Router(config, MonotonicClock())
        self.gate = AdmissionGate(self._route, self._check_wait)
        self.roster = WorkerRoster(roles, config.policy, self._router, self.gate.pump)
        self._max_losses = max_losses
        self.num_migrated = 0
        """How often a request went on elsewhere because its worker was lost."""
        self.num_predicted_tokens = 0
        """Prompt tokens that workers were believed to have cached when they got them."""

    @property
    def max_losses(self) -> int:
        """Workers that a request may lose and go on; none where no other decodes."""
        return self._max_losses if self.roster.num_decoding > 1 else 0

    @property
    def recent(self) -> Sequence[Decision]:
        """The newest decisions, oldest first."""
        return self._router.recent

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
        info = self.roster.info if self.roster.is_kv_aware else None
        return RouteRequest(
            request_id=request.request_id,
            num_prompt_tokens=len(token_ids),
            block_hashes=await self._hash(token_ids, request.cache_salt, info),
            knows_caches=info is not None,
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
        if self.roster.info is None and not is_patient:
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
        state = self.roster.states.get(int(seat.booking.worker_id))
        if state is None or state.client is None:
            raise WorkerLostError("The worker for this request is gone; send the request again.")
        state.client.carry(stream, request)
        state.num_routed += 1
        if not request.resumed:
            self.num_predicted_tokens += seat.booking.decision.cached_tokens or 0

    def cancel_all(self, error: PeltonError) -> None:
        """Ends every request in flight with `error`."""
        self.gate.close(error)
        self.roster.cancel_all(error)

    async def _hash(
        self, token_ids: list[int], cache_salt: str, info: WorkerInfo | None
    ) -> list[BlockHash]:
        if info is None or not info.shares_prefixes:
            return []
        salt = make_request_salt(info.model, cache_salt)
        if len(token_ids) < _LONG_PROMPT:
            return hash_prompt(token_ids, info.block_size, salt)
        return await asyncio.to_thread(hash_prompt, token_ids, info.block_size, salt)

    def _route(self, request: RouteRequest) -> Booking:
        route = replace(request, excluded=self.roster.find_unusable(self._need))
        return self._router.route(route, self._need)

    def _check_wait(self, request: RouteRequest, num_ahead: int) -> None:
        route = replace(request, excluded=self.roster.find_unusable(self._need))
        self._router.check_wait(route, num_ahead, self._need)

    def _book_prefill(self, route: RouteRequest, decode: Decision) -> Booking | None:
        if self._min_remote_prefill is None:
            return None
        route = replace(route, excluded=self.roster.find_unusable(Role.PREFILL))
        return book_prefill(self._router, route, decode, self._min_remote_prefill)

    def _send_prompt(self, request: GenerateRequest, prefill: Booking) -> GenerateRequest:
        """The request with its prompt to be computed where `prefill` is booked."""
        assert self._min_remote_prefill is not None
        state = self.roster.states[int(prefill.worker_id)]
        assert state.client is not None
        state.num_routed += 1
        address = state.client.info.address
        source = PrefillSource(address=address, min_tokens=self._min_remote_prefill)
        return replace(request, prefill_at=source)
