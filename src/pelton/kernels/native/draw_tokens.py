# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`draw_tokens` on a CPU: two histograms of a row's distances find where the kept tokens end.

The first is over the 11 high bits of a distance, the second over the 12 low ones of those in the
bin that the first one found.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.draw_tokens.reference import RandomRows
from pelton.kernels.native.runtime import (
    BF16,
    F32,
    argument,
    compiled,
    exact,
    is_bfloat16,
    kernel,
    load,
    load_int32,
    load_int64,
    num_threads,
    store_int32,
    store_int64,
    thread_num,
)

_NUM_BINS = 4096


@exact
def _scale(temperature):
    return np.float32(378193.84375) / max(temperature, np.float32(1e-20))


@exact
def _distance(highest, logit, scale):
    distance = (highest - logit) * scale
    # A NaN is not below: it has no weight.
    distance = distance if distance < np.float32(8388607) else np.float32(8388607)
    rounded = (distance + np.float32(8388608)) - np.float32(8388608)
    return np.int32(rounded) & np.int32(8388607)


@exact
def _weight(distance):
    x = np.float32(distance & 0x3FFFF) * np.float32(2.0**-18)
    inner = x * np.float32(-0.0009396980167366564) + np.float32(0.009193893522024155)
    inner = inner * x + np.float32(-0.055288009345531464)
    inner = inner * x + np.float32(0.24017725884914398)
    inner = inner * x + np.float32(-0.6931434273719788)
    halves = (inner * x + np.float32(2) - np.float32(1)) * np.float32(8388608)
    return (np.int64(halves) << 17) >> (distance >> 18) if distance < 8388607 else 0


@exact
def _at_least(share, total):
    """The least integer that is at least that share of the total, and not 0."""
    return max(np.int64(np.ceil(np.float64(share) * np.float64(total))), 1)


@compiled
def _bin_that_reaches(bins, wanted, reached):
    """The first bin by which the running sum reaches `wanted`, and the sum before it."""
    for place in range(_NUM_BINS):
        amount = load_int64(bins, place)
        if reached + amount >= wanted:
            return place, reached
        reached += amount
    return _NUM_BINS, reached


@compiled
def _shorten(distances, weights, bins, vocab_size, last, is_count, wanted):
    """(last, ties): kept are the tokens nearer than `last` and the first `ties` at that distance,
    the fewest whose number or weight reaches `wanted`; of those nearer than `last` now."""
    for place in range(_NUM_BINS):
        store_int64(bins, place, 0)
    for v in range(vocab_size):
        distance = load_int32(distances, v)
        if distance < last:
            amount = 1 if is_count else load_int64(weights, v)
            place = distance >> 12
            store_int64(bins, place, load_int64(bins, place) + amount)
    high, reached = _bin_that_reaches(bins, wanted, 0)
    if high < _NUM_BINS:
        for place in range(_NUM_BINS):
            store_int64(bins, place, 0)
        for v in range(vocab_size):
            distance = load_int32(distances, v)
            if distance < last and distance >> 12 == high:
                amount = 1 if is_count else load_int64(weights, v)
                place = distance & 4095
                store_int64(bins, place, load_int64(bins, place) + amount)
        low, reached = _bin_that_reaches(bins, wanted, reached)
        last = (high << 12) + low
    each = 1 if is_count else max(_weight(last), 1)
    return last, (wanted - reached + each - 1) // each


@compiled
def _draw_tokens(tag, size, a):
    num_rows, vocab_size, stride_l = argument(a, 0), argument(a, 1), argument(a, 2)
    logits, highest_ids, rows, temperature = (
        argument(a, 3), argument(a, 4), argument(a, 5), argument(a, 6)
    )  # fmt: skip
    uniforms, top_ks, top_ps, min_ps = (
        argument(a, 7), argument(a, 8), argument(a, 9), argument(a, 10)
    )  # fmt: skip
    token_ids = argument(a, 11)
    thread = thread_num()
    distances = argument(a, 12) + thread * vocab_size * 4
    weights = argument(a, 13) + thread * vocab_size * 8
    bins = argument(a, 14) + thread * _NUM_BINS * 8
    for index in range(thread, num_rows, num_threads()):
        row = load_int64(rows, index)
        start = logits + row * stride_l * size
        highest = load(tag, start, load_int32(highest_ids, row))
        scale = _scale(load(F32, temperature, index))
        for v in range(vocab_size):
            distance = _distance(highest, load(tag, start, v), scale)
            store_int32(distances, v, distance)
            store_int64(weights, v, _weight(distance))
        last, ties = 8388607, 0
        top_k, top_p = load_int32(top_ks, index), load(F32, top_ps, index)
        if top_k > 0:
            last, ties = _shorten(distances, weights, bins, vocab_size, last, True, top_k)
        if top_p < 1:
            total = ties * _weight(last)
            for v in range(vocab_size):
                total += load_int64(weights, v) if load_int32(distances, v) < last else 0
            wanted = _at_least(top_p, total)
            last, ties = _shorten(distances, weights, bins, vocab_size, last, False, wanted)
        least = _at_least(load(F32, min_ps, index), 1 << 40)
        total = 0
        for v in range(vocab_size):
            distance, weight = load_int32(distances, v), load_int64(weights, v)
            is_tie = distance == last
            is_kept = (distance < last or (is_tie and ties > 0)) and weight >= least
            ties -= is_tie
            total += weight if is_kept else 0
            store_int64(weights, v, weight if is_kept else 0)
        point = np.int64(np.float64(load(F32, uniforms, index)) * np.float64(total))
        token_id = vocab_size - 1
        for v in range(vocab_size):
            point -= load_int64(weights, v)
            if point < 0:
                token_id = v
                break
        store_int32(token_ids, index, token_id)


@kernel
def _draw_tokens_bf16(a):
    _draw_tokens(BF16, 2, a)


@kernel
def _draw_tokens_f32(a):
    _draw_tokens(F32, 4, a)


def draw_tokens(
    logits: Float[Tensor, "N V"], highest_ids: Int[Tensor, " N"], rows: RandomRows
) -> Int[Tensor, " n"]:
    num_rows, vocab_size = rows.rows.shape[0], logits.shape[1]
    token_ids = torch.empty(num_rows, dtype=torch.int32)
    threads = torch.get_num_threads()
    distances = torch.empty((threads, vocab_size), dtype=torch.int32)
    weights = torch.empty((threads, vocab_size), dtype=torch.int64)
    bins = torch.empty((threads, _NUM_BINS), dtype=torch.int64)
    run = _draw_tokens_bf16 if is_bfloat16(logits) else _draw_tokens_f32
    run(
        num_rows * vocab_size, num_rows, vocab_size, logits.stride(0), logits.data_ptr(),
        highest_ids.data_ptr(), rows.rows.data_ptr(), rows.temperature.data_ptr(),
        rows.uniforms.data_ptr(), rows.top_k.data_ptr(), rows.top_p.data_ptr(),
        rows.min_p.data_ptr(), token_ids.data_ptr(), distances.data_ptr(), weights.data_ptr(),
        bins.data_ptr(),
    )  # fmt: skip
    return token_ids
