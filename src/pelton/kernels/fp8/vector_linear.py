# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The product of one FP8 token, or very few, with an FP8 weight, on the plain units.

It is bound by reading the weight once, so what counts is how many bytes are under way: a thread
reads 16 neighbours of a row at once, from several rows, and has its first piece of the weight
before the tokens exist. The 16 share their scales. All sums are in float32, in one order.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from pelton.kernels.fp8.scales import BLOCK_SIZE, FP8Operands
from pelton.kernels.triton_runtime import (
    cdiv,
    next_power_of_2,
    num_multiprocessors,
    overlap_options,
    tl,
    triton,
)

RUN = 16
"""Neighbours in a row that a thread reads at once: as many bytes as one load takes."""
REGISTERS = {1: 48, 2: 64, 4: 96, 8: 168}
"""That a thread needs, by tokens, with one load of each row under way."""
MANY_REGISTERS = 128
"""With several under way; four programs of four warps then fill a multiprocessor."""
WARP_REGISTERS = 65536 // 32
"""Of a multiprocessor, by one warp's registers."""
MAX_TOKENS = 2
"""From three on multiplying takes longer than reading."""
MAX_TOKENS_NARROW = 8
"""The same where tiles for the matrix units leave multiprocessors idle."""
TILE_FEATURES = 32
"""Of such a tile."""


@triton.jit
def _scaled_sums(
    weight,
    start,
    x_ptr,
    x_scales_ptr,
    scales_ptr,
    stride_xt,
    stride_xst,
    stride_xsg,
    stride_wsg,
    num_tokens,
    in_features,
    HAS_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RUN: tl.constexpr,
):
    """Of each run's products with the tokens' numbers from `start` on: [BLOCK_T, BLOCK_F, runs]."""
    NUM_RUNS: tl.constexpr = BLOCK_D // RUN
    tokens = tl.arange(0, BLOCK_T)  # [BLOCK_T]
    is_token = tokens < num_tokens
    dims = start + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask = is_token[:, None] & (dims < in_features)[None, :]
    x = tl.load(x_ptr + tokens[:, None] * stride_xt + dims[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32).reshape(BLOCK_T, 1, NUM_RUNS, RUN)
    weight = weight.to(tl.float32).reshape(1, BLOCK_F, NUM_RUNS, RUN)
    sums = tl.sum(weight * x, axis=3)
    if HAS_BLOCKS:
        run_starts = start + tl.arange(0, NUM_RUNS) * RUN  # [NUM_RUNS]
        is_run = run_starts < in_features
        block = run_starts // BLOCK_SIZE
        # Runs first, so that a thread loads the scales of the runs it has summed.
        x_scale_ptr = x_scales_ptr + block[:, None] * stride_xsg + tokens[None, :] * stride_xst
        x_scales = tl.load(x_scale_ptr, mask=is_run[:, None] & is_token[None, :], other=0.0)
        scales = tl.load(scales_ptr + block * stride_wsg, mask=is_run, other=0.0)
        sums *= tl.trans(x_scales * scales[:, None])[:, None, :]
    return sums


# A stride of 1 between the tokens' scales is kept from the compiler, which would lay out by it.
@triton.jit(do_not_specialize=["stride_xst"])
def _fp8_vector_linear_kernel(
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
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RUN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_F
    features = first + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    is_feature = features < out_features
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    row_ptr = weight_ptr + features.to(tl.int64)[:, None] * stride_wf + dims[None, :]
    mask = is_feature[:, None] & (dims < in_features)[None, :]
    weight = tl.load(row_ptr, mask=mask, other=0.0)  # [BLOCK_F, BLOCK_D]
    # The features of a program lie in one block of rows.
    block_scales_ptr = weight_scales_ptr + first // BLOCK_SIZE * stride_wsf
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    # The first piece stands before the loop: FP8 numbers carried around it would be taken apart
    # into a register each.
    acc = _scaled_sums(
        weight, 0, x_ptr, x_scales_ptr, block_scales_ptr, stride_xt, stride_xst, stride_xsg,
        stride_wsg, num_tokens, in_features, HAS_BLOCKS, BLOCK_SIZE, BLOCK_T, BLOCK_F, BLOCK_D, RUN,
    )  # fmt: skip
    for start in range(BLOCK_D, in_features, BLOCK_D):
        mask = is_feature[:, None] & (start + dims < in_features)[None, :]
        weight = tl.load(row_ptr + start, mask=mask, other=0.0)
        acc += _scaled_sums(
            weight, start, x_ptr, x_scales_ptr, block_scales_ptr, stride_xt, stride_xst,
            stride_xsg, stride_wsg, num_tokens, in_features, HAS_BLOCKS, BLOCK_SIZE, BLOCK_T,
            BLOCK_F, BLOCK_D, RUN,
        )  # fmt: skip
    out = tl.sum(acc, axis=2)  # [BLOCK_T, BLOCK_F]
    tokens = tl.arange(0, BLOCK_T)  # [BLOCK_T]
    is_token = tokens < num_tokens
    if not HAS_BLOCKS:
        scales = tl.load(weight_scales_ptr + features * stride_wsf, mask=is_feature, other=0.0)
        x_scales = tl.load(x_scales_ptr + tokens * stride_xst, mask=is_token, other=0.0)
        out *= x_scales[:, None] * scales[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + features, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    out_tile_ptr = out_ptr + tokens[:, None] * stride_ot + features[None, :]
    tl.store(out_tile_ptr, out, mask=is_token[:, None] & is_feature[None, :])


def suits_plain_units(num_tokens: int, out_features: int, num_multiprocessors: int) -> bool:
    """Whether this kernel is to be taken rather than one for the matrix units, whose programs, one
    a multiprocessor, take as long as four tokens do here."""
    tiles = cdiv(out_features, TILE_FEATURES)
    is_narrow = next_power_of_2(num_tokens) * tiles <= 4 * num_multiprocessors
    return num_tokens <= (MAX_TOKENS_NARROW if is_narrow else MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class VectorTiles:
    block_t: int
    block_f: int
    block_d: int
    num_warps: int
    registers: int


def tune_vector(
    num_tokens: int, in_features: int, out_features: int, num_multiprocessors: int
) -> VectorTiles:
    """Four rows a program, so that even a small weight is spread over the whole card, and as many
    warps as let all programs run at once. Too many for that: short programs, so that the last ones
    end soon. Very few: a thread asks for several loads of each row at once."""
    block_t, block_f = next_power_of_2(num_tokens), 4
    registers = REGISTERS[block_t]
    programs = cdiv(cdiv(out_features, block_f), num_multiprocessors)  # of one multiprocessor
    num_warps = WARP_REGISTERS // registers // programs
    if num_warps < 2:
        num_warps = cdiv(in_features, 2048)
    num_warps = min(next_power_of_2(num_warps + 1) // 2, 4)
    num_warps = min(num_warps, next_power_of_2(cdiv(in_features, 32 * RUN)))
    block_d = 32 * RUN * num_warps
    pieces = min(next_power_of_2(cdiv(in_features, block_d)), 4 // block_t)
    if programs <= 4 and pieces > 1:
        block_d, registers = pieces * block_d, MANY_REGISTERS
    return VectorTiles(block_t, block_f, block_d, num_warps, registers)


def fp8_vector_linear(operands: FP8Operands) -> Float[Tensor, "T F"]:
    """At least one token and at most `MAX_TOKENS_NARROW`."""
    num_tokens, out_features, in_features = operands.shape
    out = operands.make_out()
    count = num_multiprocessors(operands.x.device)
    tiles = tune_vector(num_tokens, in_features, out_features, count)
    _fp8_vector_linear_kernel[(cdiv(out_features, tiles.block_f),)](
        **operands.kernel_arguments(out),
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_T=tiles.block_t,
        BLOCK_F=tiles.block_f,
        BLOCK_D=tiles.block_d,
        RUN=RUN,
        num_warps=tiles.num_warps,
        maxnreg=tiles.registers,
        **overlap_options(operands.x.device, num_tokens),
    )
    return out
