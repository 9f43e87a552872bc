# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Grouped products of routed rows with plain weights, gathered, gated and scattered on the way.

The tile of the weight is the left operand: its 64 or 128 features fill the matrix units' rows even
where an expert has one token, and packed formats unpack to exactly that side.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.moe.gate import Gate, gate_tile
from pelton.kernels.moe.sort_by_expert import RoutedRows
from pelton.kernels.triton_runtime import cdiv, tl, triton


@triton.jit
def tile_rows_of(tiles_ptr, order_ptr, top_k, IS_GATED: tl.constexpr, BLOCK_T: tl.constexpr):
    """The program's expert, its rows in x, its rows in the output, and which of them exist."""
    entry_ptr = tiles_ptr + tl.program_id(1) * 3
    expert = tl.load(entry_ptr).to(tl.int64)
    first = tl.load(entry_ptr + 1)
    end = tl.load(entry_ptr + 2)
    places = first + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    is_row = places < end
    order = tl.load(order_ptr + places, mask=is_row, other=0)
    places = places.to(tl.int64)
    order = order.to(tl.int64)
    # Gathers tokens into sorted rows on the way in, scatters sorted rows on the way out.
    if IS_GATED:
        return expert, order // top_k, places, is_row
    return expert, places, order, is_row


@triton.jit
def store_tile(
    acc,
    out_ptr,
    stride_on,
    out_rows,
    is_row,
    out_features,
    alpha,
    limit,
    offset,
    IS_GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """`acc` is [BLOCK_F, BLOCK_T] with its bias; `out_features` counts gate and up."""
    values = tl.trans(acc)  # [BLOCK_T, BLOCK_F]
    if IS_GATED:
        values = gate_tile(values, alpha, limit, offset, BLOCK_T, BLOCK_F)
        features = tl.program_id(0) * (BLOCK_F // 2) + tl.arange(0, BLOCK_F // 2)
        is_feature = features < out_features // 2
    else:
        features = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
        is_feature = features < out_features
    tile_ptr = out_ptr + out_rows[:, None] * stride_on + features[None, :]
    tl.store(tile_ptr, values, mask=is_row[:, None] & is_feature[None, :])


@triton.jit
def _expert_product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    tiles_ptr,
    order_ptr,
    out_ptr,
    stride_xn,
    stride_we,
    stride_wf,
    stride_be,
    stride_on,
    top_k,
    in_features,
    out_features,
    alpha,
    limit,
    offset,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # The end of an unused entry is 0.
    if tl.load(tiles_ptr + tl.program_id(1) * 3 + 2) == 0:
        return
    expert, x_rows, out_rows, is_row = tile_rows_of(tiles_ptr, order_ptr, top_k, IS_GATED, BLOCK_T)
    features = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    is_feature = features < out_features
    row_ptr = weight_ptr + expert * stride_we + features.to(tl.int64)[:, None] * stride_wf
    column_ptr = x_ptr + x_rows[None, :] * stride_xn
    acc = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
    for start in range(0, in_features, BLOCK_D):
        dims = start + tl.arange(0, BLOCK_D)  # [BLOCK_D]
        is_dim = dims < in_features
        w_mask = is_feature[:, None] & is_dim[None, :]
        x_mask = is_dim[:, None] & is_row[None, :]
        weight = tl.load(row_ptr + dims[None, :], mask=w_mask, other=0.0)  # [BLOCK_F, BLOCK_D]
        x = tl.load(column_ptr + dims[:, None], mask=x_mask, other=0.0)  # [BLOCK_D, BLOCK_T]
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * stride_be + features, mask=is_feature, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    store_tile(
        acc, out_ptr, stride_on, out_rows, is_row, out_features, alpha, limit, offset,
        IS_GATED, BLOCK_T, BLOCK_F,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProductTiles:
    block_f: int
    block_d: int
    num_warps: int
    num_stages: int


def tune(tile_rows: int, element_bytes: int) -> ProductTiles:
    """Few rows: narrow tiles of features, so that one expert already spreads over the card, and
    deep ones of D, so that many loads are in flight. float32, for checking, takes small tiles."""
    if element_bytes > 2:
        return ProductTiles(block_f=32, block_d=32, num_warps=4, num_stages=1)
    if tile_rows <= 32:
        return ProductTiles(block_f=64, block_d=128, num_warps=4, num_stages=4)
    return ProductTiles(block_f=128, block_d=64, num_warps=8, num_stages=3)


def new_rows(
    x: Tensor, routed: RoutedRows, out_features: int, gate: Gate | None, dtype: Any = None
) -> Float[Tensor, "N f"]:
    """Memory for a product: half of the columns behind a gate, which takes two each."""
    shape = routed.num_rows, out_features // 2 if gate else out_features
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device)


def routed_arguments(routed: RoutedRows, gate: Gate | None, out: Tensor) -> dict[str, Any]:
    """Of `tile_rows_of` and `store_tile`."""
    numbers = gate or Gate()
    return {
        "tiles_ptr": routed.tiles,
        "order_ptr": routed.order,
        "out_ptr": out,
        "stride_on": out.stride(0),
        "top_k": routed.top_k,
        "alpha": numbers.alpha,
        "limit": numbers.limit,
        "offset": numbers.offset,
        "IS_GATED": gate is not None,
        "BLOCK_T": routed.tile_rows,
    }


def expert_product_triton(
    x: Float[Tensor, "n D"],
    routed: RoutedRows,
    weight: Float[Tensor, "E F D"],
    bias: Float[Tensor, "E F"] | None,
    gate: Gate | None = None,
) -> Float[Tensor, "N f"]:
    _, out_features, in_features = weight.shape
    out = new_rows(x, routed, out_features, gate)
    if routed.num_rows == 0:
        return out
    tiles = tune(routed.tile_rows, x.element_size())
    _expert_product_kernel[(cdiv(out_features, tiles.block_f), routed.tiles.shape[0])](
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=weight if bias is None else bias,
        stride_xn=x.stride(0),
        stride_we=weight.stride(0),
        stride_wf=weight.stride(1),
        stride_be=0 if bias is None else bias.stride(0),
        in_features=in_features,
        out_features=out_features,
        HAS_BIAS=bias is not None,
        **routed_arguments(routed, gate, out),
        BLOCK_F=tiles.block_f,
        BLOCK_D=tiles.block_d,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out
