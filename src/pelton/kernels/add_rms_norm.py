# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Adds a layer's output to the residual stream and normalises the sum for the next layer.

residual' = x + residual, rounded to x's number format; normed = rms_norm(residual', weight, eps).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta, runs_native
from pelton.kernels.rms_norm import rms_norm_reference, tune
from pelton.kernels.triton_runtime import overlap_options, runs_triton, tl, triton
from pelton.perf.cost import OpCost, log_cost


def add_rms_norm_reference(
    x: Float[Tensor, "T D"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    new_residual = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_reference(new_residual, weight, eps), new_residual


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    new_residual_ptr,
    stride_xt,
    stride_rt,
    stride_ot,
    hidden_size,
    eps,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask = offsets < hidden_size
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * stride_xt + offsets, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + token * stride_rt + offsets, mask=mask, other=0.0)
    # The norm reads the rounded sum, so that fused and unfused runs agree.
    rounded = (x + residual.to(tl.float32)).to(new_residual_ptr.dtype.element_ty)
    tl.store(new_residual_ptr + token * stride_ot + offsets, rounded, mask=mask)
    total = rounded.to(tl.float32)
    mean_square = tl.sum(total * total, axis=0) / hidden_size
    normed = total * tl.rsqrt(mean_square + eps) * weight
    tl.store(out_ptr + token * stride_ot + offsets, normed, mask=mask)


def _add_rms_norm_triton(
    x: Float[Tensor, "T D"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    num_tokens, hidden_size = x.shape
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype, device=x.device)
    new_residual = torch.empty_like(out)
    if num_tokens == 0:
        return out, new_residual
    _add_rms_norm_kernel[(num_tokens,)](
        x_ptr=x,
        residual_ptr=residual,
        weight_ptr=weight,
        out_ptr=out,
        new_residual_ptr=new_residual,
        stride_xt=x.stride(0),
        stride_rt=residual.stride(0),
        stride_ot=out.stride(0),
        hidden_size=hidden_size,
        eps=eps,
        **tune(hidden_size),
        **overlap_options(x.device, num_tokens),
    )
    return out, new_residual


def add_rms_norm_cost(num_tokens: int, hidden_size: int, element_bytes: int) -> OpCost:
    elements = num_tokens * hidden_size
    return OpCost(5 * elements, (4 * elements + hidden_size) * element_bytes)


def _add_rms_norm_meta(
    x: Float[Tensor, "T D"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    log_cost("add_rms_norm", add_rms_norm_cost(x.shape[0], x.shape[1], x.element_size()))
    return torch.empty_like(x), torch.empty_like(x)


ADD_RMS_NORM: Dispatch[Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]] = Dispatch(
    "add_rms_norm",
    Implementation("meta", on_meta, _add_rms_norm_meta),
    Implementation("triton", runs_triton, _add_rms_norm_triton),
    Implementation("native", runs_native, "pelton.kernels.native.norm:add_rms_norm"),
    Implementation("reference", anywhere, add_rms_norm_reference),
)


def add_rms_norm(
    x: Float[Tensor, "T D"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    """Returns (normed, new residual), both new memory; neither input changes."""
    assert x.shape == residual.shape, (x.shape, residual.shape)
    assert x.stride(1) == residual.stride(1) == 1, (x.stride(), residual.stride())
    return ADD_RMS_NORM.select(x.device, x.dtype)(x, residual, weight, eps)
