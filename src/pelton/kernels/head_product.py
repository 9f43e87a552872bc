# SPDX-License-Identifier: Apache-2.0
"""A product of its own for each head: out[t, h] = x[t, h] W[h].

The library's batched product reads each head's weight once; it takes strided inputs, so nothing
is copied on the way in. The result is laid out head by head and returned as a view token by token.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta
from pelton.kernels.invariant_product import invariant_product
from pelton.kernels.triton_runtime import runs_triton
from pelton.perf.cost import OpCost, log_cost


def head_product_reference(
    x: Float[Tensor, "T H K"], weight: Float[Tensor, "H K N"]
) -> Float[Tensor, "T H N"]:
    return torch.einsum("thk,hkn->thn", x.float(), weight.float()).to(x.dtype)


def _head_product_library(
    x: Float[Tensor, "T H K"], weight: Float[Tensor, "H K N"]
) -> Float[Tensor, "T H N"]:
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def _head_product_triton(
    x: Float[Tensor, "T H K"], weight: Float[Tensor, "H K N"]
) -> Float[Tensor, "T H N"]:
    out = x.new_empty((weight.shape[0], x.shape[0], weight.shape[2]))
    invariant_product(x.transpose(0, 1), weight.transpose(1, 2), None, out)
    return out.transpose(0, 1)


def head_product_cost(
    num_tokens: int, num_heads: int, inner: int, columns: int, element_bytes: int
) -> OpCost:
    elements = num_heads * (num_tokens * (inner + columns) + inner * columns)
    return OpCost(2 * num_tokens * num_heads * inner * columns, elements * element_bytes)


def _head_product_meta(
    x: Float[Tensor, "T H K"], weight: Float[Tensor, "H K N"]
) -> Float[Tensor, "T H N"]:
    num_heads, inner, columns = weight.shape
    cost = head_product_cost(x.shape[0], num_heads, inner, columns, x.element_size())
    log_cost("head_product", cost)
    return x.new_empty((num_heads, x.shape[0], columns)).transpose(0, 1)


HEAD_PRODUCT: Dispatch[Callable[[Tensor, Tensor], Tensor]] = Dispatch(
    "head_product",
    Implementation("meta", on_meta, _head_product_meta),
    Implementation("torch", anywhere, _head_product_library, is_invariant=False),
    Implementation("triton", runs_triton, _head_product_triton),
    Implementation("reference", anywhere, head_product_reference),
)


def head_product(
    x: Float[Tensor, "T H K"], weight: Float[Tensor, "H K N"]
) -> Float[Tensor, "T H N"]:
    """New memory; the last axis is contiguous, the others may be laid out either way round."""
    assert x.shape[1:] == weight.shape[:2], (x.shape, weight.shape)
    return HEAD_PRODUCT.select(x.device, x.dtype)(x, weight)
