# SPDX-License-Identifier: Apache-2.0
"""Requests whose grammar is being compiled: they wait here, in order, before the scheduler.

Not thread safe, like the engine that owns it; only the compiling is done elsewhere.
"""

from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from pelton.core.clock import Clock
from pelton.core.errors import DeadlineExceededError, InvalidRequestError, PeltonError
from pelton.core.grammar import CompiledGrammar
from pelton.core.request import FinishReason, GenerateRequest, RequestOutput
from pelton.engine.grammar import GrammarCompiler
from pelton.engine.scheduler import Scheduler

_IDLE_WAIT_S = 0.002
"""How long a step waits for a grammar when there is nothing else to do."""


@dataclass(slots=True)
class _Waiting:
    request: GenerateRequest
    compiling: "Future[CompiledGrammar]"
    cancelled: set[int] = field(default_factory=set)
    """Choices that were cancelled meanwhile."""


class GrammarQueue:
    def __init__(self, compiler: GrammarCompiler, clock: Clock) -> None:
        self._compiler = compiler
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def num_choices(self) -> int:
        return sum(len(item.request.choices) for item in self._waiting.values())

    def push(self, request: GenerateRequest) -> CompiledGrammar | None:
        """The grammar of `request` if it is at hand; else takes the request and compiles it.
        Raises `InvalidRequestError` for a request id that waits here already."""
        grammar = request.sampling.grammar
        assert grammar is not None, request.request_id
        if request.request_id in self._waiting:
            raise InvalidRequestError(
                f"request_id {request.request_id!r} belongs to a request that has not ended.",
                param="request_id",
            )
        compiled = self._compiler.cached(grammar)
        if compiled is None:
            future = self._compiler.compile_in_background(grammar)
            self._waiting[request.request_id] = _Waiting(request, future)
        return compiled

    def cancel(self, request_id: str, index: int | None) -> bool:
        """Whether the request waits here; its choices are then cancelled at the next `settle`."""
        item = self._waiting.get(request_id)
        if item is None:
            return False
        item.cancelled |= set(item.request.choices) if index is None else {index}
        return True

    def settle(self, scheduler: Scheduler) -> list[RequestOutput]:
        """Hands requests whose grammar is ready to `scheduler`. Returns the last outputs of those
        that ended here: cancelled, too late, or with a grammar that does not compile."""
        if not scheduler.has_work:
            wait([item.compiling for item in self._waiting.values()], _IDLE_WAIT_S)
        outputs: list[RequestOutput] = []
        for request_id, item in list(self._waiting.items()):
            request = item.request
            deadline_s = request.deadline_s
            if len(item.cancelled) >= len(request.choices):
                item.compiling.cancel()
                outputs += _last_outputs(request, FinishReason.CANCELLED)
            elif deadline_s is not None and deadline_s <= self._clock.now_s():
                item.compiling.cancel()
                late = DeadlineExceededError("The request's deadline passed before it was done.")
                outputs += _last_outputs(request, FinishReason.ERROR, late)
            elif not item.compiling.done():
                continue
            else:
                outputs += _enter(scheduler, item)
            del self._waiting[request_id]
        return outputs


def _enter(scheduler: Scheduler, item: _Waiting) -> list[RequestOutput]:
    # Not raised here: it would hold this frame, and the frame holds what it is kept in.
    failure = item.compiling.exception()
    if isinstance(failure, PeltonError):
        return _last_outputs(item.request, FinishReason.ERROR, failure)
    try:
        scheduler.add(item.request, item.compiling.result())
    except PeltonError as error:
        return _last_outputs(item.request, FinishReason.ERROR, error)
    for index in item.cancelled:
        scheduler.cancel(item.request.request_id, index)
    return []


def _last_outputs(
    request: GenerateRequest, reason: FinishReason, error: PeltonError | None = None
) -> list[RequestOutput]:
    return [
        RequestOutput(
            request.request_id,
            index,
            [],
            finish_reason=reason,
            error=None if error is None else error.message,
            error_code=None if error is None else error.code,
        )
        for index in request.choices
    ]
