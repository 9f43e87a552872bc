# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The MXFP4 experts' products on Hopper where experts have few rows: bound by memory, and by the
instructions that unpack what comes from there.

Packed weights go from shared memory to the registers of the matrix units' left operand, where they
become e4m3, and nowhere else: one instruction looks up four codes in a table of eight bytes, and
the table holds their scale. An activation is a scale for its row times the sum of two numbers of
e4m3, the second a sixteenth of what it says, which together hold every bit of a bfloat16 that is
worth 2^-20 of the row's largest or more. The matrix units add e4m3 products in fewer bits than
float32 has, so their sums of 128 are added up in float32. What comes out is as near to exact as
from products of bfloat16, whose weights take half as many instructions again to unpack.

A program has the features of one tile: two measured slower, for fewer programs then fit beside each
other. Weights that are not in tiles take the kernel of `triton`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product.hopper_one import launch_one_token_product
from pelton.kernels.moe.mxfp4_product.hopper_tall import launch_tall_product
from pelton.kernels.moe.mxfp4_product.hopper_tiles import CHUNK, TILE_F, scale_of, unpack
from pelton.kernels.moe.mxfp4_product.triton import mxfp4_product_triton
from pelton.kernels.moe.sort_by_expert import RoutedRows
from pelton.kernels.triton_runtime import cdiv, gl, gluon, hopper, next_power_of_2, tl, triton

MAX_TILE_ROWS = 32
"""Taller tiles: `hopper_tall`."""
_STAGES = 4
"""How many chunks have a place in shared memory, with four programs on a multiprocessor."""
_MAX_REGISTERS = 128
"""Of a thread, for four programs."""
_SCALES_AHEAD = 3
"""Rounds between the load of scales and their use."""


@triton.jit
def _split_rows_kernel(
    x_ptr, out_ptr, scales_ptr, stride_xt, in_features, width, BLOCK: tl.constexpr
):
    inputs = tl.arange(0, BLOCK)  # [BLOCK]
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * stride_xt + inputs, mask=inputs < in_features, other=0.0)
    x = x.to(tl.float32)
    # The power of two that brings the row's largest to [128, 256).
    exponent = tl.max(tl.abs(x)).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent, 40) - 7
    x = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    high = x.to(tl.float8e4nv)
    low = ((x - high.to(tl.float32)) * 16.0).to(tl.float8e4nv)
    # Of a thread of four, a word of its four, a half of it: the words and halves come first.
    high = high.reshape([BLOCK // 128, 4, 4, 2, 4]).permute(0, 2, 3, 1, 4).reshape([BLOCK])
    low = low.reshape([BLOCK // 128, 4, 4, 2, 4]).permute(0, 2, 3, 1, 4).reshape([BLOCK])
    out_row_ptr = out_ptr + row * 2 * width
    tl.store(out_row_ptr + inputs, high, mask=inputs < width)
    tl.store(out_row_ptr + width + inputs, low, mask=inputs < width)
    is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32)) == 1
    bits = tl.where(is_finite, exponent << 23, 0x7FC00000)
    tl.store(scales_ptr + row, bits.to(tl.float32, bitcast=True))


def split_rows(x: Float[Tensor, "T D"], num_chunks: int) -> tuple[Tensor, Float[Tensor, " T"]]:
    """e4m3 [T, 2, chunks] in the order of the unpacked weights, with zeros behind the last input,
    and the rows' scales: NaN where a row has what is not finite."""
    width = num_chunks * CHUNK
    parts = torch.empty((x.shape[0], 2, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _split_rows_kernel[(x.shape[0],)](
        x_ptr=x,
        out_ptr=parts,
        scales_ptr=scales,
        stride_xt=x.stride(0),
        in_features=x.shape[1],
        width=width,
        BLOCK=next_power_of_2(width),
        num_warps=4,
    )
    return parts, scales


@gluon.jit
def _fetch(
    w_tile, x_tile, w_ptrs, x_ptrs, is_word, is_row, AHEAD: gl.constexpr,
):  # fmt: skip
    hopper.async_copy.async_copy_global_to_shared(
        w_tile, w_ptrs + AHEAD * w_tile.shape[0], mask=is_word
    )
    hopper.async_copy.async_copy_global_to_shared(
        x_tile, x_ptrs + AHEAD * x_tile.shape[1], mask=is_row[:, None]
    )
    hopper.async_copy.commit_group()


@gluon.jit
def _feature_of(row, BLOCK_F: gl.constexpr):
    """The feature at a row of the program's tile."""
    return gl.program_id(0) * BLOCK_F + row // 16 * 16 + row % 8 * 2 + row % 16 // 8


@gluon.jit
def _mxfp4_product_kernel(
    x_ptr, x_scales_ptr, words_ptr, scales_ptr, bias_ptr, tiles_ptr, order_ptr, out_ptr,
    stride_xn, stride_be, stride_se, stride_biase, stride_on,
    top_k, num_scales, num_rounds, out_features, alpha, limit, offset,
    IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK_T: gl.constexpr, BLOCK_F: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr,
    SCALES_AHEAD: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    entry_ptr = tiles_ptr + gl.program_id(1) * 3
    end = gl.load(entry_ptr + 2)
    # The end of an unused entry is 0.
    if end == 0:
        return
    expert = gl.load(entry_ptr).to(gl.int64)
    first = gl.load(entry_ptr + 1)

    CHUNK_WORDS: gl.constexpr = BLOCK_F * CHUNK // 8
    # The rows' high parts, then their low ones.
    COLUMNS: gl.constexpr = 2 * BLOCK_T
    words_layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[BLOCK_F, 16],
    )  # fmt: skip
    # Each scale beside its four words.
    scales_3d: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[BLOCK_F, 4, 4],
    )  # fmt: skip
    scales_layout: gl.constexpr = gl.SliceLayout(2, scales_3d)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, COLUMNS, 32])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    x_layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    x_shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    # Copied as it lies in memory, read as [BLOCK_F, 16].
    w_shared: gl.constexpr = gl.SharedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0], [2, 4], [4, 8]]
    )
    copied: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    copy_layout: gl.constexpr = gl.BlockedLayout([4], [32], [num_warps], [0])
    # A tile each, and no ring: places are known when compiling, and no barrier stands between the
    # copy into one and the reads of another.
    w_tiles = ()
    x_tiles = ()
    for _ in gl.static_range(STAGES):
        w_tiles = w_tiles + (gl.allocate_shared_memory(gl.int32, [CHUNK_WORDS], copied),)  # type: ignore[assignment] # noqa: RUF005
        x_tiles = x_tiles + (gl.allocate_shared_memory(gl.float8e4nv, [COLUMNS, CHUNK], x_shared),)  # type: ignore[assignment] # noqa: RUF005

    tile = gl.program_id(0) * num_scales * BLOCK_F
    scales_tile = gl.program_id(0) * (num_scales + 1) * BLOCK_F
    words = gl.arange(0, CHUNK_WORDS, copy_layout)
    w_ptrs = words_ptr + expert * stride_be + tile * 4 + words
    rows = gl.arange(0, BLOCK_F, gl.SliceLayout(1, scales_layout))
    blocks = gl.arange(0, 4, gl.SliceLayout(0, scales_layout))
    scale_ptrs = scales_ptr + expert * stride_se + scales_tile
    scale_ptrs = scale_ptrs + rows[:, None] + (blocks * BLOCK_F)[None, :]

    columns = gl.arange(0, COLUMNS, gl.SliceLayout(1, x_layout))
    places = first + columns % BLOCK_T
    is_row = places < end
    x_rows = gl.load(order_ptr + places, mask=is_row, other=0) // top_k if IS_GATED else places
    dims = gl.arange(0, CHUNK, gl.SliceLayout(0, x_layout))
    x_rows = x_rows.to(gl.int64) * 2 + columns // BLOCK_T
    x_ptrs = x_ptr + (x_rows * stride_xn)[:, None] + dims[None, :]

    words_left = num_scales * (BLOCK_F * 4)
    scales_left = num_scales
    AHEAD: gl.constexpr = STAGES - 1
    for early in gl.static_range(AHEAD):
        _fetch(
            w_tiles[early], x_tiles[early], w_ptrs, x_ptrs,
            words + early * CHUNK_WORDS < words_left, is_row, early,
        )  # fmt: skip
    scales = ()
    for early in gl.static_range(SCALES_AHEAD):
        is_scale = blocks + early * 4 < scales_left
        early_ptrs = scale_ptrs + early * (4 * BLOCK_F)
        scales = scales + (gl.load(early_ptrs, mask=is_scale[None, :], other=0),)  # type: ignore[assignment] # noqa: RUF005
    zeros = gl.zeros([BLOCK_F, COLUMNS], gl.float32, acc_layout)
    acc, _ = gl.split(zeros.reshape([BLOCK_F, 2, BLOCK_T]).permute((0, 2, 1)))
    for _ in range(num_rounds):
        for stage in gl.static_range(STAGES):
            hopper.async_copy.wait_group(AHEAD - 1)
            hopper.fence_async_shared()
            # This chunk has landed for all warps, and all have done with the one before, whose
            # place the next copies take.
            gl.thread_barrier()
            _fetch(
                w_tiles[(stage + AHEAD) % STAGES], x_tiles[(stage + AHEAD) % STAGES],
                w_ptrs, x_ptrs, words + (stage + AHEAD) * CHUNK_WORDS < words_left, is_row,
                stage + AHEAD,
            )  # fmt: skip
            is_scale = blocks + (stage + SCALES_AHEAD) * 4 < scales_left
            new_ptrs = scale_ptrs + (stage + SCALES_AHEAD) * (4 * BLOCK_F)
            new = gl.load(new_ptrs, mask=is_scale[None, :], other=0)
            exponents = gl.expand_dims(scales[0].to(gl.int32), 2)  # type: ignore[misc]
            scales = scales[1:] + (new,)  # type: ignore[assignment] # noqa: RUF005
            exponents = exponents + gl.zeros([BLOCK_F, 4, 4], gl.int32, scales_3d)
            exponents = gl.convert_layout(
                exponents.reshape([BLOCK_F, 16]), words_layout, assert_trivial=True
            )
            chunk: gl.shared_memory_descriptor = w_tiles[stage]._reinterpret(
                gl.int32, [BLOCK_F, CHUNK // 8], w_shared
            )
            left = unpack(chunk.load(words_layout), exponents)
            left = gl.convert_layout(left, left_layout, assert_trivial=True)
            part = hopper.warpgroup_mma(
                left, x_tiles[stage].permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            # The product reads its left operand until here.
            part = hopper.warpgroup_mma_wait(0, deps=[part])
            part_high, part_low = gl.split(part.reshape([BLOCK_F, 2, BLOCK_T]).permute((0, 2, 1)))
            acc = acc + part_high + part_low * 0.0625
        w_ptrs += STAGES * CHUNK_WORDS
        x_ptrs += STAGES * CHUNK
        scale_ptrs += STAGES * (CHUNK // 32) * BLOCK_F
        words_left -= STAGES * CHUNK_WORDS
        scales_left -= STAGES * (CHUNK // 32)
    hopper.async_copy.wait_group(0)
    row_layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows = gl.arange(0, BLOCK_F, row_layout)
    largest_ptrs = scales_ptr + expert * stride_se + scales_tile + num_scales * BLOCK_F + rows
    places = first + gl.arange(0, BLOCK_T, gl.SliceLayout(0, acc.type.layout))
    is_row = places < end
    x_rows = gl.load(order_ptr + places, mask=is_row, other=0) // top_k if IS_GATED else places
    x_scales = gl.load(x_scales_ptr + x_rows, mask=is_row, other=0.0)
    acc = acc * scale_of(gl.load(largest_ptrs))[:, None] * x_scales[None, :]

    if HAS_BIAS:
        features = _feature_of(rows, BLOCK_F)
        bias = gl.load(
            bias_ptr + expert * stride_biase + features, mask=features < out_features, other=0.0
        )
        acc += bias.to(gl.float32)[:, None]
    # [F / 16, 8, T, 2]: neighbours lie in one thread.
    pairs = acc.reshape([BLOCK_F // 16, 2, 8, BLOCK_T]).permute((0, 2, 3, 1))
    low, high = gl.split(pairs)
    low = low.reshape([BLOCK_F // 2, BLOCK_T])
    high = high.reshape([BLOCK_F // 2, BLOCK_T])
    out_layout: gl.constexpr = low.type.layout
    places = first + gl.arange(0, BLOCK_T, gl.SliceLayout(0, out_layout))
    is_row = places < end
    out_rows = places if IS_GATED else gl.load(order_ptr + places, mask=is_row, other=0)
    pair = gl.program_id(0) * (BLOCK_F // 2) + gl.arange(
        0, BLOCK_F // 2, gl.SliceLayout(1, out_layout)
    )
    mask = (pair < out_features // 2)[:, None] & is_row[None, :]
    row_ptrs = out_ptr + (out_rows.to(gl.int64) * stride_on)[None, :]
    if IS_GATED:
        # Written so that a NaN stays one.
        low = gl.where(low > limit, limit, low)
        high = gl.where(high > limit, limit, gl.where(high < -limit, -limit, high))
        gated = low / (1.0 + gl.exp(-alpha * low)) * (high + offset)
        gl.store(row_ptrs + pair[:, None], gated.to(gl.bfloat16), mask=mask)
    else:
        gl.store(row_ptrs + 2 * pair[:, None], low.to(gl.bfloat16), mask=mask)
        gl.store(row_ptrs + 2 * pair[:, None] + 1, high.to(gl.bfloat16), mask=mask)


def mxfp4_gate_up_product_hopper(
    x: Float[Tensor, "T D"],
    routed: RoutedRows,
    blocks: Tensor,
    scales: Tensor,
    bias: Float[Tensor, "E 2F"] | None,
    gate: Gate,
) -> Float[Tensor, "N F"]:
    return _launch_product(x, routed, blocks, scales, bias, gate)


def mxfp4_down_product_hopper(
    hidden: Float[Tensor, "N F"],
    routed: RoutedRows,
    blocks: Tensor,
    scales: Tensor,
    bias: Float[Tensor, "E D"] | None,
) -> Float[Tensor, "N D"]:
    return _launch_product(hidden, routed, blocks, scales, bias, None)


def _launch_product(
    x: Tensor,
    routed: RoutedRows,
    blocks: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    gate: Gate | None,
) -> Tensor:
    if blocks.dtype is torch.uint8:
        return mxfp4_product_triton(x, routed, blocks, scales, bias, gate)
    out_features = blocks.shape[1] * TILE_F
    width = out_features // 2 if gate else out_features
    out = torch.empty((routed.num_rows, width), dtype=x.dtype, device=x.device)
    if routed.num_rows == 0:
        return out
    if not routed.is_sorted:
        launch_one_token_product(x, routed, blocks, scales, bias, gate, out)
        return out
    if routed.tile_rows > MAX_TILE_ROWS:
        launch_tall_product(x, routed, blocks, scales, bias, gate, out)
        return out
    num_tiles, num_scales = blocks.shape[1:3]
    num_rounds = cdiv(x.shape[1], CHUNK * _STAGES)
    # The chunks that a program starts to copy at the end are there too.
    parts, x_scales = split_rows(x, (num_rounds + 1) * _STAGES - 1)
    numbers = gate or Gate()
    _mxfp4_product_kernel[(num_tiles, routed.tiles.shape[0])](
        x_ptr=parts,
        x_scales_ptr=x_scales,
        words_ptr=blocks,
        scales_ptr=scales,
        bias_ptr=x if bias is None else bias,
        tiles_ptr=routed.tiles,
        order_ptr=routed.order,
        out_ptr=out,
        stride_xn=parts.stride(1),
        stride_be=blocks.stride(0),
        stride_se=scales.stride(0),
        stride_biase=0 if bias is None else bias.stride(0),
        stride_on=out.stride(0),
        top_k=routed.top_k,
        num_scales=num_scales,
        num_rounds=num_rounds,
        out_features=out_features,
        alpha=numbers.alpha,
        limit=numbers.limit,
        offset=numbers.offset,
        IS_GATED=gate is not None,
        HAS_BIAS=bias is not None,
        BLOCK_T=routed.tile_rows,
        BLOCK_F=TILE_F,
        STAGES=_STAGES,
        CHUNK=CHUNK,
        SCALES_AHEAD=_SCALES_AHEAD,
        num_warps=TILE_F // 16,
        maxnreg=_MAX_REGISTERS,
    )
    return out
