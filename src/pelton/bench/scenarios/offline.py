# SPDX-License-Identifier: Apache-2.0
"""Offline: every prompt is there at once, in one query; only the rate counts.

LoadGen makes the query 1.1 x expected rate x duration samples large, and calls the run too short
when the system is faster than expected. So the expected rate is set above the measured one.
"""

import math
from dataclasses import dataclass

from pelton.bench.scenarios.policy import NO_LIMITS, Demand, Limits, LoadSettings

_HEADROOM = 1.25
_MIN_SAMPLES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineScenario:
    default_limits: Limits = NO_LIMITS
    load_fraction: None = None
    ladder: tuple[int, ...] = (4, 16, 64, 256)
    min_requests: int = _MIN_SAMPLES

    def plan(self, demand: Demand) -> LoadSettings:
        min_samples = demand.num_requests or self.min_requests
        expected_qps = demand.requests_per_s * _HEADROOM
        by_duration = math.floor(1.1 * expected_qps * demand.min_duration_s)
        return LoadSettings(
            loadgen_scenario="Offline",
            limits=demand.limits,
            target_qps=expected_qps,
            expected_latency_ns=1,
            min_query_count=min_samples,
            min_duration_ms=round(demand.min_duration_s * 1e3),
            has_first_token=False,
            num_expected_requests=max(min_samples, by_duration),
        )


OFFLINE = OfflineScenario()
