# SPDX-License-Identifier: Apache-2.0
"""The engine's loop: when steps are launched and committed, and what it reports."""

from dataclasses import dataclass, field

import pytest
from engine_harness import Harness, make_config, make_geometry, make_request

from pelton.core.clock import ManualClock
from pelton.core.ports import PendingStep
from pelton.core.step import StepPlan, StepResult
from pelton.engine.engine import Engine


@dataclass
class LoggingExecutor:
    log: list[str] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> PendingStep:
        self.log.append(f"launch {plan.step_id}")
        return LoggedStep(self.log, StepResult(plan.step_id, [[1]] * plan.num_rows))


@dataclass
class LoggedStep:
    log: list[str]
    result: StepResult

    def wait(self) -> StepResult:
        self.log.append(f"wait {self.result.step_id}")
        return self.result


def run_log(overlap: bool) -> list[str]:
    executor = LoggingExecutor()
    engine = Engine(make_config(overlap=overlap), make_geometry(), executor, ManualClock())
    engine.add(make_request("r", [1, 2], max_tokens=3))
    while engine.has_work:
        engine.step()
    return executor.log


def test_without_overlap_each_step_is_waited_for_at_once() -> None:
    assert run_log(overlap=False) == [
        "launch 0", "wait 0", "launch 1", "wait 1", "launch 2", "wait 2",
    ]  # fmt: skip


def test_with_overlap_the_next_step_is_launched_before_the_previous_is_waited_for() -> None:
    assert run_log(overlap=True) == [
        "launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2",
    ]  # fmt: skip


def test_an_exception_of_the_executor_passes_through() -> None:
    class Broken:
        def launch(self, plan: StepPlan) -> PendingStep:
            raise RuntimeError("device lost")

    engine = Engine(make_config(), make_geometry(), Broken(), ManualClock())
    engine.add(make_request("r", [1]))
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()


def test_a_step_without_work_is_empty() -> None:
    harness = Harness(make_config())
    assert not harness.engine.has_work
    assert harness.step() == []
    assert harness.plans == []


def test_figures_while_running_and_after() -> None:
    harness = Harness(make_config(slots=1, budget=10, num_blocks=50), make_geometry((0, 8)))
    harness.engine.add(make_request("a", [1] * 12, max_tokens=2, ignore_eos=True))
    harness.engine.add(make_request("b", [2] * 12, n=2, max_tokens=2, ignore_eos=True))
    harness.step()
    stats = harness.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 3 - 1)
    # The window: three blocks and one more, ten tokens in flight, an eighth of 50 for prefixes.
    assert stats.num_blocks == 49 + (3 + 1) + 3 + 6
    assert stats.num_used_blocks == 2 * 3
    assert (stats.batch_rows, stats.batch_tokens, stats.steps_total) == (1, 10, 1)
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_used_blocks == 0
    assert stats.num_cached_blocks > 0
    assert (stats.prompt_tokens_total, stats.cached_tokens_total) == (36, 8)
    assert (stats.generated_tokens_total, stats.finished_total) == (6, 3)
