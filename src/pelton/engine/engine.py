# SPDX-License-Identifier: Apache-2.0
"""The LLM engine: plan a step, execute it, commit its results.

An exception of the executor is fatal and passes through `step`: the device's state is unknown
then, and the process that holds the engine must end. Whoever started it restarts it and tells
the clients. What concerns one request only comes back as an output with an error.

A request with a grammar enters the scheduler once the grammar is compiled, which a thread does, so
that no step waits for it.
"""

from collections import deque
from dataclasses import replace

from pelton.core.clock import Clock
from pelton.core.config import EngineConfig, resolved
from pelton.core.errors import InvalidRequestError
from pelton.core.geometry import ModelGeometry
from pelton.core.grammar import Grammar
from pelton.core.ports import Executor, KVConnector, PendingStep
from pelton.core.request import GenerateRequest, RequestOutput
from pelton.core.stats import EngineStats, PrefillLoad
from pelton.core.step import StepPlan
from pelton.core.trace import Phase
from pelton.engine.grammar import GrammarCompiler
from pelton.engine.grammar_queue import GrammarQueue
from pelton.engine.kv.blocks import CacheChange
from pelton.engine.kv.leases import LeaseTable
from pelton.engine.scheduler import Scheduler


class Engine:
    """Not thread safe: one loop owns it and calls `step` while `has_work`."""

    def __init__(
        self,
        config: EngineConfig,
        geometry: ModelGeometry,
        executor: Executor,
        clock: Clock,
        grammars: GrammarCompiler | None = None,
        connector: KVConnector | None = None,
    ) -> None:
        """`config` must have gone through `engine.resolve`. Without `grammars`, requests that have
        one are refused; without `connector`, those whose prompt is computed elsewhere."""
        self.config = config
        self.geometry = geometry
        self._executor = executor
        self._scheduler = Scheduler(config, geometry, clock, connector)
        self._connector = connector
        self._found_nothing = False
        self._max_in_flight = 1 if resolved(config.scheduler.overlap) else 0
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._grammars = grammars
        self._compiling = None if grammars is None else GrammarQueue(grammars, clock)

    def add(self, request: GenerateRequest) -> None:
        """Takes ownership of `request`. Raises `InvalidRequestError` or `ContextLengthError`."""
        if request.sampling.grammar is None:
            self._scheduler.add(request)
            return
        if self._compiling is None:
            raise _no_tokenizer()
        self._scheduler.check(request)
        grammar = self._compiling.push(request)
        if grammar is not None:
            self._scheduler.add(request, grammar)

    def compile_grammar(self, grammar: Grammar) -> None:
        """Raises `InvalidRequestError` for a grammar that cannot be followed. Takes as long as
        compiling does; a request with it is then added without a wait."""
        if self._grammars is None:
            raise _no_tokenizer()
        self._grammars.compile(grammar)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends a request in any state, or only its choice `index`; does nothing for one that ended
        or never was. The outputs that say so come with the next `step`."""
        if self._compiling is None or not self._compiling.cancel(request_id, index):
            self._scheduler.cancel(request_id, index)

    def watch_cache(self) -> list[CacheChange] | None:
        """A list that gets every change of what the prefix cache can be asked for, in order, and
        that its reader empties between steps. Nothing is noted before the first call. None: this
        engine's requests share nothing."""
        return self._scheduler.watch_cache()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, or outputs to hand out."""
        is_compiling = self._compiling is not None and self._compiling.has_work
        return self._scheduler.has_work or is_compiling

    def step(self) -> list[RequestOutput]:
        """Launches the next step; returns the outputs of the oldest one that is due."""
        if self._compiling is not None and self._compiling.has_work:
            return self._compiling.settle(self._scheduler) + self._step()
        return self._step()

    @property
    def is_starved(self) -> bool:
        """Whether the last step found nothing to do but to wait for KV."""
        is_compiling = self._compiling is not None and self._compiling.has_work
        return self._found_nothing and not is_compiling

    @property
    def leases(self) -> LeaseTable:
        """Of the requests that are prefill only."""
        return self._scheduler.leases

    def take_phases(self) -> dict[str, list[Phase]]:
        """Of traced requests, by their ids: the phases that ended since the last call."""
        return self._scheduler.phases.take()

    def _step(self) -> list[RequestOutput]:
        if self._connector is not None:
            for pulled in self._connector.poll():
                self._scheduler.finish_pull(pulled)
        plan = self._scheduler.plan()
        is_due = self._connector is not None and self._connector.is_due
        self._found_nothing = plan is None and not self._in_flight and not is_due
        if plan is not None:
            self._in_flight.append((plan, self._executor.launch(plan)))
        if len(self._in_flight) > (0 if plan is None else self._max_in_flight):
            return self._commit_oldest()
        return self._scheduler.take_ended()

    def _commit_oldest(self) -> list[RequestOutput]:
        plan, pending = self._in_flight.popleft()
        return self._scheduler.commit(plan, pending.wait())

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        if self._compiling is not None and self._compiling.has_work:
            return replace(stats, num_waiting=stats.num_waiting + self._compiling.num_choices)
        return stats

    def prefill_load(self) -> PrefillLoad:
        """Takes time with the number of live requests: not for every step."""
        return self._scheduler.prefill_load()


def _no_tokenizer() -> InvalidRequestError:
    return InvalidRequestError(
        "This engine has no tokenizer to follow a grammar with.", param="grammar"
    )
