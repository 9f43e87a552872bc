# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Activations to FP8 (e4m3): each run of `group_size` neighbours of a token shares a scale.

scale = max |x| / 448 over the run, q = round(x * (1 / scale)) to the nearest e4m3 number; so x is
about q * scale. Both quotients are float32's nearest. DeepSeek-V3's runs are 128 long (its
technical report, 2024, section 3.3.2); per-token formats have one run a token. A run that holds a
NaN or an infinity has a NaN for its scale.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta
from pelton.kernels.triton_runtime import (
    IS_INTERPRETED,
    cdiv,
    next_power_of_2,
    overlap_options,
    runs_triton,
    tl,
    triton,
)
from pelton.perf.cost import OpCost, log_cost

HIGHEST = 448.0
"""The largest finite e4m3 number."""
SMALLEST_AMAX = 1e-10
"""A run of zeros has the scale of this magnitude."""
_PROGRAM_NUMBERS = 2048
"""That a program quantises, where runs are shorter."""

QuantizeFP8 = Callable[[Tensor, int, float], tuple[Tensor, Tensor]]


def quantize_fp8_reference(
    x: Float[Tensor, "T D"], group_size: int, bound: float
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D/group"]]:
    num_tokens, size = x.shape
    num_groups = cdiv(size, group_size)
    padded = torch.zeros((num_tokens, num_groups * group_size), device=x.device)
    padded[:, :size] = x.float()
    runs = padded.view(num_tokens, num_groups, group_size)
    amax = runs.abs().amax(dim=2).clamp(min=SMALLEST_AMAX, max=bound)
    # By a tensor: a card divides by a plain number through its reciprocal, which rounds otherwise.
    scales = amax / torch.full_like(amax, HIGHEST) + (runs * 0.0).sum(dim=2)
    inverses = torch.ones_like(scales) / scales
    quantized = (runs * inverses[:, :, None]).clamp(-HIGHEST, HIGHEST).flatten(1)
    return quantized[:, :size].to(torch.float8_e4m3fn), scales


@triton.jit
def round_to_e4m3(x):
    """The nearest e4m3 number, ties to even, in float32; for |x| at most 448."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Adding 1.5 * 2^23 steps leaves no room for bits below a step, an eighth of the power.
    magic = tl.maximum(power, 0.015625) * 1572864.0
    return (x + magic) - magic


@triton.jit
def quantize_runs(
    x,
    bound,
    HIGHEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    CAST_TRUNCATES: tl.constexpr,
):
    """Of float32 runs, a row each: (what to cast to e4m3, float32 scales). A card casts what is
    above 448 to that."""
    # As integers magnitudes have the same order, and what is not finite comes last.
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    amax = tl.minimum(tl.maximum(top.to(tl.float32, bitcast=True), SMALLEST_AMAX), bound)
    scales = tl.math.div_rn(amax, tl.full(amax.shape, HIGHEST, tl.float32))
    scales = tl.where(top < 0x7F800000, scales, float("nan"))
    quantized = x * tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), scales)[:, None]
    if CAST_TRUNCATES:
        quantized = round_to_e4m3(tl.minimum(tl.maximum(quantized, -HIGHEST), HIGHEST))
    return quantized, scales


@triton.jit(do_not_specialize=["stride_sg"])
def _quantize_fp8_kernel(
    x_ptr,
    out_ptr,
    scales_ptr,
    stride_xt,
    stride_ot,
    stride_st,
    stride_sg,
    size,
    group_size,
    bound,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    HIGHEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    CAST_TRUNCATES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)  # [GROUPS]
    members = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    dims = groups[:, None] * group_size + members
    mask = (members < group_size) & (dims < size)
    x = tl.load(x_ptr + token * stride_xt + dims, mask=mask, other=0.0).to(tl.float32)
    values, scales = quantize_runs(x, bound, HIGHEST, SMALLEST_AMAX, CAST_TRUNCATES)
    tl.store(out_ptr + token * stride_ot + dims, values.to(tl.float8e4nv), mask=mask)
    scale_ptrs = scales_ptr + token * stride_st + groups * stride_sg
    tl.store(scale_ptrs, scales, mask=groups * group_size < size)


def tune(num_tokens: int, group_size: int) -> dict[str, int]:
    """Of many tokens a program takes several short runs: with one it would have one warp, and each
    of its threads four numbers."""
    block = next_power_of_2(group_size)
    groups = max(_PROGRAM_NUMBERS // block, 1) if num_tokens > 16 else 1
    num_warps = min(max(groups * block // 512, 1), 8)
    return {"BLOCK": block, "GROUPS": groups, "num_warps": num_warps}


def _quantize_fp8_triton(
    x: Float[Tensor, "T D"], group_size: int, bound: float
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D/group"]]:
    num_tokens, size = x.shape
    out, scales = allocate_fp8(x, group_size)
    if num_tokens == 0:
        return out, scales
    blocks = tune(num_tokens, group_size)
    grid = num_tokens, cdiv(cdiv(size, group_size), blocks["GROUPS"])
    _quantize_fp8_kernel[grid](
        x_ptr=x,
        out_ptr=out,
        scales_ptr=scales,
        stride_xt=x.stride(0),
        stride_ot=out.stride(0),
        stride_st=scales.stride(0),
        stride_sg=scales.stride(1),
        size=size,
        group_size=group_size,
        bound=bound,
        HIGHEST=HIGHEST,
        SMALLEST_AMAX=SMALLEST_AMAX,
        CAST_TRUNCATES=IS_INTERPRETED,
        **blocks,
        **overlap_options(x.device, num_tokens),
    )
    return out, scales


def allocate_fp8(x: Float[Tensor, "T D"], group_size: int) -> tuple[Tensor, Tensor]:
    """The scales of one run of all tokens lie together, as the library's block product asks."""
    num_tokens, size = x.shape
    out = torch.empty((num_tokens, size), dtype=torch.float8_e4m3fn, device=x.device)
    shape = (cdiv(size, group_size), num_tokens)
    return out, torch.empty(shape, dtype=torch.float32, device=x.device).t()


def quantize_fp8_cost(num_tokens: int, size: int, group_size: int, element_bytes: int) -> OpCost:
    elements = num_tokens * size
    scales = num_tokens * cdiv(size, group_size)
    return OpCost(3 * elements, elements * (element_bytes + 1) + 4 * scales)


def _quantize_fp8_meta(
    x: Float[Tensor, "T D"], group_size: int, bound: float
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D/group"]]:
    cost = quantize_fp8_cost(x.shape[0], x.shape[1], group_size, x.element_size())
    log_cost("quantize_fp8", cost)
    return allocate_fp8(x, group_size)


QUANTIZE_FP8: Dispatch[QuantizeFP8] = Dispatch(
    "quantize_fp8",
    Implementation("meta", on_meta, _quantize_fp8_meta),
    Implementation("triton", runs_triton, _quantize_fp8_triton),
    Implementation("reference", anywhere, quantize_fp8_reference),
)


def quantize_fp8(
    x: Float[Tensor, "T D"], group_size: int, bound: float = math.inf
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D/group"]]:
    """Returns (q in float8_e4m3fn, float32 scales), both new memory. x may be strided over T; the
    last run may be shorter. Magnitudes above `bound` are clipped to it."""
    assert x.stride(1) == 1, x.stride()
    assert min(group_size, bound) > 0, (group_size, bound)
    return QUANTIZE_FP8.select(x.device, x.dtype)(x, group_size, bound)
