# SPDX-License-Identifier: Apache-2.0
"""Scenario policy: settings for LoadGen, limits, verdicts, calibration. No clock, no process."""

import pytest

from pelton.bench.config import BenchConfig, ScenarioName
from pelton.bench.measurements import RequestRecord
from pelton.bench.scenarios.calibration import CalibrationError, find_capacity
from pelton.bench.scenarios.policy import NO_LIMITS, Demand, Limits, num_queries_for
from pelton.bench.scenarios.table import SCENARIOS, resolve_limits, resolve_min_duration_s
from pelton.bench.scenarios.verdict import Verdict, judge
from pelton.core.errors import ConfigError

LADDER = SCENARIOS[ScenarioName.SERVER].ladder


def make_demand(**changes: object) -> Demand:
    values: dict[str, object] = {
        "limits": NO_LIMITS, "min_duration_s": 10.0, "num_requests": None,
        "requests_per_s": 5.0, "request_latency_s": 0.5,
    }  # fmt: skip
    return Demand(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("percentile", "num_over", "expected"), [(0.99, 0, 459), (0.99, 1, 662), (0.90, 1, 64)]
)
def test_early_stopping_needs_loadgens_own_numbers(
    percentile: float, num_over: int, expected: int
) -> None:
    assert num_queries_for(percentile, num_over) == expected


def test_server_asks_for_enough_queries_for_its_p99() -> None:
    settings = SCENARIOS[ScenarioName.SERVER].plan(make_demand())

    assert settings.min_query_count == 662
    assert settings.target_qps == 5.0
    assert settings.min_duration_ms == 10_000
    assert settings.has_first_token


def test_requests_given_replace_the_number_needed() -> None:
    settings = SCENARIOS[ScenarioName.SERVER].plan(make_demand(num_requests=50))

    assert settings.min_query_count == 50
    assert settings.num_expected_requests == 50


def test_offline_expects_more_than_was_measured() -> None:
    settings = SCENARIOS[ScenarioName.OFFLINE].plan(make_demand(requests_per_s=20.0))

    assert settings.target_qps > 20.0
    assert not settings.has_first_token


def test_offline_takes_exactly_the_requests_asked_for() -> None:
    demand = make_demand(num_requests=100, min_duration_s=0.0)
    settings = SCENARIOS[ScenarioName.OFFLINE].plan(demand)

    assert settings.num_expected_requests == settings.min_query_count == 100


def test_single_stream_expects_less_latency_than_was_measured() -> None:
    settings = SCENARIOS[ScenarioName.SINGLE_STREAM].plan(make_demand(request_latency_s=0.4))

    assert settings.expected_latency_ns < 0.4e9
    assert settings.min_query_count == 64


def test_limits_default_to_the_scenario_and_yield_to_the_user() -> None:
    config = BenchConfig(scenario=ScenarioName.INTERACTIVE, tpot_ms=50.0)

    assert resolve_limits(config) == Limits(ttft_ms=500, tpot_ms=50.0)


@pytest.mark.parametrize("option", ["ttft_ms", "tpot_ms", "qps"])
def test_a_limit_where_there_is_none_is_refused(option: str) -> None:
    config = BenchConfig(scenario=ScenarioName.OFFLINE, **{option: 100.0})  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="does not apply to offline"):
        resolve_limits(config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, 60.0), ({"requests": 5}, 0.0), ({"requests": 5, "min_duration": 3.0}, 3.0)],
)
def test_requests_alone_ask_for_no_duration(changes: dict[str, object], expected: float) -> None:
    assert resolve_min_duration_s(BenchConfig(**changes)) == expected  # type: ignore[arg-type]


def make_verdict(**changes: object) -> Verdict:
    values: dict[str, object] = {
        "limits": Limits(ttft_ms=1000, tpot_ms=100), "ttft_p99_ms": 200.0, "tpot_p99_ms": 50.0,
        "loadgen_reasons": [], "num_failed": 0, "commonest_error": "", "num_cached_tokens": 0,
        "may_reuse_prefixes": False, "aborted": None,
    }  # fmt: skip
    return judge(**(values | changes))  # type: ignore[arg-type]


def test_a_clean_run_is_valid_and_names_the_nearer_limit() -> None:
    verdict = make_verdict()

    assert verdict.is_valid
    assert verdict.binding_limit == "tpot"
    assert (verdict.ttft_share, verdict.tpot_share) == (0.2, 0.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loadgen_reasons": ["Too few."]}, "Too few"),
        ({"num_failed": 2, "commonest_error": "HTTP 500"}, "2 requests failed, most with: HTTP"),
        ({"ttft_p99_ms": 1001.0}, "over its limit of 1000 ms"),
        ({"tpot_p99_ms": 101.0}, "p99 TPOT of 101.0 ms"),
        ({"num_cached_tokens": 7}, "7 prompt tokens were reused"),
        ({"aborted": "no target"}, "ended early: no target"),
    ],
)
def test_each_fault_alone_makes_a_run_invalid(changes: dict[str, object], words: str) -> None:
    verdict = make_verdict(**changes)

    assert not verdict.is_valid
    assert len(verdict.reasons) == 1
    assert words in verdict.reasons[0]


def test_reuse_that_was_asked_for_is_no_fault() -> None:
    assert make_verdict(num_cached_tokens=7, may_reuse_prefixes=True).is_valid


def test_without_limits_none_binds() -> None:
    assert make_verdict(limits=NO_LIMITS).binding_limit == "none"


def make_records(num: int, *, latency_s: float, error: str | None = None) -> list[RequestRecord]:
    latency_ns = round(latency_s * 1e9)
    return [
        RequestRecord(
            request_id=str(i), sample_index=0, scheduled_ns=1, issued_ns=1,
            first_token_ns=1 + latency_ns // 2, last_token_ns=1 + latency_ns,
            num_output_tokens=11, finish_reason=None if error else "length", error=error,
        )
        for i in range(num)
    ]  # fmt: skip


async def test_calibration_stops_where_concurrency_gains_nothing() -> None:
    """A system that serves four at a time: latency grows with what is beyond."""
    seen: list[int] = []

    async def run_level(concurrency: int) -> list[RequestRecord]:
        seen.append(concurrency)
        return make_records(concurrency * 4, latency_s=0.1 * max(1.0, concurrency / 4))

    capacity = await find_capacity(run_level, NO_LIMITS, LADDER)

    assert seen == [1, 2, 4, 8]
    assert capacity.requests_per_s == pytest.approx(40.0)
    assert capacity.request_latency_s == pytest.approx(0.1)


async def test_calibration_keeps_to_levels_within_the_limits() -> None:
    """Each doubling gains, but its time per output token grows by half."""

    async def run_level(concurrency: int) -> list[RequestRecord]:
        return make_records(concurrency * 4, latency_s=0.1 * concurrency**0.585)

    capacity = await find_capacity(run_level, Limits(tpot_ms=20.0), LADDER)

    assert [level.is_within_limits for level in capacity.levels] == [True, True, True, False]
    assert capacity.requests_per_s == pytest.approx(capacity.levels[2].requests_per_s)


async def test_calibration_reports_a_failed_request() -> None:
    async def run_level(concurrency: int) -> list[RequestRecord]:
        return make_records(1, latency_s=0.1, error="HTTP 500")

    with pytest.raises(CalibrationError, match="HTTP 500"):
        await find_capacity(run_level, NO_LIMITS, LADDER)
