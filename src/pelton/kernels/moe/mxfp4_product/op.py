# SPDX-License-Identifier: Apache-2.0
"""The public functions for the experts' products with MXFP4 weights."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from pelton.kernels.dispatch import (
    Dispatch,
    Implementation,
    anywhere,
    must_be_invariant,
    on_cpu,
    on_meta,
)
from pelton.kernels.moe.expert_product.op import log_product
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product.cpu import mxfp4_product_cpu
from pelton.kernels.moe.mxfp4_product.hopper import (
    fits_rows,
    mxfp4_down_product_hopper,
    mxfp4_gate_up_product_hopper,
)
from pelton.kernels.moe.mxfp4_product.hopper_one import LoneToken
from pelton.kernels.moe.mxfp4_product.hopper_split import MAX_SPLIT_ROWS
from pelton.kernels.moe.mxfp4_product.hopper_tiles import TILE_F
from pelton.kernels.moe.mxfp4_product.reference import (
    BITS,
    BLOCK,
    PACKED,
    mxfp4_product_reference,
)
from pelton.kernels.moe.mxfp4_product.triton import mxfp4_product_triton
from pelton.kernels.moe.routing import Routing, SoftmaxTopK
from pelton.kernels.moe.sort_by_expert import TALLEST_TILE, RoutedRows, sort_by_expert
from pelton.kernels.triton_runtime import runs_hopper, runs_triton

Routed = RoutedRows | LoneToken

# The rows are any, as `_check` lets a lone token pass to Hopper's products alone.
GateUp = Callable[[Tensor, Any, Tensor, Tensor, Tensor | None, Gate], Tensor]
Down = Callable[[Tensor, Any, Tensor, Tensor, Tensor | None], Tensor]


def _mxfp4_product_meta(
    x: Float[Tensor, "n D"],
    routed: RoutedRows,
    blocks: UInt8[Tensor, "E F D/32 16"],
    scales: UInt8[Tensor, "E F D/32"],
    bias: Float[Tensor, "E F"] | None,
    gate: Gate | None = None,
) -> Float[Tensor, "N f"]:
    num_experts, out_features, num_blocks = scales.shape
    shape = num_experts, out_features, num_blocks * BLOCK
    name = "mxfp4_gate_up_product" if gate else "mxfp4_down_product"
    return log_product(name, x, routed, shape, BITS, gate)


def takes_hopper(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16 and runs_hopper(device)


def takes_tiles(blocks: UInt8[Tensor, "E F D/32 16"], dtype: torch.dtype) -> bool:
    """Whether published weights for activations of `dtype` pay to be put in tiles when they are
    loaded."""
    _, out_features, num_blocks, _ = blocks.shape
    is_fit = out_features % TILE_F == 0 and fits_rows(num_blocks * BLOCK)
    return is_fit and takes_hopper(blocks.device, dtype)


def _is_tiled(blocks: Tensor) -> bool:
    return blocks.dtype is torch.int32


def tallest_tile(*weights: Tensor) -> int:
    """How many rows of an expert may make a tile, for products with these weights. Where results
    may not depend on the number of rows, the Hopper kernel for many sums as that for few, in tiles
    of half the height."""
    is_split = must_be_invariant() and any(_is_tiled(blocks) for blocks in weights)
    return MAX_SPLIT_ROWS if is_split else TALLEST_TILE


def route_rows(
    routing: Routing, gate_up_blocks: Tensor, down_blocks: Tensor
) -> tuple[Routed, Float[Tensor, "T k"]]:
    """A step's rows as both products want them, and the weights of their results."""
    is_tiled = _is_tiled(gate_up_blocks) and _is_tiled(down_blocks)
    if is_tiled and isinstance(routing, SoftmaxTopK) and routing.logits.shape[0] == 1:
        token = LoneToken.of(routing)
        return token, token.weights
    expert_ids, weights = routing.choose()
    tallest = tallest_tile(gate_up_blocks, down_blocks)
    return sort_by_expert(expert_ids, gate_up_blocks.shape[0], tallest), weights


MXFP4_GATE_UP_PRODUCT: Dispatch[GateUp] = Dispatch(
    "mxfp4_gate_up_product",
    Implementation("meta", on_meta, _mxfp4_product_meta),
    Implementation("hopper", takes_hopper, mxfp4_gate_up_product_hopper),
    Implementation("triton", runs_triton, mxfp4_product_triton),
    Implementation("cpu", on_cpu, mxfp4_product_cpu),
    Implementation("reference", anywhere, mxfp4_product_reference),
)
MXFP4_DOWN_PRODUCT: Dispatch[Down] = Dispatch(
    "mxfp4_down_product",
    Implementation("meta", on_meta, _mxfp4_product_meta),
    Implementation("hopper", takes_hopper, mxfp4_down_product_hopper),
    Implementation("triton", runs_triton, mxfp4_product_triton),
    Implementation("cpu", on_cpu, mxfp4_product_cpu),
    Implementation("reference", anywhere, mxfp4_product_reference),
)


def mxfp4_gate_up_product(
    x: Float[Tensor, "T D"],
    routed: Routed,
    blocks: UInt8[Tensor, "E 2F D/32 16"],
    scales: UInt8[Tensor, "E 2F D/32"],
    bias: Float[Tensor, "E 2F"] | None,
    gate: Gate,
) -> Float[Tensor, "N F"]:
    """`gate_up_product` with packed weights: gate and up rows interleaved, both tensors
    contiguous, in the layout of published checkpoints, or, where `takes_tiles` says so and several
    times as fast there, what `tile_weights` makes of them. The result is new memory."""
    _check(x, routed, blocks, scales)
    assert x.shape[0] * routed.top_k == routed.num_rows, (x.shape, routed.num_rows, routed.top_k)
    run = MXFP4_GATE_UP_PRODUCT.select(x.device, x.dtype)
    return run(x, routed, blocks, scales, bias, gate)


def mxfp4_down_product(
    hidden: Float[Tensor, "N F"],
    routed: Routed,
    blocks: UInt8[Tensor, "E D F/32 16"],
    scales: UInt8[Tensor, "E D F/32"],
    bias: Float[Tensor, "E D"] | None,
) -> Float[Tensor, "N D"]:
    """`down_product` with packed weights, as `mxfp4_gate_up_product` takes them. The result is new
    memory. Of a lone token the weights are written, too, and it is to be the next kernel behind
    that product, or behind one that does not overlap."""
    _check(hidden, routed, blocks, scales)
    assert hidden.shape[0] == routed.num_rows, (hidden.shape, routed.num_rows)
    run = MXFP4_DOWN_PRODUCT.select(hidden.device, hidden.dtype)
    return run(hidden, routed, blocks, scales, bias)


def _check(x: Tensor, routed: Routed, blocks: Tensor, scales: Tensor) -> None:
    assert scales.dtype is torch.uint8, scales.dtype
    is_tiled = _is_tiled(blocks) and takes_hopper(x.device, x.dtype)
    if isinstance(routed, LoneToken):
        assert is_tiled, "a lone token is for weights in tiles"
        assert routed.logits.shape[1] == blocks.shape[0], (routed.logits.shape, blocks.shape)
    assert is_tiled or blocks.dtype is torch.uint8, (blocks.dtype, x.device, x.dtype)
    assert not is_tiled or fits_rows(x.shape[1]), x.shape
    assert scales.is_contiguous(), scales.stride()
    packed = PACKED // blocks.itemsize
    if is_tiled:
        scales = scales[:, :, :-1]
    assert blocks.shape == (*scales.shape, packed), (blocks.shape, scales.shape)
    assert blocks.shape[2] * BLOCK == x.shape[1], (blocks.shape, x.shape)
    assert blocks.is_contiguous(), blocks.stride()
    assert x.stride(1) == 1, x.stride()
