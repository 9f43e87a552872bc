# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention whose result for a token has the same bits in a prefill, a decode and any batch.

The context is cut at fixed positions, every `CHUNK` tokens. A chunk's softmax is computed from its
start in tiles of ascending keys, and chunks are folded into the result in ascending order. Who
computes a chunk does not matter: where queries are many, a program folds all of a tile's chunks as
it goes; where they are few, programs share them out, write each apart, and a second kernel folds
them by the same operations. What a query does not see leaves its numbers as they are.

A tile of queries (16, or as many as a KV head has heads; over FP8 8 or 16) holds the heads of one
token or of several. Multiplications and additions are fused only where that is written: the
compiler chooses it kernel by kernel.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.core.batch import AttentionRows
from pelton.kernels.paged_attention.gluon_fp8 import (
    NUM_WARPS,
    choose_queries,
    launch_gluon_fp8,
    runs_gluon_fp8,
)
from pelton.kernels.paged_attention.triton_decode import (
    LOG2_E,
    NO_WINDOW,
    multiplies_in_float16,
)
from pelton.kernels.triton_runtime import (
    cdiv,
    next_power_of_2,
    num_multiprocessors,
    overlap_options,
    tl,
    triton,
)

CHUNK = 256
"""Tokens. Shorter chunks spread one long context better, and are folded more often."""
_MAX_PARTS = 32
_MAX_WORKSPACE_BYTES = 2**28


@triton.jit
def _fold(top, total, mean, chunk_top, chunk_total, chunk_mean):
    """(highest score, sum of weights, weighted sum of values) of all chunks up to this one."""
    new_top = tl.maximum(top, chunk_top)
    # A query may have seen nothing yet; its maximum must not become a NaN.
    finite_top = tl.where(new_top > float("-inf"), new_top, 0.0)
    old, new = tl.exp2(top - finite_top), tl.exp2(chunk_top - finite_top)
    mean = mean * old[:, None] + chunk_mean * new[:, None]
    return new_top, total * old + chunk_total * new, mean


@triton.jit
def _start(sinks_ptr, heads, is_head, BLOCK_H: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The highest score and the sum of weights before any key: the sink has no value."""
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=is_head, other=0.0)
        return sinks.to(tl.float32) * 1.4426950408889634, tl.full([BLOCK_H], 1.0, tl.float32)
    return tl.full([BLOCK_H], float("-inf"), tl.float32), tl.zeros([BLOCK_H], tl.float32)


# Values that change from step to step must not each compile a kernel of their own.
@triton.jit(do_not_specialize=["first_row", "first_token", "num_parts", "num_chunks", "window"])
def _invariant_attention_kernel(
    q_ptr,
    cache_ptr,
    block_tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    sums_ptr,
    stride_qt,
    stride_qh,
    stride_cachep,
    stride_cachekv,
    stride_caches,
    stride_cacheg,
    stride_tabler,
    stride_ot,
    stride_oh,
    first_row,
    first_token,
    num_heads,
    num_parts,
    num_chunks,
    scale_log2,
    v_scale,
    window,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IN_FLOAT16: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kv_head = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) // num_parts
    part = tl.program_id(1) % num_parts
    row = (first_row + tl.program_id(2)).to(tl.int64)
    query_start = tl.load(query_starts_ptr + row).to(tl.int64)
    num_tokens = (tl.load(query_starts_ptr + row + 1) - query_start).to(tl.int32)
    context_len = tl.load(context_lens_ptr + row).to(tl.int32)
    tile_token = tile * TILE_TOKENS
    if tile_token >= num_tokens:
        return
    tile_position = context_len - num_tokens + tile_token

    packed = tl.arange(0, BLOCK_M)  # [BLOCK_M], token-major: a token's heads lie together
    token_in_tile = packed // GROUP_SIZE
    tokens = tile_token + token_in_tile
    query_positions = tile_position + token_in_tile
    heads = kv_head * GROUP_SIZE + packed % GROUP_SIZE
    dims = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    is_query = (token_in_tile < TILE_TOKENS) & (tokens < num_tokens)
    q_mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    rows_of_q = query_start + tokens
    q_tile_ptr = q_ptr + rows_of_q[:, None] * stride_qt + heads[:, None] * stride_qh
    q = tl.load(q_tile_ptr + dims[None, :], mask=q_mask, other=0.0)  # [BLOCK_M, BLOCK_K]
    if IN_FLOAT16:
        q = q.to(tl.float16)

    low = tl.maximum(tile_position - window + 1, 0)
    end = tl.minimum(context_len, tile_position + TILE_TOKENS)
    top, total = _start(sinks_ptr, heads, is_query, BLOCK_M, HAS_SINKS)
    mean = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    table_ptr = block_tables_ptr + row * stride_tabler
    head_ptr = cache_ptr + kv_head * stride_cacheg
    first_chunk = low // CHUNK
    for chunk in range(first_chunk + part, tl.cdiv(end, CHUNK), num_parts):
        chunk_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        chunk_total = tl.zeros([BLOCK_M], tl.float32)
        chunk_mean = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        start = tl.maximum(chunk * CHUNK, low // BLOCK_N * BLOCK_N)
        for tile_start in range(start, tl.minimum(end, (chunk + 1) * CHUNK), BLOCK_N):
            positions = tile_start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            is_read = (positions >= low) & (positions < end)
            block_ids = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_read, other=0)
            offsets = (
                block_ids.to(tl.int64) * stride_cachep + (positions % BLOCK_SIZE) * stride_caches
            )
            kv_mask = is_read[:, None] & (dims < HEAD_DIM)[None, :]
            k_tile_ptr = head_ptr + offsets[:, None] + dims[None, :]
            k = tl.load(k_tile_ptr, mask=kv_mask, other=0.0).to(q.dtype)  # [BLOCK_N, BLOCK_K]
            v = tl.load(k_tile_ptr + stride_cachekv, mask=kv_mask, other=0.0).to(q.dtype)

            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            distance = query_positions[:, None] - positions[None, :]
            is_seen = is_read[None, :] & (distance >= 0) & (distance < window)
            scores = tl.where(is_seen, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
            new_top = tl.maximum(chunk_top, tl.max(scores, axis=1))
            finite_top = tl.where(new_top > float("-inf"), new_top, 0.0)
            weights = tl.exp2(scores - finite_top[:, None])
            correction = tl.exp2(chunk_top - finite_top)
            chunk_total = chunk_total * correction + tl.sum(weights, axis=1)
            chunk_mean = chunk_mean * correction[:, None]
            chunk_mean = tl.dot(weights.to(v.dtype), v, chunk_mean, input_precision="ieee")
            chunk_top = new_top
        if IS_SPLIT:
            token_place = (rows_of_q - first_token) * num_chunks + chunk - first_chunk
            place = token_place * num_heads + heads  # [BLOCK_M]
            tl.store(sums_ptr + 2 * place, chunk_top, mask=is_query)
            tl.store(sums_ptr + 2 * place + 1, chunk_total, mask=is_query)
            partial_tile_ptr = partial_ptr + place[:, None] * HEAD_DIM + dims[None, :]
            tl.store(partial_tile_ptr, chunk_mean, mask=q_mask)
        else:
            top, total, mean = _fold(top, total, mean, chunk_top, chunk_total, chunk_mean)
    if not IS_SPLIT:
        out = mean / tl.where(total > 0.0, total, 1.0)[:, None] * v_scale
        out_tile_ptr = out_ptr + rows_of_q[:, None] * stride_ot + heads[:, None] * stride_oh
        tl.store(out_tile_ptr + dims[None, :], out, mask=q_mask)


@triton.jit(do_not_specialize=["first_row", "first_token", "num_chunks", "window"])
def _fold_chunks_kernel(
    partial_ptr,
    sums_ptr,
    query_starts_ptr,
    context_lens_ptr,
    sinks_ptr,
    out_ptr,
    stride_ot,
    stride_oh,
    first_row,
    first_token,
    num_heads,
    num_chunks,
    v_scale,
    window,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program for BLOCK_H heads of a token."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    token = tl.program_id(1)
    row = (first_row + tl.program_id(2)).to(tl.int64)
    query_start = tl.load(query_starts_ptr + row).to(tl.int64)
    num_tokens = (tl.load(query_starts_ptr + row + 1) - query_start).to(tl.int32)
    if token >= num_tokens:
        return
    first_position = tl.load(context_lens_ptr + row).to(tl.int32) - num_tokens
    tile_position = first_position + token // TILE_TOKENS * TILE_TOKENS
    first_chunk = tl.maximum(tile_position - window + 1, 0) // CHUNK
    count = tl.cdiv(first_position + token + 1, CHUNK) - first_chunk
    is_head = heads < num_heads
    dims = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    top, total = _start(sinks_ptr, heads, is_head, BLOCK_H, HAS_SINKS)
    mean = tl.zeros([BLOCK_H, BLOCK_K], tl.float32)
    for chunk in tl.range(0, count, loop_unroll_factor=4):
        token_place = (query_start + token - first_token) * num_chunks + chunk
        place = token_place * num_heads + heads
        chunk_top = tl.load(sums_ptr + 2 * place, mask=is_head, other=float("-inf"))
        chunk_total = tl.load(sums_ptr + 2 * place + 1, mask=is_head, other=0.0)
        partial_tile_ptr = partial_ptr + place[:, None] * HEAD_DIM + dims[None, :]
        chunk_mean = tl.load(partial_tile_ptr, mask=mask, other=0.0)
        top, total, mean = _fold(top, total, mean, chunk_top, chunk_total, chunk_mean)
    out = mean / tl.where(total > 0.0, total, 1.0)[:, None] * v_scale
    out_row_ptr = out_ptr + (query_start + token) * stride_ot
    tl.store(out_row_ptr + heads[:, None] * stride_oh + dims[None, :], out, mask=mask)


def tune(group_size: int, head_dim: int, element_bytes: int) -> dict[str, int]:
    """One tile for all batches, of few queries: decodes, of which there are most, fill no more."""
    is_half = element_bytes == 2
    block_m = max(16 if is_half else 32, next_power_of_2(group_size))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 64 if is_half else 32,
        "BLOCK_K": max(next_power_of_2(head_dim), 16),
        "num_warps": 2 if block_m == 16 else 4,
        "num_stages": 3 if is_half else 1,
    }


def choose_parts(num_tiles: int, num_chunks: int, chunk_bytes: int, num_programs: int) -> int:
    """How many programs share a tile's chunks: `num_programs` over all tiles, one where the chunks
    of all tiles, `chunk_bytes` each, would take too much memory."""
    if num_tiles * num_chunks * chunk_bytes > _MAX_WORKSPACE_BYTES:
        return 1
    return max(1, min(num_programs // max(num_tiles, 1), num_chunks, _MAX_PARTS))


def invariant_attention(
    q: Float[Tensor, "T H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    rows: AttentionRows,
    part: slice,
    tokens: slice,
    max_query_len: int,
    scale: float,
    window: int,
    sinks: Float[Tensor, " H"] | None,
    v_scale: float,
    out: Float[Tensor, "T H K"],
) -> None:
    """Writes `tokens` of `out`, which are those of the rows of `part`, none of them longer than
    `max_query_len`; zeros where the context length is 0. `scale` includes that of the keys in the
    cache, `v_scale` is the values'."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = cache_layer.shape[3]
    group_size = num_heads // num_kv_heads
    blocks = tune(group_size, head_dim, q.element_size())
    is_gluon = runs_gluon_fp8(q, cache_layer)
    tile_tokens, tile_heads = blocks["BLOCK_M"] // group_size, 1  # KV heads
    num_queries = choose_queries(max_query_len * group_size)
    num_programs = 2 * num_multiprocessors(q.device)
    if is_gluon:
        tile_tokens, tile_heads = num_queries // group_size, NUM_WARPS
        # Reading runs of four heads takes fewer programs; what parts gain is soon lost in folding.
        num_programs //= 2
    num_rows, num_tiles = part.stop - part.start, cdiv(max_query_len, tile_tokens)
    num_chunks = cdiv(max(rows.max_context_len, 1), CHUNK)
    if window:
        num_chunks = min(num_chunks, cdiv(window + min(tile_tokens, max_query_len), CHUNK) + 1)
    num_parts = 1
    # The one or two chunks that a short window touches are not worth folding apart.
    if not 0 < window <= CHUNK:
        num_parts = choose_parts(
            num_rows * num_tiles * num_kv_heads // tile_heads,
            num_chunks,
            4 * min(tile_tokens, max_query_len) * group_size * head_dim * tile_heads,
            num_programs,
        )
    partial = sums = out
    if num_parts > 1:
        shape = (tokens.stop - tokens.start, num_chunks, num_heads)
        partial = q.new_empty((*shape, head_dim), dtype=torch.float32)
        sums = q.new_empty((*shape, 2), dtype=torch.float32)
    places = {
        "partial_ptr": partial,
        "sums_ptr": sums,
        "query_starts_ptr": rows.query_starts,
        "context_lens_ptr": rows.context_lens,
        "sinks_ptr": q if sinks is None else sinks,
        "out_ptr": out,
        "stride_ot": out.stride(0),
        "stride_oh": out.stride(1),
        "first_row": part.start,
        "first_token": tokens.start,
        "num_heads": num_heads,
        "num_chunks": num_chunks,
        "v_scale": v_scale,
        "window": window or NO_WINDOW,
        "CHUNK": CHUNK,
        "HEAD_DIM": head_dim,
        "TILE_TOKENS": tile_tokens,
        "HAS_SINKS": sinks is not None,
        "enable_fp_fusion": False,
    }
    overlap = overlap_options(q.device, q.shape[0])
    of_both = {
        "q_ptr": q,
        "block_tables_ptr": rows.block_tables,
        "stride_qt": q.stride(0),
        "stride_qh": q.stride(1),
        "stride_tabler": rows.block_tables.stride(0),
        "num_parts": num_parts,
        "scale_log2": scale * LOG2_E,
        "BLOCK_SIZE": cache_layer.shape[2],
        "GROUP_SIZE": group_size,
        "IS_SPLIT": num_parts > 1,
        **places,
    }
    if is_gluon:
        launch_gluon_fp8(cache_layer, num_queries, num_tiles * num_parts, num_rows, of_both)
    else:
        _invariant_attention_kernel[(num_kv_heads, num_tiles * num_parts, num_rows)](
            cache_ptr=cache_layer,
            stride_cachep=cache_layer.stride(0),
            stride_cachekv=cache_layer.stride(1),
            stride_caches=cache_layer.stride(2),
            stride_cacheg=cache_layer.stride(3),
            IN_FLOAT16=multiplies_in_float16(q, cache_layer),
            **of_both,
            **blocks,
            **overlap,
        )
    if num_parts > 1:
        block_h = min(next_power_of_2(num_heads), 4)
        _fold_chunks_kernel[(cdiv(num_heads, block_h), max_query_len, num_rows)](
            BLOCK_H=block_h, BLOCK_K=blocks["BLOCK_K"], num_warps=4, **places, **overlap
        )
