# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3's router: sigmoid scores, experts in groups, a bias that steers the choice."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pelton.kernels.dispatch import observed
from pelton.kernels.moe.grouped_routing import GroupedRouting, sigmoid_top_k
from pelton.kernels.moe.routing import Routing
from pelton.layers.moe.router import Router
from pelton.perf.cost import log_cost, matmul_cost


class GroupedRouter(Router):
    """Logits are float32: rounded ones would send tokens to other experts."""

    weight: nn.Parameter
    correction_bias: nn.Parameter

    def __init__(self, hidden_size: int, num_experts: int, rule: GroupedRouting) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self._rule = rule
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size), requires_grad=False)
        bias = torch.empty(num_experts, dtype=torch.float32)
        self.correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Float[Tensor, "T D"]) -> Routing:
        return sigmoid_top_k(self.logits(x), self.correction_bias, self._rule)

    __call__ = forward

    def logits(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
        """Of both in their own number format, summed and kept in float32."""
        if x.is_meta:
            cost = matmul_cost(x.shape[0], x.shape[1], self.num_experts, x.element_size())
            log_cost("router", cost)
        return observed("router", _router_product)(x, self.weight.t())


def _router_product(x: Float[Tensor, "T D"], weight: Float[Tensor, "D E"]) -> Float[Tensor, "T E"]:
    if x.is_cuda and x.dtype is torch.bfloat16:
        return torch.mm(x, weight, out_dtype=torch.float32)
    return x.float() @ weight.float()
