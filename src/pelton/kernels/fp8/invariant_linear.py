# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The product of FP8 activations with an FP8 weight, its bits the same for any number of rows.

As in `kernels.invariant_product`, the weight's tile is the left operand and the sum runs over the
inputs in order, 128 at a time: each sum of 128 is scaled, where scales are those of blocks, and
added in full float32. `hopper_linear` and, for blocks, `hopper_blocks` sum likewise.
"""

from jaxtyping import Float
from torch import Tensor

from pelton.kernels.fp8.hopper_blocks import launch_hopper_blocks
from pelton.kernels.fp8.hopper_linear import launch_hopper_linear, runs_hopper_linear
from pelton.kernels.fp8.scales import BLOCK_SIZE, FP8Operands, has_blocks
from pelton.kernels.invariant_product import locate_tile
from pelton.kernels.triton_runtime import (
    cdiv,
    next_power_of_2,
    num_multiprocessors,
    overlap_options,
    tl,
    triton,
)

_MAX_FEW_TOKENS = 64
"""Up to here the product is bound by reading the weight, and tiles as wide as the tokens do."""


@triton.jit(do_not_specialize=["num_tokens", "stride_xsg"])
def _fp8_invariant_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    stride_xt,
    stride_xst,
    stride_xsg,
    stride_wf,
    stride_wsf,
    stride_wsg,
    stride_ot,
    num_tokens,
    in_features,
    out_features,
    HAS_BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RAGGED_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first_token, first_feature = locate_tile(num_tokens, BLOCK_T, out_features, BLOCK_F)
    tokens = first_token + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    features = first_feature + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    # Rows past the end read the last one and are not stored: loads without a mask are quicker.
    x_rows = tl.minimum(tokens, num_tokens - 1).to(tl.int64)
    w_rows = tl.minimum(features, out_features - 1).to(tl.int64)
    x_tile_ptr = x_ptr + x_rows[None, :] * stride_xt + dims[:, None]
    w_tile_ptr = weight_ptr + w_rows[:, None] * stride_wf + dims[None, :]
    x_scale_ptr = x_scales_ptr + x_rows * stride_xst
    if HAS_BLOCKS:
        # The features of a program lie in one block of rows.
        w_scale_ptr = weight_scales_ptr + first_feature // BLOCK_D * stride_wsf
        x_scales = tl.load(x_scale_ptr)  # [BLOCK_T]
        w_scale = tl.load(w_scale_ptr)
    acc = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
    for start in range(0, tl.cdiv(in_features, BLOCK_D), PIECES):
        for piece in tl.static_range(PIECES):
            block = start + piece
            if HAS_RAGGED_D:
                is_dim = block * BLOCK_D + dims < in_features
                weight = tl.load(w_tile_ptr, mask=is_dim[None, :], other=0.0)  # [BLOCK_F, BLOCK_D]
                x = tl.load(x_tile_ptr, mask=is_dim[:, None], other=0.0)  # [BLOCK_D, BLOCK_T]
            else:
                weight = tl.load(w_tile_ptr)
                x = tl.load(x_tile_ptr)
            partial = tl.dot(weight, x)
            if HAS_BLOCKS:
                partial = partial * (x_scales * w_scale)[None, :]
                # A block ahead: the compiler does not fetch them early by itself.
                is_left = (block + 1) * BLOCK_D < in_features
                x_scales = tl.load(x_scale_ptr + (block + 1) * stride_xsg, mask=is_left, other=0.0)
                w_scale = tl.load(w_scale_ptr + (block + 1) * stride_wsg, mask=is_left, other=0.0)
            acc += partial
            w_tile_ptr += BLOCK_D
            x_tile_ptr += BLOCK_D
    if not HAS_BLOCKS:
        w_scales = tl.load(weight_scales_ptr + w_rows * stride_wsf)  # [BLOCK_F]
        acc = acc * w_scales[:, None] * tl.load(x_scale_ptr)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + features, mask=features < out_features, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    is_out = (tokens < num_tokens)[:, None] & (features < out_features)[None, :]
    out_tile_ptr = out_ptr + tokens.to(tl.int64)[:, None] * stride_ot + features[None, :]
    tl.store(out_tile_ptr, tl.trans(acc), mask=is_out)


def tune(num_tokens: int, out_features: int, num_programs: int) -> dict[str, int]:
    """Up to 64 tokens, a tile as wide as they are; else 128, if that makes a program for each
    multiprocessor. One warpgroup: the scales of blocks, held for this round and the next, leave no
    registers for a larger tile, and two programs share a multiprocessor. Where few tokens make at
    most one for each, it takes several pieces a round and waits once for all."""
    if num_tokens > _MAX_FEW_TOKENS:
        return _tile(128 if cdiv(num_tokens, 128) * cdiv(out_features, 64) >= num_programs else 64)
    block_t = max(next_power_of_2(num_tokens), 16)
    if cdiv(out_features, 64) > num_programs:
        return _tile(block_t, num_stages=6)
    return _tile(block_t, num_pieces=4 if block_t == 16 else 2)


def _tile(block_t: int, num_stages: int = 4, num_pieces: int = 1) -> dict[str, int]:
    return {
        "BLOCK_T": block_t, "BLOCK_F": 64, "PIECES": num_pieces, "num_warps": 4,
        "num_stages": num_stages,
    }  # fmt: skip


def fp8_invariant_linear(operands: FP8Operands) -> Float[Tensor, "T F"]:
    num_tokens, out_features, in_features = operands.shape
    out = operands.make_out()
    if num_tokens == 0:
        return out
    blocked = has_blocks(operands.weight, operands.weight_scales)
    if num_tokens > _MAX_FEW_TOKENS and runs_hopper_linear(operands):
        launch = launch_hopper_blocks if blocked else launch_hopper_linear
        launch(operands, out)
        return out
    blocks = tune(num_tokens, out_features, num_multiprocessors(operands.x.device))
    num_tiles = cdiv(num_tokens, blocks["BLOCK_T"]) * cdiv(out_features, blocks["BLOCK_F"])
    _fp8_invariant_kernel[(num_tiles,)](
        **operands.kernel_arguments(out),
        HAS_RAGGED_D=in_features % (BLOCK_SIZE * blocks["PIECES"]) != 0,
        BLOCK_D=BLOCK_SIZE,
        # As `hopper_linear` adds a bias.
        enable_fp_fusion=blocked,
        **blocks,
        **overlap_options(operands.x.device, num_tokens),
    )
    return out
