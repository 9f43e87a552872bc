# SPDX-License-Identifier: Apache-2.0
"""Percentiles of the last minute, for who watches: Prometheus' histograms have no window."""

import math
from collections import deque
from collections.abc import Sequence

import msgspec

WINDOW_S = 60.0
MAX_KEPT = 4096
"""Bounds what is sorted, a millisecond's worth, for each look at it."""


class Latency(msgspec.Struct):
    """Of requests that ended well in the last minute, the newest 4,096 at most. Each percentile is
    the time of one of them: the smallest that so many per cent did not exceed."""

    num_requests: int
    p50_s: float
    p90_s: float
    p99_s: float


class RecentLatency:
    """One kind of latency, one value a request."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_KEPT)
        """When the request ended and its latency in seconds, in the order of their ends."""

    def add(self, ended_s: float, value_s: float) -> None:
        self._values.append((ended_s, value_s))

    def summary(self, now_s: float) -> Latency | None:
        """None without a request in the window. `now_s` never goes back."""
        values = self._values
        while values and values[0][0] < now_s - WINDOW_S:
            values.popleft()
        if not values:
            return None
        ordered = sorted(value_s for _, value_s in values)
        return Latency(len(ordered), *(_percentile(ordered, p) for p in (50, 90, 99)))


def _percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]
