# SPDX-License-Identifier: Apache-2.0
"""Experts whose weights are MXFP4 and stay so in memory; otherwise as `layers.moe.experts`."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pelton.core.errors import CheckpointError
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product.hopper_tiles import tile_weights
from pelton.kernels.moe.mxfp4_product.op import (
    mxfp4_down_product,
    mxfp4_gate_up_product,
    route_rows,
    takes_tiles,
)
from pelton.kernels.moe.mxfp4_product.reference import BLOCK, PACKED
from pelton.kernels.moe.routing import Routing
from pelton.kernels.moe.weighted_sum import WeightedRows


class MXFP4Experts(nn.Module):
    """Gate and up rows are interleaved, as published. Biases have the activations' format."""

    gate_up_blocks: nn.Parameter
    """uint8 [E, 2F, D/32, 16], or in tiles int32 [E, 2F/64, D/32, 64, 4]"""
    gate_up_scales: nn.Parameter
    """uint8 [E, 2F, D/32], or in tiles [E, 2F/64, D/32 + 1, 64]"""
    gate_up_bias: nn.Parameter | None
    down_blocks: nn.Parameter
    down_scales: nn.Parameter
    down_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        gate: Gate,
        *,
        has_bias: bool = False,
    ) -> None:
        """Raises `CheckpointError` for sizes that MXFP4's blocks do not divide."""
        super().__init__()
        if hidden_size % BLOCK or ffn_size % BLOCK:
            raise CheckpointError(
                f"MXFP4 experts need hidden_size and intermediate_size to be multiples of {BLOCK},"
                f" got {hidden_size} and {ffn_size}."
            )
        self._gate = gate
        self._dtype = torch.get_default_dtype()
        gate_up, down = (num_experts, 2 * ffn_size), (num_experts, hidden_size)
        self.gate_up_blocks = _bytes(*gate_up, hidden_size // BLOCK, PACKED)
        self.gate_up_scales = _bytes(*gate_up, hidden_size // BLOCK)
        self.down_blocks = _bytes(*down, ffn_size // BLOCK, PACKED)
        self.down_scales = _bytes(*down, ffn_size // BLOCK)
        for name, shape in (("gate_up_bias", gate_up), ("down_bias", down)):
            bias = nn.Parameter(torch.empty(shape), requires_grad=False) if has_bias else None
            self.register_parameter(name, bias)

    def absorb(self) -> None:
        """Puts the weights in the order that the products on this device take."""
        for name in ("gate_up", "down"):
            blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
            if takes_tiles(blocks, self._dtype):
                words, powers = tile_weights(blocks, scales)
                setattr(self, f"{name}_blocks", nn.Parameter(words, requires_grad=False))
                setattr(self, f"{name}_scales", nn.Parameter(powers, requires_grad=False))

    def forward(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
    ) -> WeightedRows:
        routed, weights = route_rows(routing, self.gate_up_blocks, self.down_blocks)
        hidden = mxfp4_gate_up_product(
            x, routed, self.gate_up_blocks, self.gate_up_scales, self.gate_up_bias, self._gate
        )
        rows = mxfp4_down_product(
            hidden, routed, self.down_blocks, self.down_scales, self.down_bias
        )
        return WeightedRows(rows, weights)

    __call__ = forward


def _bytes(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)
