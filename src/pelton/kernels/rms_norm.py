# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Root-mean-square normalisation of each token's vector, alone or of its sum with the residual.

y = x / sqrt(mean(x^2) + eps) * weight, in float32, rounded once to weight's number format
(Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4).

`add_rms_norm` adds a layer's output to the residual stream, which is float32 whatever x's format
is, and normalises the sum for the next layer: residual' = x + residual; normed =
rms_norm(residual', weight, eps). Where x is still to be added up from experts' rows, one kernel
does that too, and rounds nothing between.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import (
    Dispatch,
    Implementation,
    anywhere,
    on_cpu,
    on_meta,
    runs_native,
)
from pelton.kernels.moe.weighted_sum import WEIGHTED_SUM, WeightedRows, weighted_sum_reference
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
    return normed.to(weight.dtype)


def add_rms_norm_reference(
    x: Float[Tensor, "T D"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    new_residual = x.float() + residual
    return rms_norm_reference(new_residual, weight, eps), new_residual


@triton.jit
def norm_row(
    x_ptr,
    shares_ptr,
    residual_ptr,
    weight_ptr,
    new_residual_ptr,
    stride_xt,
    stride_rt,
    stride_ot,
    hidden_size,
    eps,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The program's token, normed, in float32 [BLOCK_D]; writes its new residual if there is one.
    x has `TOP_K` rows a token, whose shares are added up; 0: one, as it is. Of a kernel with
    `overlap_options`, first of all."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask = offsets < hidden_size
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    if TOP_K:
        total = tl.zeros([BLOCK_D], tl.float32)
        for choice in tl.static_range(TOP_K):
            row = token * TOP_K + choice
            x = tl.load(x_ptr + row * stride_xt + offsets, mask=mask, other=0.0)
            total += tl.load(shares_ptr + row) * x.to(tl.float32)
    else:
        x = tl.load(x_ptr + token * stride_xt + offsets, mask=mask, other=0.0)
        total = x.to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + token * stride_rt + offsets, mask=mask, other=0.0)
        tl.store(new_residual_ptr + token * stride_ot + offsets, total, mask=mask)
    mean_square = tl.sum(total * total, axis=0) / hidden_size
    return total * tl.rsqrt(mean_square + eps) * weight


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    shares_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    new_residual_ptr,
    stride_xt,
    stride_rt,
    stride_ot,
    hidden_size,
    eps,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    normed = norm_row(
        x_ptr, shares_ptr, residual_ptr, weight_ptr, new_residual_ptr, stride_xt, stride_rt,
        stride_ot, hidden_size, eps, TOP_K, HAS_RESIDUAL, BLOCK_D, OVERLAPS,
    )  # fmt: skip
    offsets = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    out_row_ptr = out_ptr + tl.program_id(0).to(tl.int64) * stride_ot
    tl.store(out_row_ptr + offsets, normed, mask=offsets < hidden_size)


def tune(hidden_size: int) -> dict[str, int]:
    """One program a token; eight elements a thread and load keep the loads 16 bytes wide."""
    block = next_power_of_2(hidden_size)
    return {"BLOCK_D": block, "num_warps": min(max(block // 256, 1), 16)}


def _rms_norm_triton(
    x: Float[Tensor, "T D"], weight: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "T D"]:
    return _add_rms_norm_triton(x, None, weight, eps)[0]


def _add_rms_norm_triton(
    x: Float[Tensor, "T D"],
    residual: Float[Tensor, "T D"] | None,
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    return _launch_norm(x, None, residual, weight, eps)


def _launch_norm(
    x: Float[Tensor, "N D"],
    shares: Float[Tensor, "T k"] | None,
    residual: Float[Tensor, "T D"] | None,
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    """Without shares N is T; without a residual the second result is the first."""
    hidden_size = x.shape[1]
    num_tokens, top_k = (x.shape[0], 0) if shares is None else shares.shape
    out = torch.empty((num_tokens, hidden_size), dtype=weight.dtype, device=x.device)
    new_residual = out if residual is None else torch.empty_like(out, dtype=torch.float32)
    if num_tokens == 0:
        return out, new_residual
    _rms_norm_kernel[(num_tokens,)](
        x_ptr=x,
        shares_ptr=x if shares is None else shares,
        residual_ptr=x if residual is None else residual,
        weight_ptr=weight,
        out_ptr=out,
        new_residual_ptr=new_residual,
        stride_xt=x.stride(0),
        stride_rt=0 if residual is None else residual.stride(0),
        stride_ot=out.stride(0),
        hidden_size=hidden_size,
        eps=eps,
        TOP_K=top_k,
        HAS_RESIDUAL=residual is not None,
        **tune(hidden_size),
        **overlap_options(x.device, num_tokens),
    )
    return out, new_residual


def rms_norm_cost(
    num_tokens: int, hidden_size: int, element_bytes: int, weight_element_bytes: int
) -> OpCost:
    elements = num_tokens * hidden_size
    num_bytes = elements * element_bytes + (elements + hidden_size) * weight_element_bytes
    return OpCost(4 * elements, num_bytes)


def add_rms_norm_cost(
    num_tokens: int, hidden_size: int, element_bytes: int, weight_element_bytes: int
) -> OpCost:
    elements = num_tokens * hidden_size
    norm = rms_norm_cost(num_tokens, hidden_size, element_bytes, weight_element_bytes)
    return OpCost(5 * elements, norm.bytes + 8 * elements)


def sum_add_rms_norm_cost(
    num_tokens: int, top_k: int, hidden_size: int, element_bytes: int, weight_element_bytes: int
) -> OpCost:
    norm = add_rms_norm_cost(num_tokens, hidden_size, element_bytes, weight_element_bytes)
    elements = num_tokens * top_k * hidden_size
    more_rows = (elements - num_tokens * hidden_size) * element_bytes
    return OpCost(norm.flops + 2 * elements, norm.bytes + more_rows + 4 * num_tokens * top_k)


def _rms_norm_meta(
    x: Float[Tensor, "T D"], weight: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "T D"]:
    cost = rms_norm_cost(x.shape[0], x.shape[1], x.element_size(), weight.element_size())
    log_cost("rms_norm", cost)
    return torch.empty_like(x, dtype=weight.dtype)


def _add_rms_norm_meta(
    x: Float[Tensor, "T D"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    cost = add_rms_norm_cost(x.shape[0], x.shape[1], x.element_size(), weight.element_size())
    log_cost("add_rms_norm", cost)
    return torch.empty_like(x, dtype=weight.dtype), torch.empty_like(residual)


def _sum_add_rms_norm_meta(
    rows: Float[Tensor, "N D"],
    shares: Float[Tensor, "T k"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    num_tokens, top_k = shares.shape
    sizes = rows.element_size(), weight.element_size()
    cost = sum_add_rms_norm_cost(num_tokens, top_k, rows.shape[1], *sizes)
    log_cost("sum_add_rms_norm", cost)
    return torch.empty_like(residual, dtype=weight.dtype), torch.empty_like(residual)


def _sum_add_rms_norm_apart(
    rows: Float[Tensor, "N D"],
    shares: Float[Tensor, "T k"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    place = rows.device, rows.dtype
    x = WEIGHTED_SUM.choose(*place)(rows, shares)
    return ADD_RMS_NORM.choose(*place)(x, residual, weight, eps)


def sum_add_rms_norm_reference(
    rows: Float[Tensor, "N D"],
    shares: Float[Tensor, "T k"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    x = weighted_sum_reference(rows.float(), shares)
    return add_rms_norm_reference(x, residual, weight, eps)


RMS_NORM: Dispatch[Callable[[Tensor, Tensor, float], Tensor]] = Dispatch(
    "rms_norm",
    Implementation("meta", on_meta, _rms_norm_meta),
    Implementation("triton", runs_triton, _rms_norm_triton),
    Implementation("native", runs_native, "pelton.kernels.native.norm:rms_norm"),
    Implementation("reference", anywhere, rms_norm_reference),
)
ADD_RMS_NORM: Dispatch[Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]] = Dispatch(
    "add_rms_norm",
    Implementation("meta", on_meta, _add_rms_norm_meta),
    Implementation("triton", runs_triton, _add_rms_norm_triton),
    Implementation("native", runs_native, "pelton.kernels.native.norm:add_rms_norm"),
    Implementation("reference", anywhere, add_rms_norm_reference),
)

SUM_ADD_RMS_NORM: Dispatch[
    Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
] = Dispatch(
    "sum_add_rms_norm",
    Implementation("meta", on_meta, _sum_add_rms_norm_meta),
    Implementation("triton", runs_triton, _launch_norm),
    Implementation("apart", on_cpu, _sum_add_rms_norm_apart),
    Implementation("reference", anywhere, sum_add_rms_norm_reference),
)


def rms_norm(
    x: Float[Tensor, "T D"], weight: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "T D"]:
    """`eps` is added to the mean square. x may be strided over T; the result is new memory in
    weight's number format."""
    assert x.shape[1] == weight.shape[0], (x.shape, weight.shape)
    assert x.stride(1) == 1, x.stride()
    return RMS_NORM.select(x.device, x.dtype)(x, weight, eps)


def add_rms_norm(
    x: Float[Tensor, "T D"] | WeightedRows,
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    """Returns (normed, new residual), both new memory; neither input changes. Normed is in weight's
    number format, which may be narrower than x's; residuals are float32."""
    if isinstance(x, WeightedRows):
        return sum_add_rms_norm(x.rows, x.weights, residual, weight, eps)
    assert x.shape == residual.shape, (x.shape, residual.shape)
    assert residual.dtype is torch.float32, residual.dtype
    assert x.stride(1) == residual.stride(1) == 1, (x.stride(), residual.stride())
    return ADD_RMS_NORM.select(x.device, x.dtype)(x, residual, weight, eps)


def sum_add_rms_norm(
    rows: Float[Tensor, "N D"],
    shares: Float[Tensor, "T k"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    """`add_rms_norm` of `weighted_sum(rows, shares)`, which a GPU does not round before. Shares are
    float32; they and the rows are contiguous."""
    assert (shares.numel(), residual.shape) == (rows.shape[0], (shares.shape[0], rows.shape[1]))
    assert shares.dtype is residual.dtype is torch.float32, (shares.dtype, residual.dtype)
    assert rows.is_contiguous(), rows.stride()
    assert shares.is_contiguous(), shares.stride()
    assert residual.stride(1) == 1, residual.stride()
    run = SUM_ADD_RMS_NORM.select(rows.device, rows.dtype)
    return run(rows, shares, residual, weight, eps)
