# SPDX-License-Identifier: Apache-2.0
"""8-bit weights and activations: integer products on a CPU.

A weight row has one scale, chosen when loading; a token's activations have one scale, taken from
their largest magnitude as they come. Both are symmetric: value = scale * integer. Activations go
to 127, weights to `weight_limit()`. Products of integers are exact, so a token's result does not
depend on what else is in the batch.
"""

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.int8_rows import quantize_rows, scale_rows


class Int8Weight:
    __slots__ = ("_bias", "_packed", "_scales", "_zero_points")

    def __init__(self, weight: Float[Tensor, "F D"], bias: Float[Tensor, " F"] | None) -> None:
        integers, scales = quantize_rows(weight, weight_limit())
        self._packed = torch.ops.onednn.qlinear_prepack(integers, None)
        self._scales = scales
        self._zero_points = torch.zeros(len(weight), dtype=torch.int32)
        self._bias = bias

    def __call__(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        integers, scales = quantize_rows(x)
        out: Tensor = _linear(
            integers, 1.0, 0, self._packed, self._scales, self._zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return scale_rows(out, scales, self._bias, x.dtype)

    def dequantize(self) -> Float[Tensor, "F D"]:
        integers: Tensor = self._packed.to_dense().t()
        return integers.float() * self._scales[:, None]


@cache
def weight_limit() -> int:
    """127 where a processor is known to sum products of eight bits in 32 (VNNI, AMX), else 64: x86
    processors without these sum two of them in sixteen, which saturate. 2 * 64 * 255 still fits,
    with the activation as oneDNN shifts it into [1, 255]."""
    can = torch.cpu.get_capabilities()
    return 127 if any(can.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8")) else 64


_linear = torch.ops.onednn.qlinear_pointwise.default
