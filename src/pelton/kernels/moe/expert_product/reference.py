# SPDX-License-Identifier: Apache-2.0
"""The two products of a mixture of experts: each routed row with the weights of its own expert.

    hidden_i = gate(x_token(i) W_gate_up[e(i)]^T + b_gate_up[e(i)])      rows sorted by expert
    y_n      = hidden_i W_down[e(i)]^T + b_down[e(i)]                    n = order[i]

where i walks the rows sorted by expert (`sort_by_expert`), e(i) is the expert of the tile that
holds i, token(i) = order[i] // k, and `gate` is that of `kernels.moe.gate`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.moe.gate import Gate, apply_gate
from pelton.kernels.moe.sort_by_expert import RoutedRows


def gate_up_product_reference(
    x: Float[Tensor, "T D"],
    routed: RoutedRows,
    weight: Float[Tensor, "E 2F D"],
    bias: Float[Tensor, "E 2F"] | None,
    gate: Gate,
) -> Float[Tensor, "N F"]:
    tokens = routed.order.long() // routed.top_k
    gate_up = x.new_zeros((routed.num_rows, weight.shape[1]), dtype=torch.float32)
    for expert, first, end in routed.tiles.tolist():
        product = x[tokens[first:end]].float() @ weight[expert].float().T
        gate_up[first:end] = product if bias is None else product + bias[expert].float()
    return apply_gate(gate_up, gate).to(x.dtype)


def down_product_reference(
    hidden: Float[Tensor, "N F"],
    routed: RoutedRows,
    weight: Float[Tensor, "E D F"],
    bias: Float[Tensor, "E D"] | None,
) -> Float[Tensor, "N D"]:
    out = hidden.new_zeros((routed.num_rows, weight.shape[1]))
    for expert, first, end in routed.tiles.tolist():
        product = hidden[first:end].float() @ weight[expert].float().T
        product = product if bias is None else product + bias[expert].float()
        out[routed.order[first:end].long()] = product.to(hidden.dtype)
    return out
