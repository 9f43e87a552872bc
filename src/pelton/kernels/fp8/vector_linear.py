# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The product of one FP8 token with an FP8 weight, a matrix-vector product on the plain units.

It is bound by reading the weight once, so what counts is how many bytes are under way: a thread
reads 16 neighbours of a row at once, from several rows, and has its first piece of the weight
before the token exists. The 16 share their scales. All sums are in float32, in one order.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.fp8.scales import BLOCK_SIZE, has_blocks
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
MAX_WARPS = 40
"""Of this kernel that a multiprocessor of Hopper holds: 48 registers a thread."""


@triton.jit
def _scaled_sums(
    weight,
    start,
    x_ptr,
    x_scales_ptr,
    scales_ptr,
    stride_xsg,
    stride_wsg,
    in_features,
    HAS_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RUN: tl.constexpr,
):
    """Of each run's products with the token's numbers from `start` on: [BLOCK_F, BLOCK_D / RUN]."""
    dims = start + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    x = tl.load(x_ptr + dims, mask=dims < in_features, other=0.0)
    products = weight.to(tl.float32) * x.to(tl.float32)[None, :]  # [BLOCK_F, BLOCK_D]
    sums = tl.sum(products.reshape(BLOCK_F, BLOCK_D // RUN, RUN), axis=2)
    if HAS_BLOCKS:
        run_starts = start + tl.arange(0, BLOCK_D // RUN) * RUN  # [BLOCK_D / RUN]
        mask = run_starts < in_features
        block = run_starts // BLOCK_SIZE
        scales = tl.load(x_scales_ptr + block * stride_xsg, mask=mask, other=0.0)
        scales *= tl.load(scales_ptr + block * stride_wsg, mask=mask, other=0.0)
        sums *= scales[None, :]
    return sums


@triton.jit
def _fp8_vector_linear_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    stride_xsg,
    stride_wf,
    stride_wsf,
    stride_wsg,
    in_features,
    out_features,
    HAS_BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
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
        weight, 0, x_ptr, x_scales_ptr, block_scales_ptr, stride_xsg, stride_wsg, in_features,
        HAS_BLOCKS, BLOCK_SIZE, BLOCK_F, BLOCK_D, RUN,
    )  # fmt: skip
    for start in range(BLOCK_D, in_features, BLOCK_D):
        mask = is_feature[:, None] & (start + dims < in_features)[None, :]
        weight = tl.load(row_ptr + start, mask=mask, other=0.0)
        acc += _scaled_sums(
            weight, start, x_ptr, x_scales_ptr, block_scales_ptr, stride_xsg, stride_wsg,
            in_features, HAS_BLOCKS, BLOCK_SIZE, BLOCK_F, BLOCK_D, RUN,
        )  # fmt: skip
    out = tl.sum(acc, axis=1)  # [BLOCK_F]
    if not HAS_BLOCKS:
        scales = tl.load(weight_scales_ptr + features * stride_wsf, mask=is_feature, other=0.0)
        out *= tl.load(x_scales_ptr) * scales
    if HAS_BIAS:
        out += tl.load(bias_ptr + features, mask=is_feature, other=0.0).to(tl.float32)
    tl.store(out_ptr + features, out, mask=is_feature)


@dataclass(frozen=True, slots=True)
class VectorTiles:
    block_f: int
    block_d: int
    num_warps: int


def tune_vector(in_features: int, out_features: int, num_multiprocessors: int) -> VectorTiles:
    """Four rows a program, so that even a small weight is spread over the whole card, and as many
    warps as let all programs run at once. Too many for that: short programs, so that the last ones
    end soon. Very few: a thread asks for four loads of each row at once."""
    block_f = 4
    programs = cdiv(cdiv(out_features, block_f), num_multiprocessors)  # of one multiprocessor
    if programs > MAX_WARPS // 2:
        num_warps = next_power_of_2(cdiv(in_features, 2048))
    else:
        num_warps = next_power_of_2(MAX_WARPS // programs + 1) // 2
    num_warps = min(num_warps, 4, next_power_of_2(cdiv(in_features, 32 * RUN)))
    piece = 32 * RUN * num_warps
    if programs <= 4:
        piece *= min(next_power_of_2(cdiv(in_features, piece)), 4)
    return VectorTiles(block_f=block_f, block_d=piece, num_warps=num_warps)


def fp8_vector_linear(
    x: Float[Tensor, "1 D"],
    x_scales: Float[Tensor, "1 D/128"],
    weight: Float[Tensor, "F D"],
    weight_scales: Float[Tensor, "F/128 D/128"],
    bias: Float[Tensor, " F"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "1 F"]:
    out_features, in_features = weight.shape
    out = torch.empty((1, out_features), dtype=dtype, device=x.device)
    tiles = tune_vector(in_features, out_features, num_multiprocessors(x.device))
    _fp8_vector_linear_kernel[(cdiv(out_features, tiles.block_f),)](
        x_ptr=x,
        x_scales_ptr=x_scales,
        weight_ptr=weight,
        weight_scales_ptr=weight_scales,
        bias_ptr=weight if bias is None else bias,
        out_ptr=out,
        stride_xsg=x_scales.stride(1),
        stride_wf=weight.stride(0),
        stride_wsf=weight_scales.stride(0),
        stride_wsg=weight_scales.stride(1),
        in_features=in_features,
        out_features=out_features,
        HAS_BLOCKS=has_blocks(weight, weight_scales),
        HAS_BIAS=bias is not None,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_F=tiles.block_f,
        BLOCK_D=tiles.block_d,
        RUN=RUN,
        num_warps=tiles.num_warps,
        **overlap_options(x.device, 1),
    )
    return out
