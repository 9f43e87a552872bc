# SPDX-License-Identifier: Apache-2.0
"""Weights as an FP8 checkpoint holds them: multiplied in FP8 on a card that can, else dequantised.

A card with FP8 units quantises activations as they come and multiplies e4m3 by e4m3. Elsewhere a
weight is dequantised once, when packing, to the activations' number format: it then takes two or
four times the memory but costs nothing a product, and activations are not quantised at all, so
the result is nearer to the checkpoint's weights than the format promises.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.fp8.linear import fp8_linear
from pelton.kernels.fp8.quantize import quantize_fp8
from pelton.kernels.fp8.scales import expand
from pelton.kernels.fp8.silu_mul import silu_mul_fp8
from pelton.kernels.triton_runtime import cdiv
from pelton.quantization.format import PackedWeight, WeightFormat
from pelton.quantization.fp8_scheme import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class FP8Rows:
    """Rows that came quantised from the op before, as products with FP8 weights take them."""

    values: Float[Tensor, "T D"]
    """e4m3"""
    scales: Float[Tensor, "T D/group"]
    dtype: torch.dtype
    """Of the rows before, and so of the products' results."""
    plain: Float[Tensor, "T D"] | None
    """The rows before, where something else reads them."""


Rows = Tensor | FP8Rows


def plain_rows(rows: Rows) -> Float[Tensor, "T D"]:
    if isinstance(rows, Tensor):
        return rows
    assert rows.plain is not None, "the rows before quantisation were not kept"
    return rows.plain


class FP8Weight:
    """Row-major e4m3 [F, D] with float32 scales, [F, 1] or one for a block of 128 x 128."""

    __slots__ = ("_bias", "_bound", "_group_size", "_num_rows", "_scales", "_weight")

    def __init__(
        self,
        weight: Float[Tensor, "F D"],
        scales: Float[Tensor, "a b"],
        bias: Float[Tensor, " F"] | None,
        *,
        has_blocks: bool,
        activation_bound: float = math.inf,
    ) -> None:
        self._num_rows = weight.shape[0]
        if has_blocks and self._num_rows % BLOCK_SIZE and weight.device.type != "meta":
            # To whole blocks, as the library's product asks. On `meta` floors are counted.
            weight, bias = _pad_rows(weight), None if bias is None else _pad_rows(bias)
        self._weight = weight
        self._scales = scales
        self._bias = bias
        self._bound = activation_bound
        self._group_size = BLOCK_SIZE if has_blocks else weight.shape[1]

    def __call__(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        values, scales = quantize_fp8(x, self._group_size, self._bound)
        return self.multiply(FP8Rows(values, scales, x.dtype, None))

    def gated(self, gate_up: Float[Tensor, "T 2D"]) -> Float[Tensor, "T F"]:
        """Of silu(gate) * up."""
        values, scales = silu_mul_fp8(gate_up, self._group_size, self._bound)
        return self.multiply(FP8Rows(values, scales, gate_up.dtype, None))

    def multiply(self, rows: FP8Rows) -> Float[Tensor, "T F"]:
        """Of rows quantised with the runs and the bound that this weight asks for."""
        return fp8_linear(
            rows.values, rows.scales, self._weight, self._scales, self._bias, rows.dtype
        )[:, : self._num_rows]

    def dequantize(self) -> Float[Tensor, "F D"]:
        return dequantize_fp8(self._weight[: self._num_rows], self._scales)


def _pad_rows(values: Tensor) -> Tensor:
    """With zeros, to whole blocks."""
    padded = values.new_zeros((cdiv(values.shape[0], BLOCK_SIZE) * BLOCK_SIZE, *values.shape[1:]))
    padded[: values.shape[0]] = values
    return padded


def dequantize_fp8(
    weight: Float[Tensor, "F D"], scales: Float[Tensor, "a b"]
) -> Float[Tensor, "F D"]:
    """float32 values; exact, as a product of an e4m3 number and a scale is rounded once."""
    return expand(weight.float(), scales)


def computes_in_fp8(device: torch.device) -> bool:
    """Whether the device multiplies e4m3 numbers: NVIDIA cards from compute capability 8.9 on, and
    `meta`, where costs are those of such a card."""
    if device.type == "meta":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def pack_fp8(
    weight: Float[Tensor, "F D"],
    scales: Float[Tensor, "a b"],
    bias: Float[Tensor, " F"] | None,
    *,
    has_blocks: bool,
    activation_bound: float,
    dtype: torch.dtype,
    fallback: WeightFormat,
) -> PackedWeight:
    """`dtype` is that of the activations, `fallback` the format of a dequantised weight."""
    if computes_in_fp8(weight.device):
        return FP8Weight(
            weight, scales, bias, has_blocks=has_blocks, activation_bound=activation_bound
        )
    return fallback(dequantize_fp8(weight, scales).to(dtype), bias)
