# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention of rows with one new token, read from the paged cache where it lies.

A thread takes a row, or one KV head of it where rows are few: the scores of the query heads with
every key, their softmax, then the weighted sum of the values. A row's result does not depend on
other rows, and a position's heads are read together, as they lie.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.native.runtime import (
    BF16,
    F32,
    argument,
    compiled,
    exp,
    is_bfloat16,
    kernel,
    load,
    load_int32,
    load_int64,
    num_threads,
    ordered,
    real_argument,
    store,
    store_int64,
    thread_num,
    unordered,
)


@compiled
def _softmax(scores, count, sink):
    """In place over `count` float32; `sink` is a further logit, -inf for none."""
    largest = ordered(sink)
    for c in range(count):
        largest = max(largest, ordered(load(F32, scores, c)))
    highest = unordered(largest)
    total = np.float32(0.0)
    for c in range(count):
        power = exp(load(F32, scores, c) - highest)
        store(F32, scores, c, power)
        total += power
    if sink > np.float32(-np.inf):
        total += exp(sink - highest)
    factor = np.float32(1.0) / total
    for c in range(count):
        store(F32, scores, c, load(F32, scores, c) * factor)


@compiled
def _widen_four(tag, addresses, offset, four, head_dim):
    """Four vectors of the cache in float32, one after the other."""
    for i in range(4):
        vector = load_int64(addresses, i) + offset
        for d in range(head_dim):
            store(F32, four, i * head_dim + d, load(tag, vector, d))


@compiled
def _four_scores(query, four, scores, head_dim):
    """Products of a query with four keys. A loop of known length is faster by a third."""
    score0 = score1 = score2 = score3 = np.float32(0.0)
    for d in range(head_dim):
        x = load(F32, query, d)
        score0 += x * load(F32, four, d)
        score1 += x * load(F32, four, head_dim + d)
        score2 += x * load(F32, four, 2 * head_dim + d)
        score3 += x * load(F32, four, 3 * head_dim + d)
    store(F32, scores, 0, score0)
    store(F32, scores, 1, score1)
    store(F32, scores, 2, score2)
    store(F32, scores, 3, score3)


@compiled
def _add_four(sums, four, weights, head_dim):
    """Four values, weighted, into the sums."""
    weight0, weight1 = load(F32, weights, 0), load(F32, weights, 1)
    weight2, weight3 = load(F32, weights, 2), load(F32, weights, 3)
    for d in range(head_dim):
        x = load(F32, sums, d)
        x += weight0 * load(F32, four, d) + weight1 * load(F32, four, head_dim + d)
        x += weight2 * load(F32, four, 2 * head_dim + d)
        x += weight3 * load(F32, four, 3 * head_dim + d)
        store(F32, sums, d, x)


@compiled
def _decode_attention(tag, size, a):
    num_items, items_per_row, num_heads = argument(a, 0), argument(a, 1), argument(a, 2)
    group_size, head_dim, block_size = argument(a, 3), argument(a, 4), argument(a, 5)
    q, stride_qt, stride_qh, out = argument(a, 6), argument(a, 7), argument(a, 8), argument(a, 9)
    cache, stride_cp, stride_ckv = argument(a, 10), argument(a, 11), argument(a, 12)
    stride_cs, stride_cg = argument(a, 13), argument(a, 14)
    tables, stride_table, lens = argument(a, 15), argument(a, 16), argument(a, 17)
    sinks, scale, window = argument(a, 18), real_argument(a, 19), argument(a, 20)
    scratch, stride_scratch, max_seen = argument(a, 21), argument(a, 22), argument(a, 23)
    # Of this thread: the keys' addresses [max_seen], and in float32 queries [heads, K],
    # sums [heads, K], four keys or values [4, K], scores [heads, max_seen].
    keys = scratch + thread_num() * stride_scratch * 4
    queries = keys + max_seen * 8
    sums = queries + num_heads * head_dim * 4
    four = sums + num_heads * head_dim * 4
    scores = four + 4 * head_dim * 4
    for item in range(thread_num(), num_items, num_threads()):
        row, first_head = item // items_per_row, item % items_per_row * num_heads
        to = out + item * num_heads * head_dim * size
        length = load_int32(lens, row)
        first = max(length - window, 0) if window else 0
        count = length - first
        query = q + (row * stride_qt + first_head * stride_qh) * size
        for h in range(num_heads):
            for d in range(head_dim):
                x = load(tag, query + h * stride_qh * size, d)
                store(F32, queries, h * head_dim + d, x * scale)
                store(F32, sums, h * head_dim + d, np.float32(0.0))
        table = tables + row * stride_table * 4
        item_cache = cache + first_head // group_size * stride_cg * size
        for position in range(first, length):
            block = load_int32(table, position // block_size)
            offset = block * stride_cp + position % block_size * stride_cs
            store_int64(keys, position - first, item_cache + offset * size)
        # Four positions at a time, widened once for the heads that share them.
        for c in range(0, count - count % 4, 4):
            for kv_head in range(num_heads // group_size):
                to_head = kv_head * stride_cg * size
                _widen_four(tag, keys + c * 8, to_head, four, head_dim)
                for h in range(kv_head * group_size, (kv_head + 1) * group_size):
                    query = queries + h * head_dim * 4
                    to_scores = scores + (h * max_seen + c) * 4
                    if head_dim == 64:
                        _four_scores(query, four, to_scores, 64)
                    elif head_dim == 128:
                        _four_scores(query, four, to_scores, 128)
                    else:
                        _four_scores(query, four, to_scores, head_dim)
        for c in range(count - count % 4, count):
            for h in range(num_heads):
                key0 = load_int64(keys, c) + h // group_size * stride_cg * size
                score0 = np.float32(0.0)
                for d in range(head_dim):
                    score0 += load(F32, queries, h * head_dim + d) * load(tag, key0, d)
                store(F32, scores, h * max_seen + c, score0)
        for h in range(num_heads):
            sink = np.float32(-np.inf)
            if sinks:
                sink = load(tag, sinks, first_head + h)
            _softmax(scores + h * max_seen * 4, count, sink)
        for c in range(0, count - count % 4, 4):
            for kv_head in range(num_heads // group_size):
                to_head = (stride_ckv + kv_head * stride_cg) * size
                _widen_four(tag, keys + c * 8, to_head, four, head_dim)
                for h in range(kv_head * group_size, (kv_head + 1) * group_size):
                    weights = scores + (h * max_seen + c) * 4
                    head_sums = sums + h * head_dim * 4
                    if head_dim == 64:
                        _add_four(head_sums, four, weights, 64)
                    elif head_dim == 128:
                        _add_four(head_sums, four, weights, 128)
                    else:
                        _add_four(head_sums, four, weights, head_dim)
        for c in range(count - count % 4, count):
            for h in range(num_heads):
                to_head = (stride_ckv + h // group_size * stride_cg) * size
                value0 = load_int64(keys, c) + to_head
                weight0 = load(F32, scores, h * max_seen + c)
                sum_ = sums + h * head_dim * 4
                for d in range(head_dim):
                    store(F32, sum_, d, load(F32, sum_, d) + weight0 * load(tag, value0, d))
        for d in range(num_heads * head_dim):
            store(tag, to, d, load(F32, sums, d))


@kernel
def _decode_attention_bf16(a):
    _decode_attention(BF16, 2, a)


@kernel
def _decode_attention_f32(a):
    _decode_attention(F32, 4, a)


def decode_attention(
    q: Float[Tensor, "R H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    block_tables: Int[Tensor, "R B"],
    context_lens: Int[Tensor, " R"],
    max_context_len: int,
    scale: float,
    window: int,
    sinks: Float[Tensor, " H"] | None,
    out: Float[Tensor, "R H K"],
) -> None:
    """Writes `out`, which is contiguous; zeros where the context length is 0."""
    num_rows, num_heads, head_dim = q.shape
    assert block_tables.dtype is context_lens.dtype is torch.int32, block_tables.dtype
    assert sinks is None or sinks.dtype is q.dtype, sinks
    _, _, block_size, num_kv_heads, _ = cache_layer.shape
    group_size = num_heads // num_kv_heads
    num_threads = torch.get_num_threads()
    items_per_row = 1 if num_rows >= 2 * num_threads else num_kv_heads
    item_heads = num_heads // items_per_row
    max_seen = min(max_context_len, window) if window else max_context_len
    floats = 2 * max_seen + 4 * head_dim + item_heads * (2 * head_dim + max_seen)
    scratch = torch.empty((num_threads, floats + floats % 2))
    stride_cp, stride_ckv, stride_cs, stride_cg, _ = cache_layer.stride()
    run = _decode_attention_bf16 if is_bfloat16(q) else _decode_attention_f32
    run(
        num_rows * num_heads * max_seen * head_dim, num_rows * items_per_row, items_per_row,
        item_heads, group_size, head_dim, block_size, q.data_ptr(), q.stride(0), q.stride(1),
        out.data_ptr(), cache_layer.data_ptr(), stride_cp, stride_ckv, stride_cs, stride_cg,
        block_tables.data_ptr(), block_tables.stride(0), context_lens.data_ptr(),
        0 if sinks is None else sinks.data_ptr(), scale, window, scratch.data_ptr(),
        scratch.stride(0), max_seen,
    )  # fmt: skip
