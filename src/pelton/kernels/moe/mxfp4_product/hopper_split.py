# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The product of `hopper` for experts with many rows, bit for bit the same: bound by the matrix
units, as `hopper_tall`, for where a row's result may not depend on how many there are.

    fetch (one warp)          copies chunks of weights and activations to shared memory
    multiply (warpgroup 0)    first two tiles of 64 features
    multiply (warpgroup 1)    last two

Activations are split, two columns a row, and a chunk's sums stand in registers beside those of all
chunks: tiles have half as many rows as those of `hopper_tall`. A warpgroup unpacks one tile's
weights and adds up the other's sums while its products run.
"""

from jaxtyping import Float
from torch import Tensor

from pelton.kernels.hopper_product import allocate_barriers
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product.hopper_tiles import (
    CHUNK,
    add_part,
    describe_scales,
    describe_words,
    store_tile,
    unpack_chunk,
)
from pelton.kernels.moe.sort_by_expert import RoutedRows
from pelton.kernels.triton_runtime import TensorDescriptor, cdiv, gl, gluon, hopper

MAX_SPLIT_ROWS = 64
"""Of a tile."""
_TILES = 4
"""Of 64 features, of a program."""
_STAGES = 4


@gluon.jit
def _fetch(
    x_desc, w_desc, s_desc, x_smem, w_smem, s_smem, ready, free, expert, tile, first, num_chunks,
    TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    CHUNK: gl.constexpr = x_smem.shape[2]
    BLOCKS: gl.constexpr = w_smem.shape[3]
    SCALES: gl.constexpr = s_smem.shape[3]
    BYTES: gl.constexpr = TILES * (BLOCKS * w_smem.shape[4] * 4 + SCALES) + x_smem.shape[1] * CHUNK
    for chunk in range(num_chunks):
        stage = chunk % STAGES
        hopper.mbarrier.wait(free.index(stage), (chunk // STAGES & 1) ^ 1)
        hopper.mbarrier.expect(ready.index(stage), BYTES)
        for part in gl.static_range(TILES):
            place = stage * TILES + part
            hopper.tma.async_copy_global_to_shared(
                w_desc, [expert, tile + part, chunk * BLOCKS, 0], ready.index(stage),
                w_smem.index(place),
            )  # fmt: skip
            hopper.tma.async_copy_global_to_shared(
                s_desc, [expert, tile + part, chunk * SCALES], ready.index(stage),
                s_smem.index(place),
            )  # fmt: skip
        hopper.tma.async_copy_global_to_shared(
            x_desc, [2 * first, chunk * CHUNK], ready.index(stage), x_smem.index(stage)
        )


@gluon.jit
def _multiply(
    products, stored, num_chunks, TILES: gl.constexpr, STAGES: gl.constexpr,
    IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    x_smem, _, _, _, _ = products
    _, _, _, _, _, _, first, end, _, _, _, _, _, _ = stored
    COLUMNS: gl.constexpr = x_smem.shape[1]
    if 4 * (end - first) > COLUMNS:
        _multiply_rows(
            products, stored, num_chunks, TILES, STAGES, IS_GATED, HAS_BIAS, GROUP, COLUMNS
        )
    else:
        # An expert's last tile may hold a few rows only.
        _multiply_rows(
            products, stored, num_chunks, TILES, STAGES, IS_GATED, HAS_BIAS, GROUP, COLUMNS // 2
        )


@gluon.jit
def _multiply_rows(
    products, stored, num_chunks, TILES: gl.constexpr, STAGES: gl.constexpr,
    IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr, GROUP: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """The first rows of the tile, of so many columns."""
    x_smem, w_smem, s_smem, ready, free = products
    (
        x_scales_ptr, scales_ptr, bias_ptr, order_ptr, out_ptr, stride_on, first, end, tile,
        num_tiles, num_scales, alpha, limit, offset,
    ) = stored  # fmt: skip
    gl.static_assert(TILES == 4, "two warpgroups take two tiles each")
    TILE_F: gl.constexpr = w_smem.shape[4] // 4
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    zeros = gl.zeros([TILE_F, COLUMNS], gl.float32, acc_layout)
    acc, _ = gl.split(zeros.reshape([TILE_F, COLUMNS // 2, 2]))
    next_acc = acc
    for chunk in range(num_chunks):
        stage = chunk % STAGES
        place = stage * TILES + GROUP * 2
        hopper.mbarrier.wait(ready.index(stage), chunk // STAGES & 1)
        right = x_smem.index(stage).slice(0, COLUMNS).permute((1, 0))
        # A product reads its left operand until it has been waited for.
        left = unpack_chunk(s_smem.index(place), w_smem.index(place), left_layout)
        part = hopper.warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
        next_left = unpack_chunk(s_smem.index(place + 1), w_smem.index(place + 1), left_layout)
        part = hopper.warpgroup_mma_wait(0, deps=[part])
        next_part = hopper.warpgroup_mma(next_left, right, zeros, use_acc=False, is_async=True)
        acc = add_part(acc, part)
        next_part = hopper.warpgroup_mma_wait(0, deps=[next_part])
        hopper.mbarrier.arrive(free.index(stage))
        next_acc = add_part(next_acc, next_part)
    tile += GROUP * 2
    if tile < num_tiles:
        store_tile(
            acc,
            (x_scales_ptr, scales_ptr, bias_ptr, order_ptr, out_ptr, stride_on, tile, num_scales,
             first, end, alpha, limit, offset),
            IS_GATED, HAS_BIAS,
        )  # fmt: skip
    if tile + 1 < num_tiles:
        store_tile(
            next_acc,
            (x_scales_ptr, scales_ptr, bias_ptr, order_ptr, out_ptr, stride_on, tile + 1,
             num_scales, first, end, alpha, limit, offset),
            IS_GATED, HAS_BIAS,
        )  # fmt: skip


@gluon.jit
def _split_product_kernel(
    x_desc, w_desc, s_desc, x_scales_ptr, scales_ptr, bias_ptr, tiles_ptr, order_ptr, out_ptr,
    stride_se, stride_biase, stride_on, num_tiles, num_scales, num_chunks, alpha, limit, offset,
    TILES: gl.constexpr, STAGES: gl.constexpr, IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    entry_ptr = tiles_ptr + gl.program_id(1) * 3
    expert = gl.load(entry_ptr)
    first = gl.load(entry_ptr + 1)
    end = gl.load(entry_ptr + 2)
    # The end of an unused entry is 0.
    if end == 0:
        return
    x_shape: gl.constexpr = [STAGES] + x_desc.block_shape  # noqa: RUF005
    w_shape: gl.constexpr = [STAGES * TILES] + w_desc.block_shape  # noqa: RUF005
    s_shape: gl.constexpr = [STAGES * TILES] + s_desc.block_shape  # noqa: RUF005
    x_smem = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, w_shape, w_desc.layout)
    s_smem = gl.allocate_shared_memory(s_desc.dtype, s_shape, s_desc.layout)
    ready, free = allocate_barriers(STAGES, 1, 2)
    tile = gl.program_id(0) * TILES
    products = x_smem, w_smem, s_smem, ready, free
    stored = (
        x_scales_ptr, scales_ptr + expert.to(gl.int64) * stride_se,
        bias_ptr + expert.to(gl.int64) * stride_biase, order_ptr, out_ptr, stride_on, first, end,
        tile, num_tiles, num_scales, alpha, limit, offset,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (
                products, stored, num_chunks, TILES, STAGES, IS_GATED, HAS_BIAS, 0
            )),
            (_multiply, (
                products, stored, num_chunks, TILES, STAGES, IS_GATED, HAS_BIAS, 1
            )),
            (_fetch, (
                x_desc, w_desc, s_desc, x_smem, w_smem, s_smem, ready, free, expert, tile, first,
                num_chunks, TILES, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def launch_split_product(
    parts: Tensor,
    x_scales: Float[Tensor, " N"],
    routed: RoutedRows,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    gate: Gate | None,
    out: Tensor,
) -> None:
    """`parts` and `x_scales` are the activations as `hopper.split_rows` makes them."""
    assert routed.tile_rows <= MAX_SPLIT_ROWS, routed.tile_rows
    num_tiles = words.shape[1]
    numbers = gate or Gate()
    x_box, layout = [2 * routed.tile_rows, CHUNK], gl.NVMMASharedLayout(128, 8, 2)
    _split_product_kernel[(cdiv(num_tiles, _TILES), routed.tiles.shape[0])](
        x_desc=TensorDescriptor.from_tensor(parts.flatten(0, 1), x_box, layout),
        w_desc=describe_words(words, 1),
        s_desc=describe_scales(scales),
        x_scales_ptr=x_scales,
        scales_ptr=scales,
        bias_ptr=out if bias is None else bias,
        tiles_ptr=routed.tiles,
        order_ptr=routed.order,
        out_ptr=out,
        stride_se=scales.stride(0),
        stride_biase=0 if bias is None else bias.stride(0),
        stride_on=out.stride(0),
        num_tiles=num_tiles,
        num_scales=words.shape[2],
        num_chunks=parts.shape[2] // CHUNK,
        alpha=numbers.alpha,
        limit=numbers.limit,
        offset=numbers.offset,
        TILES=_TILES,
        STAGES=_STAGES,
        IS_GATED=gate is not None,
        HAS_BIAS=bias is not None,
        num_warps=4,
    )
