# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The MXFP4 experts' products on Hopper where experts have many rows: bound by the matrix units.

    fetch (one warp)          copies chunks of weights and activations to shared memory
    multiply (warpgroup 0)    first 128 features of the tile
    multiply (warpgroup 1)    last 128

Each warpgroup unpacks a chunk's weights into its left operand, as in `hopper`, then multiplies and
waits. The two fall out of step by themselves: one unpacks while the other's product runs. The copy
engine cannot gather, so the activations are brought in the order of the routed rows first.
"""

from torch import Tensor

from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product.hopper_unpack import CHUNK, gather_inputs, powers_of, unpack
from pelton.kernels.moe.sort_by_expert import RoutedRows
from pelton.kernels.triton_runtime import TensorDescriptor, cdiv, gl, gluon, hopper

_HALF_F = 128
"""Features of a warpgroup."""
_STAGES = 4


@gluon.jit
def _fetch(
    x_desc, w_desc, x_smem, w_smem, ready, free, expert, feature, first, num_chunks,
    CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCK_F: gl.constexpr = w_smem.shape[2]
    BYTES: gl.constexpr = BLOCK_F * CHUNK // 2 + x_smem.shape[1] * CHUNK * 2
    for chunk in range(num_chunks):
        stage = chunk % STAGES
        hopper.mbarrier.wait(free.index(stage), (chunk // STAGES & 1) ^ 1)
        hopper.mbarrier.expect(ready.index(stage), BYTES)
        hopper.tma.async_copy_global_to_shared(
            w_desc, [expert, feature, chunk * (CHUNK // 8)], ready.index(stage),
            w_smem.index(stage),
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
    HALF_F: gl.constexpr = w_smem.shape[2] // 2
    # A thread's two rows of the left operand are neighbours here, a gate and its up-projection.
    words_layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 64, 0]],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 2, 0], [0, 4, 0], [0, 8, 0]],
        warp_bases=[[0, 16, 0], [0, 32, 0]], block_bases=[], shape=[1, HALF_F, 16],
    )  # fmt: skip
    scales_3d: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [1, 0, 0], [64, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[HALF_F, 4, 4],
    )  # fmt: skip
    scales_layout: gl.constexpr = gl.SliceLayout(2, scales_3d)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)

    feature = strip * (2 * HALF_F) + HALF * HALF_F
    rows = gl.arange(0, HALF_F, gl.SliceLayout(1, scales_layout))
    blocks = gl.arange(0, 4, gl.SliceLayout(0, scales_layout))
    # Rows behind the last feature read it again, and are not stored.
    rows = gl.minimum(feature + rows, out_features - 1)
    scale_ptrs = scales_ptr + expert.to(gl.int64) * stride_se
    scale_ptrs = scale_ptrs + (rows * num_scales)[:, None] + blocks[None, :]
    scales = gl.load(scale_ptrs, mask=(blocks < num_scales)[None, :], other=127)
    next_scales = gl.load(scale_ptrs + 4, mask=(blocks + 4 < num_scales)[None, :], other=127)
    acc = gl.zeros([HALF_F, BLOCK_T], gl.float32, acc_layout)
    for chunk in range(num_chunks):
        stage = chunk % STAGES
        powers = gl.expand_dims(powers_of(scales), 2)
        powers = powers + gl.zeros([HALF_F, 4, 4], gl.int32, scales_3d)
        powers = powers.reshape([1, HALF_F, 16])
        scales = next_scales
        place = (chunk + 2) * 4
        next_scales = gl.load(
            scale_ptrs + place, mask=(blocks + place < num_scales)[None, :], other=127
        )
        hopper.mbarrier.wait(ready.index(stage), chunk // STAGES & 1)
        codes = w_smem.index(stage).slice(HALF * HALF_F, HALF_F, dim=1).load(words_layout)
        powers = gl.convert_layout(powers, words_layout, assert_trivial=True)
        left = unpack(codes.reshape([HALF_F, 16]), powers.reshape([HALF_F, 16]))
        # [F / 16, 8, 2, D] with the neighbours last, to the matrix instruction's order.
        left = left.reshape([HALF_F // 16, 8, 2, CHUNK]).permute((0, 2, 1, 3))
        left = gl.convert_layout(left.reshape([HALF_F, CHUNK]), left_layout)
        acc = hopper.warpgroup_mma(left, x_smem.index(stage).permute((1, 0)), acc, is_async=True)
        # The product reads its left operand until here.
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(free.index(stage))

    acc = acc * 4294967296.0  # 2^32
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
    BLOCK_F: gl.constexpr = w_desc.block_shape[1]
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_T, CHUNK], x_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.int32, [STAGES, 1, BLOCK_F, CHUNK // 8], w_desc.layout)
    barriers: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(i), count=1)
        hopper.mbarrier.init(free.index(i), count=2)
    hopper.fence_async_shared()
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
                x_desc, w_desc, x_smem, w_smem, ready, free, expert, strip * BLOCK_F, first,
                num_chunks, CHUNK, STAGES,
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
    _, out_features, num_scales = scales.shape
    num_chunks = cdiv(x.shape[1], CHUNK)
    x = gather_inputs(x, routed, num_chunks, is_gathered=gate is not None)
    words = blocks.flatten(2)
    numbers = gate or Gate()
    x_layout, w_layout = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(0, 32, 3)
    _tall_product_kernel[(cdiv(out_features, 2 * _HALF_F), routed.tiles.shape[0])](
        x_desc=TensorDescriptor.from_tensor(x, [routed.tile_rows, CHUNK], x_layout),
        w_desc=TensorDescriptor.from_tensor(words, [1, 2 * _HALF_F, CHUNK // 8], w_layout),
        scales_ptr=scales,
        bias_ptr=x if bias is None else bias,
        tiles_ptr=routed.tiles,
        order_ptr=routed.order,
        out_ptr=out,
        stride_se=scales.stride(0),
        stride_biase=0 if bias is None else bias.stride(0),
        stride_on=out.stride(0),
        num_scales=num_scales,
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
