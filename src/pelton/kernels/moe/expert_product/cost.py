# SPDX-License-Identifier: Apache-2.0
"""The cost of the experts' products. Where rows go is not known from shapes: routing counts as
uniform, under which T tokens of k choices meet E (1 - (1 - k / E)^T) distinct experts."""

from pelton.perf.cost import OpCost


def num_distinct_experts(num_tokens: int, top_k: int, num_experts: int) -> float:
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def expert_product_cost(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    in_features: int,
    out_features: int,
    element_bytes: int,
    weight_bits: float,
    *,
    is_gated: bool,
) -> OpCost:
    """`out_features` counts gate and up; a gated product reads each token once and writes half
    its columns. `weight_bits` is what an element of the weight takes, its share of scales too."""
    num_rows = num_tokens * top_k
    num_read = num_tokens if is_gated else num_rows
    num_written = num_rows * (out_features // 2 if is_gated else out_features)
    weight = num_distinct_experts(num_tokens, top_k, num_experts) * out_features * in_features
    gate_flops = 6 * num_written if is_gated else 0
    return OpCost(
        2 * num_rows * in_features * out_features + gate_flops,
        (num_read * in_features + num_written) * element_bytes + int(weight * weight_bits / 8),
    )
