# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The id of each row's highest logit, the lowest id among ties, and whether the row is usable.

A row is not finite when its highest logit is infinite or any of its logits is NaN; its id is then
without meaning, but an id.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta, runs_native
from pelton.kernels.triton_runtime import overlap_options, runs_triton, tl, triton
from pelton.perf.cost import OpCost, log_cost

HighestLogit = Callable[[Tensor], tuple[Tensor, Tensor]]


def highest_logit_reference(
    logits: Float[Tensor, "N V"],
) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    best, token_ids = logits.max(dim=1)
    return token_ids.int(), best.isfinite().int()


@triton.jit
def _highest_logit_kernel(
    logits_ptr,
    token_ids_ptr,
    is_finite_ptr,
    stride_ln,
    vocab_size,
    BLOCK_V: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_ln
    offsets = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_ids = offsets
    num_nans = tl.zeros([BLOCK_V], tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        ids = start + offsets
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        num_nans += (logits != logits).to(tl.int32)
        # Strictly above: an earlier, lower id keeps its place among ties.
        is_better = logits > best
        best = tl.where(is_better, logits, best)
        best_ids = tl.where(is_better, ids, best_ids)
    highest = tl.max(best, axis=0)
    token_id = tl.min(tl.where(best == highest, best_ids, vocab_size - 1), axis=0)
    is_finite = (tl.sum(num_nans, axis=0) == 0) & (tl.abs(highest) < float("inf"))
    tl.store(token_ids_ptr + row, token_id)
    tl.store(is_finite_ptr + row, is_finite.to(tl.int32))


def _highest_logit_triton(
    logits: Float[Tensor, "N V"],
) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    is_finite = torch.empty_like(token_ids)
    if num_rows == 0:
        return token_ids, is_finite
    _highest_logit_kernel[(num_rows,)](
        logits_ptr=logits,
        token_ids_ptr=token_ids,
        is_finite_ptr=is_finite,
        stride_ln=logits.stride(0),
        vocab_size=vocab_size,
        BLOCK_V=8192,
        num_warps=16,
        **overlap_options(logits.device, num_rows),
    )
    return token_ids, is_finite


def _highest_logit_meta(
    logits: Float[Tensor, "N V"],
) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    elements = logits.numel()
    log_cost("highest_logit", OpCost(elements, elements * logits.element_size()))
    ids = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    return ids, torch.empty_like(ids)


HIGHEST_LOGIT: Dispatch[HighestLogit] = Dispatch(
    "highest_logit",
    Implementation("meta", on_meta, _highest_logit_meta),
    Implementation("triton", runs_triton, _highest_logit_triton),
    Implementation("native", runs_native, "pelton.kernels.native.highest_logit:highest_logit"),
    Implementation("reference", anywhere, highest_logit_reference),
)


def highest_logit(
    logits: Float[Tensor, "N V"],
) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    """Returns (token ids, 1 where the row is finite), both int32. Rows may be strided."""
    assert logits.stride(1) == 1, logits.stride()
    return HIGHEST_LOGIT.select(logits.device, logits.dtype)(logits)
