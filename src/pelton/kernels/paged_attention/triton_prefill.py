# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention of prefill rows: many new tokens of a row over its paged context, causal.

A tile of queries holds all H / G heads of a KV head for a run of tokens, so a tile of keys and
values is gathered through the block table once for the whole group. The softmax is computed
online (Dao, "FlashAttention-2", 2023, algorithm 1).

Where Hopper's own kernel can, it takes over. It multiplies what the copy engine brought as it is,
so a cache in FP8 is unpacked for it first; where that does not pay (few new tokens behind long
contexts, as with drafts), FP8 is read here, and turns into a 16-bit format on its way.
"""

from jaxtyping import Float
from torch import Tensor

from pelton.core.batch import AttentionRows
from pelton.kernels.paged_attention.hopper_prefill import (
    can_use_hopper_prefill,
    hopper_prefill_attention,
)
from pelton.kernels.paged_attention.triton_decode import (
    LOG2_E,
    NO_WINDOW,
    multiplies_in_float16,
)
from pelton.kernels.paged_attention.unpack_fp8 import heads_at_a_time, unpacked_prefill_attention
from pelton.kernels.triton_runtime import cdiv, next_power_of_2, tl, triton


# Values that change from step to step must not each compile a kernel of their own.
@triton.jit(do_not_specialize=["first_row", "window"])
def _prefill_kernel(
    q_ptr,
    cache_ptr,
    block_tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    sinks_ptr,
    out_ptr,
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
    scale_log2,
    v_scale,
    window,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IN_FLOAT16: tl.constexpr,
):
    kv_head = tl.program_id(0).to(tl.int64)
    # The last tiles see the longest context: they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
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
    rows_of_q = (query_start + tokens)[:, None]
    q_tile_ptr = q_ptr + rows_of_q * stride_qt + heads[:, None] * stride_qh + dims[None, :]
    q = tl.load(q_tile_ptr, mask=q_mask, other=0.0)  # [BLOCK_M, BLOCK_K]
    if IN_FLOAT16:
        q = q.to(tl.float16)

    low = tl.maximum(tile_position - window + 1, 0)
    end = tl.minimum(context_len, tile_position + TILE_TOKENS)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        # The softmax starts with the sink, which has weight and no value.
        running_max = tl.load(sinks_ptr + heads).to(tl.float32) * 1.4426950408889634
        running_sum += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    table_ptr = block_tables_ptr + row * stride_tabler
    head_ptr = cache_ptr + kv_head * stride_cacheg
    for tile_start in range(low // BLOCK_N * BLOCK_N, end, BLOCK_N):
        positions = tile_start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        is_read = (positions >= low) & (positions < end)
        block_ids = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_read, other=0)
        offsets = block_ids.to(tl.int64) * stride_cachep + (positions % BLOCK_SIZE) * stride_caches
        kv_mask = is_read[:, None] & (dims < HEAD_DIM)[None, :]
        k_tile_ptr = head_ptr + offsets[:, None] + dims[None, :]
        k = tl.load(k_tile_ptr, mask=kv_mask, other=0.0).to(q.dtype)  # [BLOCK_N, BLOCK_K]
        v = tl.load(k_tile_ptr + stride_cachekv, mask=kv_mask, other=0.0).to(q.dtype)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        distance = query_positions[:, None] - positions[None, :]
        is_seen = is_read[None, :] & (distance >= 0) & (distance < window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        # A query may see nothing of this tile; its maximum must not become a NaN.
        finite_max = tl.where(new_max > float("-inf"), new_max, 0.0)
        probabilities = tl.exp2(scores - finite_max[:, None])
        correction = tl.exp2(running_max - finite_max)
        running_sum = running_sum * correction + tl.sum(probabilities, axis=1)
        acc = acc * correction[:, None]
        acc = tl.dot(probabilities.to(v.dtype), v, acc, input_precision="ieee")
        running_max = new_max

    acc = acc / tl.where(running_sum > 0.0, running_sum, 1.0)[:, None] * v_scale
    out_tile_ptr = out_ptr + rows_of_q * stride_ot + heads[:, None] * stride_oh + dims[None, :]
    tl.store(out_tile_ptr, acc, mask=q_mask)


def tune_prefill(group_size: int, head_dim: int, element_bytes: int) -> dict[str, int]:
    """One warpgroup on 128 packed queries, however short the rows are: a kernel for each length
    would compile in the middle of serving. float32, for checking, takes small tiles."""
    block_k = max(next_power_of_2(head_dim), 16)
    if element_bytes > 2:
        return {
            "BLOCK_M": max(32, next_power_of_2(group_size)),
            "BLOCK_N": 32,
            "BLOCK_K": block_k,
            "num_warps": 4,
            "num_stages": 1,
        }
    return {
        "BLOCK_M": max(128, next_power_of_2(group_size)),
        "BLOCK_N": 64,
        "BLOCK_K": block_k,
        "num_warps": 4,
        "num_stages": 3 if block_k <= 128 else 2,
    }


def prefill_attention(
    q: Float[Tensor, "T H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    rows: AttentionRows,
    scale: float,
    window: int,
    sinks: Float[Tensor, " H"] | None,
    v_scale: float,
    out: Float[Tensor, "T H K"],
) -> None:
    """Writes the tokens of the rows that are not decodes in `out`. `scale` includes that of the
    keys in the cache, `v_scale` is the values'."""
    if can_use_hopper_prefill(q, cache_layer, window):
        hopper_prefill_attention(q, cache_layer, rows, scale, sinks, v_scale, out)
        return
    if num_at_a_time := heads_at_a_time(q, cache_layer, rows, window):
        unpacked_prefill_attention(q, cache_layer, rows, scale, sinks, v_scale, out, num_at_a_time)
        return
    _, num_heads, head_dim = q.shape
    num_kv_heads = cache_layer.shape[3]
    group_size = num_heads // num_kv_heads
    blocks = tune_prefill(group_size, head_dim, q.element_size())
    tile_tokens = blocks["BLOCK_M"] // group_size
    num_rows = rows.num_rows - rows.num_decodes
    _prefill_kernel[(num_kv_heads, cdiv(rows.max_query_len, tile_tokens), num_rows)](
        q_ptr=q,
        cache_ptr=cache_layer,
        block_tables_ptr=rows.block_tables,
        query_starts_ptr=rows.query_starts,
        context_lens_ptr=rows.context_lens,
        sinks_ptr=q if sinks is None else sinks,
        out_ptr=out,
        stride_qt=q.stride(0),
        stride_qh=q.stride(1),
        stride_cachep=cache_layer.stride(0),
        stride_cachekv=cache_layer.stride(1),
        stride_caches=cache_layer.stride(2),
        stride_cacheg=cache_layer.stride(3),
        stride_tabler=rows.block_tables.stride(0),
        stride_ot=out.stride(0),
        stride_oh=out.stride(1),
        first_row=rows.num_decodes,
        scale_log2=scale * LOG2_E,
        v_scale=v_scale,
        window=window or NO_WINDOW,
        BLOCK_SIZE=cache_layer.shape[2],
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        TILE_TOKENS=tile_tokens,
        HAS_SINKS=sinks is not None,
        IN_FLOAT16=multiplies_in_float16(q, cache_layer),
        **blocks,
    )
