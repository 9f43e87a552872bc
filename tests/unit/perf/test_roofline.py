# SPDX-License-Identifier: Apache-2.0
import pytest

from pelton.perf.cost import OpCost, log_cost, matmul_cost, record_costs
from pelton.perf.hardware import H100_SXM, Hardware
from pelton.perf.roofline import floor_s


def test_floor_is_the_longer_of_arithmetic_and_traffic() -> None:
    moving = OpCost(flops=1, bytes=int(3.35e12))
    computing = OpCost(flops=int(989.4e12) * 2, bytes=1)

    assert floor_s(moving, H100_SXM) == pytest.approx(1.0)
    assert floor_s(computing, H100_SXM) == pytest.approx(2.0)


def test_a_rate_nobody_measured_is_refused() -> None:
    card = Hardware(
        name="card",
        bf16_flops_per_s=1e12,
        memory_bytes_per_s=1e12,
        memory_bytes=1,
        num_multiprocessors=1,
    )

    assert floor_s(OpCost(10**12, 0), card) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="card has no known fp8"):
        floor_s(OpCost(1, 1), card, "fp8")


def test_costs_are_logged_only_inside_a_recording() -> None:
    log_cost("op", OpCost(1, 1))

    with record_costs() as log:
        log_cost("op", matmul_cost(2, 3, 4, element_bytes=2, out_element_bytes=2))

    assert log.entries == [("op", OpCost(48, (6 + 12 + 8) * 2))]
