# SPDX-License-Identifier: Apache-2.0
"""How the scales beside FP8 numbers lie: one for a row, or one for a run or block of 128."""

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
