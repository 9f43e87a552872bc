# SPDX-License-Identifier: Apache-2.0
"""Finds the least likely token that is kept by histograms of distances, without a sort."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pelton.kernels.draw_tokens.reference import (
    FARTHEST,
    RandomRows,
    distances_of,
    pick,
    share_of,
    weights_of,
)

_LOW_BITS = 12
"""Of a distance, found by the second histogram; the first one finds the 11 above."""
_LOW = 2**_LOW_BITS


def draw_tokens_cpu(
    logits: Float[Tensor, "N V"], highest_ids: Int[Tensor, " N"], rows: RandomRows
) -> Int[Tensor, " n"]:
    distances = distances_of(logits, highest_ids, rows)
    weights = weights_of(distances)
    if rows.has_top_k:
        counts = (distances < FARTHEST).long()
        total = counts.sum(dim=1, keepdim=True)
        top_k = rows.top_k[:, None].long()
        wanted = torch.where((top_k > 0) & (top_k < total), top_k, total)
        weights *= _leading(distances, counts, wanted)
    if rows.has_top_p:
        total = weights.sum(dim=1, keepdim=True)
        wanted = torch.where(rows.top_p[:, None] < 1, share_of(total, rows.top_p), total)
        weights *= _leading(distances, weights, wanted)
    return pick(weights, rows)


def _leading(
    distances: Int[Tensor, "n V"], amounts: Int[Tensor, "n V"], wanted: Int[Tensor, "n 1"]
) -> Bool[Tensor, "n V"]:
    """Which tokens come before the running sum of amounts, in the order of distances and ids,
    reaches `wanted`. Amounts at one distance are alike, or 0 from some id on."""
    high = (distances >> _LOW_BITS).long()
    last_high, reached = _reach(high, amounts, wanted, FARTHEST // _LOW + 1)
    low = torch.where(high == last_high, distances.long() & (_LOW - 1), _LOW)
    last_low, more = _reach(low, amounts, wanted - reached, _LOW + 1)
    last = last_high * _LOW + last_low
    is_tie = distances == last
    sums = (amounts * is_tie).cumsum(dim=1)
    is_leading: Tensor = (distances < last) | (is_tie & (sums - amounts < wanted - reached - more))
    return is_leading


def _reach(
    bins: Int[Tensor, "n V"], amounts: Int[Tensor, "n V"], wanted: Int[Tensor, "n 1"], num_bins: int
) -> tuple[Int[Tensor, "n 1"], Int[Tensor, "n 1"]]:
    """The first bin by which the sum of amounts reaches `wanted`, and the sum before that bin."""
    per_bin = amounts.new_zeros(bins.shape[0], num_bins).scatter_add_(1, bins, amounts)
    sums = per_bin.cumsum(dim=1)
    found = torch.searchsorted(sums, wanted).clamp_(max=num_bins - 1)
    return found, (sums - per_bin).gather(1, found)
