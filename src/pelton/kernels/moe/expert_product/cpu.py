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


def product_by_expert(
    x: Float[Tensor, "n D"],
    routed: RoutedRows,
    weight_of: WeightOf,
    out_features: int,
    bias: Float[Tensor, "E F"] | None,
    gate: Gate | None,
) -> Float[Tensor, "N f"]:
    rows = x
    if gate:
        rows = x.index_select(0, torch.div(routed.order, routed.top_k, rounding_mode="floor"))
    out = x.new_empty((routed.num_rows, out_features // 2 if gate else out_features))
    for expert, first, end in routed.tiles.tolist():
        if end > first:
            expert_bias = None if bias is None else bias[expert]
            product = linear(rows[first:end], weight_of(expert), expert_bias)
            out[first:end] = apply_gate(product.float(), gate) if gate else product
    return out if gate else torch.empty_like(out).index_copy_(0, routed.order.long(), out)


def expert_product_cpu(
    x: Float[Tensor, "n D"],
    routed: RoutedRows,
    weight: Float[Tensor, "E F D"],
    bias: Float[Tensor, "E F"] | None,
    gate: Gate | None = None,
) -> Float[Tensor, "N f"]:
    return product_by_expert(x, routed, weight.__getitem__, weight.shape[1], bias, gate)
