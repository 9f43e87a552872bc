# SPDX-License-Identifier: Apache-2.0
"""Routers: which experts a token goes to, and with what weights.

A router is called with a step's hidden states and returns its logits and the rule that chooses by
them. Experts ask for the choice, (expert ids, weights), and do not care which rule made it, or make
it themselves.
"""

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor, nn

from pelton.kernels.moe.routing import Routing, SoftmaxTopK
from pelton.layers.linear import Linear


class Router(nn.Module, ABC):
    hidden_size: int
    num_experts: int

    @abstractmethod
    def __call__(self, x: Float[Tensor, "T D"]) -> Routing: ...


class SoftmaxTopKRouter(Router):
    """The k highest logits, weighted by the softmax over those k alone."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, has_bias: bool = False
    ) -> None:
        super().__init__()
        self.logits = Linear(hidden_size, (num_experts,), has_bias=has_bias)
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self._top_k = top_k

    def forward(self, x: Float[Tensor, "T D"]) -> SoftmaxTopK:
        return SoftmaxTopK(self.logits(x), self._top_k)

    __call__ = forward
