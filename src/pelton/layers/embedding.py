# SPDX-License-Identifier: Apache-2.0
"""Token embedding: one row of a table for each token."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class Embedding(nn.Module):
    weight: nn.Parameter

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Int[Tensor, " T"]) -> Float[Tensor, "T D"]:
        return self.weight.index_select(0, token_ids)

    __call__ = forward
