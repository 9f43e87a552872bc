# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Products whose rows have the same bits however many rows there are.

A library picks a kernel, and with it the order of a sum, by the number of rows. Here every element
is one chain over the inputs in ascending order, never split, whatever the tile. The tile of the
weight is the left operand: its 64 or 128 features fill the matrix instruction's rows even where
there is one token, so that one token and thousands meet the same instruction, and only its width,
the tokens, follows their number.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.triton_runtime import (
    cdiv,
    next_power_of_2,
    num_multiprocessors,
    overlap_options,
    tl,
    triton,
)


@triton.jit
def locate_tile(num_tokens, BLOCK_T: tl.constexpr, num_features, BLOCK_F: tl.constexpr):
    """The program's first token and feature. Programs side by side form blocks of 8 tiles of
    tokens, so that both operands of neighbours are in the card's cache."""
    num_token_tiles = tl.cdiv(num_tokens, BLOCK_T)
    per_group = 8 * tl.cdiv(num_features, BLOCK_F)
    index = tl.program_id(0)
    first = index // per_group * 8
    height = tl.minimum(num_token_tiles - first, 8)
    place = index % per_group
    return (first + place % height) * BLOCK_T, place // height * BLOCK_F


@triton.jit
def _invariant_product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    stride_xb,
    stride_xt,
    stride_wb,
    stride_wf,
    stride_wd,
    stride_ob,
    stride_ot,
    num_tokens,
    in_features,
    out_features,
    HAS_BIAS: tl.constexpr,
    HAS_RAGGED_D: tl.constexpr,
    HAS_RAGGED_F: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first_token, first_feature = locate_tile(num_tokens, BLOCK_T, out_features, BLOCK_F)
    batch = tl.program_id(1).to(tl.int64)
    tokens = first_token + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    features = first_feature + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    # Rows past the end read the last one and are not stored: loads without a mask are quicker.
    x_rows = tl.minimum(tokens, num_tokens - 1).to(tl.int64)[None, :] * stride_xt
    w_rows = features
    if HAS_RAGGED_F:
        w_rows = tl.minimum(features, out_features - 1)
    w_rows = w_rows.to(tl.int64)[:, None] * stride_wf
    x_tile_ptr = x_ptr + batch * stride_xb + x_rows + dims[:, None]
    w_tile_ptr = weight_ptr + batch * stride_wb + w_rows + dims[None, :] * stride_wd
    acc = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
    for start in range(0, in_features, BLOCK_D):
        if HAS_RAGGED_D:
            is_dim = start + dims < in_features
            weight = tl.load(w_tile_ptr, mask=is_dim[None, :], other=0.0)  # [BLOCK_F, BLOCK_D]
            x = tl.load(x_tile_ptr, mask=is_dim[:, None], other=0.0)  # [BLOCK_D, BLOCK_T]
        else:
            weight = tl.load(w_tile_ptr)
            x = tl.load(x_tile_ptr)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
        w_tile_ptr += BLOCK_D * stride_wd
        x_tile_ptr += BLOCK_D
    if HAS_BIAS:
        bias = tl.load(bias_ptr + features, mask=features < out_features, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    is_out = (tokens < num_tokens)[:, None] & (features < out_features)[None, :]
    out_rows = tokens.to(tl.int64)[:, None] * stride_ot
    out_tile_ptr = out_ptr + batch * stride_ob + out_rows + features[None, :]
    tl.store(out_tile_ptr, tl.trans(acc), mask=is_out)


@dataclass(frozen=True, slots=True)
class InvariantTiles:
    block_t: int
    block_f: int
    block_d: int
    num_warps: int
    num_stages: int


_LARGE_TILES = (
    InvariantTiles(block_t=256, block_f=128, block_d=64, num_warps=8, num_stages=3),
    InvariantTiles(block_t=128, block_f=128, block_d=64, num_warps=8, num_stages=4),
)


def tune(
    num_tokens: int, out_features: int, num_products: int, element_bytes: int, num_programs: int
) -> InvariantTiles:
    """The largest tile that makes a program for each of `num_programs` multiprocessors; under 64
    tokens, where reading the weight is what takes the time, one as wide as the tokens, in more
    pieces ahead the fewer programs share a multiprocessor. float32, for checking, has one tile."""
    if element_bytes > 2:
        return InvariantTiles(block_t=32, block_f=32, block_d=32, num_warps=4, num_stages=1)
    for tiles in _LARGE_TILES:
        count = cdiv(num_tokens, tiles.block_t) * cdiv(out_features, tiles.block_f) * num_products
        if num_tokens > 64 and count >= num_programs:
            return tiles
    if num_tokens > 64:
        return InvariantTiles(block_t=128, block_f=64, block_d=64, num_warps=4, num_stages=4)
    block_t = max(next_power_of_2(num_tokens), 16)
    is_few = cdiv(out_features, 64) * num_products <= 2 * num_programs
    return InvariantTiles(
        block_t=block_t, block_f=64, block_d=128, num_warps=4, num_stages=5 if is_few else 3
    )


def invariant_product(
    x: Float[Tensor, "B T D"],
    weight: Float[Tensor, "B F D"],
    bias: Float[Tensor, " F"] | None,
    out: Float[Tensor, "B T F"],
) -> None:
    """Writes x W^T + b of each b of B, summed in float32, in `out`'s number format. The last axis
    of `x` and of `out` is contiguous, of `weight` the last or the one before."""
    num_products, num_tokens, in_features = x.shape
    out_features = weight.shape[1]
    if num_tokens == 0:
        return
    tiles = tune(
        num_tokens, out_features, num_products, x.element_size(), num_multiprocessors(x.device)
    )
    num_tiles = cdiv(num_tokens, tiles.block_t) * cdiv(out_features, tiles.block_f)
    _invariant_product_kernel[(num_tiles, num_products)](
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=weight if bias is None else bias,
        out_ptr=out,
        stride_xb=x.stride(0),
        stride_xt=x.stride(1),
        stride_wb=weight.stride(0),
        stride_wf=weight.stride(1),
        stride_wd=weight.stride(2),
        stride_ob=out.stride(0),
        stride_ot=out.stride(1),
        num_tokens=num_tokens,
        in_features=in_features,
        out_features=out_features,
        HAS_BIAS=bias is not None,
        HAS_RAGGED_D=in_features % tiles.block_d != 0,
        HAS_RAGGED_F=out_features % tiles.block_f != 0,
        BLOCK_T=tiles.block_t,
        BLOCK_F=tiles.block_f,
        BLOCK_D=tiles.block_d,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **overlap_options(x.device, num_tokens),
    )


def invariant_linear(
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "T F"]:
    """In `x`'s number format, or in `dtype`."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype or x.dtype, device=x.device)
    invariant_product(x[None], weight[None], bias, out[None])
    return out
