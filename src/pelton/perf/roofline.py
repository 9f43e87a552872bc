# SPDX-License-Identifier: Apache-2.0
"""The least time an op can take on a card: its arithmetic or its bytes, whichever is longer."""

from typing import Literal

from pelton.perf.cost import OpCost
from pelton.perf.hardware import Hardware

NumberFormat = Literal["bfloat16", "fp8", "float32"]


def floor_s(cost: OpCost, hardware: Hardware, number_format: NumberFormat = "bfloat16") -> float:
    """Seconds below which no implementation of one op comes. ValueError: an unknown rate."""
    flops_per_s = {
        "bfloat16": hardware.bf16_flops_per_s,
        "fp8": hardware.fp8_flops_per_s,
        "float32": hardware.fp32_flops_per_s,
    }[number_format]
    if flops_per_s <= 0 or hardware.memory_bytes_per_s <= 0:
        raise ValueError(f"{hardware.name} has no known {number_format} or memory rate.")
    return max(cost.flops / flops_per_s, cost.bytes / hardware.memory_bytes_per_s)
