# SPDX-License-Identifier: Apache-2.0
"""Draws one token a row from what temperature, top-k, top-p and min-p leave of its logits.

All of it is integer arithmetic, so that a sum is the same in any order and every implementation
draws the same token:

    distance(i) = round(2^18 log2(e) (highest - logit(i)) / temperature)     in 2^-18 octaves
    weight(i)   = 2^(40 - distance(i) / 2^18), rounded down                  0 from 32 octaves on

A token's share of the row's weights is its softmax to about one part in a million. Tokens at equal
distances are ties, of which the lowest ids are the likelier. Kept are the `top_k` likeliest with a
weight; of these the fewest likeliest whose weights reach the share `top_p` of the kept ones' sum;
of these the ones with at least `min_p` times the highest's weight. The draw inverts the cumulative
distribution at the row's uniform number, with the tokens in the vocabulary's order: the first one
whose running sum exceeds it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

OCTAVE_BITS = 18
WEIGHT_BITS = 40
FARTHEST = 2**23 - 1
"""The distance of all tokens without a weight."""
DISTANCES_PER_NAT = 378193.84375
COLDEST = 1e-20
"""Any temperature below counts as this one: the scale must not overflow."""
_POWERS = (
    -0.0009396980167366564,
    0.009193893522024155,
    -0.055288009345531464,
    0.24017725884914398,
    -0.6931434273719788,
    2.0,
)
"""Coefficients of 1 + 2^-x on [0, 1], highest power first: a polynomial of least relative error,
1e-7, that is exact at both ends. Each product and each sum is rounded to float32."""


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Rows that sample at a temperature above 0, and how."""

    rows: Int[Tensor, " n"]
    """Row numbers of the logits, distinct."""
    temperature: Float[Tensor, " n"]
    uniforms: Float[Tensor, " n"]
    """In [0, 1), multiples of 2^-24."""
    top_k: Int[Tensor, " n"]
    """0: off."""
    top_p: Float[Tensor, " n"]
    """Above 0; 1: off."""
    min_p: Float[Tensor, " n"]
    has_top_k: bool
    """Whether it is on in any row."""
    has_top_p: bool


def distances_of(
    logits: Float[Tensor, "N V"], highest_ids: Int[Tensor, " N"], rows: RandomRows
) -> Int[Tensor, "n V"]:
    chosen = logits.index_select(0, rows.rows).float()
    highest = chosen.gather(1, highest_ids.index_select(0, rows.rows).long()[:, None])
    scale = DISTANCES_PER_NAT / rows.temperature.clamp(min=COLDEST)
    distances = (highest - chosen) * scale[:, None]
    # A NaN is not below: it has no weight.
    distances = torch.where(distances < FARTHEST, distances, float(FARTHEST))
    return distances.round().int() & FARTHEST


def weights_of(distances: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    x = (distances & (2**OCTAVE_BITS - 1)).float() / 2**OCTAVE_BITS
    total = x * _POWERS[0] + _POWERS[1]
    for coefficient in _POWERS[2:]:
        total = total * x + coefficient
    halves = (total - 1) * 2**23  # whole: in [1.5, 2] a float32 is a multiple of 2^-23
    weights: Tensor = (halves.long() << (WEIGHT_BITS - 23)) >> (distances >> OCTAVE_BITS)
    return weights.masked_fill(distances == FARTHEST, 0)


def share_of(total: Int[Tensor, "n 1"], share: Float[Tensor, " n"]) -> Int[Tensor, "n 1"]:
    """The least sum that is at least that share of the total, and not nothing."""
    exact = total.double() * share.double()[:, None]
    return exact.ceil().long().clamp(min=1)


def pick(weights: Int[Tensor, "n V"], rows: RandomRows) -> Int[Tensor, " n"]:
    """Draws from kept weights in the vocabulary's order."""
    unit = torch.full_like(weights[:, :1], 2**WEIGHT_BITS)
    sums = weights.masked_fill(weights < share_of(unit, rows.min_p), 0).cumsum(dim=1)
    points = (sums[:, -1:].double() * rows.uniforms.double()[:, None]).long()
    token_ids = torch.searchsorted(sums, points, right=True)[:, 0]
    return token_ids.clamp(max=weights.shape[1] - 1).int()


def draw_tokens_reference(
    logits: Float[Tensor, "N V"], highest_ids: Int[Tensor, " N"], rows: RandomRows
) -> Int[Tensor, " n"]:
    distances = distances_of(logits, highest_ids, rows)
    distances, order = distances.sort(dim=1, stable=True)
    weights = weights_of(distances)
    top_k = torch.where(rows.top_k == 0, weights.shape[1], rows.top_k)
    weights = weights * (torch.arange(weights.shape[1], device=weights.device) < top_k[:, None])
    sums = weights.cumsum(dim=1)
    total = sums[:, -1:]
    wanted = torch.where(rows.top_p[:, None] < 1, share_of(total, rows.top_p), total)
    weights = weights * (sums - weights < wanted)
    return pick(torch.zeros_like(weights).scatter(1, order, weights), rows)
