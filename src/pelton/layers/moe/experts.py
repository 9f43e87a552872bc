# SPDX-License-Identifier: Apache-2.0
"""The feed-forward experts of a layer, and how a step's tokens pass through those chosen for them.

    routed  <- expert ids            rows sorted by expert, cut in tiles
    hidden  <- x, gate_up weights    gathered, multiplied, gated
    rows    <- hidden, down weights  multiplied, scattered back
    out     <- rows, weights         added up, by what comes behind

An expert's gate and up rows are interleaved in one weight (see `kernels.moe.gate`), whatever the
checkpoint's layout: the loader puts them there.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from pelton.kernels.moe.expert_product.op import down_product, gate_up_product
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.routing import Routing
from pelton.kernels.moe.sort_by_expert import sort_by_expert
from pelton.kernels.moe.weighted_sum import WeightedRows
from pelton.quantization.fp8 import Rows, plain_rows


class Experts(nn.Module):
    """Weights in the activations' number format."""

    gate_up: nn.Parameter
    """[E, 2F, D]"""
    gate_up_bias: nn.Parameter | None
    down: nn.Parameter
    """[E, D, F]"""
    down_bias: nn.Parameter | None

    interleaved_parts: Mapping[str, int] = MappingProxyType({"gate_up": 2, "gate_up_bias": 2})
    """Parameters whose rows (of one expert) take turns between this many checkpoint tensors."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        gate: Gate,
        *,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._gate = gate
        self.gate_up = _parameter(num_experts, 2 * ffn_size, hidden_size)
        self.down = _parameter(num_experts, hidden_size, ffn_size)
        gate_up_bias = _parameter(num_experts, 2 * ffn_size) if has_bias else None
        self.register_parameter("gate_up_bias", gate_up_bias)
        self.register_parameter(
            "down_bias", _parameter(num_experts, hidden_size) if has_bias else None
        )

    def forward(self, x: Rows, routing: Routing) -> WeightedRows:
        expert_ids, weights = routing.choose()
        x = plain_rows(x)
        routed = sort_by_expert(expert_ids, self._num_experts)
        hidden = gate_up_product(x, routed, self.gate_up, self.gate_up_bias, self._gate)
        rows = down_product(hidden, routed, self.down, self.down_bias)
        return WeightedRows(rows, weights)

    __call__ = forward


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
