# SPDX-License-Identifier: Apache-2.0
"""The LLM engine: plan a step, execute it, commit its results.

An exception of the executor is fatal and passes through `step`: the device's state is unknown
then, and the process that holds the engine must end. Whoever started it restarts it and tells
the clients. What concerns one request only comes back as an output with an error.
"""

from collections import deque

from pelton.core.clock import Clock
from pelton.core.config import EngineConfig, resolved
from pelton.core.geometry import ModelGeometry
from pelton.core.ports import Executor, PendingStep
from pelton.core.request import GenerateRequest, RequestOutput
from pelton.core.stats import EngineStats
from pelton.core.step import StepPlan
from pelton.engine.scheduler import Scheduler


class Engine:
    """Not thread safe: one loop owns it and calls `step` while `has_work`."""

    def __init__(
        self, config: EngineConfig, geometry: ModelGeometry, executor: Executor, clock: Clock
    ) -> None:
        """`config` must have gone through `engine.resolve`."""
        self.config = config
        self.geometry = geometry
        self._executor = executor
        self._scheduler = Scheduler(config, geometry, clock)
        self._max_in_flight = 1 if resolved(config.scheduler.overlap) else 0
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()

    def add(self, request: GenerateRequest) -> None:
        """Takes ownership of `request`. Raises `InvalidRequestError` or `ContextLengthError`."""
        self._scheduler.add(request)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends a request in any state, or only its choice `index`; does nothing for one that ended
        or never was. The outputs that say so come with the next `step`."""
        self._scheduler.cancel(request_id, index)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, or outputs to hand out."""
        return self._scheduler.has_work

    def step(self) -> list[RequestOutput]:
        """Launches the next step; returns the outputs of the oldest one that is due."""
        plan = self._scheduler.plan()
        if plan is not None:
            self._in_flight.append((plan, self._executor.launch(plan)))
        if len(self._in_flight) > (0 if plan is None else self._max_in_flight):
            return self._commit_oldest()
        return self._scheduler.take_ended()

    def _commit_oldest(self) -> list[RequestOutput]:
        plan, pending = self._in_flight.popleft()
        return self._scheduler.commit(plan, pending.wait())

    def stats(self) -> EngineStats:
        return self._scheduler.stats()
