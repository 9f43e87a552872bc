# SPDX-License-Identifier: Apache-2.0
"""What a machine can do at most, as `pelton roofline --measure` takes it."""

from collections.abc import Callable

import pytest
import torch

from pelton.bench import ceilings
from pelton.bench.machine import cpu_name

CPU = torch.device("cpu")


@pytest.mark.parametrize("quicker", [torch.float32, torch.bfloat16])
def test_a_cpus_products_are_those_of_the_quicker_format(
    quicker: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_s(call: Callable[[], torch.Tensor], device: torch.device) -> float:
        assert device == CPU
        return 0.25 if call().dtype is quicker else 0.5

    monkeypatch.setattr(ceilings, "_time_s", time_s)

    hardware = ceilings.measure_ceilings(CPU)

    assert hardware.bf16_flops_per_s == 2 * 1024**3 / 0.25
    assert hardware.fp8_flops_per_s == 0
    assert hardware.name == cpu_name()
