# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Adds up what a token's experts gave, by the router's weights: out_t = sum_j w_tj y_tj.

Summed in float32, in the order of the token's choices, and rounded once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_cpu, on_meta
from pelton.kernels.triton_runtime import (
    cdiv,
    next_power_of_2,
    overlap_options,
    runs_triton,
    tl,
    triton,
)
from pelton.perf.cost import OpCost, log_cost


@dataclass(frozen=True, slots=True)
class WeightedRows:
    """A weighted sum that is not made yet: the norm behind it takes its parts."""

    rows: Float[Tensor, "N D"]
    weights: Float[Tensor, "T k"]

    def sum(self) -> Float[Tensor, "T D"]:
        return weighted_sum(self.rows, self.weights)


def weighted_sum_reference(
    rows: Float[Tensor, "N D"], weights: Float[Tensor, "T k"]
) -> Float[Tensor, "T D"]:
    rows_TkD = rows.float().view(*weights.shape, rows.shape[1])
    return torch.einsum("tkd,tk->td", rows_TkD, weights.float()).to(rows.dtype)


@triton.jit
def _weighted_sum_kernel(
    rows_ptr,
    weights_ptr,
    out_ptr,
    hidden_size,
    TOP_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask = dims < hidden_size
    total = tl.zeros([BLOCK_D], tl.float32)
    for choice in tl.static_range(TOP_K):
        row = token * TOP_K + choice
        weight = tl.load(weights_ptr + row)
        values = tl.load(rows_ptr + row * hidden_size + dims, mask=mask, other=0.0)
        total += weight * values.to(tl.float32)
    tl.store(out_ptr + token * hidden_size + dims, total, mask=mask)


def tune(hidden_size: int) -> dict[str, int]:
    block = min(next_power_of_2(hidden_size), 1024)
    return {"BLOCK_D": block, "num_warps": min(max(block // 256, 1), 4)}


def _weighted_sum_triton(
    rows: Float[Tensor, "N D"], weights: Float[Tensor, "T k"]
) -> Float[Tensor, "T D"]:
    num_tokens, top_k = weights.shape
    hidden_size = rows.shape[1]
    out = torch.empty((num_tokens, hidden_size), dtype=rows.dtype, device=rows.device)
    if num_tokens == 0:
        return out
    blocks = tune(hidden_size)
    _weighted_sum_kernel[(num_tokens, cdiv(hidden_size, blocks["BLOCK_D"]))](
        rows_ptr=rows,
        weights_ptr=weights,
        out_ptr=out,
        hidden_size=hidden_size,
        TOP_K=top_k,
        **blocks,
        **overlap_options(rows.device, num_tokens),
    )
    return out


def _weighted_sum_cpu(
    rows: Float[Tensor, "N D"], weights: Float[Tensor, "T k"]
) -> Float[Tensor, "T D"]:
    products = torch.bmm(weights[:, None, :], rows.view(*weights.shape, rows.shape[1]).float())
    return products[:, 0].to(rows.dtype)


def weighted_sum_cost(num_tokens: int, top_k: int, hidden_size: int, element_bytes: int) -> OpCost:
    elements = num_tokens * (top_k + 1) * hidden_size
    flops = 2 * num_tokens * top_k * hidden_size
    return OpCost(flops, elements * element_bytes + 4 * num_tokens * top_k)


def _weighted_sum_meta(
    rows: Float[Tensor, "N D"], weights: Float[Tensor, "T k"]
) -> Float[Tensor, "T D"]:
    num_tokens, top_k = weights.shape
    cost = weighted_sum_cost(num_tokens, top_k, rows.shape[1], rows.element_size())
    log_cost("weighted_sum", cost)
    return rows.new_empty((num_tokens, rows.shape[1]))


WEIGHTED_SUM: Dispatch[Callable[[Tensor, Tensor], Tensor]] = Dispatch(
    "weighted_sum",
    Implementation("meta", on_meta, _weighted_sum_meta),
    Implementation("triton", runs_triton, _weighted_sum_triton),
    Implementation("cpu", on_cpu, _weighted_sum_cpu),
    Implementation("reference", anywhere, weighted_sum_reference),
)


def weighted_sum(rows: Float[Tensor, "N D"], weights: Float[Tensor, "T k"]) -> Float[Tensor, "T D"]:
    """`rows` holds token t's choice j at t * k + j; weights are float32; both contiguous."""
    assert rows.shape[0] == weights.numel(), (rows.shape, weights.shape)
    assert rows.is_contiguous(), rows.stride()
    assert weights.is_contiguous(), weights.stride()
    return WEIGHTED_SUM.select(rows.device, rows.dtype)(rows, weights)
