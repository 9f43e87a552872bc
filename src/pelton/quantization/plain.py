# SPDX-License-Identifier: Apache-2.0
"""Weights in the number format of the activations: as loaded."""

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.linear import linear


class PlainWeight:
    """Row-major [F, D]; shares the tensor it is given. `dtype`: of its products, if not x's."""

    __slots__ = ("_bias", "_dtype", "_weight")

    def __init__(
        self,
        weight: Float[Tensor, "F D"],
        bias: Float[Tensor, " F"] | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._dtype = dtype

    def __call__(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        return linear(x, self._weight, self._bias, self._dtype)

    def dequantize(self) -> Float[Tensor, "F D"]:
        return self._weight.float()
