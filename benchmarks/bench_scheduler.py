# SPDX-License-Identifier: Apache-2.0
"""Host time of `Scheduler.plan` and `commit` a step, with an executor that costs nothing.

python benchmarks/bench_scheduler.py [--requests 512] [--steps 400] [--out record.json]
"""

import argparse
import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pelton.bench.figures import write_figures
from pelton.core.clock import ManualClock
from pelton.core.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    config_hash,
    to_dict,
)
from pelton.core.geometry import KVGroup, ModelGeometry
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.core.step import StepPlan, StepResult
from pelton.engine.resolve import resolve
from pelton.engine.scheduler import Scheduler

PROMPT_LEN = 512
VOCAB_SIZE = 50_000


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    overlap: bool
    windows: tuple[int, ...] = (0,)
    """One KV group for each; 0: full attention."""
    output_len: int | None = None
    """Least tokens of an output. None: nobody ends while steps are timed."""


CASES = (
    Case("decode only", overlap=False),
    Case("decode only, overlap", overlap=True),
    Case("full + window 128, overlap", overlap=True, windows=(0, 128)),
    Case("80 to 176 tokens, overlap", overlap=True, output_len=80),
)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Nanoseconds of each step, by call, in the order measured."""

    case: str
    num_requests: int
    plan_ns: list[int]
    commit_ns: list[int]

    def totals_ms(self) -> list[float]:
        return sorted((a + b) / 1e6 for a, b in zip(self.plan_ns, self.commit_ns, strict=True))


def make_geometry(windows: tuple[int, ...]) -> ModelGeometry:
    """Sizes of a model with one KV group for each window (0: full attention)."""
    groups = tuple(
        KVGroup(name=f"group{g}", layers=(g,), num_kv_heads=1, head_dim=1, window=window)
        for g, window in enumerate(windows)
    )
    return ModelGeometry(
        name="bench",
        architecture="none",
        num_layers=len(groups),
        hidden_size=1,
        num_heads=1,
        vocab_size=VOCAB_SIZE,
        max_context=8192,
        num_parameters=0,
        kv_groups=groups,
        bos_token_id=None,
        eos_token_ids=(0,),
    )


def make_config(geometry: ModelGeometry, num_requests: int, overlap: bool) -> EngineConfig:
    config = EngineConfig(
        model=ModelConfig(model="bench", max_model_len=8192),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(
            max_num_requests=num_requests, max_num_batched_tokens=8192, overlap=overlap
        ),
    )
    return resolve(config, geometry, kv_bytes_available=2**31, device="cuda", element_bytes=2)


def instant_result(plan: StepPlan) -> StepResult:
    sampled = [
        [start % 1000 + 1] if s else [] for start, s in zip(plan.starts, plan.samples, strict=True)
    ]
    return StepResult(plan.step_id, sampled)


def make_request(number: int, output_len: int | None) -> GenerateRequest:
    length = PROMPT_LEN + number % 16
    prompt = [(number * 7919 + i * 104729) % (VOCAB_SIZE - 1) + 1 for i in range(length)]
    # Lengths differ, so that requests end one after the other and not all at once.
    max_tokens = None if output_len is None else output_len + number % 97
    return GenerateRequest(
        request_id=f"request-{number}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens),
        seed=number,
    )


def measure(case: Case, num_requests: int, num_steps: int) -> tuple[StepTimes, EngineConfig]:
    """Times `num_steps` steps with every slot taken; a request that ends is replaced."""
    geometry = make_geometry(case.windows)
    config = make_config(geometry, num_requests, case.overlap)
    scheduler = Scheduler(config, geometry, ManualClock())
    for number in range(num_requests):
        scheduler.add(make_request(number, case.output_len))
    num_added = num_requests
    times = StepTimes(case.name, num_requests, [], [])
    in_flight: list[StepPlan] = []
    is_warm = False
    gc.collect()
    gc.freeze()
    while len(times.plan_ns) < num_steps:
        is_warm = is_warm or scheduler.stats().num_waiting == 0
        started = time.perf_counter_ns()
        plan = scheduler.plan()
        plan_ns = time.perf_counter_ns() - started
        assert plan is not None, "nothing to run although requests are replaced"
        in_flight.append(plan)
        if case.overlap and len(in_flight) < 2:
            continue
        oldest = in_flight.pop(0)
        result = instant_result(oldest)
        started = time.perf_counter_ns()
        outputs = scheduler.commit(oldest, result)
        commit_ns = time.perf_counter_ns() - started
        for output in outputs:
            if output.finish_reason is not None:
                scheduler.add(make_request(num_added, case.output_len))
                num_added += 1
        if is_warm:
            times.plan_ns.append(plan_ns)
            times.commit_ns.append(commit_ns)
    gc.unfreeze()
    return times, config


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=512, help="requests that decode at once")
    parser.add_argument("--steps", type=int, default=400, help="steps measured in each case")
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    arguments = parser.parse_args()
    cases = [measure(case, arguments.requests, arguments.steps) for case in CASES]
    print(
        f"{'case':28} {'plan p50':>9} {'commit p50':>11} {'sum p50':>9} {'p90':>7} {'p99':>7}  ms"
    )
    for times, _ in cases:
        total = times.totals_ms()
        plan_ms = sorted(ns / 1e6 for ns in times.plan_ns)
        commit_ms = sorted(ns / 1e6 for ns in times.commit_ns)
        print(
            f"{times.case:28} {percentile(plan_ms, 0.5):9.3f} {percentile(commit_ms, 0.5):11.3f}"
            f" {percentile(total, 0.5):9.3f} {percentile(total, 0.9):7.3f}"
            f" {percentile(total, 0.99):7.3f}"
        )
    if arguments.out is not None:
        write_figures(arguments.out, "scheduler", make_figures(cases))


def make_figures(cases: list[tuple[StepTimes, EngineConfig]]) -> dict[str, Any]:
    return {
        "prompt_len": PROMPT_LEN,
        "cases": [
            {
                "case": times.case,
                "num_requests": times.num_requests,
                "sum_p50_ms": percentile(times.totals_ms(), 0.5),
                "sum_p99_ms": percentile(times.totals_ms(), 0.99),
                "plan_ns": times.plan_ns,
                "commit_ns": times.commit_ns,
                "config": to_dict(config),
                "config_hash": config_hash(config),
            }
            for times, config in cases
        ],
    }


if __name__ == "__main__":
    main()
