# SPDX-License-Identifier: Apache-2.0
"""How long each op of a step takes, on the device and in the step that it belongs to.

On a GPU the step runs eagerly under the profiler, and a marker kernel stands before and after each
op: the kernels between two markers are the op's, whatever library they come from. What lies between
ops (embedding, additions, indexing) is the step's rest. On a CPU an op takes as long as its call.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pelton.core.batch import ForwardBatch
from pelton.engine.step_cost import run_step
from pelton.kernels.dispatch import observed_ops
from pelton.models.language_model import LanguageModel

_MARKER = "spin_kernel"
"""What the marker is called on the device."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    ops: list[tuple[str, float]]
    """Name and seconds of each op in the order they ran: medians of the repeats."""
    rest_s: float
    """Of everything on the device that is no op."""

    @property
    def total_s(self) -> float:
        return sum(seconds for _, seconds in self.ops) + self.rest_s


@torch.inference_mode()
def time_step(
    model: LanguageModel,
    batch: ForwardBatch,
    next_batch: ForwardBatch,
    num_drafts: int,
    repeats: int,
) -> StepTimes:
    """Of `run_step` with these arguments, which must be on one device, caches filled."""

    def step() -> None:
        run_step(model, batch, next_batch, num_drafts)

    step()  # compiles kernels
    time_once = _time_on_gpu if batch.token_ids.is_cuda else _time_on_cpu
    runs = [time_once(step) for _ in range(repeats)]
    names = [name for name, _ in runs[0].ops]
    assert all([name for name, _ in run.ops] == names for run in runs), "ops differ between runs"
    columns = zip(*([seconds for _, seconds in run.ops] for run in runs), strict=True)
    medians = [statistics.median(column) for column in columns]
    rest_s = statistics.median(run.rest_s for run in runs)
    return StepTimes(list(zip(names, medians, strict=True)), rest_s)


def _time_on_cpu(step: Callable[[], None]) -> StepTimes:
    times: list[tuple[str, float]] = []
    depth = 0

    def observe(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            nonlocal depth
            depth += 1
            start_s = time.perf_counter()
            result = function(*arguments, **options)
            end_s = time.perf_counter()
            depth -= 1
            if not depth:  # an op that another one calls is part of that one
                times.append((op, end_s - start_s))
            return result

        return timed

    with observed_ops(observe):
        start_s = time.perf_counter()
        step()
        duration_s = time.perf_counter() - start_s
    return StepTimes(times, duration_s - sum(seconds for _, seconds in times))


def _time_on_gpu(step: Callable[[], None]) -> StepTimes:
    names: list[str] = []
    depth = 0

    def observe(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*arguments: Any, **options: Any) -> Any:
            nonlocal depth
            if not depth:
                names.append(op)
                _mark()
            depth += 1
            result = function(*arguments, **options)
            depth -= 1
            if not depth:
                _mark()
            return result

        return marked

    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile, observed_ops(observe):
        step()
        torch.cuda.synchronize()
    kernels = [
        (event.time_range.start, event.name, event.time_range.elapsed_us() / 1e6)
        for event in profile.events()
        if event.device_type.name == "CUDA"
    ]
    return split_by_markers(names, [(name, seconds) for _, name, seconds in sorted(kernels)])


def _mark() -> None:
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]


def split_by_markers(names: list[str], kernels: list[tuple[str, float]]) -> StepTimes:
    """`kernels` in the order they ran, with a marker before and after those of each of `names`."""
    num_marked = sum(_MARKER in kernel for kernel, _ in kernels)
    assert num_marked == 2 * len(names), f"{num_marked} markers around {len(names)} ops"
    op_times = [0.0] * len(names)
    rest_s, num_markers = 0.0, 0
    for kernel, seconds in kernels:
        if _MARKER in kernel:
            num_markers += 1
        elif num_markers % 2:
            op_times[num_markers // 2] += seconds
        else:
            rest_s += seconds
    return StepTimes(list(zip(names, op_times, strict=True)), rest_s)
