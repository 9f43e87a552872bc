# SPDX-License-Identifier: Apache-2.0
"""Figures from raw values: exact percentiles and sums."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.bench.measurements import RequestRecord, make_distribution, percentile, summarise

MS = 1_000_000


def make_record(number: int, **changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "request_id": str(number), "sample_index": 0,
        "scheduled_ns": number * 100 * MS, "issued_ns": number * 100 * MS + MS,
        "first_token_ns": number * 100 * MS + 50 * MS,
        "last_token_ns": number * 100 * MS + 90 * MS,
        "num_prompt_tokens": 7, "num_output_tokens": 5, "num_cached_tokens": 0,
        "finish_reason": "length",
    }  # fmt: skip
    return RequestRecord(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 51), (90, 91), (99, 100), (100, 100), (0, 1)]
)
def test_percentiles_follow_loadgens_rank(percent: float, expected: int) -> None:
    assert percentile(range(1, 101), percent) == expected


@given(st.lists(st.integers(0, 10**6), min_size=1), st.sampled_from([50, 90, 99]))
def test_a_percentile_is_a_value_with_that_share_under_it(values: list[int], percent: int) -> None:
    ordered = sorted(values)
    found = percentile(ordered, percent)
    num_under = sum(value < found for value in ordered)

    assert found in ordered
    assert Fraction(num_under, len(ordered)) <= Fraction(percent, 100)


def test_the_distribution_of_nothing_is_none() -> None:
    assert make_distribution([]) is None


def test_latencies_count_from_the_schedule_and_after_the_first_token() -> None:
    record = make_record(3)

    assert record.ttft_ms == 50.0
    assert record.tpot_ms == 10.0


def test_rates_span_from_first_schedule_to_last_token() -> None:
    summary = summarise([make_record(i) for i in range(10)])

    assert summary.duration_s == pytest.approx(0.99)
    assert summary.requests_per_s == pytest.approx(10 / 0.99)
    assert summary.output_tokens_per_s == pytest.approx(50 / 0.99)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (70, 50)
    assert summary.issue_delay_p99_ms == 1.0


def test_failed_requests_are_counted_and_give_no_figures() -> None:
    failed = make_record(9, error="HTTP 500", num_output_tokens=99)
    summary = summarise([make_record(0), failed, make_record(1, finish_reason=None)])

    assert (summary.num_requests, summary.num_ok, summary.num_failed) == (3, 1, 2)
    assert summary.num_output_tokens == 5
    assert summary.errors == {"HTTP 500": 1, "no answer": 1}


def test_unknown_reuse_of_one_request_is_unknown_for_all() -> None:
    known, unknown = make_record(0, num_cached_tokens=4), make_record(1, num_cached_tokens=None)

    assert summarise([known, known]).num_cached_tokens == 8
    assert summarise([known, unknown]).num_cached_tokens is None


def test_a_run_without_requests_has_zeros_and_no_latencies() -> None:
    summary = summarise([])

    assert summary.output_tokens_per_s == 0.0
    assert summary.ttft_ms is None
