# SPDX-License-Identifier: Apache-2.0
"""Root mean square norm, alone and fused with the residual sum before it."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pelton.kernels.fp8.norm import NormQuantization, add_rms_norm_fp8, rms_norm_fp8
from pelton.kernels.moe.weighted_sum import WeightedRows
from pelton.kernels.rms_norm import add_rms_norm, rms_norm
from pelton.quantization.fp8 import FP8Rows, Rows, computes_in_fp8
from pelton.quantization.fp8_scheme import BLOCK_SIZE, FP8Scheme, Granularity


class _Norm(nn.Module):
    weight: nn.Parameter

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.eps = eps


class RMSNorm(_Norm):
    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        return rms_norm(x, self.weight, self.eps)

    __call__ = forward

    def add(
        self, x: Float[Tensor, "T D"] | WeightedRows, residual: Float[Tensor, "T D"]
    ) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
        """Returns (norm(x + residual), x + residual)."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class InputNorm(_Norm):
    """The norm whose result goes into products alone, whose weights are stored as `fp8` says (None:
    they are not quantised). Where those are multiplied in FP8, it gives their rows quantised.

    `keeps_plain`: something else reads the rows too.
    """

    def __init__(
        self, hidden_size: int, eps: float, fp8: FP8Scheme | None, *, keeps_plain: bool = False
    ) -> None:
        super().__init__(hidden_size, eps)
        self._fp8 = fp8
        self._keeps_plain = keeps_plain
        self._then: NormQuantization | None = None

    def absorb(self) -> None:
        """Call once, after loading: chooses by the device, as the products do."""
        if self._fp8 is None or not computes_in_fp8(self.weight.device):
            return
        is_block = self._fp8.granularity is Granularity.BLOCK
        group_size = BLOCK_SIZE if is_block else self.weight.shape[0]
        self._then = NormQuantization(group_size, self._fp8.activation_bound, self._keeps_plain)

    def forward(self, x: Float[Tensor, "T D"]) -> Rows:
        if self._then is None:
            return rms_norm(x, self.weight, self.eps)
        values, scales, plain = rms_norm_fp8(x, self.weight, self.eps, self._then)
        return FP8Rows(values, scales, x.dtype, plain)

    __call__ = forward

    def add(
        self, x: Float[Tensor, "T D"], residual: Float[Tensor, "T D"]
    ) -> tuple[Rows, Float[Tensor, "T D"]]:
        """Returns (norm(x + residual), x + residual)."""
        if self._then is None:
            return add_rms_norm(x, residual, self.weight, self.eps)
        (values, scales, plain), total = add_rms_norm_fp8(
            x, residual, self.weight, self.eps, self._then
        )
        return FP8Rows(values, scales, x.dtype, plain), total
