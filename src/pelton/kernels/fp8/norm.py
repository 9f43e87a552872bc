# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The norms in front of FP8 products: `rms_norm` and `add_rms_norm`, their result quantised.

Equal bit for bit to the norm followed by `quantize_fp8`: the normed numbers are rounded to x's
number format before their scales are found. They are written themselves only where asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta
from pelton.kernels.fp8.quantize import (
    HIGHEST,
    SMALLEST_AMAX,
    allocate_fp8,
    quantize_fp8_reference,
    quantize_runs,
)
from pelton.kernels.rms_norm import (
    add_rms_norm_reference,
    norm_row,
    rms_norm_reference,
    tune,
)
from pelton.kernels.triton_runtime import (
    IS_INTERPRETED,
    cdiv,
    overlap_options,
    runs_triton,
    tl,
    triton,
)
from pelton.perf.cost import OpCost, log_cost


@dataclass(frozen=True, slots=True)
class NormQuantization:
    """What becomes of normed numbers: the arguments of `quantize_fp8`, whose runs are a power of
    two long or the whole row, and whether the normed numbers are kept beside."""

    group_size: int
    bound: float
    keeps_normed: bool


Quantized = tuple[Tensor, Tensor, Tensor | None]
"""e4m3 numbers, their scales, and the normed numbers if they are kept."""


def rms_norm_fp8_reference(
    x: Float[Tensor, "T D"], weight: Float[Tensor, " D"], eps: float, then: NormQuantization
) -> Quantized:
    normed = rms_norm_reference(x, weight, eps)
    values, scales = quantize_fp8_reference(normed, then.group_size, then.bound)
    return values, scales, normed if then.keeps_normed else None


def add_rms_norm_fp8_reference(
    x: Float[Tensor, "T D"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
    then: NormQuantization,
) -> tuple[Quantized, Float[Tensor, "T D"]]:
    normed, new_residual = add_rms_norm_reference(x, residual, weight, eps)
    values, scales = quantize_fp8_reference(normed, then.group_size, then.bound)
    return (values, scales, normed if then.keeps_normed else None), new_residual


@triton.jit(do_not_specialize=["stride_sg"])
def _rms_norm_fp8_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    values_ptr,
    scales_ptr,
    normed_ptr,
    new_residual_ptr,
    stride_xt,
    stride_rt,
    stride_vt,
    stride_st,
    stride_sg,
    hidden_size,
    eps,
    bound,
    HAS_RESIDUAL: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HIGHEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    CAST_TRUNCATES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    normed = norm_row(
        x_ptr, x_ptr, residual_ptr, weight_ptr, new_residual_ptr, stride_xt, stride_rt, stride_vt,
        hidden_size, eps, 0, HAS_RESIDUAL, BLOCK_D, OVERLAPS,
    )  # fmt: skip
    normed = normed.to(x_ptr.dtype.element_ty)
    token = tl.program_id(0).to(tl.int64)
    if KEEPS_NORMED:
        offsets = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        tl.store(normed_ptr + token * stride_vt + offsets, normed, mask=offsets < hidden_size)
    runs = normed.to(tl.float32).reshape(BLOCK_D // GROUP_SIZE, GROUP_SIZE)
    values, scales = quantize_runs(runs, bound, HIGHEST, SMALLEST_AMAX, CAST_TRUNCATES)
    groups = tl.arange(0, BLOCK_D // GROUP_SIZE)  # [groups]
    dims = groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]  # [groups, GROUP_SIZE]
    row_ptr = values_ptr + token * stride_vt
    tl.store(row_ptr + dims, values.to(tl.float8e4nv), mask=dims < hidden_size)
    is_group = groups * GROUP_SIZE < hidden_size
    tl.store(scales_ptr + token * stride_st + groups * stride_sg, scales, mask=is_group)


def _rms_norm_fp8_triton(
    x: Float[Tensor, "T D"], weight: Float[Tensor, " D"], eps: float, then: NormQuantization
) -> Quantized:
    return _add_rms_norm_fp8_triton(x, None, weight, eps, then)[0]


def _add_rms_norm_fp8_triton(
    x: Float[Tensor, "T D"],
    residual: Float[Tensor, "T D"] | None,
    weight: Float[Tensor, " D"],
    eps: float,
    then: NormQuantization,
) -> tuple[Quantized, Float[Tensor, "T D"]]:
    """Without a residual the second part of the result is x."""
    num_tokens, hidden_size = x.shape
    (values, scales, normed), new_residual = _allocate(x, then, has_residual=residual is not None)
    if num_tokens == 0:
        return (values, scales, normed), new_residual
    tiles = tune(hidden_size)
    is_row = then.group_size >= hidden_size
    _rms_norm_fp8_kernel[(num_tokens,)](
        x_ptr=x,
        residual_ptr=x if residual is None else residual,
        weight_ptr=weight,
        values_ptr=values,
        scales_ptr=scales,
        normed_ptr=x if normed is None else normed,
        new_residual_ptr=new_residual,
        stride_xt=x.stride(0),
        stride_rt=0 if residual is None else residual.stride(0),
        stride_vt=values.stride(0),
        stride_st=scales.stride(0),
        stride_sg=scales.stride(1),
        hidden_size=hidden_size,
        eps=eps,
        bound=then.bound,
        HAS_RESIDUAL=residual is not None,
        KEEPS_NORMED=normed is not None,
        GROUP_SIZE=tiles["BLOCK_D"] if is_row else then.group_size,
        HIGHEST=HIGHEST,
        SMALLEST_AMAX=SMALLEST_AMAX,
        CAST_TRUNCATES=IS_INTERPRETED,
        **tiles,
        **overlap_options(x.device, num_tokens),
    )
    return (values, scales, normed), new_residual


def _allocate(
    x: Float[Tensor, "T D"], then: NormQuantization, *, has_residual: bool
) -> tuple[Quantized, Float[Tensor, "T D"]]:
    """New memory, contiguous whatever x is; without a residual x itself stands for the new one."""
    values, scales = allocate_fp8(x, then.group_size)
    normed = x.new_empty(x.shape) if then.keeps_normed else None
    residual = x.new_empty(x.shape, dtype=torch.float32) if has_residual else x
    return (values, scales, normed), residual


def norm_fp8_cost(
    num_tokens: int,
    hidden_size: int,
    element_bytes: int,
    then: NormQuantization,
    *,
    has_residual: bool,
) -> OpCost:
    """Reads x, and the residual if there is one, and the norm's weight; writes e4m3 numbers and
    scales, the new residual, and the normed numbers if they are kept."""
    elements = num_tokens * hidden_size
    wide = 1 + then.keeps_normed
    scales = num_tokens * cdiv(hidden_size, then.group_size)
    moved = (wide * elements + hidden_size) * element_bytes + elements + 4 * scales
    moved += 8 * elements * has_residual
    return OpCost((7 + has_residual) * elements, moved)


def _rms_norm_fp8_meta(
    x: Float[Tensor, "T D"], weight: Float[Tensor, " D"], eps: float, then: NormQuantization
) -> Quantized:
    sizes = x.shape[0], x.shape[1], x.element_size()
    log_cost("rms_norm_fp8", norm_fp8_cost(*sizes, then, has_residual=False))
    return _allocate(x, then, has_residual=False)[0]


def _add_rms_norm_fp8_meta(
    x: Float[Tensor, "T D"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
    then: NormQuantization,
) -> tuple[Quantized, Float[Tensor, "T D"]]:
    sizes = x.shape[0], x.shape[1], x.element_size()
    log_cost("add_rms_norm_fp8", norm_fp8_cost(*sizes, then, has_residual=True))
    return _allocate(x, then, has_residual=True)


RMS_NORM_FP8: Dispatch[Callable[[Tensor, Tensor, float, NormQuantization], Quantized]] = Dispatch(
    "rms_norm_fp8",
    Implementation("meta", on_meta, _rms_norm_fp8_meta),
    Implementation("triton", runs_triton, _rms_norm_fp8_triton),
    Implementation("reference", anywhere, rms_norm_fp8_reference),
)
ADD_RMS_NORM_FP8: Dispatch[
    Callable[[Tensor, Tensor, Tensor, float, NormQuantization], tuple[Quantized, Tensor]]
] = Dispatch(
    "add_rms_norm_fp8",
    Implementation("meta", on_meta, _add_rms_norm_fp8_meta),
    Implementation("triton", runs_triton, _add_rms_norm_fp8_triton),
    Implementation("reference", anywhere, add_rms_norm_fp8_reference),
)


def rms_norm_fp8(
    x: Float[Tensor, "T D"], weight: Float[Tensor, " D"], eps: float, then: NormQuantization
) -> Quantized:
    """As `quantize_fp8(rms_norm(x, weight, eps), ...)`; all results are new memory. x may be
    strided over T."""
    assert x.shape[1] == weight.shape[0], (x.shape, weight.shape)
    assert x.dtype is weight.dtype, (x.dtype, weight.dtype)
    assert x.stride(1) == 1, x.stride()
    return RMS_NORM_FP8.select(x.device, x.dtype)(x, weight, eps, then)


def add_rms_norm_fp8(
    x: Float[Tensor, "T D"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
    then: NormQuantization,
) -> tuple[Quantized, Float[Tensor, "T D"]]:
    """Returns (quantised norm of the sum, new residual), all new memory; neither input changes.
    Residuals are float32."""
    assert x.shape == residual.shape, (x.shape, residual.shape)
    assert x.dtype is weight.dtype, (x.dtype, weight.dtype)
    assert residual.dtype is torch.float32, residual.dtype
    assert x.stride(1) == residual.stride(1) == 1, (x.stride(), residual.stride())
    return ADD_RMS_NORM_FP8.select(x.device, x.dtype)(x, residual, weight, eps, then)
