# SPDX-License-Identifier: Apache-2.0
"""The requests of one reply on their workers, from before they are sent until the reply ends.

Each request is booked, sent and, if its worker is lost, booked and sent again as what is left of
it. Leaving the context ends whatever still runs and returns every booking.

    with pool.place(requests) as placement:
        await placement.start()
        async for outputs in placement.stream: ...
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self

from pelton.core.errors import PeltonError, WorkerDrainedError, WorkerLostError
from pelton.core.request import GenerateRequest
from pelton.core.trace import Phase
from pelton.serving.admission_gate import AdmissionGate
from pelton.serving.request_stream import RequestStream
from pelton.serving.router.booking import Booking
from pelton.serving.router.types import Decision, RouteRequest
from pelton.serving.tracing import RequestTrace, Trace

_log = logging.getLogger("pelton.serving")


@dataclass(frozen=True, slots=True)
class Seat:
    """What a request has booked: where it is decoded and, if that is another worker, where its
    prompt is computed."""

    booking: Booking
    prefill: Booking | None = None

    @property
    def decision(self) -> Decision:
        decision = self.booking.decision
        if self.prefill is None:
            return decision
        return replace(decision, prefill_at=self.prefill.worker_id)

    @property
    def bookings(self) -> list[Booking]:
        """The decoding worker's, then the other's."""
        return [self.booking] if self.prefill is None else [self.booking, self.prefill]

    def on_first_token(self) -> None:
        self.booking.on_first_token()
        if self.prefill is not None:
            self.prefill.release()

    def release(self) -> None:
        self.booking.release()
        if self.prefill is not None:
            self.prefill.release()


class Pool(Protocol):
    """What a placement needs of `WorkerPool`."""

    gate: AdmissionGate
    num_migrated: int

    @property
    def max_losses(self) -> int: ...

    async def describe(self, request: GenerateRequest, session: str) -> RouteRequest: ...
    async def book(
        self, request: GenerateRequest, route: RouteRequest, *, has_begun: bool
    ) -> Seat | None: ...
    def send(self, seat: Seat, stream: RequestStream, request: GenerateRequest) -> None: ...


class Placement:
    def __init__(
        self,
        pool: Pool,
        requests: Sequence[GenerateRequest],
        session: str,
        trace: Trace | None = None,
    ) -> None:
        self.stream = RequestStream(requests, keeps_tokens=pool.max_losses > 0)
        self.stream.on_first_output = self._note_first_output
        self.stream.on_finished = self._release
        self.stream.on_done = self._withdraw
        self.stream.on_phases = self._note_phases
        self._max_losses = pool.max_losses
        if self._max_losses:
            self.stream.on_lost = self._go_on_elsewhere
        self.decision: Decision | None = None
        """Of the first request; None until it is sent."""
        self._pool = pool
        self._requests = requests
        self._session = session
        self._seats: dict[str, Seat] = {}
        self._traces: dict[str, RequestTrace] = {}
        """Of each request, if there is a `trace`."""
        if trace is not None:
            self._traces = {r.request_id: RequestTrace(trace, r.request_id) for r in requests}
        self._num_losses: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Sends the first request as soon as a worker has room for it, and the others one after the
        other while the stream is read. Raises what `WorkerPool.book` does for the first; what it
        raises for another ends the stream."""
        first, *others = self._requests
        await self._place(first.request_id, first, has_begun=False)
        if others:
            self._spawn(self._send_others(others))

    async def _send_others(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            await self._place(request.request_id, request, has_begun=True)

    async def _place(self, request_id: str, request: GenerateRequest, *, has_begun: bool) -> None:
        """`has_begun`: the client may have been sent a part of the reply."""
        if self.stream.is_done:
            return
        trace, start_ns = self._traces.get(request_id), time.time_ns()
        route = await self._pool.describe(request, self._session)
        if self.stream.is_done:  # withdrawn before there was anything to withdraw
            return
        seat = await self._pool.book(request, route, has_begun=has_begun)
        if seat is None:
            return
        self._seats[request_id] = seat
        remainder = self.stream.remainder(request_id)
        if remainder is None:
            self._release(request_id)
            return
        self.decision = self.decision or seat.decision
        if trace is not None:
            trace.book(start_ns, seat.bookings)
            remainder = replace(remainder, traceparent=trace.send(seat.bookings))
        try:
            self._pool.send(seat, self.stream, remainder)
        except WorkerLostError as error:  # it died between the booking and now
            self._go_on_elsewhere(request_id, error)

    def _note_first_output(self, request_id: str) -> None:
        self._seats[request_id].on_first_token()

    def _note_phases(self, request_id: str, phases: list[Phase]) -> None:
        if request_id in self._traces:
            self._traces[request_id].take(phases)

    def _go_on_elsewhere(self, request_id: str, error: PeltonError) -> None:
        """A worker is gone: decides whether the request survives it."""
        if request_id in self._traces:
            self._traces[request_id].lose(error)
        self._release(request_id)
        if not isinstance(error, WorkerDrainedError):
            num_losses = self._num_losses[request_id] = self._num_losses.get(request_id, 0) + 1
            if num_losses > self._max_losses:
                self.stream.fail(error)
                return
        self._spawn(self._migrate(request_id))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Whatever ended the task ends the stream, which would otherwise wait for its deadline."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, PeltonError):
            _log.error("event=placement_failed", exc_info=error)
            error = PeltonError("Placing this request on a worker failed; the log says why.")
        self.stream.fail(error)

    async def _migrate(self, request_id: str) -> None:
        remainder = self.stream.remainder(request_id)
        if remainder is None:
            return
        num_tokens = max(map(len, remainder.resumed.values()), default=0)
        _log.info("event=migrate request_id=%s num_tokens=%d", request_id, num_tokens)
        self._pool.num_migrated += 1
        await self._place(request_id, remainder, has_begun=True)

    def _withdraw(self) -> None:
        """Nobody waits for what has not been sent."""
        for request in self._requests:
            self._pool.gate.withdraw(request.request_id)

    def _release(self, request_id: str) -> None:
        seat = self._seats.pop(request_id, None)
        if seat is not None:
            if request_id in self._traces:
                self._traces[request_id].leave()
            seat.release()
            self._pool.gate.pump()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stream.cancel()
        for task in self._tasks:
            task.cancel()
        for request_id in list(self._seats):
            self._release(request_id)
        for trace in self._traces.values():
            trace.end()
