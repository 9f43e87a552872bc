# SPDX-License-Identifier: Apache-2.0
"""How the scales beside FP8 numbers lie: one for a row, or one for a run or block of 128."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.triton_runtime import cdiv

BLOCK_SIZE = 128


def expand(values: Float[Tensor, "n D"], scales: Float[Tensor, "a b"]) -> Float[Tensor, "n D"]:
    """values times their scales: a scale for each row, 128 columns, or 128 x 128 block."""
    for axis, size in enumerate(values.shape):
        if scales.shape[axis] == cdiv(size, BLOCK_SIZE) and scales.shape[axis] != size:
            repeated = scales.repeat_interleave(BLOCK_SIZE, dim=axis)
            scales = repeated.narrow(axis, 0, size)
    return values * scales


def has_blocks(weight: Float[Tensor, "F D"], weight_scales: Float[Tensor, "a b"]) -> bool:
    """Whether the scales are those of blocks; a row's scales have the shape [F, 1]. A weight of
    one row and at most 128 columns may be read either way."""
    return weight_scales.shape[0] != weight.shape[0] or weight_scales.shape[1] != 1


@dataclass(frozen=True, slots=True)
class FP8Operands:
    """What `fp8_linear` multiplies, for its implementations."""

    x: Float[Tensor, "T D"]
    x_scales: Float[Tensor, "T D/128"]
    weight: Float[Tensor, "F D"]
    weight_scales: Float[Tensor, "F/128 D/128"]
    bias: Float[Tensor, " F"] | None
    dtype: torch.dtype
    """Of the result."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, outputs, inputs."""
        return self.x.shape[0], self.weight.shape[0], self.weight.shape[1]

    def make_out(self) -> Float[Tensor, "T F"]:
        num_tokens, out_features, _ = self.shape
        return torch.empty((num_tokens, out_features), dtype=self.dtype, device=self.x.device)

    def kernel_arguments(self, out: Float[Tensor, "T F"]) -> dict[str, Any]:
        """Those that every kernel of this product has."""
        num_tokens, out_features, in_features = self.shape
        return {
            "x_ptr": self.x,
            "x_scales_ptr": self.x_scales,
            "weight_ptr": self.weight,
            "weight_scales_ptr": self.weight_scales,
            "bias_ptr": self.weight if self.bias is None else self.bias,
            "out_ptr": out,
            "stride_xt": self.x.stride(0),
            "stride_xst": self.x_scales.stride(0),
            "stride_xsg": self.x_scales.stride(1),
            "stride_wf": self.weight.stride(0),
            "stride_wsf": self.weight_scales.stride(0),
            "stride_wsg": self.weight_scales.stride(1),
            "stride_ot": out.stride(0),
            "num_tokens": num_tokens,
            "in_features": in_features,
            "out_features": out_features,
            "HAS_BLOCKS": has_blocks(self.weight, self.weight_scales),
            "HAS_BIAS": self.bias is not None,
        }
