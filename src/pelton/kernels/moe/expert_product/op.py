# SPDX-License-Identifier: Apache-2.0
"""The public functions for the experts' products with plain weights."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_cpu, on_meta
from pelton.kernels.moe.expert_product.cost import expert_product_cost
from pelton.kernels.moe.expert_product.cpu import down_product_cpu, gate_up_product_cpu
from pelton.kernels.moe.expert_product.reference import (
    down_product_reference,
    gate_up_product_reference,
)
from pelton.kernels.moe.expert_product.triton import down_product_triton, gate_up_product_triton
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.sort_by_expert import RoutedRows
from pelton.kernels.triton_runtime import runs_triton
from pelton.perf.cost import log_cost

GateUp = Callable[[Tensor, RoutedRows, Tensor, Tensor | None, Gate], Tensor]
Down = Callable[[Tensor, RoutedRows, Tensor, Tensor | None], Tensor]


def _gate_up_product_meta(
    x: Float[Tensor, "T D"],
    routed: RoutedRows,
    weight: Float[Tensor, "E 2F D"],
    bias: Float[Tensor, "E 2F"] | None,
    gate: Gate,
) -> Float[Tensor, "N F"]:
    num_experts, out_features, in_features = weight.shape
    cost = expert_product_cost(
        x.shape[0], routed.top_k, num_experts, in_features, out_features, x.element_size(),
        8 * weight.element_size(), is_gated=True,
    )  # fmt: skip
    log_cost("gate_up_product", cost)
    return x.new_empty((routed.num_rows, out_features // 2))


def _down_product_meta(
    hidden: Float[Tensor, "N F"],
    routed: RoutedRows,
    weight: Float[Tensor, "E D F"],
    bias: Float[Tensor, "E D"] | None,
) -> Float[Tensor, "N D"]:
    num_experts, out_features, in_features = weight.shape
    cost = expert_product_cost(
        hidden.shape[0] // routed.top_k, routed.top_k, num_experts, in_features, out_features,
        hidden.element_size(), 8 * weight.element_size(), is_gated=False,
    )  # fmt: skip
    log_cost("down_product", cost)
    return hidden.new_empty((routed.num_rows, out_features))


GATE_UP_PRODUCT: Dispatch[GateUp] = Dispatch(
    "gate_up_product",
    Implementation("meta", on_meta, _gate_up_product_meta),
    Implementation("triton", runs_triton, gate_up_product_triton),
    Implementation("cpu", on_cpu, gate_up_product_cpu),
    Implementation("reference", anywhere, gate_up_product_reference),
)
DOWN_PRODUCT: Dispatch[Down] = Dispatch(
    "down_product",
    Implementation("meta", on_meta, _down_product_meta),
    Implementation("triton", runs_triton, down_product_triton),
    Implementation("cpu", on_cpu, down_product_cpu),
    Implementation("reference", anywhere, down_product_reference),
)


def gate_up_product(
    x: Float[Tensor, "T D"],
    routed: RoutedRows,
    weight: Float[Tensor, "E 2F D"],
    bias: Float[Tensor, "E 2F"] | None,
    gate: Gate,
) -> Float[Tensor, "N F"]:
    """Gated hidden states, rows sorted by expert. Gate and up rows of `weight` are interleaved;
    the last axis of x and weight is contiguous. The result is new memory."""
    assert x.shape[1] == weight.shape[2], (x.shape, weight.shape)
    assert x.shape[0] * routed.top_k == routed.num_rows, (x.shape, routed.num_rows, routed.top_k)
    assert x.stride(1) == weight.stride(2) == 1, (x.stride(), weight.stride())
    return GATE_UP_PRODUCT.select(x.device, x.dtype)(x, routed, weight, bias, gate)


def down_product(
    hidden: Float[Tensor, "N F"],
    routed: RoutedRows,
    weight: Float[Tensor, "E D F"],
    bias: Float[Tensor, "E D"] | None,
) -> Float[Tensor, "N D"]:
    """Takes rows sorted by expert, gives them in routed order: token t's choice j at t * k + j.
    The last axis of both is contiguous; the result is new memory."""
    assert hidden.shape == (routed.num_rows, weight.shape[2]), (hidden.shape, weight.shape)
    assert hidden.stride(1) == weight.stride(2) == 1, (hidden.stride(), weight.stride())
    return DOWN_PRODUCT.select(hidden.device, hidden.dtype)(hidden, routed, weight, bias)
