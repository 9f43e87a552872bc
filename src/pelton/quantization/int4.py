# SPDX-License-Identifier: Apache-2.0
"""4-bit weights for few tokens at a time on a CPU, with their bfloat16 values for many.

Each 32 neighbours of a weight row share a scale and a middle: value = scale * (q - 8) + middle with
q in [0, 15]. A product of a few tokens is bound by the bytes of its weight and reads the 4-bit
form; one of many is bound by arithmetic, for which torch's 4-bit kernel is slow, so the same values
are kept in the activations' format as well.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.core.errors import ConfigError
from pelton.quantization.format import PackedWeight, WeightFormat

GROUP_SIZE = 32
MAX_FEW_TOKENS = 4
_ROW_MULTIPLE = 16
"""torch packs whole tiles of this many rows."""


def quantize_groups(
    weight: Float[Tensor, "F D"], dtype: torch.dtype
) -> tuple[Int[Tensor, "F D"], Float[Tensor, "F D/32"], Float[Tensor, "F D/32"]]:
    """Integers in [0, 15], scales and middles; the last two rounded to `dtype`."""
    groups = weight.float().view(weight.shape[0], -1, GROUP_SIZE)
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    scales = ((high - low) / 15).clamp_(min=1e-10).to(dtype)
    middles = (low + 8 * scales.float()).to(dtype)
    # Rounded against the rounded scale and middle, so that their error is not added to.
    integers = ((groups - middles.float()) / scales.float()).round_().add_(8).clamp_(0, 15)
    return integers.view(weight.shape).int(), scales[:, :, 0], middles[:, :, 0]


def dequantize_groups(
    integers: Int[Tensor, "F D"],
    scales: Float[Tensor, "F D/32"],
    middles: Float[Tensor, "F D/32"],
) -> Float[Tensor, "F D"]:
    scales = scales.float().repeat_interleave(GROUP_SIZE, dim=1)
    middles = middles.float().repeat_interleave(GROUP_SIZE, dim=1)
    return (integers.float() - 8) * scales + middles


class Int4Weight:
    __slots__ = ("_bias", "_dequantized", "_packed", "_scales_and_middles")

    def __init__(
        self,
        weight: Float[Tensor, "F D"],
        bias: Float[Tensor, " F"] | None,
        for_many: WeightFormat,
    ) -> None:
        """`for_many` is the format of the second form. Raises `ConfigError` for a weight whose
        size the 4-bit kernel does not take."""
        rows, columns = weight.shape
        if rows % _ROW_MULTIPLE or columns % GROUP_SIZE:
            raise ConfigError(
                f"--quantization int4 needs weights of a multiple of {_ROW_MULTIPLE} rows and"
                f" {GROUP_SIZE} columns; this model has one of {rows} x {columns}. Use int8.",
                param="quantization",
            )
        integers, scales, middles = quantize_groups(weight, weight.dtype)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
        self._scales_and_middles = torch.stack((scales.t(), middles.t()), dim=2).contiguous()
        self._bias = bias
        values = dequantize_groups(integers, scales, middles).to(weight.dtype)
        self._dequantized: PackedWeight = for_many(values, bias)

    def __call__(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        if x.shape[0] > MAX_FEW_TOKENS:
            return self._dequantized(x)
        out: Tensor = _linear(x, self._packed, GROUP_SIZE, self._scales_and_middles)
        return out if self._bias is None else out.add_(self._bias)

    def dequantize(self) -> Float[Tensor, "F D"]:
        return self._dequantized.dequantize()


_linear = torch.ops.aten._weight_int4pack_mm_for_cpu.default
