# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The MXFP4 experts' products on Hopper where experts have few rows: bound by memory.

    fetch (four warps)          copy packed weights and their exponents, each for its warpgroup
    multiply (four warpgroups)  each a tile of 64 features, chunk by chunk

A program a multiprocessor takes tile after tile, nearly all of one expert, whose rows lie in shared
memory meanwhile: read again for each tile, they would be half as many bytes from the L2 cache as
the weights are, or as many. No warpgroup waits for another one until the expert changes. Of an
expert's rows that half or a quarter of a tile would hold, no more is multiplied.

Packed weights go from shared memory to the registers of the matrix units' left operand, where they
become e4m3, and nowhere else: one instruction looks up four codes in a table of eight bytes, and
the table holds their scale. An activation is a scale for its row times the sum of two numbers of
e4m3, the second a sixteenth of what it says, which together hold every bit of a bfloat16 that is
worth 2^-20 of the row's largest or more. The matrix units add e4m3 products in fewer bits than
float32 has, so their sums of 128 are added up in float32. What comes out is as near to exact as
from products of bfloat16, whose weights take half as many instructions again to unpack.

Weights that are not in tiles take the kernel of `triton`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import must_be_invariant
from pelton.kernels.hopper_product import allocate_barriers
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product.hopper_one import LoneToken, launch_one_token_product
from pelton.kernels.moe.mxfp4_product.hopper_split import launch_split_product
from pelton.kernels.moe.mxfp4_product.hopper_tall import launch_tall_product
from pelton.kernels.moe.mxfp4_product.hopper_tiles import (
    CHUNK,
    TILE_F,
    add_part,
    describe_scales,
    describe_words,
    store_tile,
    unpack_chunk,
)
from pelton.kernels.moe.mxfp4_product.reference import BLOCK
from pelton.kernels.moe.mxfp4_product.triton import mxfp4_product_triton
from pelton.kernels.moe.sort_by_expert import RoutedRows
from pelton.kernels.triton_runtime import (
    TensorDescriptor,
    cdiv,
    gl,
    gluon,
    hopper,
    next_power_of_2,
    num_multiprocessors,
    tl,
    triton,
)

MAX_TILE_ROWS = 32
"""Taller tiles: `hopper_tall`, or `hopper_split` where the sums are to be as here."""
_GROUPS = 4
"""Warpgroups of a program."""
_BLOCKS = CHUNK // BLOCK
_CHUNK_BYTES = TILE_F * (CHUNK // 2 + _BLOCKS)
_MAX_STAGES = 6
"""Of a warpgroup; four to seven measured the same."""
_SHARED_BYTES = 226 * 1024
"""Of a program, and another KiB for the barriers."""


def tune(tile_rows: int, in_features: int) -> int:
    """How many chunks of each warpgroup have a place beside the rows of an expert."""
    row_bytes = 2 * cdiv(in_features, CHUNK) * CHUNK
    bytes_left = _SHARED_BYTES - tile_rows * row_bytes
    return min(bytes_left // (_GROUPS * _CHUNK_BYTES), _MAX_STAGES)


def fits_rows(in_features: int) -> bool:
    """Whether shared memory holds the rows of a tile of any height, and two chunks of each
    warpgroup at least: up to 3,072 inputs."""
    return tune(MAX_TILE_ROWS, in_features) >= 2


@triton.jit
def _split_rows_kernel(
    x_ptr, order_ptr, out_ptr, scales_ptr, stride_xt, top_k, in_features, width,
    IS_GATHERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    inputs = tl.arange(0, BLOCK)  # [BLOCK]
    row = tl.program_id(0).to(tl.int64)
    x_row = row
    if IS_GATHERED:
        x_row = (tl.load(order_ptr + row) // top_k).to(tl.int64)
    x = tl.load(x_ptr + x_row * stride_xt + inputs, mask=inputs < in_features, other=0.0)
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


def split_rows(
    x: Float[Tensor, "n D"], routed: RoutedRows, *, is_gathered: bool
) -> tuple[Tensor, Float[Tensor, " N"]]:
    """e4m3 [N, 2, chunks] in the order of the unpacked weights, with zeros behind the last input,
    and the rows' scales: NaN where a row has what is not finite. `is_gathered`: a row for each
    routed one; else the rows of `x`, which are those."""
    width = cdiv(x.shape[1], CHUNK) * CHUNK
    num_rows = routed.num_rows
    parts = torch.empty((num_rows, 2, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    _split_rows_kernel[(num_rows,)](
        x_ptr=x,
        order_ptr=routed.order,
        out_ptr=parts,
        scales_ptr=scales,
        stride_xt=x.stride(0),
        top_k=routed.top_k,
        in_features=x.shape[1],
        width=width,
        IS_GATHERED=is_gathered,
        BLOCK=next_power_of_2(width),
        num_warps=4,
    )
    return parts, scales


@gluon.jit
def _count_entries(tiles_ptr, num_entries, num_warps: gl.constexpr):
    """The entries in use, which come first."""
    BLOCK: gl.constexpr = 256
    places = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [num_warps], [0]))
    count = 0
    for start in range(0, num_entries, BLOCK):
        # The end of an unused entry is 0.
        is_entry = start + places < num_entries
        ends = gl.load(tiles_ptr + (start + places) * 3 + 2, mask=is_entry, other=0)
        count += gl.sum((ends > 0).to(gl.int32), axis=0)
    return count


@gluon.jit
def _locate(tiles_ptr, begin, stop, num_tiles):
    """Of a program's share from `begin` on: the entry, its first tile here, and how many of its
    `num_tiles` are in the share."""
    entry_ptr = tiles_ptr + begin // num_tiles * 3
    first_tile = begin % num_tiles
    return entry_ptr, first_tile, gl.minimum(stop - begin, num_tiles - first_tile)


@gluon.jit
def _fetch(copies, GROUPS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """All chunks of the warpgroup's tiles, as places become free, and, by the first warp, the rows
    of each expert."""
    (
        x_desc, w_desc, s_desc, x_smem, w_smem, s_smem, x_ready, x_free, ready, free, tiles_ptr,
        begin, stop, num_tiles,
    ) = copies  # fmt: skip
    CHUNKS: gl.constexpr = x_smem.shape[0]
    COLUMNS: gl.constexpr = x_smem.shape[1]
    CHUNK: gl.constexpr = x_smem.shape[2]
    BLOCKS: gl.constexpr = w_smem.shape[3]
    SCALES: gl.constexpr = s_smem.shape[3]
    BYTES: gl.constexpr = BLOCKS * w_smem.shape[4] * 4 + SCALES
    count = 0
    num_shown = 0
    while begin < stop:
        entry_ptr, first_tile, num_left = _locate(tiles_ptr, begin, stop, num_tiles)
        expert = gl.load(entry_ptr)
        if GROUP == 0:
            first = gl.load(entry_ptr + 1)
            hopper.mbarrier.wait(x_free, (num_shown & 1) ^ 1)
            hopper.mbarrier.expect(x_ready, CHUNKS * COLUMNS * CHUNK)
            for chunk in range(CHUNKS):
                hopper.tma.async_copy_global_to_shared(
                    x_desc, [2 * first, chunk * CHUNK], x_ready, x_smem.index(chunk)
                )
            num_shown += 1
        for tile in range(first_tile + GROUP, first_tile + num_left, GROUPS):
            for chunk in range(CHUNKS):
                stage = GROUP * STAGES + count % STAGES
                hopper.mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
                hopper.mbarrier.expect(ready.index(stage), BYTES)
                hopper.tma.async_copy_global_to_shared(
                    w_desc, [expert, tile, chunk * BLOCKS, 0], ready.index(stage),
                    w_smem.index(stage),
                )  # fmt: skip
                hopper.tma.async_copy_global_to_shared(
                    s_desc, [expert, tile, chunk * SCALES], ready.index(stage), s_smem.index(stage)
                )
                count += 1
        begin += num_left


@gluon.jit
def _multiply(
    products, GROUPS: gl.constexpr, STAGES: gl.constexpr, IS_GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    (
        x_smem, w_smem, s_smem, x_ready, x_free, ready, free, x_scales_ptr, scales_ptr, bias_ptr,
        tiles_ptr, order_ptr, out_ptr, stride_se, stride_biase, stride_on, begin, stop,
        num_tiles, num_scales, alpha, limit, offset,
    ) = products  # fmt: skip
    CHUNKS: gl.constexpr = x_smem.shape[0]
    # A row's high part, then its low one.
    COLUMNS: gl.constexpr = x_smem.shape[1]
    count = 0
    num_shown = 0
    while begin < stop:
        entry_ptr, first_tile, num_left = _locate(tiles_ptr, begin, stop, num_tiles)
        expert = gl.load(entry_ptr).to(gl.int64)
        first = gl.load(entry_ptr + 1)
        end = gl.load(entry_ptr + 2)
        hopper.mbarrier.wait(x_ready, num_shown & 1)
        for tile in range(first_tile + GROUP, first_tile + num_left, GROUPS):
            sums = x_smem, w_smem, s_smem, ready, free, count
            stored = (
                x_scales_ptr, scales_ptr + expert * stride_se, bias_ptr + expert * stride_biase,
                order_ptr, out_ptr, stride_on, tile, num_scales, first, end, alpha, limit, offset,
            )  # fmt: skip
            # Multiplying empty rows takes power, and power is what limits many requests.
            if 8 * (end - first) <= COLUMNS:
                _take_tile(sums, stored, COLUMNS // 4, STAGES, GROUP, IS_GATED, HAS_BIAS)
            elif 4 * (end - first) <= COLUMNS:
                _take_tile(sums, stored, COLUMNS // 2, STAGES, GROUP, IS_GATED, HAS_BIAS)
            else:
                _take_tile(sums, stored, COLUMNS, STAGES, GROUP, IS_GATED, HAS_BIAS)
            count += CHUNKS
        hopper.mbarrier.arrive(x_free)
        num_shown += 1
        begin += num_left


@gluon.jit
def _take_tile(
    sums, stored, COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """A tile's products with so many columns, of two a row."""
    x_smem, w_smem, s_smem, ready, free, count = sums
    CHUNKS: gl.constexpr = x_smem.shape[0]
    TILE_F: gl.constexpr = w_smem.shape[4] // 4
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    zeros = gl.zeros([TILE_F, COLUMNS], gl.float32, acc_layout)
    acc, _ = gl.split(zeros.reshape([TILE_F, COLUMNS // 2, 2]))
    for chunk in range(CHUNKS):
        stage = GROUP * STAGES + count % STAGES
        hopper.mbarrier.wait(ready.index(stage), count // STAGES & 1)
        left = unpack_chunk(s_smem.index(stage), w_smem.index(stage), left_layout)
        right = x_smem.index(chunk).slice(0, COLUMNS).permute((1, 0))
        part = hopper.warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
        hopper.mbarrier.arrive(free.index(stage))
        # The product reads its left operand until here.
        part = hopper.warpgroup_mma_wait(0, deps=[part])
        acc = add_part(acc, part)
        count += 1
    store_tile(acc, stored, IS_GATED, HAS_BIAS)


@gluon.jit(do_not_specialize=["num_entries"])
def _mxfp4_product_kernel(
    x_desc, w_desc, s_desc, x_scales_ptr, scales_ptr, bias_ptr, tiles_ptr, order_ptr, out_ptr,
    stride_se, stride_biase, stride_on, num_entries, num_tiles, num_scales, alpha, limit, offset,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, IS_GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    # A program's share of the tiles of all entries.
    total = _count_entries(tiles_ptr, num_entries, num_warps) * num_tiles
    begin = gl.program_id(0) * total // gl.num_programs(0)
    stop = (gl.program_id(0) + 1) * total // gl.num_programs(0)

    PLACES: gl.constexpr = GROUPS * STAGES
    x_shape: gl.constexpr = [CHUNKS] + x_desc.block_shape  # noqa: RUF005
    w_shape: gl.constexpr = [PLACES] + w_desc.block_shape  # noqa: RUF005
    s_shape: gl.constexpr = [PLACES] + s_desc.block_shape  # noqa: RUF005
    x_smem = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, w_shape, w_desc.layout)
    s_smem = gl.allocate_shared_memory(s_desc.dtype, s_shape, s_desc.layout)
    barriers: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    x_ready = gl.allocate_shared_memory(gl.int64, [1], barriers)
    x_free = gl.allocate_shared_memory(gl.int64, [1], barriers)
    hopper.mbarrier.init(x_ready, count=1)
    hopper.mbarrier.init(x_free, count=GROUPS)
    ready, free = allocate_barriers(PLACES, 1, 1)
    products = (
        x_smem, w_smem, s_smem, x_ready, x_free, ready, free, x_scales_ptr, scales_ptr, bias_ptr,
        tiles_ptr, order_ptr, out_ptr, stride_se, stride_biase, stride_on, begin, stop,
        num_tiles, num_scales, alpha, limit, offset,
    )  # fmt: skip
    copies = (
        x_desc, w_desc, s_desc, x_smem, w_smem, s_smem, x_ready, x_free, ready, free, tiles_ptr,
        begin, stop, num_tiles,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (products, GROUPS, STAGES, IS_GATED, HAS_BIAS, 0)),
            (_multiply, (products, GROUPS, STAGES, IS_GATED, HAS_BIAS, 1)),
            (_multiply, (products, GROUPS, STAGES, IS_GATED, HAS_BIAS, 2)),
            (_multiply, (products, GROUPS, STAGES, IS_GATED, HAS_BIAS, 3)),
            (_fetch, (copies, GROUPS, STAGES, 0)),
            (_fetch, (copies, GROUPS, STAGES, 1)),
            (_fetch, (copies, GROUPS, STAGES, 2)),
            (_fetch, (copies, GROUPS, STAGES, 3)),
        ],
        [4, 4, 4, 1, 1, 1, 1],
        [112, 112, 112, 32, 32, 32, 32],
    )


def mxfp4_gate_up_product_hopper(
    x: Float[Tensor, "T D"],
    routed: RoutedRows | LoneToken,
    blocks: Tensor,
    scales: Tensor,
    bias: Float[Tensor, "E 2F"] | None,
    gate: Gate,
) -> Float[Tensor, "N F"]:
    return _launch_product(x, routed, blocks, scales, bias, gate)


def mxfp4_down_product_hopper(
    hidden: Float[Tensor, "N F"],
    routed: RoutedRows | LoneToken,
    blocks: Tensor,
    scales: Tensor,
    bias: Float[Tensor, "E D"] | None,
) -> Float[Tensor, "N D"]:
    return _launch_product(hidden, routed, blocks, scales, bias, None)


def _launch_product(
    x: Tensor,
    routed: RoutedRows | LoneToken,
    blocks: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    gate: Gate | None,
) -> Tensor:
    if blocks.dtype is torch.uint8:
        assert isinstance(routed, RoutedRows)
        return mxfp4_product_triton(x, routed, blocks, scales, bias, gate)
    out_features = blocks.shape[1] * TILE_F
    width = out_features // 2 if gate else out_features
    out = torch.empty((routed.num_rows, width), dtype=x.dtype, device=x.device)
    if routed.num_rows == 0:
        return out
    if isinstance(routed, LoneToken):
        launch_one_token_product(x, routed, blocks, scales, bias, gate, out)
    elif routed.tile_rows > MAX_TILE_ROWS:
        if must_be_invariant():
            launch_split_product(
                *split_rows(x, routed, is_gathered=gate is not None), routed, blocks, scales, bias,
                gate, out,
            )  # fmt: skip
        else:
            launch_tall_product(x, routed, blocks, scales, bias, gate, out)
    else:
        _launch_low_product(x, routed, blocks, scales, bias, gate, out)
    return out


def _launch_low_product(
    x: Tensor,
    routed: RoutedRows,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    gate: Gate | None,
    out: Tensor,
) -> None:
    parts, x_scales = split_rows(x, routed, is_gathered=gate is not None)
    numbers = gate or Gate()
    x_box, layout = [2 * routed.tile_rows, CHUNK], gl.NVMMASharedLayout(128, 8, 2)
    _mxfp4_product_kernel[(num_multiprocessors(x.device),)](
        x_desc=TensorDescriptor.from_tensor(parts.flatten(0, 1), x_box, layout),
        w_desc=describe_words(words, 1),
        s_desc=describe_scales(scales),
        x_scales_ptr=x_scales,
        scales_ptr=scales,
        bias_ptr=x if bias is None else bias,
        tiles_ptr=routed.tiles,
        order_ptr=routed.order,
        out_ptr=out,
        stride_se=scales.stride(0),
        stride_biase=0 if bias is None else bias.stride(0),
        stride_on=out.stride(0),
        num_entries=routed.tiles.shape[0],
        num_tiles=words.shape[1],
        num_scales=words.shape[2],
        alpha=numbers.alpha,
        limit=numbers.limit,
        offset=numbers.offset,
        CHUNKS=cdiv(x.shape[1], CHUNK),
        GROUPS=_GROUPS,
        STAGES=tune(routed.tile_rows, x.shape[1]),
        IS_GATED=gate is not None,
        HAS_BIAS=bias is not None,
        num_warps=4,
    )
