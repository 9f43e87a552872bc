# SPDX-License-Identifier: Apache-2.0
"""Products of routed rows on a CPU: one after the other for the experts that have rows.

`weight_of(expert)` gives an expert's weight in the activations' format, so that packed formats
unpack an expert when it is used and hold no more than one.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from pelton.kernels.moe.gate import Gate, apply_gate
from pelton.kernels.moe.sort_by_expert import RoutedRows

WeightOf = Callable[[int], Tensor]


def gate_up_by_expert(
    x: Float[Tensor, "T D"],
    routed: RoutedRows,
    weight_of: WeightOf,
    bias: Float[Tensor, "E 2F"] | None,
    gate: Gate,
    ffn_size: int,
) -> Float[Tensor, "N F"]:
    rows = x.index_select(0, torch.div(routed.order, routed.top_k, rounding_mode="floor"))
    hidden = x.new_empty((routed.num_rows, ffn_size))
    for expert, first, end in routed.tiles.tolist():
        if end > first:
            expert_bias = None if bias is None else bias[expert]
            gate_up = linear(rows[first:end], weight_of(expert), expert_bias)
            hidden[first:end] = apply_gate(gate_up.float(), gate)
    return hidden


def down_by_expert(
    hidden: Float[Tensor, "N F"],
    routed: RoutedRows,
    weight_of: WeightOf,
    bias: Float[Tensor, "E D"] | None,
    hidden_size: int,
) -> Float[Tensor, "N D"]:
    sorted_rows = hidden.new_empty((routed.num_rows, hidden_size))
    for expert, first, end in routed.tiles.tolist():
        if end > first:
            expert_bias = None if bias is None else bias[expert]
            sorted_rows[first:end] = linear(hidden[first:end], weight_of(expert), expert_bias)
    return torch.empty_like(sorted_rows).index_copy_(0, routed.order.long(), sorted_rows)


def gate_up_product_cpu(
    x: Float[Tensor, "T D"],
    routed: RoutedRows,
    weight: Float[Tensor, "E 2F D"],
    bias: Float[Tensor, "E 2F"] | None,
    gate: Gate,
) -> Float[Tensor, "N F"]:
    return gate_up_by_expert(x, routed, weight.__getitem__, bias, gate, weight.shape[1] // 2)


def down_product_cpu(
    hidden: Float[Tensor, "N F"],
    routed: RoutedRows,
    weight: Float[Tensor, "E D F"],
    bias: Float[Tensor, "E D"] | None,
) -> Float[Tensor, "N D"]:
    return down_by_expert(hidden, routed, weight.__getitem__, bias, weight.shape[1])
