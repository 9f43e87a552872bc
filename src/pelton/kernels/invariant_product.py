# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Products whose rows have the same bits however many rows there are.

A library picks a kernel, and with it the order of a sum, by the number of rows. Here every element
is one chain over the inputs in ascending order, whatever the tile. The tile of the weight is the
left operand: its 64 or 128 features fill the matrix instruction's rows even where there is one
token, so that one token and thousands meet the same instruction, and only its width, the tokens,
follows their number. In bfloat16 many tokens have a kernel of their own on Hopper
(`hopper_product`), bit for bit. Of a weight with few outputs the inputs are cut in parts, whose
sums are added in order: how many follows from the weight's shape alone.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.hopper_product import launch_hopper_product, runs_hopper_product
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


@triton.jit(do_not_specialize=["num_tokens"])
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


@triton.jit
def _sum_parts_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    out_features,
    NUM_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    mask = features < out_features
    row_ptr = partial_ptr + token * NUM_PARTS * out_features + features
    total = tl.zeros([BLOCK_F], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(row_ptr + part * out_features, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + features, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_features + features, total, mask=mask)


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
    num_tokens: int,
    in_features: int,
    out_features: int,
    num_products: int,
    element_bytes: int,
    num_programs: int,
) -> InvariantTiles:
    """The largest tile that makes a program for each of `num_programs` multiprocessors; under 64
    tokens, where reading the weight is what takes the time, one as wide as the tokens, with as many
    pieces on their way as there is room for, if the tokens are 16 at most or few programs share a
    multiprocessor. float32, for checking, has one tile."""
    if element_bytes > 2:
        return InvariantTiles(block_t=32, block_f=32, block_d=32, num_warps=4, num_stages=1)
    for tiles in _LARGE_TILES:
        count = cdiv(num_tokens, tiles.block_t) * cdiv(out_features, tiles.block_f) * num_products
        is_tall = num_tokens > max(_MAX_FEW_TOKENS, tiles.block_t // 2)
        if is_tall and count >= num_programs:
            return tiles
    if num_tokens > _MAX_FEW_TOKENS:
        return InvariantTiles(block_t=128, block_f=64, block_d=64, num_warps=4, num_stages=4)
    block_t = max(next_power_of_2(num_tokens), 16)
    # A last piece of long rows that is half empty costs less than twice as many pieces.
    block_d = 128 if in_features % 128 == 0 or in_features >= 1024 else 64
    bytes_ahead = 2**17 if cdiv(out_features, 64) * num_products <= num_programs else 2**16
    if block_t == 16:
        bytes_ahead = 2**17 + 2**14
    num_stages = 1 + max(bytes_ahead // (2 * block_d * (64 + block_t)), 2)
    # No more than there are pieces: with few inputs, as a head's, the room is another program's.
    num_stages = min(num_stages, cdiv(in_features, block_d), 8)
    return InvariantTiles(block_t, 64, block_d, num_warps=4, num_stages=max(num_stages, 1))


_MAX_FEW_TOKENS = 64
_MAX_NARROW = 512
_MAX_PARTS = 16
_PART_MULTIPLE = 64


def count_parts(in_features: int, out_features: int) -> int:
    """How many parts of equal length the inputs are cut in: as many as spread a narrow weight, such
    as a router's, over the card; 1 for others. Of the shape alone, never of the number of rows."""
    if out_features > _MAX_NARROW:
        return 1
    counts = range(1, _MAX_PARTS + 1)
    return max((n for n in counts if in_features % (n * _PART_MULTIPLE) == 0), default=1)


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
        num_tokens, in_features, out_features, num_products, x.element_size(),
        num_multiprocessors(x.device),
    )  # fmt: skip
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


def _cut(rows: Float[Tensor, "T D"], num_parts: int) -> Float[Tensor, "n T D/n"]:
    width = rows.shape[1] // num_parts
    return rows.as_strided((num_parts, rows.shape[0], width), (width, rows.stride(0), 1))


def invariant_linear(
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "T F"]:
    """In `x`'s number format, or in `dtype`."""
    num_tokens, (out_features, in_features) = x.shape[0], weight.shape
    out = torch.empty((num_tokens, out_features), dtype=dtype or x.dtype, device=x.device)
    num_parts = count_parts(in_features, out_features)
    if num_parts == 1 and num_tokens > _MAX_FEW_TOKENS and runs_hopper_product(x, weight):
        launch_hopper_product(x, weight, bias, out)
        return out
    if num_parts == 1 or num_tokens == 0:
        invariant_product(x[None], weight[None], bias, out[None])
        return out
    shape = (num_tokens, num_parts, out_features)
    partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    invariant_product(_cut(x, num_parts), _cut(weight, num_parts), None, partial.transpose(0, 1))
    block_f = min(next_power_of_2(out_features), 256)
    _sum_parts_kernel[(num_tokens, cdiv(out_features, block_f))](
        partial_ptr=partial,
        bias_ptr=out if bias is None else bias,
        out_ptr=out,
        out_features=out_features,
        NUM_PARTS=num_parts,
        HAS_BIAS=bias is not None,
        BLOCK_F=block_f,
        num_warps=2,
        **overlap_options(x.device, num_tokens),
    )
    return out
