# SPDX-License-Identifier: Apache-2.0
"""Weights in the number format of the activations: as loaded."""

from jaxtyping import Float
from torch import Tensor

from pelton.kernels.linear import linear


class PlainWeight:
    """Row-major [F, D]; shares the tensor it is given."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Float[Tensor, "F D"], bias: Float[Tensor, " F"] | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        return linear(x, self._weight, self._bias)

    def dequantize(self) -> Float[Tensor, "F D"]:
        return self._weight.float()
