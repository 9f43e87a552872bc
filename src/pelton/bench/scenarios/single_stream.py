# SPDX-License-Identifier: Apache-2.0
"""Single-stream: the next request goes out when the last one is done; nothing is limited.

LoadGen makes its queries beforehand, twice as many as the expected latency leaves time for, and
calls the run too short when they run out. So it is told a latency well below the measured one.
"""

from dataclasses import dataclass

from pelton.bench.scenarios.policy import NO_LIMITS, Demand, Limits, LoadSettings, num_queries_for

_HEADROOM = 8
_NUM_OVER_LIMIT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleStreamScenario:
    default_limits: Limits = NO_LIMITS
    load_fraction: None = None
    ladder: tuple[int, ...] = (1,)

    @property
    def min_requests(self) -> int:
        return num_queries_for(0.90, _NUM_OVER_LIMIT)

    def plan(self, demand: Demand) -> LoadSettings:
        expected_latency_s = demand.request_latency_s / _HEADROOM
        min_queries = demand.num_requests or self.min_requests
        return LoadSettings(
            loadgen_scenario="SingleStream",
            limits=demand.limits,
            target_qps=1.0 / expected_latency_s,
            expected_latency_ns=max(1, round(expected_latency_s * 1e9)),
            min_query_count=min_queries,
            min_duration_ms=round(demand.min_duration_s * 1e3),
            has_first_token=True,
            num_expected_requests=max(
                min_queries, round(demand.min_duration_s / demand.request_latency_s)
            ),
        )


SINGLE_STREAM = SingleStreamScenario()
