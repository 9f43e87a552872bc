# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention of decode rows: one query token over a long context, bound by reading the cache.

The context is cut in a fixed number of splits, so the grid depends on the number of rows alone
and a CUDA graph replays at any context length. The H / G query heads of a KV head share one tile,
padded to 16 rows for the matrix units, so keys and values are read once. A second kernel merges
the splits by their log-sum-exp (Dao et al., "Flash-Decoding", 2023).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.triton_runtime import (
    cdiv,
    next_power_of_2,
    num_multiprocessors,
    overlap_options,
    tl,
    triton,
)
from pelton.kernels.tuning import tunable

LOG2_E = 1.4426950408889634
NO_WINDOW = 2**31 - 1
_MAX_SPLITS = 32


@triton.jit
def _split_context(
    context_len, window, num_splits, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """-> (the first position that is seen, the most positions of a split). Tiles begin at the
    first: a window of a tile's length is one. Splits behind the context are empty."""
    low = tl.maximum(context_len - window, 0) if HAS_WINDOW else 0
    return low, tl.cdiv(tl.cdiv(context_len - low, BLOCK_N), num_splits) * BLOCK_N


# Values that change from step to step must not each compile a kernel of their own.
@triton.jit(do_not_specialize=["num_splits", "window"])
def _decode_split_kernel(
    q_ptr,
    cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    stride_qt,
    stride_qh,
    stride_cachep,
    stride_cachekv,
    stride_caches,
    stride_cacheg,
    stride_tabler,
    stride_ot,
    stride_oh,
    num_heads,
    num_splits,
    scale_log2,
    v_scale,
    window,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IN_FLOAT16: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    # Neighbouring programs read neighbouring KV heads of the same tokens.
    kv_head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)

    context_len = tl.load(context_lens_ptr + row)
    low, split_len = _split_context(context_len, window, num_splits, BLOCK_N, HAS_WINDOW)
    start = low + split * split_len
    end = tl.minimum(context_len, start + split_len)
    # An empty split makes room at once for the programs of the next kernels, which hold weights.
    # The first stays: they may not end before the kernel in front of this one has.
    if (split > 0) & (start >= end):
        return
    table_ptr = block_tables_ptr + row * stride_tabler
    if OVERLAPS:
        # The first tile's blocks are known before its last key is written.
        positions = start + tl.arange(0, BLOCK_N)
        is_seen = positions < end
        first_ids = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_seen, other=0)
        tl.extra.cuda.gdc_wait()

    members = tl.arange(0, BLOCK_H)  # [BLOCK_H]
    dims = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    heads = kv_head * GROUP_SIZE + members
    q_mask = (members < GROUP_SIZE)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile_ptr = q_ptr + row * stride_qt + heads[:, None] * stride_qh + dims[None, :]
    q = tl.load(q_tile_ptr, mask=q_mask, other=0.0)  # [BLOCK_H, BLOCK_K]
    if IN_FLOAT16:
        q = q.to(tl.float16)

    running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_H], tl.float32)
    if HAS_SINKS and not IS_SPLIT:  # splits get it when they are merged
        # The softmax starts with the sink, which has weight and no value.
        sinks = tl.load(sinks_ptr + heads, mask=members < GROUP_SIZE, other=0.0)
        running_max = sinks.to(tl.float32) * 1.4426950408889634
        running_sum += 1.0
    acc = tl.zeros([BLOCK_H, BLOCK_K], tl.float32)
    head_ptr = cache_ptr + kv_head * stride_cacheg
    for tile_start in range(start, end, BLOCK_N):
        positions = tile_start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        is_seen = positions < end
        is_unread = is_seen & (tile_start > start) if OVERLAPS else is_seen
        block_ids = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_unread, other=0)
        if OVERLAPS:
            block_ids = tl.where(tile_start > start, block_ids, first_ids)
        offsets = block_ids.to(tl.int64) * stride_cachep + (positions % BLOCK_SIZE) * stride_caches
        kv_mask = is_seen[:, None] & (dims < HEAD_DIM)[None, :]
        k_tile_ptr = head_ptr + offsets[:, None] + dims[None, :]
        k = tl.load(k_tile_ptr, mask=kv_mask, other=0.0).to(q.dtype)  # [BLOCK_N, BLOCK_K]
        v = tl.load(k_tile_ptr + stride_cachekv, mask=kv_mask, other=0.0).to(q.dtype)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [BLOCK_H, BLOCK_N]
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        # Each tile of a split holds a seen position, so the maximum is finite.
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        probabilities = tl.exp2(scores - new_max[:, None])
        correction = tl.exp2(running_max - new_max)
        running_sum = running_sum * correction + tl.sum(probabilities, axis=1)
        acc = acc * correction[:, None]
        acc = tl.dot(probabilities.to(v.dtype), v, acc, input_precision="ieee")
        running_max = new_max

    divisor = tl.where(running_sum == 0.0, 1.0, running_sum)
    acc = acc / divisor[:, None] * v_scale
    if IS_SPLIT:
        place = (row * num_heads + heads) * num_splits + split  # [BLOCK_H]
        tl.store(lse_ptr + place, running_max + tl.log2(divisor), mask=members < GROUP_SIZE)
        partial_tile_ptr = partial_ptr + place[:, None] * HEAD_DIM + dims[None, :]
        tl.store(partial_tile_ptr, acc, mask=q_mask)
    else:
        out_tile_ptr = out_ptr + row * stride_ot + heads[:, None] * stride_oh + dims[None, :]
        tl.store(out_tile_ptr, acc, mask=q_mask)


@triton.jit(do_not_specialize=["window"])
def _merge_splits_kernel(
    partial_ptr,
    lse_ptr,
    context_lens_ptr,
    sinks_ptr,
    out_ptr,
    stride_ot,
    stride_oh,
    num_heads,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    splits = tl.arange(0, NUM_SPLITS)  # [NUM_SPLITS]
    dims = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    place = (row * num_heads + head) * NUM_SPLITS + splits
    context_len = tl.load(context_lens_ptr + row)
    low, split_len = _split_context(context_len, window, NUM_SPLITS, BLOCK_N, HAS_WINDOW)
    is_full = low + splits * split_len < context_len
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    lse = tl.load(lse_ptr + place, mask=is_full, other=float("-inf"))
    top = tl.max(lse, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    weights = tl.where(is_full, tl.exp2(lse - tl.where(top > float("-inf"), top, 0.0)), 0.0)
    mask = is_full[:, None] & (dims < HEAD_DIM)[None, :]
    partial_tile_ptr = partial_ptr + place[:, None] * HEAD_DIM + dims[None, :]
    partial = tl.load(partial_tile_ptr, mask=mask, other=0.0)  # [NUM_SPLITS, BLOCK_K]
    total = tl.sum(weights, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    merged = tl.sum(partial * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    out_row_ptr = out_ptr + row * stride_ot + head * stride_oh + dims
    tl.store(out_row_ptr, merged, mask=dims < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    num_splits: int
    block_n: int
    """Keys in a tile."""
    num_warps: int
    num_stages: int


@tunable("paged_decode")
def tune_decode(
    num_rows: int, num_kv_heads: int, head_dim: int, kv_element_bytes: int, num_multiprocessors: int
) -> DecodeTiles:
    """Splits until there are four programs a multiprocessor; tiles of at most 16 KiB of keys."""
    wanted = 4 * num_multiprocessors // max(num_rows * num_kv_heads, 1)
    block_k = max(next_power_of_2(head_dim), 16)
    return DecodeTiles(
        num_splits=min(1 << max(wanted, 1).bit_length() - 1, _MAX_SPLITS),
        block_n=min(max(16384 // (block_k * kv_element_bytes), 16), 128),
        num_warps=4,
        num_stages=3,
    )


def multiplies_in_float16(q: Tensor, cache_layer: Tensor) -> bool:
    """A cache in FP8 turns into the queries' format in registers, exactly; with bfloat16 queries
    they turn into float16 instead. A card converts e4m3 to float16 two at a time, and to bfloat16
    only by way of it, one by one; and float16 rounds queries and probabilities less. A query
    beyond its range, 65504, would make its row NaN, which the sampler reports."""
    return cache_layer.dtype is torch.float8_e4m3fn and q.dtype is torch.bfloat16


def decode_attention(
    q: Float[Tensor, "R H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    block_tables: Int[Tensor, "R B"],
    context_lens: Int[Tensor, " R"],
    scale: float,
    window: int,
    sinks: Float[Tensor, " H"] | None,
    v_scale: float,
    out: Float[Tensor, "R H K"],
) -> None:
    """Writes `out`: row r's one token over its context; zeros where the context length is 0.
    `scale` includes that of the keys in the cache, `v_scale` is the values'."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = cache_layer.shape[3]
    group_size = num_heads // num_kv_heads
    block_k = max(next_power_of_2(head_dim), 16)
    tiles = tune_decode(
        num_rows, num_kv_heads, head_dim, cache_layer.element_size(), num_multiprocessors(q.device)
    )
    num_splits = tiles.num_splits
    if window:
        # A window of one tile has nothing to split, and nothing to merge.
        num_splits = min(num_splits, next_power_of_2(cdiv(window, tiles.block_n)))
    if num_splits == 1:
        partial = lse = out
    else:
        partial = q.new_empty((num_rows, num_heads, num_splits, head_dim), dtype=torch.float32)
        lse = q.new_empty((num_rows, num_heads, num_splits), dtype=torch.float32)
    _decode_split_kernel[(num_kv_heads, num_splits, num_rows)](
        q_ptr=q,
        cache_ptr=cache_layer,
        block_tables_ptr=block_tables,
        context_lens_ptr=context_lens,
        sinks_ptr=q if sinks is None else sinks,
        out_ptr=out,
        partial_ptr=partial,
        lse_ptr=lse,
        stride_qt=q.stride(0),
        stride_qh=q.stride(1),
        stride_cachep=cache_layer.stride(0),
        stride_cachekv=cache_layer.stride(1),
        stride_caches=cache_layer.stride(2),
        stride_cacheg=cache_layer.stride(3),
        stride_tabler=block_tables.stride(0),
        stride_ot=out.stride(0),
        stride_oh=out.stride(1),
        num_heads=num_heads,
        num_splits=num_splits,
        scale_log2=scale * LOG2_E,
        v_scale=v_scale,
        window=window,
        BLOCK_SIZE=cache_layer.shape[2],
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        BLOCK_H=max(next_power_of_2(group_size), 16),
        BLOCK_K=block_k,
        BLOCK_N=tiles.block_n,
        IS_SPLIT=num_splits > 1,
        HAS_WINDOW=window > 0,
        HAS_SINKS=sinks is not None,
        IN_FLOAT16=multiplies_in_float16(q, cache_layer),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **overlap_options(q.device, num_rows),
    )
    if num_splits > 1:
        _merge_splits_kernel[(num_heads, num_rows)](
            partial_ptr=partial,
            lse_ptr=lse,
            context_lens_ptr=context_lens,
            sinks_ptr=q if sinks is None else sinks,
            out_ptr=out,
            stride_ot=out.stride(0),
            stride_oh=out.stride(1),
            num_heads=num_heads,
            window=window,
            HEAD_DIM=head_dim,
            BLOCK_K=block_k,
            BLOCK_N=tiles.block_n,
            NUM_SPLITS=num_splits,
            HAS_WINDOW=window > 0,
            HAS_SINKS=sinks is not None,
            num_warps=4,
            **overlap_options(q.device, num_rows),
        )
