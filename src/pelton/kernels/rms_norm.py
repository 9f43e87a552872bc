# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Root-mean-square normalisation of each token's vector.

y = x / sqrt(mean(x^2) + eps) * weight, in float32, rounded once to x's number format
(Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta, runs_native
from pelton.kernels.triton_runtime import (
    next_power_of_2,
    overlap_options,
    runs_triton,
    tl,
    triton,
)
from pelton.perf.cost import OpCost, log_cost


def rms_norm_reference(
    x: Float[Tensor, "T D"], weight: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "T D"]:
    x_float = x.float()
    mean_square = x_float.square().mean(dim=-1, keepdim=True)
    normed = x_float * torch.rsqrt(mean_square + eps) * weight.float()
    return normed.to(x.dtype)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    stride_xt,
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
    mean_square = tl.sum(x * x, axis=0) / hidden_size
    normed = x * tl.rsqrt(mean_square + eps) * weight
    tl.store(out_ptr + token * stride_ot + offsets, normed, mask=mask)


def tune(hidden_size: int) -> dict[str, int]:
    """One program a token; eight elements a thread and load keep the loads 16 bytes wide."""
    block = next_power_of_2(hidden_size)
    return {"BLOCK_D": block, "num_warps": min(max(block // 256, 1), 16)}


def _rms_norm_triton(
    x: Float[Tensor, "T D"], weight: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "T D"]:
    num_tokens, hidden_size = x.shape
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    _rms_norm_kernel[(num_tokens,)](
        x_ptr=x,
        weight_ptr=weight,
        out_ptr=out,
        stride_xt=x.stride(0),
        stride_ot=out.stride(0),
        hidden_size=hidden_size,
        eps=eps,
        **tune(hidden_size),
        **overlap_options(x.device, num_tokens),
    )
    return out


def rms_norm_cost(num_tokens: int, hidden_size: int, element_bytes: int) -> OpCost:
    elements = num_tokens * hidden_size
    return OpCost(4 * elements, (2 * elements + hidden_size) * element_bytes)


def _rms_norm_meta(
    x: Float[Tensor, "T D"], weight: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "T D"]:
    log_cost("rms_norm", rms_norm_cost(x.shape[0], x.shape[1], x.element_size()))
    return torch.empty_like(x)


RMS_NORM: Dispatch[Callable[[Tensor, Tensor, float], Tensor]] = Dispatch(
    "rms_norm",
    Implementation("meta", on_meta, _rms_norm_meta),
    Implementation("triton", runs_triton, _rms_norm_triton),
    Implementation("native", runs_native, "pelton.kernels.native.norm:rms_norm"),
    Implementation("reference", anywhere, rms_norm_reference),
)


def rms_norm(
    x: Float[Tensor, "T D"], weight: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "T D"]:
    """`eps` is added to the mean square. x may be strided over T; the result is new memory."""
    assert x.shape[1] == weight.shape[0], (x.shape, weight.shape)
    assert x.stride(1) == 1, x.stride()
    return RMS_NORM.select(x.device, x.dtype)(x, weight, eps)
