# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3's router: sigmoid scores, experts in groups, a bias that steers the choice."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pelton.kernels.moe.grouped_routing import GroupedRouting, SigmoidTopK
from pelton.kernels.moe.router_product import router_product
from pelton.layers.moe.router import Router


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

    def forward(self, x: Float[Tensor, "T D"]) -> SigmoidTopK:
        return SigmoidTopK(self.logits(x), self.correction_bias, self._rule)

    __call__ = forward

    def logits(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
        return router_product(x, self.weight)
