# SPDX-License-Identifier: Apache-2.0
"""The outputs of requests that are answered together, whichever workers they come from.

A request is carried by one worker at a time. A stream that keeps tokens can say how another worker
goes on where one was lost: with the prompt, the tokens of each choice so far, and the same
sampling, limits and seed. Its reader notices nothing but a pause.

All outputs that arrive between two reads are handed over together, so a slow reader gets fewer and
longer batches, never a longer queue of small ones.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from pelton.core.errors import DeadlineExceededError, PeltonError
from pelton.core.request import FinishReason, GenerateRequest, RequestOutput
from pelton.core.trace import Phase
from pelton.serving.messages import error_from_code

_DEADLINE_GRACE_S = 0.5
"""The engine ends a request at its deadline; this much later the stream does it for the engine."""


class Carrier(Protocol):
    """What a stream needs of `WorkerClient`."""

    def cancel_request(self, request_id: str, index: int | None = None) -> None: ...
    def forget(self, request_id: str) -> None: ...


class RequestStream:
    """An async iterator of what arrived since the last read. Ends when every choice of every
    request has finished; raises the typed error that ended them otherwise. Whoever stops reading
    early calls `cancel`.
    """

    def __init__(self, requests: Sequence[GenerateRequest], *, keeps_tokens: bool = False) -> None:
        self._requests = {request.request_id: request for request in requests}
        self._carriers: dict[str, Carrier] = {}
        self._expected: set[str] = set()
        """Requests of which nothing has come since they were last sent."""
        self._num_open = {request.request_id: len(request.choices) for request in requests}
        """Choices that have not ended, of each request that has some."""
        self._closed: set[tuple[str, int]] = set()
        """Choices, by request id and index, that have ended while others go on."""
        self._keeps_tokens = keeps_tokens
        self._tokens: dict[tuple[str, int], list[int]] = {}
        """Of each choice that has some, if they are kept."""
        self._num_cached_tokens: dict[tuple[str, int], int] = {}
        """What the first worker of each choice said."""
        self._pending: list[RequestOutput] = []
        self._error: PeltonError | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._wants_all = False
        self._timer: asyncio.TimerHandle | None = None
        self.is_done = False
        """Nothing more will arrive; what has may still be unread."""
        self.first_output_s: float | None = None
        """When the first output arrived, on the host's monotonic clock."""
        self.on_first_output: Callable[[str], None] = lambda request_id: None
        """Called with the id of a request when the worker it was sent to gives its first output."""
        self.on_phases: Callable[[str, list[Phase]], None] = lambda request_id, phases: None
        """Called with the id of a traced request and what its worker says of it."""
        self.on_finished: Callable[[str], None] = lambda request_id: None
        """Called with the id of a request that has ended while others go on."""
        self.on_done: Callable[[], None] = lambda: None
        """Called once nothing more will arrive."""
        self.on_lost: Callable[[str, PeltonError], None] = lambda request_id, error: self.fail(
            error
        )
        """Called with the id of a request whose worker is gone."""
        deadlines_s = [r.deadline_s for r in requests if r.deadline_s is not None]
        if deadlines_s:
            delay_s = min(deadlines_s) - time.monotonic() + _DEADLINE_GRACE_S
            self._timer = self._loop.call_later(max(delay_s, 0), self._deadline_passed)

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> list[RequestOutput]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self.is_done:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        outputs, self._pending = self._pending, []
        return outputs

    async def collect(self) -> list[RequestOutput]:
        """Everything still to come, once it is all there: one wake-up instead of one a step."""
        self._wants_all = True
        while not self.is_done:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        outputs, self._pending = self._pending, []
        return outputs

    def cancel(self, error: PeltonError | None = None) -> None:
        """Ends the requests in their workers; a reader gets `error`, or the end of the stream.

        Does nothing once the stream is done.
        """
        if not self.is_done:
            self._cancel_carried()
            self._finish(error)

    def cancel_choice(self, request_id: str, index: int) -> None:
        """Ends one choice in the worker; nothing more of it arrives, and the others go on. Does
        nothing for a choice that has ended."""
        if not self.is_done and (request_id, index) not in self._closed:
            carrier = self._carriers.get(request_id)
            if carrier is not None:
                carrier.cancel_request(request_id, index)
            self._close_choice(request_id, index)

    def push(self, output: RequestOutput) -> None:
        """Takes one output from a worker. Called by its client only, once a token."""
        if self.is_done or (self._closed and (output.request_id, output.index) in self._closed):
            return
        if self._keeps_tokens:
            self._keep(output)
        if self._expected and output.request_id in self._expected:
            self._expected.remove(output.request_id)
            self.first_output_s = self.first_output_s or time.monotonic()
            self.on_first_output(output.request_id)
        if output.finish_reason is not None and not self._count_finished(output):
            return
        self._pending.append(output)
        if not self._wants_all:
            self._wake()

    def _keep(self, output: RequestOutput) -> None:
        key = output.request_id, output.index
        tokens = self._tokens.get(key)
        if tokens is not None:
            tokens += output.token_ids
            output.num_cached_tokens = self._num_cached_tokens[key]
        elif output.token_ids:
            self._tokens[key] = output.token_ids.copy()
            self._num_cached_tokens[key] = output.num_cached_tokens

    def _count_finished(self, output: RequestOutput) -> bool:
        """Whether the output of a choice that ended is to be read, not an error to be raised."""
        if output.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            text = output.error or "The worker ended this request before it was done."
            error = error_from_code(output.error_code, text)
            if sum(self._num_open.values()) > 1:
                self._cancel_carried()
            self._finish(error)
            return False
        self._close_choice(output.request_id, output.index)
        return True

    def _close_choice(self, request_id: str, index: int) -> None:
        self._closed.add((request_id, index))
        self._num_open[request_id] -= 1
        if self._num_open[request_id]:
            return
        del self._num_open[request_id]
        if not self._num_open:
            self._finish(None)
            return
        carrier = self._carriers.pop(request_id, None)
        if carrier is not None:
            carrier.forget(request_id)
        self.on_finished(request_id)

    # What happens to workers

    def carried_by(self, carrier: Carrier, request_id: str) -> None:
        """The request is sent to a worker, and its outputs come from there from now on."""
        self._carriers[request_id] = carrier
        self._expected.add(request_id)

    def lose(self, request_id: str, error: PeltonError) -> None:
        """The worker that carried the request is gone. Called by its client only."""
        if self._carriers.pop(request_id, None) is not None and not self.is_done:
            self.on_lost(request_id, error)

    def fail(self, error: PeltonError) -> None:
        """Nobody will go on with the requests."""
        self.cancel(error)

    @property
    def can_move(self) -> bool:
        """Whether another worker could go on with its requests."""
        return self._keeps_tokens

    def remainder(self, request_id: str) -> GenerateRequest | None:
        """What is still to be done for the request; None: nothing. Only with `keeps_tokens`."""
        request, tokens = self._requests[request_id], self._tokens
        keys = [(request_id, index) for index in request.choices]
        still_open = [key for key in keys if key not in self._closed]
        if not still_open or self.is_done:
            return None
        if len(still_open) == len(keys) and not any(key in tokens for key in keys):
            return request
        sampling = request.sampling
        if (request_id, 0) in tokens or (request_id, 0) in self._closed:
            sampling = replace(sampling, prompt_logprobs=None)  # its first output brought them
        resumed = {index: tokens.get((request_id, index), []) for _, index in still_open}
        return replace(request, sampling=sampling, resumed=resumed)

    def _cancel_carried(self) -> None:
        for request_id, carrier in self._carriers.items():
            carrier.cancel_request(request_id)

    def _finish(self, error: PeltonError | None) -> None:
        self.is_done = True
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
        for request_id, carrier in self._carriers.items():
            carrier.forget(request_id)
        self._carriers.clear()
        self.on_done()
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _deadline_passed(self) -> None:
        self.cancel(DeadlineExceededError("The request's deadline passed before it was done."))
