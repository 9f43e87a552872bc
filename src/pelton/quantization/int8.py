# SPDX-License-Identifier: Apache-2.0
"""8-bit weights and activations: integer products on a CPU.

A weight row has one scale, chosen when loading; a token's activations have one scale, taken from
their largest magnitude as they come. Both are symmetric: value = scale * integer in [-127, 127].
Products of integers are exact, so a token's result does not depend on what else is in the batch.
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny


def quantize_rows(
    x: Float[Tensor, "n D"],
) -> tuple[Int8[Tensor, "n D"], Float[Tensor, "n 1"]]:
    """Integers and the scale of each row. A row with a NaN or infinity gets such a scale, so that
    what is computed from it is not finite either."""
    # An infinite norm would be one op, of which torch has no vectorised form.
    scales = x.abs().amax(dim=1, keepdim=True).float().mul_(1 / 127).clamp_(min=_TINY)
    return torch.mul(x, scales.reciprocal()).round_().to(torch.int8), scales


class Int8Weight:
    __slots__ = ("_bias", "_packed", "_scales", "_zero_points")

    def __init__(self, weight: Float[Tensor, "F D"], bias: Float[Tensor, " F"] | None) -> None:
        integers, scales = quantize_rows(weight)
        self._packed = torch.ops.onednn.qlinear_prepack(integers, None)
        self._scales = scales[:, 0].contiguous()
        self._zero_points = torch.zeros(len(weight), dtype=torch.int32)
        self._bias = bias

    def __call__(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        integers, scales = quantize_rows(x)
        out: Tensor = _linear(
            integers, 1.0, 0, self._packed, self._scales, self._zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        out.mul_(scales)
        if self._bias is not None:
            out.add_(self._bias)
        return out.to(x.dtype)

    def dequantize(self) -> Float[Tensor, "F D"]:
        integers: Tensor = self._packed.to_dense().t()
        return integers.float() * self._scales[:, None]


_linear = torch.ops.onednn.qlinear_pointwise.default
