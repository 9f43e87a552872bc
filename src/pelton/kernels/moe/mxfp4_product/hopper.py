# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The MXFP4 experts' products on Hopper where experts have few rows: bound by memory, and by the
instructions that unpack what comes from there.

Packed weights go from shared memory to the registers of the matrix units' left operand, where they
are unpacked (`hopper_unpack`), and nowhere else.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product.hopper_tall import launch_tall_product
from pelton.kernels.moe.mxfp4_product.hopper_unpack import (
    CHUNK,
    gather_inputs,
    ordered,
    powers_of,
    unpack,
)
from pelton.kernels.moe.sort_by_expert import RoutedRows
from pelton.kernels.triton_runtime import cdiv, gl, gluon, hopper

_BLOCK_F = 64
"""Features of a program: the rows of the matrix instruction. Two instructions' worth measured
slower, for fewer programs then fit beside each other."""
_MAX_TILE_ROWS = 64
"""Taller tiles: `hopper_tall`."""
_SCALES_AHEAD = 3
"""Rounds between the load of scales and their use."""


@gluon.jit
def _fetch(
    w_tile, x_tile, w_ptrs, x_ptrs, is_word, is_row, AHEAD: gl.constexpr,
):  # fmt: skip
    hopper.async_copy.async_copy_global_to_shared(
        w_tile, w_ptrs + AHEAD * w_tile.shape[1], mask=is_word[None, :]
    )
    hopper.async_copy.async_copy_global_to_shared(
        x_tile, x_ptrs + AHEAD * x_tile.shape[1], mask=is_row[:, None]
    )
    hopper.async_copy.commit_group()


@gluon.jit
def _feature_of(row, BLOCK_F: gl.constexpr):
    """The feature at a row of the left operand: a thread's two rows are neighbours, so that it
    holds a gate and its up-projection."""
    return gl.program_id(0) * BLOCK_F + row // 16 * 16 + row % 8 * 2 + row % 16 // 8


@gluon.jit
def _mxfp4_product_kernel(
    x_ptr, words_ptr, scales_ptr, bias_ptr, tiles_ptr, order_ptr, out_ptr,
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
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_T, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    x_shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    w_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # A tile each, and no ring: places are known when compiling, and no barrier stands between the
    # copy into one and the reads of another.
    w_tiles = ()
    x_tiles = ()
    for _ in gl.static_range(STAGES):
        w_tiles = w_tiles + (gl.allocate_shared_memory(gl.int32, [BLOCK_F, CHUNK // 8], w_shared),)  # type: ignore[assignment] # noqa: RUF005
        x_tiles = x_tiles + (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_T, CHUNK], x_shared),)  # type: ignore[assignment] # noqa: RUF005

    # Rows behind the last feature read it again, and are not stored.
    rows = gl.arange(0, BLOCK_F, gl.SliceLayout(1, words_layout))
    features = gl.minimum(_feature_of(rows, BLOCK_F), out_features - 1)
    words = gl.arange(0, CHUNK // 8, gl.SliceLayout(0, words_layout))
    w_ptrs = (
        words_ptr + expert * stride_be + ((features * num_scales * 4)[:, None] + words[None, :])
    )
    rows = gl.arange(0, BLOCK_F, gl.SliceLayout(1, scales_layout))
    features = gl.minimum(_feature_of(rows, BLOCK_F), out_features - 1)
    blocks = gl.arange(0, 4, gl.SliceLayout(0, scales_layout))
    scale_ptrs = scales_ptr + expert * stride_se
    scale_ptrs = scale_ptrs + (features * num_scales)[:, None] + blocks[None, :]

    places = first + gl.arange(0, BLOCK_T, gl.SliceLayout(1, x_layout))
    is_row = places < end
    x_rows = gl.load(order_ptr + places, mask=is_row, other=0) // top_k if IS_GATED else places
    dims = gl.arange(0, CHUNK, gl.SliceLayout(0, x_layout))
    x_ptrs = x_ptr + (x_rows.to(gl.int64) * stride_xn)[:, None] + dims[None, :]

    words_left = num_scales * 4
    scales_left = num_scales
    AHEAD: gl.constexpr = STAGES - 1
    for early in gl.static_range(AHEAD):
        _fetch(
            w_tiles[early], x_tiles[early], w_ptrs, x_ptrs,
            words + early * (CHUNK // 8) < words_left, is_row, early,
        )  # fmt: skip
    scales = ()
    for early in gl.static_range(SCALES_AHEAD):
        is_scale = blocks + early * 4 < scales_left
        scales = scales + (gl.load(scale_ptrs + early * 4, mask=is_scale[None, :], other=127),)  # type: ignore[assignment] # noqa: RUF005
    acc = gl.zeros([BLOCK_F, BLOCK_T], gl.float32, acc_layout)
    for _ in range(num_rounds):
        for stage in gl.static_range(STAGES):
            hopper.async_copy.wait_group(AHEAD - 1)
            hopper.fence_async_shared()
            # This chunk has landed for all warps, and all have done with the one before, whose
            # place the next copies take.
            gl.thread_barrier()
            _fetch(
                w_tiles[(stage + AHEAD) % STAGES], x_tiles[(stage + AHEAD) % STAGES],
                w_ptrs, x_ptrs, words + (stage + AHEAD) * (CHUNK // 8) < words_left, is_row,
                stage + AHEAD,
            )  # fmt: skip
            is_scale = blocks + (stage + SCALES_AHEAD) * 4 < scales_left
            new = gl.load(
                scale_ptrs + (stage + SCALES_AHEAD) * 4, mask=is_scale[None, :], other=127
            )
            powers = gl.expand_dims(powers_of(scales[0]), 2)  # type: ignore[misc]
            scales = scales[1:] + (new,)  # type: ignore[assignment] # noqa: RUF005
            powers = powers + gl.zeros([BLOCK_F, 4, 4], gl.int32, scales_3d)
            powers = gl.convert_layout(
                powers.reshape([BLOCK_F, 16]), words_layout, assert_trivial=True
            )
            left = unpack(w_tiles[stage].load(words_layout), powers)
            acc = hopper.warpgroup_mma(
                gl.convert_layout(left, left_layout), x_tiles[stage].permute((1, 0)), acc,
                is_async=True,
            )  # fmt: skip
            # The product reads its left operand until here.
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        w_ptrs += STAGES * (CHUNK // 8)
        x_ptrs += STAGES * CHUNK
        scale_ptrs += STAGES * (CHUNK // 32)
        words_left -= STAGES * (CHUNK // 8)
        scales_left -= STAGES * (CHUNK // 32)
    hopper.async_copy.wait_group(0)
    acc = acc * 4294967296.0  # 2^32

    if HAS_BIAS:
        rows = gl.arange(0, BLOCK_F, gl.SliceLayout(1, acc_layout))
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


def tune(tile_rows: int) -> int:
    """How many chunks have a place in shared memory: three or four programs on a multiprocessor."""
    return 4 if tile_rows <= 16 else 3


def mxfp4_gate_up_product_hopper(
    x: Float[Tensor, "T D"],
    routed: RoutedRows,
    blocks: Tensor,
    scales: UInt8[Tensor, "E 2F D/32"],
    bias: Float[Tensor, "E 2F"] | None,
    gate: Gate,
) -> Float[Tensor, "N F"]:
    out = torch.empty((routed.num_rows, blocks.shape[1] // 2), dtype=x.dtype, device=x.device)
    _launch_product(x, routed, blocks, scales, bias, gate, out)
    return out


def mxfp4_down_product_hopper(
    hidden: Float[Tensor, "N F"],
    routed: RoutedRows,
    blocks: Tensor,
    scales: UInt8[Tensor, "E D F/32"],
    bias: Float[Tensor, "E D"] | None,
) -> Float[Tensor, "N D"]:
    out = torch.empty((routed.num_rows, blocks.shape[1]), dtype=hidden.dtype, device=hidden.device)
    _launch_product(hidden, routed, blocks, scales, bias, None, out)
    return out


def _launch_product(
    x: Tensor,
    routed: RoutedRows,
    blocks: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    gate: Gate | None,
    out: Tensor,
) -> None:
    if routed.num_rows == 0:
        return
    blocks = ordered(blocks)
    if routed.tile_rows > _MAX_TILE_ROWS:
        launch_tall_product(x, routed, blocks, scales, bias, gate, out)
        return
    _, out_features, num_scales = scales.shape
    assert out_features % 2 == 0, out_features
    num_stages = tune(routed.tile_rows)
    num_rounds = cdiv(x.shape[1], CHUNK * num_stages)
    # The chunks that a program starts to copy at the end are there too.
    x = gather_inputs(x, routed, (num_rounds + 1) * num_stages - 1, is_gathered=False)
    numbers = gate or Gate()
    _mxfp4_product_kernel[(cdiv(out_features, _BLOCK_F), routed.tiles.shape[0])](
        x_ptr=x,
        words_ptr=blocks,
        scales_ptr=scales,
        bias_ptr=x if bias is None else bias,
        tiles_ptr=routed.tiles,
        order_ptr=routed.order,
        out_ptr=out,
        stride_xn=x.stride(0),
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
        BLOCK_F=_BLOCK_F,
        STAGES=num_stages,
        CHUNK=CHUNK,
        SCALES_AHEAD=_SCALES_AHEAD,
        num_warps=_BLOCK_F // 16,
    )
