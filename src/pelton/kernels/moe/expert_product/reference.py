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


def expert_product_reference(
    x: Float[Tensor, "n D"],
    routed: RoutedRows,
    weight: Float[Tensor, "E F D"],
    bias: Float[Tensor, "E F"] | None,
    gate: Gate | None = None,
) -> Float[Tensor, "N f"]:
    """The first product with a gate, the second without."""
    order = routed.order.long()
    rows = x[order // routed.top_k] if gate else x
    product = x.new_zeros((routed.num_rows, weight.shape[1]), dtype=torch.float32)
    for expert, first, end in routed.tiles.tolist():
        product[first:end] = rows[first:end].float() @ weight[expert].float().T
        if bias is not None:
            product[first:end] += bias[expert].float()
    if gate:
        return apply_gate(product, gate).to(x.dtype)
    return torch.zeros_like(product).index_copy(0, order, product).to(x.dtype)
