# SPDX-License-Identifier: Apache-2.0
"""What a card can do at most: the yardstick that measured times are divided by.

Datasheet rates are dense and without sparsity. What a card reaches in practice is lower and
differs from card to card, so reports prefer what `bench.ceilings` measures in the same run. A rate
that was not measured is 0: `roofline` refuses to use it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    name: str
    bf16_flops_per_s: float
    fp8_flops_per_s: float = 0.0
    fp32_flops_per_s: float = 0.0
    memory_bytes_per_s: float
    memory_bytes: int
    num_multiprocessors: int
    source: str = "measured"
    """"datasheet" or "measured"."""


H100_SXM = Hardware(
    name="NVIDIA H100 80GB HBM3",
    bf16_flops_per_s=989.4e12,
    fp8_flops_per_s=1978.9e12,
    fp32_flops_per_s=66.9e12,
    memory_bytes_per_s=3.35e12,
    memory_bytes=80 * 10**9,
    num_multiprocessors=132,
    source="datasheet",
)

H200 = Hardware(
    name="NVIDIA H200",
    bf16_flops_per_s=989.4e12,
    fp8_flops_per_s=1978.9e12,
    fp32_flops_per_s=66.9e12,
    memory_bytes_per_s=4.8e12,
    memory_bytes=141 * 10**9,
    num_multiprocessors=132,
    source="datasheet",
)
