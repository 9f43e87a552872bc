# SPDX-License-Identifier: Apache-2.0
"""What a scenario decides: how LoadGen is set and which latencies are limited. Pure policy.

The words are LoadGen's here: a *query* is what it issues and a *sample* is one prompt. All but
offline issue one sample a query; offline issues one query that holds every sample.
"""

import math
from dataclasses import dataclass
from typing import Protocol

CONFIDENCE = 0.99
"""With which LoadGen's early stopping wants to know that a percentile is under its limit."""

# The seeds of the v6.1 round, which the LoadGen release in use embeds in its own mlperf.conf.
QSL_SEED = 2085463073848966840
SAMPLE_INDEX_SEED = 2747215439041700203
SCHEDULE_SEED = 16159082839903944936


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the p99, milliseconds. None: the scenario has no such limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def are_any(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the run is asked for and what is known of the system, in requests and seconds."""

    limits: Limits
    min_duration_s: float
    num_requests: int | None
    """None: as many as the percentile and the duration need."""
    requests_per_s: float
    """Server: the arrival rate. Others: what the system was seen to do."""
    request_latency_s: float
    """Of one request alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """LoadGen's settings for one run, as they cross to its process."""

    loadgen_scenario: str
    limits: Limits
    target_qps: float
    expected_latency_ns: int
    min_query_count: int
    min_duration_ms: int
    has_first_token: bool
    """Whether LoadGen wants to be told of first tokens (all but offline)."""
    num_expected_requests: int | None
    """For the progress bar; None where only time decides."""
    qsl_seed: int = QSL_SEED
    sample_index_seed: int = SAMPLE_INDEX_SEED
    schedule_seed: int = SCHEDULE_SEED


class Scenario(Protocol):
    """One way in which load arrives."""

    @property
    def default_limits(self) -> Limits: ...

    @property
    def load_fraction(self) -> float | None:
        """Part of the calibrated capacity to offer when no rate is given. None: the scenario has
        no rate to choose."""
        ...

    @property
    def ladder(self) -> tuple[int, ...]:
        """Concurrencies that a calibration tries, in this order."""
        ...

    @property
    def min_requests(self) -> int:
        """Fewest requests from which LoadGen calls the percentile known."""
        ...

    def plan(self, demand: Demand) -> LoadSettings: ...


def num_queries_for(percentile: float, num_over_limit: int) -> int:
    """Queries early stopping needs to trust `percentile` when so many of them are over the limit.

    The least n for which P(at most `num_over_limit` of n are over | each with 1 - percentile) is
    under 1 - CONFIDENCE: p99 needs 459 with none over and 662 with one; p90 needs 64 with one.
    """
    over = 1.0 - percentile
    num = num_over_limit + 1
    while _binomial_at_most(num_over_limit, num, over) >= 1.0 - CONFIDENCE:
        num += 1
    return num


def _binomial_at_most(most: int, num: int, probability: float) -> float:
    return sum(
        math.comb(num, k) * probability**k * (1.0 - probability) ** (num - k)
        for k in range(most + 1)
    )
