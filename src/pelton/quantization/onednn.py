# SPDX-License-Identifier: Apache-2.0
"""bfloat16 weights in oneDNN's own block layout, so that no product lays its weight out again."""

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import observed

_BATCH_HINT = 16
"""Rows for which the layout is chosen; the product takes any number."""


class OneDNNWeight:
    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Float[Tensor, "F D"], bias: Float[Tensor, " F"] | None) -> None:
        assert weight.dtype is torch.bfloat16, weight.dtype
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_HINT)
        self._bias = bias

    def __call__(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        multiply = observed("linear", _linear)
        out: Tensor = multiply(x, self._weight, self._bias, "none", [], "")
        return out

    def dequantize(self) -> Float[Tensor, "F D"]:
        weight: Tensor = self._weight.to_dense()
        return weight.float()


_linear = torch.ops.mkldnn._linear_pointwise.default


def has_bfloat16_products() -> bool:
    """Whether oneDNN computes bfloat16 products on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
