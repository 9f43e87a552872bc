# SPDX-License-Identifier: Apache-2.0
"""Time as a port, so that policies run in virtual time.

Seconds come from the host's monotonic clock, which all processes of one host share: a deadline
made in a frontend means the same in a worker beside it. To another host goes the time that is left.
"""

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float: ...


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told: for tests and the simulator."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, duration_s: float) -> None:
        assert duration_s >= 0, duration_s
        self._now_s += duration_s
