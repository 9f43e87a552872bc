# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Prompts over keys and values in FP8 on Hopper: unpacked once, then read as bfloat16.

A tile of 128 queries of a prompt reads what the tile before it has read, and to turn e4m3 into a
16-bit format each time costs `triton_prefill` more than its products. Here the rows' contexts are
written to memory as bfloat16 (which holds every e4m3 exactly), one behind the other, and
`hopper_prefill` attends over that. What is written is bounded: of long contexts, a part of the
heads at a time.
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.core.batch import AttentionRows
from pelton.kernels.paged_attention.hopper_prefill import (
    hopper_prefill_attention,
    suits_hopper_prefill,
    tune_hopper_prefill,
)
from pelton.kernels.triton_runtime import cdiv, num_multiprocessors, tl, triton

UNPACKED_TOKENS = 32_768
"""Keys and values of all heads of this many tokens exist at a time: 128 MiB with 8 KV heads of
128. Of more tokens there is room for fewer heads, down to one."""
_MIN_QUERIES = 64
"""New tokens a row, weighted by context, from which the products repay the writing."""
_MIN_PRODUCTS = 2**33
"""Pairs of a query and a key, times heads, times head size, from which what is saved repays the
host's time for two more launches: 8 prompts of 512 tokens of an 8B model."""
_POSITIONS, _COLUMNS = 32, 256
"""A program's tile: 8 KiB to read."""


@triton.jit(do_not_specialize=["stride_tabler", "first_row", "num_tiles"])
def _unpack_kernel(
    cache_ptr,
    unpacked_ptr,
    tables_ptr,
    block_tables_ptr,
    context_lens_ptr,
    stride_cachep,
    stride_cachekv,
    stride_caches,
    stride_cacheg,
    stride_tabler,
    first_row,
    num_tiles,
    width,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(2)
    plane = tl.program_id(1) % 2
    start = tl.program_id(0) * POSITIONS
    row_lens_ptr = context_lens_ptr + first_row
    context_len = tl.load(row_lens_ptr + row)
    # A row without context has a tile of zeros.
    if start >= tl.cdiv(tl.maximum(context_len, 1), TILE) * TILE:
        return
    tile = start // TILE
    for first in range(0, row, 64):
        others = first + tl.arange(0, 64)
        lens = tl.load(row_lens_ptr + others, mask=others < row, other=0)
        tiles = tl.where(others < row, tl.cdiv(tl.maximum(lens, 1), TILE), 0)
        tile += tl.sum(tiles, axis=0)
    positions = start + tl.arange(0, POSITIONS)  # [POSITIONS]
    columns = tl.program_id(1) // 2 * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    is_written = positions < context_len
    table_ptr = block_tables_ptr + (first_row + row).to(tl.int64) * stride_tabler
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_written, other=0)
    slots = blocks.to(tl.int64) * stride_cachep + (positions % BLOCK_SIZE) * stride_caches
    places = columns // HEAD_DIM * stride_cacheg + columns % HEAD_DIM
    is_column = (columns < width)[None, :]
    packed = tl.load(
        cache_ptr + plane * stride_cachekv + slots[:, None] + places[None, :],
        mask=is_written[:, None] & is_column,
        other=0.0,
    )
    tile_ptr = unpacked_ptr + (tile.to(tl.int64) * 2 + plane) * TILE * width
    offsets = (positions % TILE)[:, None] * width + columns[None, :]
    tl.store(tile_ptr + offsets, packed.to(unpacked_ptr.dtype.element_ty), mask=is_column)
    if (tl.program_id(1) == 0) & (start % TILE == 0):
        tl.store(tables_ptr + (first_row + row) * num_tiles + start // TILE, tile)


def heads_at_a_time(
    q: Float[Tensor, "T H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    rows: AttentionRows,
    window: int,
) -> int:
    """KV heads whose contexts there is room to unpack; 0: these rows are better read as they are,
    or cannot be unpacked."""
    num_kv_heads = cache_layer.shape[3]
    lens = rows.chunk_lens
    if (
        not lens
        or cache_layer.dtype is not torch.float8_e4m3fn
        or not suits_hopper_prefill(q, num_kv_heads, window)
    ):
        return 0
    num_pairs = sum(num_tokens * context_len for num_tokens, context_len in lens)
    num_products = num_pairs * q.shape[1] * q.shape[2]
    num_keys = sum(context_len for _, context_len in lens)
    if num_pairs < _MIN_QUERIES * num_keys or num_products < _MIN_PRODUCTS:
        return 0
    tile = tune_hopper_prefill(q.shape[2]).block_n
    num_heads = UNPACKED_TOKENS * num_kv_heads // (sum(_tiles_of(rows, tile)) * tile)
    if num_heads >= num_kv_heads:
        return num_kv_heads
    # A part of the heads must give the card enough to do.
    num_packed = sum(num_tokens for num_tokens, _ in lens) * (q.shape[1] // num_kv_heads)
    if num_heads * num_packed < num_multiprocessors(q.device) * tile:
        return 0
    num_parts = cdiv(num_kv_heads, num_heads)
    return cdiv(num_kv_heads, num_parts)


def _tiles_of(rows: AttentionRows, tile: int) -> list[int]:
    """One at least, of zeros, for each row that is not a decode."""
    return [cdiv(max(context_len, 1), tile) for _, context_len in rows.chunk_lens]


def unpack(
    packed: Float[Tensor, "P 2 S G K"], rows: AttentionRows, tile: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "N 2 tile G K"], Int[Tensor, "R B"]]:
    """Keys and values of the rows that are not decodes, one row behind the other in blocks of
    `tile` positions, and those rows' block tables. Behind a context, its last block holds zeros."""
    _, _, block_size, num_heads, head_dim = packed.shape
    num_rows = rows.num_rows - rows.num_decodes
    assert num_rows == len(rows.chunk_lens), (num_rows, rows.chunk_lens)
    tiles = _tiles_of(rows, tile)
    shape = (sum(tiles), 2, tile, num_heads, head_dim)
    unpacked = torch.empty(shape, dtype=dtype, device=packed.device)
    tables = rows.block_tables.new_empty((rows.num_rows, max(tiles)))
    width = num_heads * head_dim
    grid = (max(tiles) * tile // _POSITIONS, 2 * cdiv(width, _COLUMNS), num_rows)
    _unpack_kernel[grid](
        cache_ptr=packed,
        unpacked_ptr=unpacked,
        tables_ptr=tables,
        block_tables_ptr=rows.block_tables,
        context_lens_ptr=rows.context_lens,
        stride_cachep=packed.stride(0),
        stride_cachekv=packed.stride(1),
        stride_caches=packed.stride(2),
        stride_cacheg=packed.stride(3),
        stride_tabler=rows.block_tables.stride(0),
        first_row=rows.num_decodes,
        num_tiles=max(tiles),
        width=width,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        TILE=tile,
        POSITIONS=_POSITIONS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return unpacked, tables


def unpacked_prefill_attention(
    q: Float[Tensor, "T H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    rows: AttentionRows,
    scale: float,
    sinks: Float[Tensor, " H"] | None,
    v_scale: float,
    out: Float[Tensor, "T H K"],
    num_at_a_time: int,
) -> None:
    """As `triton_prefill.prefill_attention`, without a window; `num_at_a_time` KV heads at a time,
    at least one."""
    num_kv_heads, head_dim = cache_layer.shape[3:]
    group_size = q.shape[1] // num_kv_heads
    tile = tune_hopper_prefill(head_dim).block_n
    for first in range(0, num_kv_heads, num_at_a_time):
        end = min(first + num_at_a_time, num_kv_heads)
        unpacked, tables = unpack(cache_layer[:, :, :, first:end], rows, tile, q.dtype)
        heads = slice(first * group_size, end * group_size)
        hopper_prefill_attention(
            q[:, heads], unpacked, replace(rows, block_tables=tables), scale,
            None if sinks is None else sinks[heads], v_scale, out[:, heads], ends_in_zeros=True,
        )  # fmt: skip
        # Not two parts at once.
        del unpacked, tables
