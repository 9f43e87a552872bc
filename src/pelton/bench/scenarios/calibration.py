# SPDX-License-Identifier: Apache-2.0
"""Finds how much load a system takes within its limits, by climbing a ladder of concurrencies.

Each level keeps that many requests in flight for a short while. The ladder ends when a limit is
broken or a level adds little; the capacity is the best rate among the levels within the limits.
"""

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from pelton.bench.measurements import RequestRecord, summarise
from pelton.bench.scenarios.policy import Limits
from pelton.core.errors import PeltonError

_MIN_GAIN = 1.08
"""A level must beat the best rate so far by this much for the ladder to go on."""
_LATENCY_MARGIN = 0.8
"""Closed loops are calmer than Poisson arrivals: a level may use this part of a limit."""


class Level(msgspec.Struct, frozen=True, kw_only=True):
    concurrency: int
    num_requests: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p90_ms: float
    tpot_p90_ms: float
    is_within_limits: bool


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    requests_per_s: float
    """Of the best level within the limits; of the lowest level where none is."""
    request_latency_s: float
    """At the lowest level."""
    levels: list[Level]


RunLevel = Callable[[int], Awaitable[Sequence[RequestRecord]]]
"""Keeps so many requests in flight for a while and returns their records."""


class CalibrationError(PeltonError):
    """A request of the calibration failed."""


async def find_capacity(run_level: RunLevel, limits: Limits, ladder: Sequence[int]) -> Capacity:
    levels: list[Level] = []
    best_rate = 0.0
    latency_s = 0.0
    for concurrency in ladder:
        records = await run_level(concurrency)
        level = measure_level(concurrency, records, limits)
        levels.append(level)
        if len(levels) == 1:
            latency_s = concurrency / level.requests_per_s
            best_rate = level.requests_per_s
            continue
        has_gained = level.requests_per_s >= best_rate * _MIN_GAIN
        if level.is_within_limits:
            best_rate = max(best_rate, level.requests_per_s)
        if not level.is_within_limits or not has_gained:
            break
    return Capacity(requests_per_s=best_rate, request_latency_s=latency_s, levels=levels)


def measure_level(concurrency: int, records: Sequence[RequestRecord], limits: Limits) -> Level:
    """The figures of one level. The rate is Little's law, concurrency over mean latency, which
    the idle end of a short run does not dilute."""
    failed = next((record for record in records if not record.is_ok), None)
    if failed is not None:
        raise CalibrationError(f"A request of the calibration failed: {failed.error}")
    summary = summarise(records)
    assert summary.ttft_ms is not None, "a level without requests"
    assert summary.tpot_ms is not None, "a level without requests"
    latencies = [(record.last_token_ns - record.issued_ns) / 1e9 for record in records]
    rate = min(concurrency, len(records)) * len(latencies) / sum(latencies)
    is_within = _is_within(summary.ttft_ms.p90, limits.ttft_ms) and _is_within(
        summary.tpot_ms.p90, limits.tpot_ms
    )
    return Level(
        concurrency=concurrency,
        num_requests=len(records),
        requests_per_s=rate,
        output_tokens_per_s=rate * summary.num_output_tokens / len(records),
        ttft_p90_ms=summary.ttft_ms.p90,
        tpot_p90_ms=summary.tpot_ms.p90,
        is_within_limits=is_within,
    )


def _is_within(value_ms: float, limit_ms: float | None) -> bool:
    return limit_ms is None or value_ms <= _LATENCY_MARGIN * limit_ms
