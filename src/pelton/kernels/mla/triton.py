# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Absorbed latent attention of rows with one or more new tokens, split over the context.

The queries of a row are its (token, head) pairs, cut in tiles that all read the same latents, which
the cache of the card keeps; a latent is key and value in one. The number of splits depends on the
number of tiles alone, so a CUDA graph replays at any context length. The splits are merged by
their log-sum-exp (Dao et al., "Flash-Decoding", 2023), in base 2 on both sides.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.core.batch import AttentionRows
from pelton.kernels.triton_runtime import (
    cdiv,
    next_power_of_2,
    num_multiprocessors,
    tl,
    triton,
)
from pelton.kernels.tuning import tunable

LOG2_E = 1.4426950408889634
_MAX_SPLITS = 32


# Values that change from step to step must not each compile a kernel of their own.
@triton.jit(do_not_specialize=["num_splits", "first_row", "first_token"])
def _latent_attention_kernel(
    q_latent_ptr,
    q_rope_ptr,
    cache_ptr,
    block_tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    stride_qt,
    stride_qh,
    stride_rt,
    stride_rh,
    stride_cachep,
    stride_caches,
    stride_tabler,
    stride_ot,
    stride_oh,
    first_row,
    first_token,
    num_splits,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = (first_row + tl.program_id(2)).to(tl.int64)
    query_start = tl.load(query_starts_ptr + row).to(tl.int64)
    num_tokens = (tl.load(query_starts_ptr + row + 1) - query_start).to(tl.int32)
    context_len = tl.load(context_lens_ptr + row)
    if tile * BLOCK_M >= num_tokens * NUM_HEADS:
        return
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M], a token's heads lie together
    tokens = pairs // NUM_HEADS
    heads = (pairs % NUM_HEADS).to(tl.int64)
    is_query = tokens < num_tokens
    query_positions = context_len - num_tokens + tokens
    # The last token of the tile sees the most.
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // NUM_HEADS, num_tokens - 1)
    seen = tl.maximum(context_len - num_tokens + last_token + 1, 0)
    tiles_per_split = tl.cdiv(tl.cdiv(seen, BLOCK_N), num_splits)
    start = split * tiles_per_split * BLOCK_N
    end = tl.minimum(seen, start + tiles_per_split * BLOCK_N)

    latents = tl.arange(0, BLOCK_L)  # [BLOCK_L]
    ropes = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    is_latent, is_rope = latents < LATENT, ropes < ROPE
    rows_of_q = query_start + tokens
    latent_mask = is_query[:, None] & is_latent[None, :]
    q_ptr = q_latent_ptr + rows_of_q[:, None] * stride_qt + heads[:, None] * stride_qh
    q_latent = tl.load(q_ptr + latents[None, :], mask=latent_mask, other=0.0)  # [BLOCK_M, BLOCK_L]
    q_ptr = q_rope_ptr + rows_of_q[:, None] * stride_rt + heads[:, None] * stride_rh
    rope_mask = is_query[:, None] & is_rope[None, :]
    q_rope = tl.load(q_ptr + ropes[None, :], mask=rope_mask, other=0.0)  # [BLOCK_M, BLOCK_R]

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    table_ptr = block_tables_ptr + row * stride_tabler
    for tile_start in range(start, end, BLOCK_N):
        positions = tile_start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        is_read = positions < end
        block_ids = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_read, other=0)
        offsets = block_ids.to(tl.int64) * stride_cachep + (positions % BLOCK_SIZE) * stride_caches
        entry_ptr = cache_ptr + offsets[:, None]
        c = tl.load(
            entry_ptr + latents[None, :], mask=is_read[:, None] & is_latent[None, :], other=0.0
        )  # [BLOCK_N, BLOCK_L]
        r = tl.load(
            entry_ptr + LATENT + ropes[None, :], mask=is_read[:, None] & is_rope[None, :], other=0.0
        )  # [BLOCK_N, BLOCK_R]
        scores = tl.dot(q_latent, tl.trans(c), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q_rope, tl.trans(r), scores, input_precision="ieee") * scale_log2
        is_seen = is_read[None, :] & (positions[None, :] <= query_positions[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        # A query may see nothing of this tile; its maximum must not become a NaN.
        finite_max = tl.where(new_max > float("-inf"), new_max, 0.0)
        probabilities = tl.exp2(scores - finite_max[:, None])
        correction = tl.exp2(running_max - finite_max)
        running_sum = running_sum * correction + tl.sum(probabilities, axis=1)
        acc = acc * correction[:, None]
        acc = tl.dot(probabilities.to(c.dtype), c, acc, input_precision="ieee")
        running_max = new_max

    divisor = tl.where(running_sum == 0.0, 1.0, running_sum)
    acc = acc / divisor[:, None]
    if IS_SPLIT:
        local = rows_of_q - first_token
        place = (local * NUM_HEADS + heads) * num_splits + split  # [BLOCK_M]
        # Minus infinity where the query saw nothing: running_max never moved.
        tl.store(lse_ptr + place, running_max + tl.log2(divisor), mask=is_query)
        tl.store(partial_ptr + place[:, None] * LATENT + latents[None, :], acc, mask=latent_mask)
    else:
        out_tile_ptr = out_ptr + rows_of_q[:, None] * stride_ot + heads[:, None] * stride_oh
        tl.store(out_tile_ptr + latents[None, :], acc, mask=latent_mask)


@triton.jit(do_not_specialize=["first_token"])
def _merge_splits_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    stride_ot,
    stride_oh,
    first_token,
    num_heads,
    LATENT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    local = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK_L)  # [BLOCK_L]
    place = (local * num_heads + head) * NUM_SPLITS
    lse = tl.load(lse_ptr + place + tl.arange(0, NUM_SPLITS))  # [NUM_SPLITS]
    top = tl.max(lse, axis=0)
    top = tl.where(top > float("-inf"), top, 0.0)
    merged = tl.zeros([BLOCK_L], tl.float32)
    total = tl.sum(tl.zeros([NUM_SPLITS], tl.float32), axis=0)
    for split in range(NUM_SPLITS):
        split_lse = tl.load(lse_ptr + place + split)
        if split_lse != float("-inf"):  # True for NaN, which must reach the output
            weight = tl.exp2(split_lse - top)
            row_ptr = partial_ptr + (place + split) * LATENT
            merged += weight * tl.load(row_ptr + dims, mask=dims < LATENT, other=0.0)
            total += weight
    merged = merged / tl.where(total == 0.0, 1.0, total)
    out_row_ptr = out_ptr + (first_token + local) * stride_ot + head * stride_oh + dims
    tl.store(out_row_ptr, merged, mask=dims < LATENT)


@dataclass(frozen=True, slots=True)
class LatentTiles:
    num_splits: int
    block_m: int
    """(token, head) pairs in a tile."""
    block_n: int
    """Latents in a tile."""
    num_warps: int
    num_stages: int


@tunable("latent_decode")
def tune(
    num_rows: int, num_pairs: int, latent_rank: int, element_bytes: int, num_multiprocessors: int
) -> LatentTiles:
    """`num_pairs` of the longest row. Two programs a multiprocessor; a tile of 64 queries by 512
    latents fills a program's registers in float32."""
    block_m = min(max(next_power_of_2(num_pairs), 16), 64 if element_bytes == 2 else 16)
    num_tiles = num_rows * cdiv(num_pairs, block_m)
    wanted = 2 * num_multiprocessors // max(num_tiles, 1)
    num_splits = min(1 << max(wanted, 1).bit_length() - 1, _MAX_SPLITS)
    return _make_tiles(num_splits, block_m, element_bytes)


def tune_invariant(
    num_rows: int, num_pairs: int, latent_rank: int, element_bytes: int, num_multiprocessors: int
) -> LatentTiles:
    """One tile and no splits, so that every query meets its latents in one order."""
    return _make_tiles(1, 64 if element_bytes == 2 else 16, element_bytes)


Tune = Callable[[int, int, int, int, int], LatentTiles]
"""From the arguments of `tune`."""


def _make_tiles(num_splits: int, block_m: int, element_bytes: int) -> LatentTiles:
    return LatentTiles(
        num_splits=num_splits,
        block_m=block_m,
        block_n=64 if element_bytes == 2 else 16,
        num_warps=8 if block_m >= 64 else 4,
        num_stages=2 if element_bytes == 2 else 1,
    )


def latent_attention_rows(
    q_latent: Float[Tensor, "T H L"],
    q_rope: Float[Tensor, "T H R"],
    cache_layer: Float[Tensor, "P S L+R"],
    rows: AttentionRows,
    part: slice,
    tokens: slice,
    max_query_len: int,
    scale: float,
    out: Float[Tensor, "T H L"],
    tune: Tune,
) -> None:
    """Writes `tokens` of `out`, which are those of the rows of `part`, none of them longer than
    `max_query_len`; zeros where the context length is 0."""
    num_heads, latent_rank = q_latent.shape[1:]
    rope_dim = q_rope.shape[2]
    num_rows = part.stop - part.start
    num_pairs = max_query_len * num_heads
    tiles = tune(
        num_rows, num_pairs, latent_rank, q_latent.element_size(),
        num_multiprocessors(q_latent.device),
    )  # fmt: skip
    num_splits = tiles.num_splits
    partial = lse = out
    if num_splits > 1:
        partial, lse = new_partials(out[tokens], num_splits)
    _latent_attention_kernel[(cdiv(num_pairs, tiles.block_m), num_splits, num_rows)](
        q_latent_ptr=q_latent,
        q_rope_ptr=q_rope,
        cache_ptr=cache_layer,
        block_tables_ptr=rows.block_tables,
        query_starts_ptr=rows.query_starts,
        context_lens_ptr=rows.context_lens,
        out_ptr=out,
        partial_ptr=partial,
        lse_ptr=lse,
        stride_qt=q_latent.stride(0),
        stride_qh=q_latent.stride(1),
        stride_rt=q_rope.stride(0),
        stride_rh=q_rope.stride(1),
        stride_cachep=cache_layer.stride(0),
        stride_caches=cache_layer.stride(1),
        stride_tabler=rows.block_tables.stride(0),
        stride_ot=out.stride(0),
        stride_oh=out.stride(1),
        first_row=part.start,
        first_token=tokens.start,
        num_splits=num_splits,
        scale_log2=scale * LOG2_E,
        BLOCK_SIZE=cache_layer.shape[1],
        NUM_HEADS=num_heads,
        LATENT=latent_rank,
        ROPE=rope_dim,
        BLOCK_M=tiles.block_m,
        BLOCK_L=max(next_power_of_2(latent_rank), 16),
        BLOCK_R=max(next_power_of_2(rope_dim), 16),
        BLOCK_N=tiles.block_n,
        IS_SPLIT=num_splits > 1,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if num_splits > 1:
        merge_splits(partial, lse, out, tokens.start)


def new_partials(out: Float[Tensor, "t H L"], num_splits: int) -> tuple[Tensor, Tensor]:
    """Memory for each split's sums [t, H, s, L] and their log-sum-exps [t, H, s]."""
    shape = (*out.shape[:2], num_splits)
    partial = out.new_empty((*shape, out.shape[2]), dtype=torch.float32)
    return partial, out.new_empty(shape, dtype=torch.float32)


def merge_splits(
    partial: Float[Tensor, "t H s L"],
    lse: Float[Tensor, "t H s"],
    out: Float[Tensor, "T H L"],
    first_token: int,
) -> None:
    """Writes t tokens of `out`, from `first_token` on. s is a power of two."""
    num_tokens, num_heads, num_splits, latent_rank = partial.shape
    _merge_splits_kernel[(num_heads, num_tokens)](
        partial_ptr=partial,
        lse_ptr=lse,
        out_ptr=out,
        stride_ot=out.stride(0),
        stride_oh=out.stride(1),
        first_token=first_token,
        num_heads=num_heads,
        LATENT=latent_rank,
        BLOCK_L=max(next_power_of_2(latent_rank), 16),
        NUM_SPLITS=num_splits,
        num_warps=4,
    )
