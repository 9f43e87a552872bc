# SPDX-License-Identifier: Apache-2.0
"""Server: requests arrive by themselves at a Poisson rate; both p99 latencies are limited.

Interactive is the same with tighter limits. The limits are those of Llama-3.1-8B in MLPerf
Inference v6.0.
"""

import math
from dataclasses import dataclass

from pelton.bench.scenarios.policy import Demand, Limits, LoadSettings, num_queries_for

_NUM_OVER_LIMIT_FORGIVEN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonScenario:
    default_limits: Limits
    load_fraction: float
    ladder: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

    @property
    def min_requests(self) -> int:
        return num_queries_for(0.99, _NUM_OVER_LIMIT_FORGIVEN)

    def plan(self, demand: Demand) -> LoadSettings:
        min_queries = demand.num_requests or self.min_requests
        by_duration = math.ceil(demand.requests_per_s * demand.min_duration_s)
        return LoadSettings(
            loadgen_scenario="Server",
            limits=demand.limits,
            target_qps=demand.requests_per_s,
            expected_latency_ns=_nanoseconds(demand.request_latency_s),
            min_query_count=min_queries,
            min_duration_ms=round(demand.min_duration_s * 1e3),
            has_first_token=True,
            num_expected_requests=max(min_queries, by_duration),
        )


SERVER = PoissonScenario(default_limits=Limits(ttft_ms=2000, tpot_ms=100), load_fraction=0.6)


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))
