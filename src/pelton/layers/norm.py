# SPDX-License-Identifier: Apache-2.0
"""Root mean square norm, alone and fused with the residual sum before it."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pelton.kernels.add_rms_norm import add_rms_norm
from pelton.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    weight: nn.Parameter

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        return rms_norm(x, self.weight, self.eps)

    __call__ = forward

    def add(
        self, x: Float[Tensor, "T D"], residual: Float[Tensor, "T D"]
    ) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
        """Returns (norm(x + residual), x + residual)."""
        return add_rms_norm(x, residual, self.weight, self.eps)
