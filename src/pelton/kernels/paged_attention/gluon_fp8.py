# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention over a cache in FP8, in Gluon: what `triton_invariant` says, where a tile of queries is
that of one warp.

The matrix units take values of two neighbouring positions in one register, and a cache in bytes has
a position's dimensions side by side: Triton gathers them byte by byte from shared memory, which
takes longer than reading the cache. Here a thread loads the same dimensions of two positions as
words and interleaves them in registers. For that the dimensions of queries, keys and results stand
in an order of their own (`_query_dim`, `_value_dim`). Each warp has a KV head of its own, and a
program reads those of all its warps in one run.

Keys and values are the left operands, whose 16 rows positions and dimensions fill; queries, of
which a decode has a few, are columns, 8 or 16. The queries of a warp are those of its head for one
token or several. However many columns there are, a query's results are the same bits.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.triton_runtime import gl, gluon, hopper, runs_hopper

NUM_WARPS = 4
MAX_QUERIES = 16
"""Heads times tokens: columns of a warp's products."""
_BLOCK_N = 32
"""Positions of a tile, for each of a program's KV heads."""
_FEWEST_TILE_ROWS = {64: 256, 128: 64}
"""By the heads' dimensions: rows times KV heads from which this kernel is faster than
`triton_decode`'s."""


@gluon.jit
def _query_dim(place, HEAD_DIM: gl.constexpr):
    """The dimension at a row of the queries' operand: thread t of four holds the t-th quarter, two
    neighbours a register."""
    return place // 2 % 4 * (HEAD_DIM // 4) + place // 8 * 2 + place % 2


@gluon.jit
def _value_dim(place, HEAD_DIM: gl.constexpr):
    """The dimension at a row of the values' operand: thread g of eight holds the g-th eighth."""
    return place % 8 * (HEAD_DIM // 8) + place // 8


@gluon.constexpr_function
def _key_layout(words):
    """[positions, words of four heads]: how threads hold keys."""
    columns = [[0, 1 << bit] for bit in range((words // 4).bit_length() - 1)]
    quarters = [[0, words // 4], [0, words // 2]]
    return gl.DistributedLinearLayout(
        [*columns, [8, 0], [16, 0]], [*quarters, [1, 0], [2, 0], [4, 0]],
        [[0, words], [0, 2 * words]], [], [32, 4 * words],
    )  # fmt: skip


@gluon.constexpr_function
def _value_layout(words, is_paired):
    """Values; `is_paired`: with neighbouring positions one register after the other."""
    columns = [[0, 1 << bit] for bit in range((words // 8).bit_length() - 1)]
    eighths = [[0, words // 8], [0, words // 4], [0, words // 2]]
    return gl.DistributedLinearLayout(
        [*([[1, 0], *columns] if is_paired else [*columns, [1, 0]]), [8, 0], [16, 0]],
        [[2, 0], [4, 0], *eighths], [[0, words], [0, 2 * words]], [], [32, 4 * words],
    )  # fmt: skip


@gluon.constexpr_function
def _product_layout(num_warps):
    """[warp, positions or dimensions, queries]: each warp multiplies for its own KV head."""
    return gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def _copy_layout(words):
    """[positions, words of four heads]: how threads copy a tile, 16 bytes each; a warp takes eight
    neighbouring positions."""
    columns = [[0, 1 << bit] for bit in range(words.bit_length() + 1)]
    rows = [[1, 0], [2, 0], [4, 0]]
    lane_rows = 5 - (len(columns) - 2)
    return gl.DistributedLinearLayout(
        [*columns[:2], *rows[lane_rows:]], [*columns[2:], *rows[:lane_rows]],
        [[8, 0], [16, 0]], [], [32, 4 * words],
    )  # fmt: skip


@gluon.constexpr_function
def _run_layout(words, run):
    """The positions alone as [runs, positions of a run]."""
    copy = _copy_layout(words)
    registers = [pair for pair in copy.reg_bases if pair[0]]
    register_rows, lane_rows, warp_rows = (
        [[row // run, row % run] for row, _ in pairs]
        for pairs in (registers, copy.lane_bases, copy.warp_bases)
    )
    return gl.DistributedLinearLayout(register_rows, lane_rows, warp_rows, [], [32 // run, run])


@gluon.constexpr_function
def _conversion(is_paired):
    """Two registers of four e4m3 to four of two float16: the first one's bytes and then the
    second's, or, `is_paired`, a byte of each."""
    picks = "mov.b32 four, $4;", "mov.b32 four, $5;"
    if is_paired:
        picks = "prmt.b32 four, $4, $5, 0x5140;", "prmt.b32 four, $4, $5, 0x7362;"
    return f"""
        {{
        .reg .b32 four;
        .reg .b16 low, high;
        {picks[0]}
        mov.b32 {{low, high}}, four;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        {picks[1]}
        mov.b32 {{low, high}}, four;
        cvt.rn.f16x2.e4m3x2 $2, low;
        cvt.rn.f16x2.e4m3x2 $3, high;
        }}
        """


@gluon.jit
def _to_float16(words, IS_PAIRED: gl.constexpr):
    """int32 [N, W] of four e4m3 to float16 [N, W, 4]. `IS_PAIRED`: of a thread's registers, two one
    behind the other are words of neighbouring positions; else of one."""
    dims = gl.inline_asm_elementwise(
        _conversion(IS_PAIRED),
        constraints="=&r,=&r,=&r,=&r,r,r",
        args=[words],
        dtype=(gl.float16,) * 4,
        is_pure=True,
        pack=2,
    )
    tile = gl.join(gl.join(dims[0], dims[2]), gl.join(dims[1], dims[3]))
    if not IS_PAIRED:
        # Two words' registers are [N, W / 2, byte of a half, word, half].
        tile = tile.reshape([words.shape[0], words.shape[1] // 2, 2, 2, 2])
        tile = tile.permute((0, 1, 3, 4, 2))
    return tile.reshape([words.shape[0], words.shape[1], 4])


@gluon.jit
def _transpose_squares(weights):
    """float16 [warp, positions, queries], a product's result, for the right operand of another. In
    each square of 8 x 8 a thread has one position's weights and gets one query's."""
    num_warps: gl.constexpr = weights.shape[0]
    POSITIONS: gl.constexpr = weights.shape[1]
    QUERIES: gl.constexpr = weights.shape[2]
    squares = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        constraints="=r,r",
        args=[weights],
        dtype=gl.float16,
        is_pure=False,  # all threads of a warp take part
        pack=2,
    )
    squares = squares.reshape([num_warps, POSITIONS // 8, 8, QUERIES // 8, 8])
    squares = squares.permute((0, 1, 4, 3, 2)).reshape([num_warps, POSITIONS, QUERIES])
    right: gl.constexpr = gl.DotOperandLayout(1, weights.type.layout, 2)
    return gl.convert_layout(squares, right, assert_trivial=True)


@gluon.jit
def _block_ids(table_ptr, start, low, end, RUN: gl.constexpr, BLOCK_SIZE: gl.constexpr, runs):
    """Of each run of positions of a tile; 0 where none is seen."""
    positions = start + runs * RUN
    is_seen = (positions + RUN > low) & (positions < end)
    return gl.load(table_ptr + positions // BLOCK_SIZE, mask=is_seen, other=0)


@gluon.jit
def _fetch(
    k_tile, v_tile, heads_ptr, block_ids, start, low, end, stride_cachep,
    STRIDE_KV: gl.constexpr, STRIDE_S: gl.constexpr, RUN: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Starts to copy a tile of keys and values; zeros where a position is not seen, which is where
    it is not from `low` to `end`, at least `low`."""
    BLOCK_N: gl.constexpr = k_tile.shape[0]
    WORDS: gl.constexpr = k_tile.shape[1]
    copy: gl.constexpr = _copy_layout(WORDS // 4)
    runs_layout: gl.constexpr = _run_layout(WORDS // 4, RUN)
    runs = gl.arange(0, BLOCK_N // RUN, gl.SliceLayout(1, runs_layout))
    members = gl.arange(0, RUN, gl.SliceLayout(0, runs_layout))
    run_offsets = (
        block_ids.to(gl.int64) * stride_cachep + (start + runs * RUN) % BLOCK_SIZE * STRIDE_S
    )
    offsets = (run_offsets[:, None] + (members * STRIDE_S)[None, :]).reshape([BLOCK_N])
    offsets = gl.convert_layout(offsets, gl.SliceLayout(1, copy), assert_trivial=True)
    # Below `low` this is a large number.
    places = ((start - low + runs * RUN)[:, None] + members[None, :]).reshape([BLOCK_N])
    places = gl.convert_layout(places, gl.SliceLayout(1, copy), assert_trivial=True)
    is_seen = places.to(gl.uint32) < (end - low).to(gl.uint32)
    words = gl.arange(0, WORDS, gl.SliceLayout(0, copy))
    # Rows begin at multiples of 16 bytes.
    ptrs = heads_ptr + gl.multiple_of(offsets, 4)[:, None] + words[None, :]
    mask = is_seen[:, None] & (words >= 0)[None, :]
    hopper.async_copy.async_copy_global_to_shared(k_tile, ptrs, mask=mask)
    hopper.async_copy.async_copy_global_to_shared(v_tile, ptrs + STRIDE_KV, mask=mask)
    hopper.async_copy.commit_group()


@gluon.jit
def _attend_tile(q, k_tile, v_tile, is_seen, top, total, mean, scale_log2):
    """One step of an online softmax. q [warp, K, queries] and the tiles [positions, words of the
    warps' heads] in shared memory; is_seen broadcasts to [warp, positions, queries].

    -> (highest score, sum of weights, weighted sum of values) with this tile's."""
    num_warps: gl.constexpr = q.shape[0]
    HEAD_DIM: gl.constexpr = q.shape[1]
    QUERIES: gl.constexpr = q.shape[2]
    BLOCK_N: gl.constexpr = k_tile.shape[0]
    mma: gl.constexpr = _product_layout(num_warps)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    k = _to_float16(k_tile.load(_key_layout(HEAD_DIM // 4)), False)
    k = k.reshape([BLOCK_N, num_warps, 4, HEAD_DIM // 8, 2]).permute((1, 0, 3, 2, 4))
    k = gl.convert_layout(k.reshape([num_warps, BLOCK_N, HEAD_DIM]), left, assert_trivial=True)
    scores = gl.zeros([num_warps, BLOCK_N, QUERIES], gl.float32, mma)
    scores = gl.where(is_seen, hopper.mma_v2(k, q, scores), float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1) * scale_log2)
    # A query may have seen nothing yet; its maximum must not become a NaN.
    finite_top = gl.where(new_top > float("-inf"), new_top, 0.0)
    weights = gl.exp2(gl.fma(scores, scale_log2, -gl.expand_dims(finite_top, 1)))
    correction = gl.exp2(top - finite_top)
    total = total * correction + gl.sum(weights, axis=1)
    mean = mean * gl.expand_dims(correction, 1)
    words = v_tile.load(_value_layout(HEAD_DIM // 4, False))
    v = _to_float16(gl.convert_layout(words, _value_layout(HEAD_DIM // 4, True)), True)
    v = v.reshape([BLOCK_N, num_warps, 8, HEAD_DIM // 32, 4]).permute((1, 3, 4, 2, 0))
    v = gl.convert_layout(v.reshape([num_warps, HEAD_DIM, BLOCK_N]), left, assert_trivial=True)
    mean = hopper.mma_v2(v, _transpose_squares(weights.to(gl.float16)), mean)
    return new_top, total, mean


@gluon.jit
def _queries(
    layout: gl.constexpr, tile_token, num_tokens, QUERIES: gl.constexpr, GROUP_SIZE: gl.constexpr,
    TILE_TOKENS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """-> [warp, queries] token of the row, head, and whether there is such a query. A token's heads
    lie together."""
    members = gl.arange(0, QUERIES, gl.SliceLayout(0, layout))
    warps = gl.arange(0, num_warps, gl.SliceLayout(1, layout))
    kv_heads = (gl.program_id(0) * num_warps + warps)[:, None]
    heads = kv_heads * GROUP_SIZE + (members % GROUP_SIZE)[None, :]
    tokens = (tile_token + members // GROUP_SIZE)[None, :] + kv_heads * 0
    is_query = (members // GROUP_SIZE < TILE_TOKENS)[None, :] & (tokens < num_tokens)
    return tokens, heads, is_query


@gluon.jit(do_not_specialize=["first_row", "first_token", "num_parts", "num_chunks", "window"])
def _fp8_attention_kernel(
    q_ptr, cache_ptr, block_tables_ptr, query_starts_ptr, context_lens_ptr, sinks_ptr, out_ptr,
    partial_ptr, sums_ptr, stride_qt, stride_qh, stride_cachep, stride_tabler, stride_ot, stride_oh,
    first_row, first_token, num_heads, num_parts, num_chunks, scale_log2, v_scale, window,
    STRIDE_KV: gl.constexpr, STRIDE_S: gl.constexpr, CHUNK: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, QUERIES: gl.constexpr,
    TILE_TOKENS: gl.constexpr, STAGES: gl.constexpr, IS_SPLIT: gl.constexpr,
    HAS_SINKS: gl.constexpr, BLOCK_N: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    gl.static_assert(BLOCK_N == 32 and num_warps == 4, "the layouts are made for these")
    WORDS: gl.constexpr = HEAD_DIM // 4
    tile_token = gl.program_id(1) // num_parts * TILE_TOKENS
    part = gl.program_id(1) % num_parts
    row = (first_row + gl.program_id(2)).to(gl.int64)
    query_start = gl.load(query_starts_ptr + row).to(gl.int64)
    num_tokens = (gl.load(query_starts_ptr + row + 1) - query_start).to(gl.int32)
    context_len = gl.load(context_lens_ptr + row).to(gl.int32)
    if tile_token >= num_tokens:
        return
    tile_position = context_len - num_tokens + tile_token
    # Of padding rows `tile_position` is negative, and no window is the largest of integers.
    low = gl.maximum(gl.maximum(tile_position, 0) - window + 1, 0)
    end = gl.minimum(context_len, tile_position + TILE_TOKENS)
    # A part's chunks are neighbours: one run of tiles.
    first_chunk = low // CHUNK
    chunks_per_part = gl.cdiv(gl.cdiv(end, CHUNK) - first_chunk, num_parts)
    part_chunk = first_chunk + part * chunks_per_part
    start = gl.maximum(part_chunk * CHUNK, low // BLOCK_N * BLOCK_N)
    end = gl.maximum(gl.minimum(end, (part_chunk + chunks_per_part) * CHUNK), low)

    mma: gl.constexpr = _product_layout(num_warps)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    # A run of a warp's copies lies in one block.
    RUN: gl.constexpr = 8 if BLOCK_SIZE % 8 == 0 else 1
    runs_layout: gl.constexpr = gl.SliceLayout(1, _run_layout(WORDS, RUN))
    shared: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    k_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, num_warps * WORDS], shared)
    v_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, num_warps * WORDS], shared)
    runs = gl.arange(0, BLOCK_N // RUN, runs_layout)
    table_ptr = block_tables_ptr + row * stride_tabler
    heads_ptr = cache_ptr + gl.program_id(0) * (num_warps * WORDS)
    AHEAD: gl.constexpr = STAGES - 1
    for early in gl.static_range(AHEAD):
        early_start = start + early * BLOCK_N
        ids = _block_ids(table_ptr, early_start, low, end, RUN, BLOCK_SIZE, runs)
        _fetch(
            k_tiles.index(early), v_tiles.index(early), heads_ptr, ids, early_start, low, end,
            stride_cachep, STRIDE_KV, STRIDE_S, RUN, BLOCK_SIZE,
        )  # fmt: skip
    ids = _block_ids(table_ptr, start + AHEAD * BLOCK_N, low, end, RUN, BLOCK_SIZE, runs)

    q_token, q_head, is_query = _queries(
        gl.SliceLayout(1, right), tile_token, num_tokens, QUERIES, GROUP_SIZE, TILE_TOKENS,
        num_warps,
    )  # fmt: skip
    dims = _query_dim(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(2, right))), HEAD_DIM)
    dims = gl.expand_dims(gl.expand_dims(dims, 0), 2)
    offsets = (query_start + q_token) * stride_qt + q_head * stride_qh
    q = gl.load(
        q_ptr + gl.expand_dims(offsets, 1) + dims,
        mask=gl.expand_dims(is_query, 1) & (dims >= 0),
        other=0.0,
    ).to(gl.float16)

    by_query: gl.constexpr = gl.SliceLayout(1, mma)
    token, head, is_query = _queries(
        by_query, tile_token, num_tokens, QUERIES, GROUP_SIZE, TILE_TOKENS, num_warps
    )
    query_positions = gl.expand_dims(context_len - num_tokens + token, 1)
    tile_positions = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, mma)))
    tile_positions = gl.expand_dims(gl.expand_dims(tile_positions, 0), 2)
    dims = _value_dim(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(2, mma))), HEAD_DIM)
    dims = gl.expand_dims(gl.expand_dims(dims, 0), 2)
    mask = gl.expand_dims(is_query, 1) & (dims >= 0)
    top = gl.full([num_warps, QUERIES], float("-inf"), gl.float32, by_query)
    total = gl.zeros([num_warps, QUERIES], gl.float32, by_query)
    if HAS_SINKS:
        # The softmax starts with the sink, which has weight and no value.
        sinks = gl.load(sinks_ptr + head, mask=is_query, other=0.0).to(gl.float32)
        top = sinks * 1.4426950408889634
        total += 1.0
    mean = gl.zeros([num_warps, HEAD_DIM, QUERIES], gl.float32, mma)
    stage = 0
    for chunk in range(part_chunk, gl.cdiv(end, CHUNK)):
        chunk_top = gl.full([num_warps, QUERIES], float("-inf"), gl.float32, by_query)
        chunk_total = gl.zeros([num_warps, QUERIES], gl.float32, by_query)
        chunk_mean = gl.zeros([num_warps, HEAD_DIM, QUERIES], gl.float32, mma)
        chunk_start = gl.maximum(chunk * CHUNK, start)
        for tile_start in range(chunk_start, gl.minimum(end, (chunk + 1) * CHUNK), BLOCK_N):
            hopper.async_copy.wait_group(AHEAD - 1)
            # This tile has landed for all warps, and all have done with the one before, whose
            # place the next copies take.
            gl.thread_barrier()
            next_start = tile_start + AHEAD * BLOCK_N
            next_stage = gl.where(stage == 0, STAGES - 1, stage - 1)
            _fetch(
                k_tiles.index(next_stage), v_tiles.index(next_stage), heads_ptr, ids, next_start,
                low, end, stride_cachep, STRIDE_KV, STRIDE_S, RUN, BLOCK_SIZE,
            )  # fmt: skip
            ids = _block_ids(table_ptr, next_start + BLOCK_N, low, end, RUN, BLOCK_SIZE, runs)
            distance = query_positions - (tile_start + tile_positions)
            # Of a position to come, negative, it is a large number.
            is_seen = distance.to(gl.uint32) < window.to(gl.uint32)
            chunk_top, chunk_total, chunk_mean = _attend_tile(
                q, k_tiles.index(stage), v_tiles.index(stage), is_seen, chunk_top, chunk_total,
                chunk_mean, scale_log2,
            )  # fmt: skip
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        if IS_SPLIT:
            place = (query_start + token - first_token) * num_chunks + chunk - first_chunk
            place = place * num_heads + head
            gl.store(sums_ptr + 2 * place, chunk_top, mask=is_query)
            gl.store(sums_ptr + 2 * place + 1, chunk_total, mask=is_query)
            partial_tile_ptr = partial_ptr + gl.expand_dims(place * HEAD_DIM, 1) + dims
            gl.store(partial_tile_ptr, chunk_mean, mask=mask)
        else:
            new_top = gl.maximum(top, chunk_top)
            finite_top = gl.where(new_top > float("-inf"), new_top, 0.0)
            old, new = gl.exp2(top - finite_top), gl.exp2(chunk_top - finite_top)
            mean = mean * gl.expand_dims(old, 1) + chunk_mean * gl.expand_dims(new, 1)
            total = total * old + chunk_total * new
            top = new_top
    hopper.async_copy.wait_group(0)
    if not IS_SPLIT:
        divisor = gl.where(total > 0.0, total, 1.0)
        out = mean / gl.expand_dims(divisor, 1) * v_scale
        offsets = (query_start + token) * stride_ot + head * stride_oh
        out_tile_ptr = out_ptr + gl.expand_dims(offsets, 1) + dims
        gl.store(out_tile_ptr, out.to(out_ptr.dtype.element_ty), mask=mask)


def runs_gluon_fp8(q: Float[Tensor, "T H K"], cache_layer: Float[Tensor, "P 2 S G K"]) -> bool:
    """Depends on the formats and strides alone, never on how many tokens there are."""
    num_kv_heads = cache_layer.shape[3]
    return (
        cache_layer.dtype is torch.float8_e4m3fn
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in (64, 128)
        and num_kv_heads % NUM_WARPS == 0
        and q.shape[1] // num_kv_heads <= MAX_QUERIES
        and cache_layer.stride(3) == q.shape[2]  # heads side by side
        and not any(stride % 16 for stride in cache_layer.stride()[:3])  # copied 16 bytes a time
        and runs_hopper(q.device)
    )


def suits_decodes(q: Float[Tensor, "R H K"], cache_layer: Float[Tensor, "P 2 S G K"]) -> bool:
    """Whether rows of one token each are faster here than in `triton_decode`."""
    if not runs_gluon_fp8(q, cache_layer):
        return False
    return q.shape[0] * cache_layer.shape[3] >= _FEWEST_TILE_ROWS[q.shape[2]]


def choose_queries(num_queries: int) -> int:
    """The columns of a tile, for so many heads times tokens of the longest row."""
    return 8 if num_queries <= 8 else MAX_QUERIES


def launch_gluon_fp8(
    cache_layer: Float[Tensor, "P 2 S G K"],
    num_queries: int,
    num_parts: int,
    num_rows: int,
    others: dict[str, Any],
) -> None:
    """`num_queries`: columns of a tile. `num_parts`: of all tiles of a row. `others`: the arguments
    that `triton_invariant`'s kernel has too."""
    words = cache_layer.view(torch.int32)
    num_kv_heads, head_dim = cache_layer.shape[3:]
    _fp8_attention_kernel[(num_kv_heads // NUM_WARPS, num_parts, num_rows)](
        cache_ptr=words,
        stride_cachep=words.stride(0),
        STRIDE_KV=words.stride(1),
        STRIDE_S=words.stride(2),
        QUERIES=num_queries,
        STAGES=3,
        BLOCK_N=_BLOCK_N,
        num_warps=NUM_WARPS,
        # Four programs a multiprocessor, or two.
        maxnreg=128 if head_dim == 64 else None,
        **others,
    )
