# SPDX-License-Identifier: Apache-2.0
"""Matrix product with a weight that may fuse several tensors and be stored in a packed format.

A `Linear` is filled by the loader as a plain [out, in] parameter. `pack` then replaces it with the
form its device and the chosen format compute fastest on, and drops the plain one.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pelton.kernels.silu_mul import silu_mul
from pelton.quantization.format import PackedWeight, WeightFormat
from pelton.quantization.fp8 import Rows, plain_rows
from pelton.quantization.fp8_scheme import FP8Scheme
from pelton.quantization.plain import PlainWeight


class Linear(nn.Module):
    """y = x W^T + b. `parts` are the row counts of the tensors fused in W, in order.

    `gives_float32`: whatever reads y takes float32, so a format that sums in it need not round.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    fp8: FP8Scheme | None = None
    """How an FP8 checkpoint stores the weight."""

    def __init__(
        self,
        in_features: int,
        parts: Sequence[int],
        *,
        has_bias: bool = False,
        gives_float32: bool = False,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.gives_float32 = gives_float32
        self._dtype = torch.get_default_dtype()
        out_features = sum(self.parts)
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if has_bias else None
        self.register_parameter("bias", bias)
        self._packed: PackedWeight | None = None

    def pack(self, weight_format: WeightFormat) -> None:
        """Call once, after loading. The parameter is gone after it, unless another module owns it
        too (a tied embedding) or the format keeps it as it is."""
        self._packed = weight_format(self.weight.detach(), self.bias)
        del self.weight

    def forward(self, x: Rows) -> Float[Tensor, "T F"]:
        if self._packed is None:
            self._packed = PlainWeight(self.weight, self.bias)
        return self._packed(plain_rows(x))

    def gated(self, gate_up: Float[Tensor, "T 2D"]) -> Float[Tensor, "T F"]:
        """The product of silu(gate) * up, where gate_up holds gate then up."""
        return self(silu_mul(gate_up, self._dtype))

    # Modules here have no hooks, so a call is the forward pass itself, typed and without overhead.
    __call__ = forward
