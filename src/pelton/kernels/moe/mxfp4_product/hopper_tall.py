# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The MXFP4 experts' products on Hopper where experts have many rows: bound by the matrix units.

    fetch (one warp)          copies chunks of weights and activations to shared memory
    multiply (warpgroup 0)    first 128 features of the tile
    multiply (warpgroup 1)    last 128

Each warpgroup unpacks a chunk's weights to bfloat16 into its left operand, then multiplies and
waits. The two fall out of step by themselves: one unpacks while the other's product runs. The copy
engine cannot gather, so the activations are brought in the order of the routed rows first, and
their columns into that of the unpacked weights.
"""

from jaxtyping import Float
from torch import Tensor

from pelton.kernels.hopper_product import allocate_barriers
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product.hopper_tiles import CHUNK, describe_words, scale_of
from pelton.kernels.moe.sort_by_expert import RoutedRows
from pelton.kernels.triton_runtime import TensorDescriptor, cdiv, gl, gluon, hopper, tl, triton

_HALF_TILES = 2
"""Tiles of a warpgroup: 128 features."""
_STAGES = 4
_GATHER_BLOCK = 1024
"""Inputs that a program puts in order."""


@triton.jit
def _gather_inputs_kernel(
    x_ptr, order_ptr, out_ptr, stride_xt, top_k, in_features, width,
    IS_GATHERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    inputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    row = tl.program_id(0)
    x_row = row
    if IS_GATHERED:
        x_row = tl.load(order_ptr + row) // top_k
    x_row_ptr = x_ptr + x_row.to(tl.int64) * stride_xt
    x = tl.load(x_row_ptr + inputs, mask=inputs < in_features, other=0.0)
    # Of a thread of four, a word of its four, a pair of its codes: the words and pairs come first.
    x = x.reshape([BLOCK // 128, 4, 4, 4, 2]).permute(0, 2, 3, 1, 4)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + row.to(tl.int64) * width + places, x.reshape([BLOCK]), mask=places < width)


def _gather_inputs(
    x: Float[Tensor, "T D"], routed: RoutedRows, num_chunks: int, *, is_gathered: bool
) -> Tensor:
    """[N, chunks]: each chunk's columns in the order of the unpacked weights, and zeros behind the
    last input. `is_gathered`: a row for each routed one; else the rows of `x`."""
    num_rows, in_features = x.shape
    if is_gathered:
        num_rows = routed.num_rows
    out = x.new_empty((num_rows, num_chunks * CHUNK))
    _gather_inputs_kernel[(num_rows, cdiv(num_chunks * CHUNK, _GATHER_BLOCK))](
        x_ptr=x,
        order_ptr=routed.order,
        out_ptr=out,
        stride_xt=x.stride(0),
        top_k=routed.top_k,
        in_features=in_features,
        width=num_chunks * CHUNK,
        IS_GATHERED=is_gathered,
        BLOCK=_GATHER_BLOCK,
        num_warps=4,
    )
    return out


@gluon.jit
def _unpack(words, powers):
    """int32 [F, 16] of eight codes each to bfloat16 [F, 128] in the order of `_gather_inputs`;
    `powers` [F, 16] holds a word's power of two twice, as bfloat16."""
    # Two words a time. The high and the low bytes of four magnitudes are looked up at once, signs
    # are put on the high ones, and the bytes are woven together.
    codes = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, h, l, u;
        and.b32 s, $8, 0x77777777;
        prmt.b32 h, 0x3F3F3F00, 0x40404040, s;
        prmt.b32 l, 0xC0800000, 0xC0804000, s;
        lop3.b32 h, h, $8, 0x80808080, 0xF8;
        prmt.b32 u, l, h, 0x5140;
        mul.rn.bf16x2 $0, u, $10;
        prmt.b32 u, l, h, 0x7362;
        mul.rn.bf16x2 $1, u, $10;
        shr.u32 s, s, 16;
        prmt.b32 h, 0x3F3F3F00, 0x40404040, s;
        prmt.b32 l, 0xC0800000, 0xC0804000, s;
        shl.b32 u, $8, 4;
        lop3.b32 h, h, u, 0x80808080, 0xF8;
        prmt.b32 u, l, h, 0x5140;
        mul.rn.bf16x2 $2, u, $10;
        prmt.b32 u, l, h, 0x7362;
        mul.rn.bf16x2 $3, u, $10;
        and.b32 s, $9, 0x77777777;
        prmt.b32 h, 0x3F3F3F00, 0x40404040, s;
        prmt.b32 l, 0xC0800000, 0xC0804000, s;
        lop3.b32 h, h, $9, 0x80808080, 0xF8;
        prmt.b32 u, l, h, 0x5140;
        mul.rn.bf16x2 $4, u, $11;
        prmt.b32 u, l, h, 0x7362;
        mul.rn.bf16x2 $5, u, $11;
        shr.u32 s, s, 16;
        prmt.b32 h, 0x3F3F3F00, 0x40404040, s;
        prmt.b32 l, 0xC0800000, 0xC0804000, s;
        shl.b32 u, $9, 4;
        lop3.b32 h, h, u, 0x80808080, 0xF8;
        prmt.b32 u, l, h, 0x5140;
        mul.rn.bf16x2 $6, u, $11;
        prmt.b32 u, l, h, 0x7362;
        mul.rn.bf16x2 $7, u, $11;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        args=[words, powers],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )
    # A register holds two codes of one word and stands for one element of both: [F, word, p0, p1,
    # w0] with q1 q0 w1 and the code of the pair in the word's bits.
    first = gl.join(gl.join(codes[0], codes[1]), gl.join(codes[2], codes[3]))
    second = gl.join(gl.join(codes[4], codes[5]), gl.join(codes[6], codes[7]))
    FEATURES: gl.constexpr = words.shape[0]
    tile = gl.join(first, second).reshape([FEATURES, 4, 2, 2, 2, 2, 2])
    return tile.permute((0, 2, 6, 5, 4, 1, 3)).reshape([FEATURES, 128])


@gluon.jit
def _powers_of(exponents):
    """2^(e - 5) for exponents e [F, 4], as bfloat16 in both halves of an int32."""
    return (exponents.to(gl.int32) * 128 + 122 * 128) * 0x10001


@gluon.jit
def _fetch(
    x_desc, w_desc, x_smem, w_smem, ready, free, expert, tile, first, num_chunks,
    CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    HALF_TILES: gl.constexpr = w_smem.shape[2]
    BLOCK_F: gl.constexpr = 2 * HALF_TILES * (w_smem.shape[4] // 4)
    BYTES: gl.constexpr = BLOCK_F * CHUNK // 2 + x_smem.shape[1] * CHUNK * 2
    for chunk in range(num_chunks):
        stage = chunk % STAGES
        hopper.mbarrier.wait(free.index(stage), (chunk // STAGES & 1) ^ 1)
        hopper.mbarrier.expect(ready.index(stage), BYTES)
        for half in gl.static_range(2):
            hopper.tma.async_copy_global_to_shared(
                w_desc, [expert, tile + half * HALF_TILES, chunk * (CHUNK // 32), 0],
                ready.index(stage), w_smem.index(stage * 2 + half),
            )  # fmt: skip
        hopper.tma.async_copy_global_to_shared(
            x_desc, [first, chunk * CHUNK], ready.index(stage), x_smem.index(stage)
        )


@gluon.jit
def _store_tile(
    values, out_ptr, order_ptr, stride_on, feature, first, end, num_features,
    IS_GATED: gl.constexpr,
):  # fmt: skip
    """float32 [F, T]: features side by side in memory."""
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    values = gl.convert_layout(values.to(gl.bfloat16), layout)
    features = feature + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    places = first + gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
    is_row = places < end
    rows = places if IS_GATED else gl.load(order_ptr + places, mask=is_row, other=0)
    out_ptrs = out_ptr + (rows.to(gl.int64) * stride_on)[None, :] + features[:, None]
    gl.store(out_ptrs, values, mask=(features < num_features)[:, None] & is_row[None, :])


@gluon.jit
def _multiply(
    x_smem, w_smem, ready, free, scales_ptr, bias_ptr, order_ptr, out_ptr,
    stride_se, stride_biase, stride_on, expert, strip, first, end, num_scales, num_chunks,
    out_features, alpha, limit, offset, HALF: gl.constexpr,
    IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCK_T: gl.constexpr = x_smem.shape[1]
    if end - first > BLOCK_T // 2:
        _multiply_rows(
            x_smem, w_smem, ready, free, scales_ptr, bias_ptr, order_ptr, out_ptr,
            stride_se, stride_biase, stride_on, expert, strip, first, end, num_scales, num_chunks,
            out_features, alpha, limit, offset, HALF, IS_GATED, HAS_BIAS, CHUNK, STAGES, BLOCK_T,
        )  # fmt: skip
    else:
        # An expert's last tile may hold a few rows only.
        _multiply_rows(
            x_smem, w_smem, ready, free, scales_ptr, bias_ptr, order_ptr, out_ptr,
            stride_se, stride_biase, stride_on, expert, strip, first, end, num_scales, num_chunks,
            out_features, alpha, limit, offset, HALF, IS_GATED, HAS_BIAS, CHUNK, STAGES,
            BLOCK_T // 2,
        )  # fmt: skip


@gluon.jit
def _multiply_rows(
    x_smem, w_smem, ready, free, scales_ptr, bias_ptr, order_ptr, out_ptr,
    stride_se, stride_biase, stride_on, expert, strip, first, end, num_scales, num_chunks,
    out_features, alpha, limit, offset, HALF: gl.constexpr,
    IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_T: gl.constexpr,
):  # fmt: skip
    """The first BLOCK_T rows of the tile."""
    TILE_F: gl.constexpr = w_smem.shape[4] // 4
    HALF_F: gl.constexpr = w_smem.shape[2] * TILE_F
    words_layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [64, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[HALF_F, 16],
    )  # fmt: skip
    w_shared: gl.constexpr = gl.SharedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0], [2, 4], [4, 8], [64, 0]]
    )
    scales_3d: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0], [64, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[HALF_F, 4, 4],
    )  # fmt: skip
    scales_layout: gl.constexpr = gl.SliceLayout(2, scales_3d)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)

    feature = strip * (2 * HALF_F) + HALF * HALF_F
    rows = gl.arange(0, HALF_F, gl.SliceLayout(1, scales_layout))
    blocks = gl.arange(0, 4, gl.SliceLayout(0, scales_layout))
    # Tiles behind the last one read it again, and are not stored.
    tiles = gl.minimum(feature // TILE_F + rows // TILE_F, (out_features - 1) // TILE_F)
    scale_rows = tiles * (num_scales + 1) * TILE_F + rows % TILE_F
    scale_ptrs = scales_ptr + expert.to(gl.int64) * stride_se
    scale_ptrs = scale_ptrs + scale_rows[:, None] + (blocks * TILE_F)[None, :]
    scales = gl.load(scale_ptrs, mask=(blocks < num_scales)[None, :], other=0)
    next_scales = gl.load(scale_ptrs + 4 * TILE_F, mask=(blocks + 4 < num_scales)[None, :], other=0)
    acc = gl.zeros([HALF_F, BLOCK_T], gl.float32, acc_layout)
    for chunk in range(num_chunks):
        stage = chunk % STAGES
        powers = gl.expand_dims(_powers_of(scales), 2)
        powers = powers + gl.zeros([HALF_F, 4, 4], gl.int32, scales_3d)
        powers = powers.reshape([HALF_F, 16])
        scales = next_scales
        place = (chunk + 2) * 4
        next_scales = gl.load(
            scale_ptrs + place * TILE_F, mask=(blocks + place < num_scales)[None, :], other=0
        )
        hopper.mbarrier.wait(ready.index(stage), chunk // STAGES & 1)
        codes = w_smem.index(stage * 2 + HALF)
        codes = codes._reinterpret(gl.int32, [HALF_F, CHUNK // 8], w_shared).load(words_layout)
        powers = gl.convert_layout(powers, words_layout, assert_trivial=True)
        left = gl.convert_layout(_unpack(codes, powers), left_layout)
        x = x_smem.index(stage).slice(0, BLOCK_T)
        acc = hopper.warpgroup_mma(left, x.permute((1, 0)), acc, is_async=True)
        # The product reads its left operand until here.
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(free.index(stage))

    rows = gl.arange(0, HALF_F, gl.SliceLayout(1, acc_layout))
    tiles = gl.minimum(feature // TILE_F + rows // TILE_F, (out_features - 1) // TILE_F)
    largest_places = (tiles * (num_scales + 1) + num_scales) * TILE_F + rows % TILE_F
    largest = gl.load(scales_ptr + expert.to(gl.int64) * stride_se + largest_places)
    acc = acc * scale_of(largest)[:, None]
    # [F / 2, T] each: even features and odd ones.
    even, odd = gl.split(acc.reshape([HALF_F // 16, 2, 8, BLOCK_T]).permute((0, 2, 3, 1)))
    even = even.reshape([HALF_F // 2, BLOCK_T])
    odd = odd.reshape([HALF_F // 2, BLOCK_T])
    if HAS_BIAS:
        pairs = gl.arange(0, HALF_F // 2, gl.SliceLayout(1, even.type.layout))
        bias_ptrs = bias_ptr + expert * stride_biase + feature + 2 * pairs
        is_feature = feature + 2 * pairs < out_features
        even += gl.load(bias_ptrs, mask=is_feature, other=0.0).to(gl.float32)[:, None]
        odd += gl.load(bias_ptrs + 1, mask=is_feature, other=0.0).to(gl.float32)[:, None]
    if IS_GATED:
        # Written so that a NaN stays one.
        even = gl.where(even > limit, limit, even)
        odd = gl.where(odd > limit, limit, gl.where(odd < -limit, -limit, odd))
        gated = even / (1.0 + gl.exp(-alpha * even)) * (odd + offset)
        _store_tile(
            gated, out_ptr, order_ptr, stride_on, feature // 2, first, end, out_features // 2, True
        )
    else:
        values = gl.join(even, odd).permute((0, 2, 1)).reshape([HALF_F, 2, BLOCK_T // 2])
        low, high = gl.split(values.permute((0, 2, 1)))
        _store_tile(low, out_ptr, order_ptr, stride_on, feature, first, end, out_features, False)
        _store_tile(
            high, out_ptr, order_ptr, stride_on, feature, first + BLOCK_T // 2, end, out_features,
            False,
        )  # fmt: skip


@gluon.jit
def _tall_product_kernel(
    x_desc, w_desc, scales_ptr, bias_ptr, tiles_ptr, order_ptr, out_ptr,
    stride_se, stride_biase, stride_on, num_scales, num_chunks, out_features, alpha, limit, offset,
    IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    entry_ptr = tiles_ptr + gl.program_id(1) * 3
    expert = gl.load(entry_ptr)
    first = gl.load(entry_ptr + 1)
    end = gl.load(entry_ptr + 2)
    # The end of an unused entry is 0.
    if end == 0:
        return
    BLOCK_T: gl.constexpr = x_desc.block_shape[0]
    HALF_TILES: gl.constexpr = w_desc.block_shape[1]
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_T, CHUNK], x_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.int32, [STAGES * 2] + w_desc.block_shape, w_desc.layout)  # noqa: RUF005
    ready, free = allocate_barriers(STAGES, 1, 2)
    strip = gl.program_id(0)
    gl.warp_specialize(
        [
            (_multiply, (
                x_smem, w_smem, ready, free, scales_ptr, bias_ptr, order_ptr, out_ptr,
                stride_se, stride_biase, stride_on, expert, strip, first, end, num_scales,
                num_chunks, out_features, alpha, limit, offset, 0,
                IS_GATED, HAS_BIAS, CHUNK, STAGES,
            )),
            (_multiply, (
                x_smem, w_smem, ready, free, scales_ptr, bias_ptr, order_ptr, out_ptr,
                stride_se, stride_biase, stride_on, expert, strip, first, end, num_scales,
                num_chunks, out_features, alpha, limit, offset, 1,
                IS_GATED, HAS_BIAS, CHUNK, STAGES,
            )),
            (_fetch, (
                x_desc, w_desc, x_smem, w_smem, ready, free, expert, strip * (2 * HALF_TILES),
                first, num_chunks, CHUNK, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def launch_tall_product(
    x: Tensor,
    routed: RoutedRows,
    blocks: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    gate: Gate | None,
    out: Tensor,
) -> None:
    out_features = out.shape[1] * (2 if gate else 1)
    num_chunks = cdiv(x.shape[1], CHUNK)
    x = _gather_inputs(x, routed, num_chunks, is_gathered=gate is not None)
    numbers = gate or Gate()
    x_box, layout = [routed.tile_rows, CHUNK], gl.NVMMASharedLayout(128, 16, 2)
    _tall_product_kernel[(cdiv(blocks.shape[1], 2 * _HALF_TILES), routed.tiles.shape[0])](
        x_desc=TensorDescriptor.from_tensor(x, x_box, layout),
        w_desc=describe_words(blocks, _HALF_TILES),
        scales_ptr=scales,
        bias_ptr=x if bias is None else bias,
        tiles_ptr=routed.tiles,
        order_ptr=routed.order,
        out_ptr=out,
        stride_se=scales.stride(0),
        stride_biase=0 if bias is None else bias.stride(0),
        stride_on=out.stride(0),
        num_scales=blocks.shape[2],
        num_chunks=num_chunks,
        out_features=out_features,
        alpha=numbers.alpha,
        limit=numbers.limit,
        offset=numbers.offset,
        IS_GATED=gate is not None,
        HAS_BIAS=bias is not None,
        CHUNK=CHUNK,
        STAGES=_STAGES,
        num_warps=4,
    )
