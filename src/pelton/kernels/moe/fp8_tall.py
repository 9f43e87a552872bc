# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The FP8 experts' products on Hopper where experts have many rows: bound by the matrix units.

    fetch (one warp)          copies blocks of 128 inputs to shared memory
    multiply (warpgroup 0)    first 64 rows of the tile
    multiply (warpgroup 1)    last 64

A tile is 128 rows by 256 features: with fewer, what the multiprocessors read from the L2 cache
bounds it. The sum over a block of inputs is taken by the matrix units, and while one warpgroup adds
it in full float32, the other's product runs. A tile's features have two scales a block of inputs:
one for each 128 of them, or, where gate and up take turns, one for each of the two. A thread holds
two rows, so it multiplies its part of a block's sum by four numbers.

The copy engine cannot gather, so activations are brought in the order of the routed rows first.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.fp8.scales import BLOCK_SIZE
from pelton.kernels.hopper_product import allocate_barriers, start_product
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.sort_by_expert import RoutedRows
from pelton.kernels.triton_runtime import TensorDescriptor, cdiv, gl, gluon, hopper, runs_hopper

_HALF_T = 64
_HALF_F = 128
_STAGES = 4


@gluon.jit
def _fetch(
    x_desc, w_desc, x_smem, xs_smem, w_smem, ready, free, x_scales_ptr, num_rows, feature_row,
    first, num_blocks, STAGES: gl.constexpr,
):  # fmt: skip
    """A stage is ready when its copies have landed: the copy engine's, and each thread's own."""
    HALF_T: gl.constexpr = x_smem.shape[1]
    HALF_F: gl.constexpr = w_smem.shape[1]
    BLOCK_D: gl.constexpr = x_smem.shape[2]
    places = first + gl.arange(0, HALF_T, gl.BlockedLayout([1], [32], [1], [0]))
    for block in range(num_blocks):
        stage = block % STAGES
        hopper.mbarrier.wait(free.index(stage), (block // STAGES & 1) ^ 1)
        hopper.mbarrier.expect(ready.index(stage), 2 * (HALF_T + HALF_F) * BLOCK_D)
        for part in gl.static_range(2):
            hopper.tma.async_copy_global_to_shared(
                w_desc, [feature_row + part * HALF_F, block * BLOCK_D], ready.index(stage),
                w_smem.index(stage * 2 + part),
            )  # fmt: skip
        for half in gl.static_range(2):
            hopper.tma.async_copy_global_to_shared(
                x_desc, [first + half * HALF_T, block * BLOCK_D], ready.index(stage),
                x_smem.index(stage * 2 + half),
            )  # fmt: skip
            rows = places + half * HALF_T
            hopper.async_copy.async_copy_global_to_shared(
                xs_smem.index(stage * 2 + half), x_scales_ptr + block * num_rows + rows,
                mask=rows < num_rows,
            )  # fmt: skip
        hopper.async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)


@gluon.jit
def _add_block(acc, partial, x_scales, even_scale, odd_scale):
    """With the scales of even features and of odd ones."""
    columns = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    w_scales = gl.where(columns % 2 == 0, even_scale, odd_scale)
    acc += partial * (w_scales[None, :] * x_scales[:, None])
    # No product is under way: the sum is pinned in front of the next, which takes its registers.
    return hopper.warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _store(
    acc, out_ptr, order_ptr, stride_on, feature, place, end, num_features, alpha, limit, offset,
    IS_GATED: gl.constexpr,
):  # fmt: skip
    """float32 [T, F] of features and routed rows from these on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    values = acc
    if IS_GATED:
        # Gate and up are neighbouring features, which a thread has both of.
        even, odd = gl.split(acc.reshape([acc.shape[0], acc.shape[1] // 2, 2]))
        # Written so that a NaN stays one.
        even = gl.where(even > limit, limit, even)
        odd = gl.where(odd > limit, limit, gl.where(odd < -limit, -limit, odd))
        values = even / (1.0 + gl.exp(-alpha * even)) * (odd + offset)
    values = gl.convert_layout(values.to(out_ptr.dtype.element_ty), layout)
    features = feature + gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
    places = place + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    is_row = places < end
    rows = places if IS_GATED else gl.load(order_ptr + places, mask=is_row, other=0)
    out_ptrs = out_ptr + (rows.to(gl.int64) * stride_on)[:, None] + features[None, :]
    gl.store(out_ptrs, values, mask=is_row[:, None] & (features < num_features)[None, :])


@gluon.jit
def _multiply(
    x_smem, xs_smem, w_smem, ready, free, scales_ptr, order_ptr, out_ptr,
    stride_sf, stride_sg, stride_on, strip, first, end,
    num_blocks, out_features, num_scale_rows, alpha, limit, offset,
    HALF: gl.constexpr, IS_GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    HALF_T: gl.constexpr = x_smem.shape[1]
    HALF_F: gl.constexpr = w_smem.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_F, 32])
    low_ptr = scales_ptr + strip * 2 * stride_sf
    # The last strip may have no second row of scales, and then no features there.
    high_ptr = scales_ptr + gl.minimum(strip * 2 + 1, num_scale_rows - 1) * stride_sf
    low, high = gl.load(low_ptr), gl.load(high_ptr)
    partial = gl.zeros([HALF_T, HALF_F], gl.float32, layout)
    acc0, acc1 = partial, partial
    no = num_blocks < 0
    place = first + HALF * HALF_T
    num_multiplied = num_blocks
    if place >= end:
        # The tile ends before this half.
        num_multiplied = 0
    for block in range(num_multiplied):
        stage = block % STAGES
        hopper.mbarrier.wait(ready.index(stage), block // STAGES & 1)
        x_tile = x_smem.index(stage * 2 + HALF)
        partial = start_product(x_tile, w_smem.index(stage * 2), partial, no)
        x_scales = xs_smem.index(stage * 2 + HALF).load(gl.SliceLayout(1, layout))
        # The next block's, while this one's products run.
        ahead = gl.minimum(block + 1, num_blocks - 1) * stride_sg
        next_low, next_high = gl.load(low_ptr + ahead), gl.load(high_ptr + ahead)
        partial = hopper.warpgroup_mma_wait(0, deps=[partial])
        acc0 = _add_block(acc0, partial, x_scales, low, high if IS_GATED else low)
        partial = start_product(x_tile, w_smem.index(stage * 2 + 1), partial, no)
        partial = hopper.warpgroup_mma_wait(0, deps=[partial])
        hopper.mbarrier.arrive(free.index(stage))
        acc1 = _add_block(acc1, partial, x_scales, low if IS_GATED else high, high)
        low, high = next_low, next_high
    for block in range(num_multiplied, num_blocks):
        hopper.mbarrier.wait(ready.index(block % STAGES), block // STAGES & 1)
        hopper.mbarrier.arrive(free.index(block % STAGES))

    WIDTH: gl.constexpr = HALF_F // 2 if IS_GATED else HALF_F
    num_features = out_features // 2 if IS_GATED else out_features
    for part in gl.static_range(2):
        _store(
            acc1 if part else acc0, out_ptr, order_ptr, stride_on, (strip * 2 + part) * WIDTH,
            place, end, num_features, alpha, limit, offset, IS_GATED,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows"])
def _tall_product_kernel(
    x_desc, w_desc, x_scales_ptr, scales_ptr, tiles_ptr, order_ptr, out_ptr,
    stride_se, stride_sf, stride_sg, stride_on, num_rows, num_blocks, out_features, num_scale_rows,
    alpha, limit, offset, IS_GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    entry_ptr = tiles_ptr + gl.program_id(1) * 3
    expert = gl.load(entry_ptr)
    first = gl.load(entry_ptr + 1)
    end = gl.load(entry_ptr + 2)
    # The end of an unused entry is 0.
    if end == 0:
        return
    x_shape: gl.constexpr = [STAGES * 2] + x_desc.block_shape  # noqa: RUF005
    w_shape: gl.constexpr = [STAGES * 2] + w_desc.block_shape  # noqa: RUF005
    xs_shape: gl.constexpr = [STAGES * 2, x_desc.block_shape[0]]
    in_order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_smem = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, w_shape, w_desc.layout)
    xs_smem = gl.allocate_shared_memory(gl.float32, xs_shape, in_order)
    ready, free = allocate_barriers(STAGES, 33, 2)
    strip = gl.program_id(0)
    feature_row = expert * out_features + strip * (2 * w_desc.block_shape[0])
    scales_ptr += expert.to(gl.int64) * stride_se
    gl.warp_specialize(
        [
            (_multiply, (
                x_smem, xs_smem, w_smem, ready, free, scales_ptr, order_ptr, out_ptr,
                stride_sf, stride_sg, stride_on, strip, first, end,
                num_blocks, out_features, num_scale_rows, alpha, limit, offset,
                0, IS_GATED, STAGES,
            )),
            (_multiply, (
                x_smem, xs_smem, w_smem, ready, free, scales_ptr, order_ptr, out_ptr,
                stride_sf, stride_sg, stride_on, strip, first, end,
                num_blocks, out_features, num_scale_rows, alpha, limit, offset,
                1, IS_GATED, STAGES,
            )),
            (_fetch, (
                x_desc, w_desc, x_smem, xs_smem, w_smem, ready, free, x_scales_ptr, num_rows,
                feature_row, first, num_blocks, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def suits_tall_product(x: Tensor, routed: RoutedRows, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the copy engine fits these shapes, and tiles are as high as the kernel's."""
    return (
        routed.tile_rows == 2 * _HALF_T
        and dtype is not torch.float32
        and x.shape[1] % BLOCK_SIZE == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and runs_hopper(x.device)
    )


def launch_tall_product(
    x: Float[Tensor, "n D"],
    x_scales: Float[Tensor, "n D/128"],
    routed: RoutedRows,
    weight: Float[Tensor, "E F D"],
    scales: Float[Tensor, "E a b"],
    gate: Gate | None,
    out: Float[Tensor, "N f"],
) -> None:
    """As `fp8_product.launch_product`, bit for bit; `suits_tall_product` must hold."""
    num_experts, out_features, in_features = weight.shape
    scales_by_block = x_scales.t()
    if gate is not None:
        rows = routed.order // routed.top_k
        x = x.contiguous().view(torch.int64).index_select(0, rows).view(x.dtype)
        scales_by_block = scales_by_block.index_select(1, rows)
    numbers = gate or Gate()
    layout = gl.NVMMASharedLayout(128, 8, 2)
    weight = weight.view(num_experts * out_features, in_features)
    _tall_product_kernel[(cdiv(out_features, 2 * _HALF_F), routed.tiles.shape[0])](
        x_desc=TensorDescriptor.from_tensor(x.contiguous(), [_HALF_T, BLOCK_SIZE], layout),
        w_desc=TensorDescriptor.from_tensor(weight, [_HALF_F, BLOCK_SIZE], layout),
        x_scales_ptr=scales_by_block.contiguous(),
        scales_ptr=scales,
        tiles_ptr=routed.tiles,
        order_ptr=routed.order,
        out_ptr=out,
        stride_se=scales.stride(0),
        stride_sf=scales.stride(1),
        stride_sg=scales.stride(2),
        stride_on=out.stride(0),
        num_rows=x.shape[0],
        num_blocks=in_features // BLOCK_SIZE,
        out_features=out_features,
        num_scale_rows=scales.shape[1],
        alpha=numbers.alpha,
        limit=numbers.limit,
        offset=numbers.offset,
        IS_GATED=gate is not None,
        STAGES=_STAGES,
        num_warps=4,
    )
