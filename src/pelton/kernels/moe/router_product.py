# SPDX-License-Identifier: Apache-2.0
"""A router's logits: both sides in their own number format, summed and kept in float32."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta
from pelton.kernels.invariant_product import invariant_linear
from pelton.kernels.linear import vector_linear
from pelton.kernels.triton_runtime import runs_triton
from pelton.perf.cost import log_cost, matmul_cost


def router_product_reference(
    x: Float[Tensor, "T D"], weight: Float[Tensor, "E D"]
) -> Float[Tensor, "T E"]:
    return x.float() @ weight.float().T


def _router_product_bfloat16(
    x: Float[Tensor, "T D"], weight: Float[Tensor, "E D"]
) -> Float[Tensor, "T E"]:
    """The library's, but for one token, as `linear` has it."""
    if x.shape[0] == 1 and runs_triton(x.device, x.dtype):
        return vector_linear(x, weight, None, torch.float32)
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _router_product_triton(
    x: Float[Tensor, "T D"], weight: Float[Tensor, "E D"]
) -> Float[Tensor, "T E"]:
    return invariant_linear(x, weight, None, torch.float32)


def _router_product_meta(
    x: Float[Tensor, "T D"], weight: Float[Tensor, "E D"]
) -> Float[Tensor, "T E"]:
    cost = matmul_cost(x.shape[0], x.shape[1], weight.shape[0], x.element_size(), 4)
    log_cost("router_product", cost)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


def _takes_bfloat16(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype is torch.bfloat16


ROUTER_PRODUCT: Dispatch[Callable[[Tensor, Tensor], Tensor]] = Dispatch(
    "router_product",
    Implementation("meta", on_meta, _router_product_meta),
    Implementation("torch", _takes_bfloat16, _router_product_bfloat16, is_invariant=False),
    Implementation("triton", runs_triton, _router_product_triton),
    Implementation("reference", anywhere, router_product_reference),
)


def router_product(x: Float[Tensor, "T D"], weight: Float[Tensor, "E D"]) -> Float[Tensor, "T E"]:
    """float32, new memory."""
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.stride(1) == weight.stride(1) == 1, (x.stride(), weight.stride())
    return ROUTER_PRODUCT.select(x.device, x.dtype)(x, weight)
