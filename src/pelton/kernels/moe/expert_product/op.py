# SPDX-License-Identifier: Apache-2.0
"""The public functions for the experts' products with plain weights."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_cpu, on_meta
from pelton.kernels.moe.expert_product.cost import expert_product_cost
from pelton.kernels.moe.expert_product.cpu import expert_product_cpu
from pelton.kernels.moe.expert_product.reference import expert_product_reference
from pelton.kernels.moe.expert_product.triton import expert_product_triton, new_rows
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.sort_by_expert import RoutedRows
from pelton.kernels.triton_runtime import runs_triton
from pelton.perf.cost import log_cost

ExpertProduct = Callable[[Tensor, RoutedRows, Tensor, Tensor | None, Gate | None], Tensor]


def log_product(
    name: str,
    x: Tensor,
    routed: RoutedRows,
    weight_shape: tuple[int, ...],
    weight_bits: float,
    gate: Gate | None,
) -> Tensor:
    """An empty result on `meta`, its cost logged. `weight_shape` is [E, F, D]."""
    num_experts, out_features, in_features = weight_shape
    cost = expert_product_cost(
        routed.num_rows // routed.top_k, routed.top_k, num_experts, in_features, out_features,
        x.element_size(), weight_bits, is_gated=gate is not None,
    )  # fmt: skip
    log_cost(name, cost)
    return new_rows(x, routed, out_features, gate)


def _expert_product_meta(
    x: Float[Tensor, "n D"],
    routed: RoutedRows,
    weight: Float[Tensor, "E F D"],
    bias: Float[Tensor, "E F"] | None,
    gate: Gate | None = None,
) -> Float[Tensor, "N f"]:
    name = "gate_up_product" if gate else "down_product"
    return log_product(name, x, routed, weight.shape, 8 * weight.element_size(), gate)


_IMPLEMENTATIONS: tuple[Implementation[ExpertProduct], ...] = (
    Implementation("meta", on_meta, _expert_product_meta),
    Implementation("triton", runs_triton, expert_product_triton),
    Implementation("cpu", on_cpu, expert_product_cpu),
    Implementation("reference", anywhere, expert_product_reference),
)
GATE_UP_PRODUCT: Dispatch[ExpertProduct] = Dispatch("gate_up_product", *_IMPLEMENTATIONS)
DOWN_PRODUCT: Dispatch[ExpertProduct] = Dispatch("down_product", *_IMPLEMENTATIONS)


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
    return DOWN_PRODUCT.select(hidden.device, hidden.dtype)(hidden, routed, weight, bias, None)
