# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention of prefill rows on Hopper: what `triton_prefill` computes, at the matrix units' pace.

    fetch (one warp)        copies blocks of keys and values to shared memory, two tiles ahead
    attend (warpgroup 0)    first half of a tile's queries
    attend (warpgroup 1)    second half

The copy engine gathers a tile of keys block by block through the block table and signals a barrier
when all have landed; a warpgroup signals another when it has read them. A warpgroup starts the
product with the next tile's keys before it takes the softmax of this one, and the product with this
tile's values runs under the next softmax, so the matrix units do not wait for exponentials (Shah et
al., "FlashAttention-3", 2024, sections 3.1 and 3.2). Tiles of keys are walked from the last to the
first: only the first few of them need the causal mask.

Programs stay and take every n-th tile of queries, longest first. n is prime, so that no period in
the order of tiles (heads, rows that are short) leaves all the work to a few programs.
"""

from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.core.batch import AttentionRows
from pelton.kernels.paged_attention.triton_decode import LOG2_E
from pelton.kernels.triton_runtime import (
    TensorDescriptor,
    gl,
    gluon,
    hopper,
    num_multiprocessors,
    runs_hopper,
)

_HALF_QUERIES = 64
"""Packed queries of a warpgroup: the row count of its matrix instruction."""
_PANEL = 64
"""Elements of a swizzled row of shared memory: 128 bytes of a 16-bit format."""


@gluon.jit
def _bound(
    query_starts_ptr, first_row, num_rows, TILE_TOKENS: gl.constexpr, NUM_WARPS: gl.constexpr
):
    """Rows up to the last that has tokens, and tiles of the longest, one at least of each: a graph
    is captured with room for more."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    end = 1
    longest = 1
    for start in range(0, num_rows, 32):
        rows = start + gl.arange(0, 32, layout)
        starts_ptrs = query_starts_ptr + first_row + rows
        is_row = rows < num_rows
        lens = gl.load(starts_ptrs + 1, mask=is_row, other=0)
        lens = lens - gl.load(starts_ptrs, mask=is_row, other=0)
        end = gl.maximum(end, gl.max(gl.where(lens > 0, rows + 1, 0), axis=0))
        longest = gl.maximum(longest, gl.max(lens, axis=0))
    return end, gl.cdiv(longest, TILE_TOKENS)


@gluon.jit
def _locate(
    index, query_starts_ptr, context_lens_ptr, first_row, num_rows, num_tiles, num_kv_heads,
    TILE_TOKENS: gl.constexpr,
):  # fmt: skip
    """The index-th tile of queries: KV heads vary fastest, then rows, then tiles, last first."""
    kv_head = index % num_kv_heads
    place = index // num_kv_heads
    row = first_row + place % num_rows
    tile_token = (num_tiles - 1 - place // num_rows) * TILE_TOKENS
    query_start = gl.load(query_starts_ptr + row)
    num_tokens = gl.load(query_starts_ptr + row + 1) - query_start
    context_len = gl.load(context_lens_ptr + row)
    return kv_head, row, tile_token, query_start, num_tokens, context_len


@gluon.jit
def _fetch(
    kv_desc, k_smem, v_smem, ready, free, landed,
    block_tables_ptr, query_starts_ptr, context_lens_ptr, stride_tabler,
    rows_per_block, first_row, num_rows, num_kv_heads,
    BLOCK_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    TILE_TOKENS: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr,
    ENDS_IN_ZEROS: gl.constexpr,
):  # fmt: skip
    PANELS: gl.constexpr = HEAD_DIM // PANEL
    BLOCKS: gl.constexpr = BLOCK_N // BLOCK_SIZE
    TILE_BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    # A tile as the copies see it: panels of 64 dims, in each the blocks one after the other.
    shape: gl.constexpr = [STAGES * PANELS * BLOCKS, BLOCK_SIZE, PANEL]
    k_blocks = k_smem._reinterpret(k_smem.dtype, shape, kv_desc.layout)
    v_blocks = v_smem._reinterpret(v_smem.dtype, shape, kv_desc.layout)
    num_rows, num_tiles = _bound(query_starts_ptr, first_row, num_rows, TILE_TOKENS, 1)
    total_tiles = num_kv_heads * num_rows * num_tiles
    count = 0
    num_ragged = 0
    tile = _locate(
        gl.minimum(gl.program_id(0), total_tiles - 1), query_starts_ptr, context_lens_ptr,
        first_row, num_rows, num_tiles, num_kv_heads, TILE_TOKENS,
    )  # fmt: skip
    for index in range(gl.program_id(0), total_tiles, gl.num_programs(0)):
        kv_head, row, tile_token, _, num_tokens, context_len = tile
        next_tile = _locate(
            gl.minimum(index + gl.num_programs(0), total_tiles - 1), query_starts_ptr,
            context_lens_ptr, first_row, num_rows, num_tiles, num_kv_heads, TILE_TOKENS,
        )  # fmt: skip
        if tile_token < num_tokens:
            end = gl.minimum(context_len, context_len - num_tokens + tile_token + TILE_TOKENS)
            table_ptr = block_tables_ptr + row.to(gl.int64) * stride_tabler
            column = kv_head * HEAD_DIM
            # A padding row sees nothing, of one tile.
            num_kv_tiles = gl.cdiv(gl.maximum(end, 1), BLOCK_N)
            for step in range(num_kv_tiles):
                start = (num_kv_tiles - 1 - step) * BLOCK_N
                stage = count % STAGES
                phase = (count // STAGES) & 1
                cache_rows = ()
                for b in gl.static_range(BLOCKS):
                    position = start + b * BLOCK_SIZE
                    # A block behind the context: any memory, of which nothing is used.
                    block = gl.load(
                        table_ptr + position // BLOCK_SIZE, mask=position < context_len, other=0
                    )
                    cache_rows = cache_rows + (block * rows_per_block,)  # type: ignore[assignment] # noqa: RUF005

                hopper.mbarrier.wait(free.index(stage), phase ^ 1)
                hopper.mbarrier.expect(ready.index(stage), TILE_BYTES)
                for b in gl.static_range(BLOCKS):
                    for p in gl.static_range(PANELS):
                        hopper.tma.async_copy_global_to_shared(
                            kv_desc, [cache_rows[b], column + p * PANEL], ready.index(stage),
                            k_blocks.index((stage * PANELS + p) * BLOCKS + b),
                        )  # fmt: skip

                hopper.mbarrier.wait(free.index(STAGES + stage), phase ^ 1)
                is_ragged = (start + BLOCK_N > context_len) & (not ENDS_IN_ZEROS)
                v_ready = ready.index(STAGES + stage)
                hopper.mbarrier.expect(v_ready, TILE_BYTES, pred=is_ragged == 0)
                hopper.mbarrier.expect(landed, TILE_BYTES, pred=is_ragged)
                for b in gl.static_range(BLOCKS):
                    for p in gl.static_range(PANELS):
                        place = v_blocks.index((stage * PANELS + p) * BLOCKS + b)
                        coordinates = [cache_rows[b] + BLOCK_SIZE, column + p * PANEL]
                        hopper.tma.async_copy_global_to_shared(
                            kv_desc, coordinates, v_ready, place, pred=is_ragged == 0
                        )
                        hopper.tma.async_copy_global_to_shared(
                            kv_desc, coordinates, landed, place, pred=is_ragged
                        )
                if is_ragged:
                    # Memory behind the context may hold a NaN, which a weight of 0 does not hide.
                    hopper.mbarrier.wait(landed, num_ragged & 1)
                    num_ragged += 1
                    slots = gl.arange(0, BLOCK_SIZE, gl.SliceLayout(1, layout))
                    for b in gl.static_range(BLOCKS):
                        block_start = start + b * BLOCK_SIZE
                        if block_start + BLOCK_SIZE > context_len:
                            is_written = (block_start + slots < context_len)[:, None]
                            for p in gl.static_range(PANELS):
                                place = v_blocks.index((stage * PANELS + p) * BLOCKS + b)
                                values = place.load(layout)
                                place.store(gl.where(is_written, values, gl.zeros_like(values)))
                    hopper.fence_async_shared()
                    gl.thread_barrier()
                    hopper.mbarrier.arrive(v_ready)
                count += 1
        tile = next_tile


@gluon.jit
def softmax_step(scores, top, total, scale_log2):
    """Weights of a tile's scores [queries, keys], the new maxima and sums [queries], and the factor
    that brings sums over earlier tiles to the new maximum."""
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    # A query may see nothing of the tiles so far; its maximum must not become a NaN.
    offset = gl.where(new_top > float("-inf"), new_top, 0.0) * scale_log2
    correction = gl.exp2(top * scale_log2 - offset)
    weights = gl.exp2(scores * scale_log2 - offset[:, None])
    return weights, new_top, total * correction + gl.sum(weights, axis=1), correction


@gluon.jit
def _attend_step(
    q_tile, k_tile, v_tile, k_ready, k_free, v_ready, v_free, phase, v_phase,
    weights, acc, top, total, query_positions, start, scale_log2,
    BLOCK_N: gl.constexpr, IS_MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of this tile; meanwhile the product of the last tile's weights with its values."""
    scores_layout: gl.constexpr = query_positions.type.layout.parent
    hopper.mbarrier.wait(k_ready, phase)
    scores = hopper.warpgroup_mma(
        q_tile, k_tile.permute((1, 0)),
        gl.zeros([query_positions.shape[0], BLOCK_N], gl.float32, scores_layout),
        use_acc=False, is_async=True,
    )  # fmt: skip
    hopper.mbarrier.wait(v_ready, v_phase)
    acc = hopper.warpgroup_mma(weights, v_tile, acc, is_async=True)
    scores = hopper.warpgroup_mma_wait(1, deps=[scores])
    hopper.mbarrier.arrive(k_free)
    if IS_MASKED:
        positions = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout))
        is_seen = positions[None, :] <= query_positions[:, None]
        scores = gl.where(is_seen, scores, float("-inf"))
    new_weights, top, total, correction = softmax_step(scores, top, total, scale_log2)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    hopper.mbarrier.arrive(v_free)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    acc = acc * gl.convert_layout(correction, acc_rows)[:, None]
    weights = gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)
    return weights, acc, top, total


@gluon.jit
def _copy_queries(
    q_tile, q_ptr, tile, stride_qt, stride_qh,
    HALF: gl.constexpr, GROUP_SIZE: gl.constexpr, HALF_TOKENS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Starts to fill a half's queries, token-major: a token's heads lie together."""
    kv_head, _, tile_token, query_start, num_tokens, _ = tile
    packed = gl.arange(0, q_tile.shape[0], gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, q_tile.shape[1], gl.SliceLayout(0, LAYOUT))
    tokens = tile_token + HALF * HALF_TOKENS + packed // GROUP_SIZE
    is_query = (packed < HALF_TOKENS * GROUP_SIZE) & (tokens < num_tokens)
    heads = kv_head * GROUP_SIZE + packed % GROUP_SIZE
    row_offsets = (query_start + tokens).to(gl.int64) * stride_qt + heads * stride_qh
    offsets = row_offsets[:, None] + dims[None, :]
    hopper.async_copy.async_copy_global_to_shared(q_tile, q_ptr + offsets, mask=is_query[:, None])
    hopper.async_copy.commit_group()


@gluon.jit
def _attend(
    q_ptr, sinks_ptr, out_ptr, q_smem, k_smem, v_smem, ready, free,
    query_starts_ptr, context_lens_ptr, stride_qt, stride_qh, stride_ot, stride_oh,
    first_row, num_rows, num_kv_heads, scale_log2, v_scale, HALF: gl.constexpr,
    GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, TILE_TOKENS: gl.constexpr, STAGES: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):  # fmt: skip
    HALF_TOKENS: gl.constexpr = TILE_TOKENS // 2
    io: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    packed_rows = gl.arange(0, BLOCK_M, score_rows)
    row_token = HALF * HALF_TOKENS + packed_rows // GROUP_SIZE
    num_rows, num_tiles = _bound(query_starts_ptr, first_row, num_rows, TILE_TOKENS, 4)
    total_tiles = num_kv_heads * num_rows * num_tiles
    count = 0
    turn = 0
    tile = _locate(
        gl.minimum(gl.program_id(0), total_tiles - 1), query_starts_ptr, context_lens_ptr,
        first_row, num_rows, num_tiles, num_kv_heads, TILE_TOKENS,
    )  # fmt: skip
    _copy_queries(
        q_smem.index(HALF), q_ptr, tile, stride_qt, stride_qh, HALF, GROUP_SIZE, HALF_TOKENS, io,
    )  # fmt: skip
    for index in range(gl.program_id(0), total_tiles, gl.num_programs(0)):
        kv_head, _, tile_token, query_start, num_tokens, context_len = tile
        q_tile = q_smem.index(2 * turn + HALF)
        turn = turn ^ 1
        next_tile = _locate(
            gl.minimum(index + gl.num_programs(0), total_tiles - 1), query_starts_ptr,
            context_lens_ptr, first_row, num_rows, num_tiles, num_kv_heads, TILE_TOKENS,
        )  # fmt: skip
        hopper.async_copy.wait_group(0)
        hopper.fence_async_shared()
        # All warps have read the other buffer's queries, and this one's are there for all.
        gl.thread_barrier()
        _copy_queries(
            q_smem.index(2 * turn + HALF), q_ptr, next_tile, stride_qt, stride_qh,
            HALF, GROUP_SIZE, HALF_TOKENS, io,
        )  # fmt: skip
        if tile_token < num_tokens:
            tile_position = context_len - num_tokens + tile_token
            end = gl.minimum(context_len, tile_position + TILE_TOKENS)
            num_kv_tiles = gl.cdiv(gl.maximum(end, 1), BLOCK_N)
            # Tiles before this one are seen whole by each query of this half.
            first_masked = (tile_position + HALF * HALF_TOKENS + 1) // BLOCK_N
            query_positions = tile_position + row_token

            stage = count % STAGES
            phase = (count // STAGES) & 1
            hopper.mbarrier.wait(ready.index(stage), phase)
            scores = hopper.warpgroup_mma(
                q_tile, k_smem.index(stage).permute((1, 0)),
                gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores_layout),
                use_acc=False, is_async=True,
            )  # fmt: skip
            scores = hopper.warpgroup_mma_wait(0, deps=[scores])
            hopper.mbarrier.arrive(free.index(stage))
            positions = (num_kv_tiles - 1) * BLOCK_N + gl.arange(
                0, BLOCK_N, gl.SliceLayout(0, scores_layout)
            )
            is_seen = positions[None, :] <= query_positions[:, None]
            scores = gl.where(is_seen, scores, float("-inf"))
            top = gl.full([BLOCK_M], float("-inf"), gl.float32, score_rows)
            total = gl.zeros([BLOCK_M], gl.float32, score_rows)
            if HAS_SINKS:
                # The softmax starts with the sink, which has weight and no value.
                sinks = gl.load(sinks_ptr + kv_head * GROUP_SIZE + packed_rows % GROUP_SIZE)
                top = sinks.to(gl.float32) * (1.4426950408889634 / scale_log2)
                total += 1.0
            new_weights, top, total, _unused = softmax_step(scores, top, total, scale_log2)
            weights = gl.convert_layout(new_weights.to(q_smem.dtype), weights_layout)
            acc = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, acc_layout)

            num_masked = gl.minimum(num_kv_tiles - first_masked, num_kv_tiles)
            for step in range(1, num_masked):
                last = count % STAGES
                last_phase = (count // STAGES) & 1
                count += 1
                stage = count % STAGES
                phase = (count // STAGES) & 1
                weights, acc, top, total = _attend_step(
                    q_tile, k_smem.index(stage), v_smem.index(last),
                    ready.index(stage), free.index(stage),
                    ready.index(STAGES + last), free.index(STAGES + last), phase, last_phase,
                    weights, acc, top, total, query_positions,
                    (num_kv_tiles - 1 - step) * BLOCK_N, scale_log2, BLOCK_N, True,
                )  # fmt: skip
            for _step in range(gl.maximum(num_masked, 1), num_kv_tiles):
                last = count % STAGES
                last_phase = (count // STAGES) & 1
                count += 1
                stage = count % STAGES
                phase = (count // STAGES) & 1
                weights, acc, top, total = _attend_step(
                    q_tile, k_smem.index(stage), v_smem.index(last),
                    ready.index(stage), free.index(stage),
                    ready.index(STAGES + last), free.index(STAGES + last), phase, last_phase,
                    weights, acc, top, total, query_positions, 0, scale_log2, BLOCK_N, False,
                )  # fmt: skip
            stage = count % STAGES
            hopper.mbarrier.wait(ready.index(STAGES + stage), (count // STAGES) & 1)
            acc = hopper.warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            hopper.mbarrier.arrive(free.index(STAGES + stage))
            count += 1

            divisor = gl.convert_layout(total, gl.SliceLayout(1, acc_layout))
            divisor = gl.where(divisor == 0.0, 1.0, divisor)
            result = acc / divisor[:, None] * v_scale
            result = gl.convert_layout(result.to(q_smem.dtype), io)
            packed = gl.arange(0, BLOCK_M, gl.SliceLayout(1, io))
            dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, io))
            tokens = tile_token + HALF * HALF_TOKENS + packed // GROUP_SIZE
            is_query = (packed < HALF_TOKENS * GROUP_SIZE) & (tokens < num_tokens)
            heads = kv_head * GROUP_SIZE + packed % GROUP_SIZE
            row_offsets = (query_start + tokens).to(gl.int64) * stride_ot + heads * stride_oh
            out_offsets = row_offsets[:, None] + dims[None, :]
            gl.store(out_ptr + out_offsets, result, mask=is_query[:, None])
        tile = next_tile
    hopper.async_copy.wait_group(0)


@gluon.jit(
    do_not_specialize=["first_row", "num_rows", "num_kv_heads", "stride_tabler"],
    do_not_specialize_on_alignment=["sinks_ptr"],
)
def _hopper_prefill_kernel(
    kv_desc,
    q_ptr,
    sinks_ptr,
    out_ptr,
    block_tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_tabler,
    rows_per_block,
    first_row,
    num_rows,
    num_kv_heads,
    scale_log2,
    v_scale,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    PANEL: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    ENDS_IN_ZEROS: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = kv_desc.layout
    # Both halves of this tile's queries, and of the next one's.
    q_smem = gl.allocate_shared_memory(dtype, [4, BLOCK_M, HEAD_DIM], layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    # Keys of each stage, then values of each stage.
    barriers: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], barriers)
    free = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], barriers)
    landed = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for i in gl.static_range(2 * STAGES):
        hopper.mbarrier.init(ready.index(i), count=1)
        hopper.mbarrier.init(free.index(i), count=2)
    hopper.mbarrier.init(landed, count=1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                q_ptr, sinks_ptr, out_ptr, q_smem, k_smem, v_smem, ready, free,
                query_starts_ptr, context_lens_ptr, stride_qt, stride_qh, stride_ot, stride_oh,
                first_row, num_rows, num_kv_heads, scale_log2, v_scale, 0,
                GROUP_SIZE, HEAD_DIM, BLOCK_M, BLOCK_N, TILE_TOKENS, STAGES, HAS_SINKS,
            )),
            (_attend, (
                q_ptr, sinks_ptr, out_ptr, q_smem, k_smem, v_smem, ready, free,
                query_starts_ptr, context_lens_ptr, stride_qt, stride_qh, stride_ot, stride_oh,
                first_row, num_rows, num_kv_heads, scale_log2, v_scale, 1,
                GROUP_SIZE, HEAD_DIM, BLOCK_M, BLOCK_N, TILE_TOKENS, STAGES, HAS_SINKS,
            )),
            (_fetch, (
                kv_desc, k_smem, v_smem, ready, free, landed,
                block_tables_ptr, query_starts_ptr, context_lens_ptr, stride_tabler,
                rows_per_block, first_row, num_rows, num_kv_heads,
                BLOCK_SIZE, HEAD_DIM, BLOCK_N, TILE_TOKENS, STAGES, PANEL, ENDS_IN_ZEROS,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HopperTiles:
    block_n: int
    """Keys in a tile."""
    num_stages: int


def tune_hopper_prefill(head_dim: int) -> HopperTiles:
    """Two tiles of keys and of values beside the queries: 192 KiB at a head size of 128."""
    return HopperTiles(block_n=128, num_stages=2 if head_dim > 64 else 3)


def can_use_hopper_prefill(
    q: Float[Tensor, "T H K"], cache_layer: Float[Tensor, "P 2 S G K"], window: int
) -> bool:
    """Whether the copy engine and the matrix instruction fit these shapes."""
    _, _, block_size, num_kv_heads, head_dim = cache_layer.shape
    row = num_kv_heads * head_dim
    return (
        suits_hopper_prefill(q, num_kv_heads, window)
        and cache_layer.dtype is torch.bfloat16
        and block_size in (16, 32, 64, 128)
        and cache_layer.stride()[2:] == (row, head_dim, 1)
        and cache_layer.stride(1) == block_size * row
        and cache_layer.stride(0) % row == 0
        and cache_layer.shape[0] * cache_layer.stride(0) // row < 2**31
        and cache_layer.data_ptr() % 16 == 0
    )


def suits_hopper_prefill(q: Float[Tensor, "T H K"], num_kv_heads: int, window: int) -> bool:
    """Whether these queries do, whatever their keys and values lie in."""
    return (
        runs_hopper(q.device)
        and q.dtype is torch.bfloat16
        and window == 0
        and q.shape[2] in (64, 128)
        and q.shape[1] // num_kv_heads <= _HALF_QUERIES
    )


@cache
def _num_programs(device: torch.device) -> int:
    """The largest prime that is not above the number of multiprocessors."""
    count = num_multiprocessors(device)
    while any(count % divisor == 0 for divisor in range(2, count)):
        count -= 1
    return count


def hopper_prefill_attention(
    q: Float[Tensor, "T H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    rows: AttentionRows,
    scale: float,
    sinks: Float[Tensor, " H"] | None,
    v_scale: float,
    out: Float[Tensor, "T H K"],
    *,
    ends_in_zeros: bool = False,
) -> None:
    """Writes the tokens of the rows that are not decodes in `out`. `can_use_hopper_prefill` must
    hold. With `ends_in_zeros`, memory behind a context is zeros up to the next multiple of a tile's
    keys, block 0 holds no NaN, and so neither needs care."""
    num_blocks, _, block_size, num_kv_heads, head_dim = cache_layer.shape
    group_size = q.shape[1] // num_kv_heads
    tiles = tune_hopper_prefill(head_dim)
    tile_tokens = 2 * (_HALF_QUERIES // group_size)
    row_elements = num_kv_heads * head_dim
    rows_per_block = cache_layer.stride(0) // row_elements
    # One row for each slot's keys, or values, of all heads, from this layer's first on.
    descriptor = TensorDescriptor(
        cache_layer,
        [(num_blocks - 1) * rows_per_block + 2 * block_size, row_elements],
        [row_elements, 1],
        [block_size, _PANEL],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    )
    _hopper_prefill_kernel[(_num_programs(q.device),)](
        kv_desc=descriptor,
        q_ptr=q,
        sinks_ptr=q if sinks is None else sinks,
        out_ptr=out,
        block_tables_ptr=rows.block_tables,
        query_starts_ptr=rows.query_starts,
        context_lens_ptr=rows.context_lens,
        stride_qt=q.stride(0),
        stride_qh=q.stride(1),
        stride_ot=out.stride(0),
        stride_oh=out.stride(1),
        stride_tabler=rows.block_tables.stride(0),
        rows_per_block=rows_per_block,
        first_row=rows.num_decodes,
        num_rows=rows.num_rows - rows.num_decodes,
        num_kv_heads=num_kv_heads,
        scale_log2=scale * LOG2_E,
        v_scale=v_scale,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=_HALF_QUERIES,
        BLOCK_N=tiles.block_n,
        TILE_TOKENS=tile_tokens,
        STAGES=tiles.num_stages,
        PANEL=_PANEL,
        HAS_SINKS=sinks is not None,
        ENDS_IN_ZEROS=ends_in_zeros,
        num_warps=4,
    )
