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
from pelton.kernels.triton_runtime import (
    num_multiprocessors,
    overlap_options,
    runs_triton,
    tl,
    triton,
)
from pelton.perf.cost import OpCost, log_cost

HighestLogit = Callable[[Tensor], tuple[Tensor, Tensor]]


def highest_logit_reference(
    logits: Float[Tensor, "N V"],
) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    best, token_ids = logits.max(dim=1)
    return token_ids.int(), best.isfinite().int()


@triton.jit(do_not_specialize=["num_splits"])
def _highest_logit_kernel(
    logits_ptr,
    best_ptr,
    token_ids_ptr,
    num_nans_ptr,
    stride_ln,
    vocab_size,
    num_splits,
    BLOCK_V: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of a row's split: its highest logit, the lowest id that has it, and how many are NaN."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = logits_ptr + row * stride_ln
    length = tl.cdiv(tl.cdiv(vocab_size, BLOCK_V), num_splits) * BLOCK_V
    first = split * length
    offsets = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_ids = first + offsets
    num_nans = tl.zeros([BLOCK_V], tl.int32)
    for start in range(first, tl.minimum(first + length, vocab_size), BLOCK_V):
        ids = start + offsets
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        num_nans += (logits != logits).to(tl.int32)
        # Strictly above: an earlier, lower id keeps its place among ties.
        is_better = logits > best
        best = tl.where(is_better, logits, best)
        best_ids = tl.where(is_better, ids, best_ids)
    highest = tl.max(best, axis=0)
    token_id = tl.min(tl.where(best == highest, best_ids, vocab_size - 1), axis=0)
    place = row * num_splits + split
    tl.store(best_ptr + place, highest)
    tl.store(token_ids_ptr + place, token_id)
    tl.store(num_nans_ptr + place, tl.sum(num_nans, axis=0))


@triton.jit
def _highest_of_splits_kernel(
    best_ptr,
    split_ids_ptr,
    num_nans_ptr,
    token_ids_ptr,
    is_finite_ptr,
    vocab_size,
    NUM_SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    places = row * NUM_SPLITS + tl.arange(0, NUM_SPLITS)  # [NUM_SPLITS]
    best = tl.load(best_ptr + places)
    highest = tl.max(best, axis=0)
    ids = tl.load(split_ids_ptr + places)
    token_id = tl.min(tl.where(best == highest, ids, vocab_size - 1), axis=0)
    num_nans = tl.sum(tl.load(num_nans_ptr + places), axis=0)
    is_finite = (num_nans == 0) & (tl.abs(highest) < float("inf"))
    tl.store(token_ids_ptr + row, token_id)
    tl.store(is_finite_ptr + row, is_finite.to(tl.int32))


def tune(num_rows: int, num_multiprocessors: int) -> int:
    """Splits of a row, a power of two: four programs a multiprocessor, up to 64."""
    wanted = max(4 * num_multiprocessors // max(num_rows, 1), 1)
    return min(1 << wanted.bit_length() - 1, 64)


def _highest_logit_triton(
    logits: Float[Tensor, "N V"],
) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    num_rows, vocab_size = logits.shape
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
    is_finite = torch.empty_like(token_ids)
    if num_rows == 0:
        return token_ids, is_finite
    num_splits = tune(num_rows, num_multiprocessors(device))
    best = torch.empty((num_rows, num_splits), dtype=torch.float32, device=device)
    split_ids, num_nans = torch.empty((2, num_rows, num_splits), dtype=torch.int32, device=device)
    overlaps = overlap_options(device, num_rows)
    _highest_logit_kernel[(num_rows, num_splits)](
        logits_ptr=logits,
        best_ptr=best,
        token_ids_ptr=split_ids,
        num_nans_ptr=num_nans,
        stride_ln=logits.stride(0),
        vocab_size=vocab_size,
        num_splits=num_splits,
        BLOCK_V=4096,
        num_warps=8,
        **overlaps,
    )
    _highest_of_splits_kernel[(num_rows,)](
        best_ptr=best,
        split_ids_ptr=split_ids,
        num_nans_ptr=num_nans,
        token_ids_ptr=token_ids,
        is_finite_ptr=is_finite,
        vocab_size=vocab_size,
        NUM_SPLITS=num_splits,
        num_warps=1,
        **overlaps,
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
