# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The product of `invariant_linear` for many tokens on Hopper, where scales are those of rows.

    fetch (one warp)          copies blocks of 128 inputs to shared memory
    multiply (warpgroup 0)    first 64 features of the tile
    multiply (warpgroup 1)    last 64

An element is summed as there, bit for bit: four products of 32 inputs in the matrix units, then
that sum of 128 inputs is added in full float32. While one warpgroup adds, the other's product runs.
A program takes tile after tile, and the copies of the next begin while this one is stored.
"""

from jaxtyping import Float
from torch import Tensor

from pelton.kernels.fp8.scales import BLOCK_SIZE, FP8Operands
from pelton.kernels.hopper_product import allocate_stages, fetch_tiles, locate_tile
from pelton.kernels.triton_runtime import (
    TensorDescriptor,
    cdiv,
    gl,
    gluon,
    hopper,
    num_multiprocessors,
    runs_hopper,
)

_BLOCK_T = 128
_HALF_F = 64
_STAGES = 6


@gluon.jit
def _multiply(
    x_smem, w_smem, ready, free, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, stride_xst,
    stride_wsf, stride_ot, num_tokens, out_features, num_token_tiles, num_feature_tiles, num_blocks,
    HALF: gl.constexpr, HAS_BIAS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCK_T: gl.constexpr = x_smem.shape[1]
    HALF_F: gl.constexpr = w_smem.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 32])
    # Features side by side in memory.
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    nothing = gl.zeros([HALF_F, BLOCK_T], gl.float32, layout)
    count = 0
    for index in range(gl.program_id(0), num_token_tiles * num_feature_tiles, gl.num_programs(0)):
        token_tile, feature_tile = locate_tile(index, num_token_tiles, num_feature_tiles)
        acc = gl.zeros([HALF_F, BLOCK_T], gl.float32, layout)
        for _ in range(num_blocks):
            stage = count % STAGES
            hopper.mbarrier.wait(ready.index(stage), count // STAGES & 1)
            partial = hopper.warpgroup_mma(
                w_smem.index(stage * 2 + HALF), x_smem.index(stage).permute((1, 0)), nothing,
                use_acc=False, is_async=True,
            )  # fmt: skip
            partial = hopper.warpgroup_mma_wait(0, deps=[partial])
            hopper.mbarrier.arrive(free.index(stage))
            acc += partial
            count += 1

        first_feature = (feature_tile * 2 + HALF) * HALF_F
        features = first_feature + gl.arange(0, HALF_F, gl.SliceLayout(1, layout))
        tokens = token_tile * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(0, layout))
        is_feature, is_token = features < out_features, tokens < num_tokens
        w_scales = gl.load(weight_scales_ptr + features * stride_wsf, mask=is_feature, other=0.0)
        x_scales = gl.load(x_scales_ptr + tokens * stride_xst, mask=is_token, other=0.0)
        acc = acc * w_scales[:, None] * x_scales[None, :]
        if HAS_BIAS:
            bias = gl.load(bias_ptr + features, mask=is_feature, other=0.0)
            acc += bias.to(gl.float32)[:, None]
        out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), stored)
        features = first_feature + gl.arange(0, HALF_F, gl.SliceLayout(1, stored))
        tokens = token_tile * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(0, stored))
        out_ptrs = out_ptr + tokens.to(gl.int64)[None, :] * stride_ot + features[:, None]
        gl.store(
            out_ptrs, out, mask=(features < out_features)[:, None] & (tokens < num_tokens)[None, :]
        )


@gluon.jit(do_not_specialize=["num_tokens", "num_token_tiles"])
def _hopper_linear_kernel(
    x_desc, w_desc, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, stride_xst, stride_wsf,
    stride_ot, num_tokens, out_features, num_token_tiles, num_feature_tiles, num_blocks,
    HAS_BIAS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    x_smem, w_smem, ready, free = allocate_stages(x_desc, w_desc, STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                x_smem, w_smem, ready, free, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr,
                stride_xst, stride_wsf, stride_ot, num_tokens, out_features, num_token_tiles,
                num_feature_tiles, num_blocks, 0, HAS_BIAS, STAGES,
            )),
            (_multiply, (
                x_smem, w_smem, ready, free, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr,
                stride_xst, stride_wsf, stride_ot, num_tokens, out_features, num_token_tiles,
                num_feature_tiles, num_blocks, 1, HAS_BIAS, STAGES,
            )),
            (fetch_tiles, (
                x_desc, w_desc, x_smem, w_smem, ready, free, num_token_tiles, num_feature_tiles,
                num_blocks, 1, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def runs_hopper_linear(operands: FP8Operands) -> bool:
    """Whether the copy engine takes both operands."""
    x, weight = operands.x, operands.weight
    return (
        x.shape[1] % BLOCK_SIZE == 0
        and all(
            side.stride(0) >= side.shape[1] > 0 and side.stride(0) % 16 == side.data_ptr() % 16 == 0
            for side in (x, weight)
        )
        and runs_hopper(x.device)
    )


def launch_hopper_linear(operands: FP8Operands, out: Float[Tensor, "T F"]) -> None:
    num_tokens, out_features, in_features = operands.shape
    layout = gl.NVMMASharedLayout(128, 8, 2)
    num_token_tiles, num_feature_tiles = cdiv(num_tokens, _BLOCK_T), cdiv(out_features, 2 * _HALF_F)
    num_programs = min(num_token_tiles * num_feature_tiles, num_multiprocessors(operands.x.device))
    _hopper_linear_kernel[(num_programs,)](
        x_desc=TensorDescriptor.from_tensor(operands.x, [_BLOCK_T, BLOCK_SIZE], layout),
        w_desc=TensorDescriptor.from_tensor(operands.weight, [_HALF_F, BLOCK_SIZE], layout),
        x_scales_ptr=operands.x_scales,
        weight_scales_ptr=operands.weight_scales,
        bias_ptr=operands.weight if operands.bias is None else operands.bias,
        out_ptr=out,
        stride_xst=operands.x_scales.stride(0),
        stride_wsf=operands.weight_scales.stride(0),
        stride_ot=out.stride(0),
        num_tokens=num_tokens,
        out_features=out_features,
        num_token_tiles=num_token_tiles,
        num_feature_tiles=num_feature_tiles,
        num_blocks=in_features // BLOCK_SIZE,
        HAS_BIAS=operands.bias is not None,
        STAGES=_STAGES,
        enable_fp_fusion=False,
        num_warps=4,
    )
