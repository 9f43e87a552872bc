# SPDX-License-Identifier: Apache-2.0
"""Percentiles of the last minute, for who watches: Prometheus' histograms have no window."""

import math
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

WINDOW_S = 60.0
Sample = tuple[float, float]
"""When a request ended, on the host's monotonic clock, and its latency in seconds."""
MAX_KEPT = 4096
"""Bounds what is sorted, a millisecond's worth, for each look at it."""


class Latency(msgspec.Struct):
    """Of requests that ended well in the last minute, the newest 4,096 of a frontend at most.
    Each percentile is the time of one: the smallest that so many per cent did not exceed."""

    num_requests: int
    p50_s: float
    p90_s: float
    p99_s: float


class RecentLatency:
    """One kind of latency, one value a request."""

    def __init__(self) -> None:
        self._values: deque[Sample] = deque(maxlen=MAX_KEPT)
        """In the order of their ends."""

    def add(self, ended_s: float, value_s: float) -> None:
        self._values.append((ended_s, value_s))

    def samples(self, now_s: float) -> list[Sample]:
        """Those in the window. `now_s` never goes back."""
        values = self._values
        while values and values[0][0] < now_s - WINDOW_S:
            values.popleft()
        return list(values)


def summarize(samples: Iterable[Sample]) -> Latency | None:
    """None without any."""
    ordered = sorted(value_s for _, value_s in samples)
    if not ordered:
        return None
    return Latency(len(ordered), *(_percentile(ordered, p) for p in (50, 90, 99)))


def _percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]
