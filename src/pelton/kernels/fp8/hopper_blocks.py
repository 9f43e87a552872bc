# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The product of `invariant_linear` for many tokens on Hopper, where scales are those of blocks.

    fetch (one warp)          copies blocks of 128 inputs, and tokens' scales, to shared memory
    multiply (warpgroup 0)    first 64 tokens of the tile
    multiply (warpgroup 1)    last 64

An element is summed as there, bit for bit: four products of 32 inputs in the matrix units, whose
sum is scaled and added in full float32. While one warpgroup adds, the other's product runs. Tokens
are rows here, of which a thread holds two: it needs two of their scales a block, and one of the
weight's. A program takes tile after tile, as in `hopper_linear`.
"""

from jaxtyping import Float
from torch import Tensor

from pelton.kernels.fp8.scales import BLOCK_SIZE, FP8Operands
from pelton.kernels.hopper_product import allocate_barriers, locate_tile, start_product
from pelton.kernels.triton_runtime import (
    TensorDescriptor,
    cdiv,
    gl,
    gluon,
    hopper,
    next_power_of_2,
    num_multiprocessors,
)

_HALF_T = 64
_BYTES_AHEAD = 3 * 2**16


@gluon.jit
def _fetch(
    x_desc, w_desc, x_smem, xs_smem, w_smem, ready, free, x_scales_ptr, stride_xst, stride_xsg,
    num_tokens, num_token_tiles, num_feature_tiles, num_blocks, STAGES: gl.constexpr,
):  # fmt: skip
    """A stage is ready when its copies have landed: the copy engine's, and each thread's own."""
    HALF_T: gl.constexpr = x_smem.shape[1]
    BLOCK_F: gl.constexpr = w_smem.shape[1]
    BLOCK_D: gl.constexpr = w_smem.shape[2]
    places = gl.arange(0, 2 * HALF_T, gl.BlockedLayout([1], [32], [1], [0]))
    count = 0
    for index in range(gl.program_id(0), num_token_tiles * num_feature_tiles, gl.num_programs(0)):
        feature_tile, token_tile = locate_tile(index, num_feature_tiles, num_token_tiles)
        tokens = token_tile * (2 * HALF_T) + places
        x_scale_ptrs = x_scales_ptr + tokens.to(gl.int64) * stride_xst
        for block in range(num_blocks):
            stage = count % STAGES
            hopper.mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            hopper.mbarrier.expect(ready.index(stage), (2 * HALF_T + BLOCK_F) * BLOCK_D)
            hopper.tma.async_copy_global_to_shared(
                w_desc, [feature_tile * BLOCK_F, block * BLOCK_D], ready.index(stage),
                w_smem.index(stage),
            )  # fmt: skip
            for half in gl.static_range(2):
                hopper.tma.async_copy_global_to_shared(
                    x_desc, [(token_tile * 2 + half) * HALF_T, block * BLOCK_D],
                    ready.index(stage), x_smem.index(stage * 2 + half),
                )  # fmt: skip
            hopper.async_copy.async_copy_global_to_shared(
                xs_smem.index(stage), x_scale_ptrs + block * stride_xsg, mask=tokens < num_tokens
            )
            hopper.async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            count += 1


@gluon.jit
def _add_block(acc, partial, scales):
    acc += partial * scales[:, None]
    # No product is under way: the sum is pinned in front of the next, which takes its registers.
    return hopper.warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _store(
    acc, bias_ptr, out_ptr, stride_ot, first_token, first_feature, num_tokens, out_features,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """float32 [T, F] of tokens and features from these on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if HAS_BIAS:
        features = first_feature + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        bias = gl.load(bias_ptr + features, mask=features < out_features, other=0.0)
        acc += bias.to(gl.float32)[None, :]
    values = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), layout)
    tokens = first_token + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    features = first_feature + gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
    out_ptrs = out_ptr + tokens.to(gl.int64)[:, None] * stride_ot + features[None, :]
    is_out = (tokens < num_tokens)[:, None] & (features < out_features)[None, :]
    gl.store(out_ptrs, values, mask=is_out)


@gluon.jit
def _multiply(
    x_smem, xs_smem, w_smem, ready, free, weight_scales_ptr, bias_ptr, out_ptr, stride_wsf,
    stride_wsg, stride_ot, num_tokens, out_features, num_token_tiles, num_feature_tiles,
    num_blocks, HALF: gl.constexpr, HAS_BIAS: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    HALF_T: gl.constexpr = x_smem.shape[1]
    BLOCK_F: gl.constexpr = w_smem.shape[1]
    BLOCK_D: gl.constexpr = w_smem.shape[2]
    PART_F: gl.constexpr = BLOCK_F // PARTS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_F, 32])
    partial = gl.zeros([HALF_T, PART_F], gl.float32, layout)
    no = num_blocks < 0
    count = 0
    for index in range(gl.program_id(0), num_token_tiles * num_feature_tiles, gl.num_programs(0)):
        feature_tile, token_tile = locate_tile(index, num_feature_tiles, num_token_tiles)
        first_feature = feature_tile * BLOCK_F
        low_ptr = weight_scales_ptr + first_feature // BLOCK_D * stride_wsf
        high_ptr = low_ptr
        if PARTS == 2:
            # The last tile may end before its second part.
            high_ptr += gl.where(first_feature + PART_F < out_features, stride_wsf, 0)
        low, high = gl.load(low_ptr), gl.load(high_ptr)
        acc0 = gl.zeros([HALF_T, PART_F], gl.float32, layout)
        acc1 = acc0
        for block in range(num_blocks):
            stage = count % STAGES
            hopper.mbarrier.wait(ready.index(stage), count // STAGES & 1)
            x_tile = x_smem.index(stage * 2 + HALF)
            w_tile = w_smem.index(stage).slice(0, PART_F)
            partial = start_product(x_tile, w_tile, partial, no)
            x_scales = xs_smem.index(stage).slice(HALF * HALF_T, HALF_T)
            x_scales = x_scales.load(gl.SliceLayout(1, layout))
            # The next block's, while this one's products run.
            ahead = gl.minimum(block + 1, num_blocks - 1) * stride_wsg
            next_low, next_high = gl.load(low_ptr + ahead), gl.load(high_ptr + ahead)
            partial = hopper.warpgroup_mma_wait(0, deps=[partial])
            if PARTS == 2:
                acc0 = _add_block(acc0, partial, x_scales * low)
                w_tile = w_smem.index(stage).slice(PART_F, PART_F)
                partial = start_product(x_tile, w_tile, partial, no)
                partial = hopper.warpgroup_mma_wait(0, deps=[partial])
                hopper.mbarrier.arrive(free.index(stage))
                acc1 = _add_block(acc1, partial, x_scales * high)
            else:
                hopper.mbarrier.arrive(free.index(stage))
                acc0 = _add_block(acc0, partial, x_scales * low)
            low, high = next_low, next_high
            count += 1

        for part in gl.static_range(PARTS):
            _store(
                acc1 if part else acc0, bias_ptr, out_ptr, stride_ot,
                (token_tile * 2 + HALF) * HALF_T, first_feature + part * PART_F, num_tokens,
                out_features, HAS_BIAS,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "num_token_tiles", "stride_xsg"])
def _hopper_blocks_kernel(
    x_desc, w_desc, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, stride_xst, stride_xsg,
    stride_wsf, stride_wsg, stride_ot, num_tokens, out_features, num_token_tiles,
    num_feature_tiles, num_blocks,
    HAS_BIAS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    x_shape: gl.constexpr = [STAGES * 2] + x_desc.block_shape  # noqa: RUF005
    w_shape: gl.constexpr = [STAGES] + w_desc.block_shape  # noqa: RUF005
    xs_shape: gl.constexpr = [STAGES, 2 * x_desc.block_shape[0]]
    in_order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_smem = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, w_shape, w_desc.layout)
    xs_smem = gl.allocate_shared_memory(gl.float32, xs_shape, in_order)
    ready, free = allocate_barriers(STAGES, 33, 2)
    gl.warp_specialize(
        [
            (_multiply, (
                x_smem, xs_smem, w_smem, ready, free, weight_scales_ptr, bias_ptr, out_ptr,
                stride_wsf, stride_wsg, stride_ot, num_tokens, out_features, num_token_tiles,
                num_feature_tiles, num_blocks, 0, HAS_BIAS, PARTS, STAGES,
            )),
            (_multiply, (
                x_smem, xs_smem, w_smem, ready, free, weight_scales_ptr, bias_ptr, out_ptr,
                stride_wsf, stride_wsg, stride_ot, num_tokens, out_features, num_token_tiles,
                num_feature_tiles, num_blocks, 1, HAS_BIAS, PARTS, STAGES,
            )),
            (_fetch, (
                x_desc, w_desc, x_smem, xs_smem, w_smem, ready, free, x_scales_ptr, stride_xst,
                stride_xsg, num_tokens, num_token_tiles, num_feature_tiles, num_blocks, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def tune(num_tokens: int, out_features: int, num_programs: int) -> int:
    """Features of the tile with which `num_programs` multiprocessors are done first, the most of
    equals. A block takes the matrix units 4 cycles a feature, what it copies comes at 64 bytes a
    cycle, and a product's start and end take as long as 64 features do. The same from one power of
    two to the next, as in `hopper_product`."""
    num_token_tiles = cdiv(next_power_of_2(num_tokens), 2 * _HALF_T)

    def count_cycles(block_f: int) -> int:
        num_turns = cdiv(num_token_tiles * cdiv(out_features, block_f), num_programs)
        return num_turns * (256 + max(4 * block_f, 2 * (block_f + 2 * _HALF_T)))

    return min((256, 128, 64), key=count_cycles)


def launch_hopper_blocks(operands: FP8Operands, out: Float[Tensor, "T F"]) -> None:
    """As `invariant_linear` for scales of blocks; `runs_hopper_linear` must hold."""
    num_tokens, out_features, in_features = operands.shape
    block_f = tune(num_tokens, out_features, num_multiprocessors(operands.x.device))
    layout = gl.NVMMASharedLayout(128, 8, 2)
    num_token_tiles, num_feature_tiles = cdiv(num_tokens, 2 * _HALF_T), cdiv(out_features, block_f)
    num_programs = min(num_token_tiles * num_feature_tiles, num_multiprocessors(operands.x.device))
    _hopper_blocks_kernel[(num_programs,)](
        x_desc=TensorDescriptor.from_tensor(operands.x, [_HALF_T, BLOCK_SIZE], layout),
        w_desc=TensorDescriptor.from_tensor(operands.weight, [block_f, BLOCK_SIZE], layout),
        x_scales_ptr=operands.x_scales,
        weight_scales_ptr=operands.weight_scales,
        bias_ptr=operands.weight if operands.bias is None else operands.bias,
        out_ptr=out,
        stride_xst=operands.x_scales.stride(0),
        stride_xsg=operands.x_scales.stride(1),
        stride_wsf=operands.weight_scales.stride(0),
        stride_wsg=operands.weight_scales.stride(1),
        stride_ot=out.stride(0),
        num_tokens=num_tokens,
        out_features=out_features,
        num_token_tiles=num_token_tiles,
        num_feature_tiles=num_feature_tiles,
        num_blocks=in_features // BLOCK_SIZE,
        HAS_BIAS=operands.bias is not None,
        PARTS=2 if block_f == 256 else 1,
        STAGES=_BYTES_AHEAD // (BLOCK_SIZE * (2 * _HALF_T + block_f)),
        # As where tokens are few.
        enable_fp_fusion=True,
        num_warps=4,
    )
