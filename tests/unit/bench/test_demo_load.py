# SPDX-License-Identifier: Apache-2.0
"""Limits of the demo on machines of any speed."""

import pytest

from pelton.bench.demo_load import TPOT_MS, TTFT_MS, DemoLoad, choose_widening
from pelton.bench.scenarios.calibration import CalibrationError, Level


def make_level(ttft_ms: float, tpot_ms: float) -> Level:
    return Level(
        concurrency=8,
        num_requests=32,
        requests_per_s=2.0,
        output_tokens_per_s=16.0,
        ttft_p90_ms=ttft_ms,
        tpot_p90_ms=tpot_ms,
        is_within_limits=ttft_ms <= TTFT_MS and tpot_ms <= TPOT_MS,
    )


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "expected"),
    [(5, 1, 1), (2000, 200, 1), (2001, 200, 2), (100, 237, 2), (100, 1601, 16)],
)
def test_limits_widen_until_the_machine_holds_them(
    ttft_ms: float, tpot_ms: float, expected: int
) -> None:
    assert choose_widening(make_level(ttft_ms, tpot_ms)) == expected


def test_a_server_that_hardly_answers_is_not_measured() -> None:
    with pytest.raises(CalibrationError, match="too slow"):
        choose_widening(make_level(1e6, 10.0))


def test_both_limits_are_those_of_the_load() -> None:
    load = DemoLoad(qps=2.0, output_len=8, num_requests=480, widening=2)

    assert (load.ttft_ms, load.tpot_ms, load.duration_s) == (4000.0, 400.0, 240.0)
