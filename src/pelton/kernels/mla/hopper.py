# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Absorbed latent attention on Hopper: what `mla.triton` computes, at the matrix units' pace.

    fetch (one warp)        copies latents to shared memory, a tile ahead
    score (warpgroup 0)     scores and softmax; the first half of each sum of latents
    sum (warpgroup 1)       the last half

With 64 (token, head) pairs a tile, a sum of latents, 512 numbers wide, fills the registers of two
warpgroups. Both need the softmax's weights, so one computes them and hands them on through shared
memory (DeepSeek, "FlashMLA", 2025, divides the work so). It starts the next tile's scores right
behind its half of this tile's sum. A half of a tile is free once its sum is taken, and the next but
one is copied over it; scores start when the first half is there.
"""

from jaxtyping import Float
from torch import Tensor

from pelton.core.batch import AttentionRows
from pelton.kernels.mla.triton import LOG2_E, merge_splits, new_partials
from pelton.kernels.paged_attention.hopper_prefill import softmax_step
from pelton.kernels.triton_runtime import (
    TensorDescriptor,
    cdiv,
    gl,
    gluon,
    hopper,
    num_multiprocessors,
    runs_hopper,
)

_BLOCK_M = 64
"""(token, head) pairs of a tile: the row count of a warpgroup's matrix instruction."""
_BLOCK_N = 64
"""Latents of a tile."""
_LATENT, _ROPE = 512, 64
_STAGES = 2
_PANEL = 64
"""Elements of a swizzled row of shared memory: 128 bytes of a 16-bit format."""
_MAX_SPLITS = 32


@gluon.jit
def _fetch(
    cache_desc, k_smem, r_smem, ready, free, table_ptr, rows_per_block, start, end,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    HALF: gl.constexpr = k_smem.shape[2]
    PANELS: gl.constexpr = 2 * HALF // PANEL
    BOX: gl.constexpr = cache_desc.block_shape[0]
    BOXES: gl.constexpr = BLOCK_N // BOX
    # A tile as the copies see it: panels of 64 numbers, in each the boxes one after the other.
    k_shape: gl.constexpr = [STAGES * PANELS * BOXES, BOX, PANEL]
    r_shape: gl.constexpr = [STAGES * BOXES, BOX, PANEL]
    k_boxes = k_smem._reinterpret(k_smem.dtype, k_shape, cache_desc.layout)
    r_boxes = r_smem._reinterpret(r_smem.dtype, r_shape, cache_desc.layout)
    for count in range(gl.cdiv(end - start, BLOCK_N)):
        tile_start = start + count * BLOCK_N
        stage = count % STAGES
        cache_rows = ()
        for b in gl.static_range(BOXES):
            position = tile_start + b * BOX
            # A block behind the context: any memory, of which nothing is used.
            block = gl.load(table_ptr + position // BLOCK_SIZE, mask=position < end, other=0)
            cache_rows = cache_rows + (block * rows_per_block + position % BLOCK_SIZE,)  # type: ignore[assignment] # noqa: RUF005
        for half in gl.static_range(2):
            # What keys have beside latents comes with the first half.
            is_ready = ready.index(stage * 2 + half)
            hopper.mbarrier.wait(free.index(stage * 2 + half), (count // STAGES & 1) ^ 1)
            hopper.mbarrier.expect(is_ready, BLOCK_N * (HALF + (1 - half) * PANEL) * 2)
            for p in gl.static_range(half * PANELS // 2, (half + 1) * PANELS // 2):
                for b in gl.static_range(BOXES):
                    hopper.tma.async_copy_global_to_shared(
                        cache_desc, [cache_rows[b], p * PANEL], is_ready,
                        k_boxes.index((stage * PANELS + p) * BOXES + b),
                    )  # fmt: skip
            if half == 0:
                for b in gl.static_range(BOXES):
                    hopper.tma.async_copy_global_to_shared(
                        cache_desc, [cache_rows[b], PANELS * PANEL], is_ready,
                        r_boxes.index(stage * BOXES + b),
                    )  # fmt: skip


@gluon.jit
def _copy_queries(q_tile, q_ptr, row_offsets, first_column, is_query, LAYOUT: gl.constexpr):
    columns = first_column + gl.arange(0, q_tile.shape[1], gl.SliceLayout(0, LAYOUT))
    hopper.async_copy.async_copy_global_to_shared(
        q_tile, q_ptr + row_offsets[:, None] + columns[None, :], mask=is_query[:, None]
    )


@gluon.jit
def _hide_unwritten(k_smem, half, num_seen, STAGES: gl.constexpr, PANEL: gl.constexpr):
    """Zeros for a half's latents from `num_seen` on: memory behind the context may hold a NaN,
    which a weight of 0 does not hide. `half` counts the halves of all stages."""
    ROWS: gl.constexpr = 16
    BOXES: gl.constexpr = k_smem.shape[1] // ROWS
    PANELS: gl.constexpr = k_smem.shape[2] // PANEL
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    shape: gl.constexpr = [2 * STAGES * PANELS * BOXES, ROWS, PANEL]
    boxes = k_smem._reinterpret(k_smem.dtype, shape, k_smem.layout)
    slots = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    for b in range(num_seen // ROWS, BOXES):
        is_seen = (b * ROWS + slots < num_seen)[:, None]
        for p in gl.static_range(PANELS):
            box = boxes.index((half * PANELS + p) * BOXES + b)
            values = box.load(layout)
            box.store(gl.where(is_seen, values, gl.zeros_like(values)))
    hopper.fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _store_half(
    acc, staged, out_ptr, partial_ptr, first_pair, num_pairs, query_start, first_token,
    stride_ot, stride_oh, split, num_splits,
    HALF: gl.constexpr, NUM_HEADS: gl.constexpr, IS_SPLIT: gl.constexpr,
):  # fmt: skip
    """`staged` is shared memory of the half's shape that nobody reads any more."""
    WIDTH: gl.constexpr = acc.shape[1]
    if IS_SPLIT:
        layout: gl.constexpr = acc.type.layout
        pairs = first_pair + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
        columns = HALF * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        place = ((query_start - first_token) * NUM_HEADS + pairs).to(gl.int64) * num_splits + split
        offsets = place[:, None] * (2 * WIDTH) + columns[None, :]
        gl.store(partial_ptr + offsets, acc, mask=(pairs < num_pairs)[:, None])
    else:
        io: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        staged.store(acc.to(staged.dtype))
        gl.thread_barrier()
        values = staged.load(io)
        pairs = first_pair + gl.arange(0, acc.shape[0], gl.SliceLayout(1, io))
        columns = HALF * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, io))
        rows = (query_start + pairs // NUM_HEADS).to(gl.int64) * stride_ot
        rows = rows + (pairs % NUM_HEADS).to(gl.int64) * stride_oh
        offsets = rows[:, None] + columns[None, :]
        gl.store(out_ptr + offsets, values, mask=(pairs < num_pairs)[:, None])


@gluon.jit
def _scores_of(q_smem, q_rope_smem, k_smem, r_smem, ready, stage, phase, BLOCK_N: gl.constexpr):
    """Three products under way."""
    PAIRS: gl.constexpr = q_rope_smem.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    hopper.mbarrier.wait(ready.index(stage * 2), phase)
    scores = hopper.warpgroup_mma(
        q_rope_smem, r_smem.index(stage).permute((1, 0)),
        gl.zeros([PAIRS, BLOCK_N], gl.float32, layout), use_acc=False, is_async=True,
    )  # fmt: skip
    scores = hopper.warpgroup_mma(
        q_smem.index(0), k_smem.index(stage * 2).permute((1, 0)), scores, is_async=True
    )
    hopper.mbarrier.wait(ready.index(stage * 2 + 1), phase)
    return hopper.warpgroup_mma(
        q_smem.index(1), k_smem.index(stage * 2 + 1).permute((1, 0)), scores, is_async=True
    )


@gluon.jit
def _weigh(scores, last_seen, tile_start, top, total, scale_log2, is_masked):
    """`softmax_step` of what the queries see of a tile."""
    if is_masked:
        layout: gl.constexpr = scores.type.layout
        positions = tile_start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout))
        scores = gl.where(positions[None, :] <= last_seen[:, None], scores, float("-inf"))
    return softmax_step(scores, top, total, scale_log2)


@gluon.jit
def _hand_on(weights, factor, p_smem, factor_smem, given, taken, count):
    """The tile's weights, and the factor for the sum so far, to the other warpgroup."""
    hopper.mbarrier.wait(taken, (count & 1) ^ 1)
    p_smem.store(weights)
    factor_smem.store(factor)
    hopper.fence_async_shared()
    gl.thread_barrier()
    hopper.mbarrier.arrive(given)


@gluon.jit
def _score(
    q_latent_ptr, q_rope_ptr, out_ptr, partial_ptr, lse_ptr,
    q_smem, q_rope_smem, k_smem, r_smem, p_smem, factor_smem, ready, free, given, taken,
    stride_qt, stride_qh, stride_rt, stride_rh, stride_ot, stride_oh,
    query_start, first_token, first_pair, num_pairs, first_position, split, num_splits,
    start, end, scale_log2,
    NUM_HEADS: gl.constexpr, IS_SPLIT: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr,
):  # fmt: skip
    """`first_position` is that of the row's first new token."""
    BLOCK_M: gl.constexpr = q_rope_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    HALF: gl.constexpr = k_smem.shape[2]
    dtype: gl.constexpr = q_smem.dtype
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)

    pairs = first_pair + gl.arange(0, BLOCK_M, gl.SliceLayout(1, wide))
    rows = (query_start + pairs // NUM_HEADS).to(gl.int64) * stride_qt
    rows = rows + (pairs % NUM_HEADS).to(gl.int64) * stride_qh
    _copy_queries(q_smem.index(0), q_latent_ptr, rows, 0, pairs < num_pairs, wide)
    _copy_queries(q_smem.index(1), q_latent_ptr, rows, HALF, pairs < num_pairs, wide)
    pairs = first_pair + gl.arange(0, BLOCK_M, gl.SliceLayout(1, narrow))
    rows = (query_start + pairs // NUM_HEADS).to(gl.int64) * stride_rt
    rows = rows + (pairs % NUM_HEADS).to(gl.int64) * stride_rh
    _copy_queries(q_rope_smem, q_rope_ptr, rows, 0, pairs < num_pairs, narrow)
    hopper.async_copy.commit_group()
    hopper.async_copy.wait_group(0)
    hopper.fence_async_shared()
    gl.thread_barrier()

    pairs = first_pair + gl.arange(0, BLOCK_M, score_rows)
    last_seen = gl.minimum(first_position + pairs // NUM_HEADS, end - 1)
    # Tiles before this position are seen whole by each query.
    all_seen = gl.minimum(first_position + first_pair // NUM_HEADS + 1, end)
    scores = _scores_of(q_smem, q_rope_smem, k_smem, r_smem, ready, 0, 0, BLOCK_N)
    scores = hopper.warpgroup_mma_wait(0, deps=[scores])
    top = gl.full([BLOCK_M], float("-inf"), gl.float32, score_rows)
    total = gl.zeros([BLOCK_M], gl.float32, score_rows)
    new_weights, top, total, factor = _weigh(
        scores, last_seen, start, top, total, scale_log2, start + BLOCK_N > all_seen
    )
    _hand_on(new_weights.to(dtype), factor, p_smem, factor_smem, given, taken, 0)
    weights = gl.convert_layout(new_weights.to(dtype), weights_layout)
    acc = gl.zeros([BLOCK_M, HALF], gl.float32, acc_layout)
    count = 0
    for tile_start in range(start + BLOCK_N, end, BLOCK_N):
        last = count % STAGES
        count += 1
        stage = count % STAGES
        acc = hopper.warpgroup_mma(weights, k_smem.index(last * 2), acc, is_async=True)
        scores = _scores_of(
            q_smem, q_rope_smem, k_smem, r_smem, ready, stage, count // STAGES & 1, BLOCK_N
        )
        acc = hopper.warpgroup_mma_wait(3, deps=[acc])
        hopper.mbarrier.arrive(free.index(last * 2))
        scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        new_weights, top, total, factor = _weigh(
            scores, last_seen, tile_start, top, total, scale_log2, tile_start + BLOCK_N > all_seen
        )
        _hand_on(new_weights.to(dtype), factor, p_smem, factor_smem, given, taken, count)
        acc = acc * gl.convert_layout(factor, acc_rows)[:, None]
        weights = gl.convert_layout(new_weights.to(dtype), weights_layout)
    last = count % STAGES
    num_seen = end - start - count * BLOCK_N
    if num_seen < BLOCK_N:
        _hide_unwritten(k_smem, last * 2, num_seen, STAGES, PANEL)
    acc = hopper.warpgroup_mma(weights, k_smem.index(last * 2), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    hopper.mbarrier.arrive(free.index(last * 2))

    divisor = gl.where(total == 0.0, 1.0, total)
    hopper.mbarrier.wait(taken, count & 1)
    factor_smem.store(divisor)
    gl.thread_barrier()
    hopper.mbarrier.arrive(given)
    if IS_SPLIT:
        # Minus infinity where the query saw nothing: the maximum never moved.
        place = ((query_start - first_token) * NUM_HEADS + pairs).to(gl.int64) * num_splits + split
        gl.store(lse_ptr + place, top * scale_log2 + gl.log2(divisor), mask=pairs < num_pairs)
    acc = acc / gl.convert_layout(divisor, acc_rows)[:, None]
    _store_half(
        acc, q_smem.index(0), out_ptr, partial_ptr, first_pair, num_pairs, query_start,
        first_token, stride_ot, stride_oh, split, num_splits, 0, NUM_HEADS, IS_SPLIT,
    )  # fmt: skip


@gluon.jit
def _sum(
    out_ptr, partial_ptr, q_smem, k_smem, p_smem, factor_smem, ready, free, given, taken,
    stride_ot, stride_oh, query_start, first_token, first_pair, num_pairs, split, num_splits,
    start, end,
    NUM_HEADS: gl.constexpr, IS_SPLIT: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = p_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    HALF: gl.constexpr = k_smem.shape[2]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    acc = gl.zeros([BLOCK_M, HALF], gl.float32, acc_layout)
    count = 0
    for tile_start in range(start, end, BLOCK_N):
        stage = count % STAGES
        hopper.mbarrier.wait(ready.index(stage * 2 + 1), count // STAGES & 1)
        hopper.mbarrier.wait(given, count & 1)
        acc = acc * factor_smem.load(acc_rows)[:, None]
        if end - tile_start < BLOCK_N:
            _hide_unwritten(k_smem, stage * 2 + 1, end - tile_start, STAGES, PANEL)
        acc = hopper.warpgroup_mma(p_smem, k_smem.index(stage * 2 + 1), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(taken)
        hopper.mbarrier.arrive(free.index(stage * 2 + 1))
        count += 1
    hopper.mbarrier.wait(given, count & 1)
    acc = acc / factor_smem.load(acc_rows)[:, None]
    _store_half(
        acc, q_smem.index(1), out_ptr, partial_ptr, first_pair, num_pairs, query_start,
        first_token, stride_ot, stride_oh, split, num_splits, 1, NUM_HEADS, IS_SPLIT,
    )  # fmt: skip


@gluon.jit
def _store_nothing(
    out_ptr, lse_ptr, first_pair, num_pairs, query_start, first_token, stride_ot, stride_oh,
    split, num_splits, NUM_HEADS: gl.constexpr, IS_SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Of queries that see nothing here."""
    io: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    pairs = first_pair + gl.arange(0, BLOCK_M, gl.SliceLayout(1, io))
    if IS_SPLIT:
        place = ((query_start - first_token) * NUM_HEADS + pairs).to(gl.int64) * num_splits + split
        nothing = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, io))
        gl.store(lse_ptr + place, nothing, mask=pairs < num_pairs)
    else:
        columns = gl.arange(0, WIDTH, gl.SliceLayout(0, io))
        rows = (query_start + pairs // NUM_HEADS).to(gl.int64) * stride_ot
        rows = rows + (pairs % NUM_HEADS).to(gl.int64) * stride_oh
        zeros = gl.zeros([BLOCK_M, WIDTH], out_ptr.dtype.element_ty, io)
        out_ptrs = out_ptr + rows[:, None] + columns[None, :]
        gl.store(out_ptrs, zeros, mask=(pairs < num_pairs)[:, None])


@gluon.jit(do_not_specialize=["num_splits", "first_row", "first_token", "stride_tabler"])
def _hopper_latent_kernel(
    cache_desc,
    q_latent_ptr,
    q_rope_ptr,
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
    stride_tabler,
    stride_ot,
    stride_oh,
    rows_per_block,
    first_row,
    first_token,
    num_splits,
    scale_log2,
    BLOCK_SIZE: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
    PANEL: gl.constexpr,
    IS_SPLIT: gl.constexpr,
):
    split = gl.program_id(1)
    row = first_row + gl.program_id(2)
    query_start = gl.load(query_starts_ptr + row)
    num_tokens = gl.load(query_starts_ptr + row + 1) - query_start
    context_len = gl.load(context_lens_ptr + row)
    first_pair = gl.program_id(0) * BLOCK_M
    num_pairs = num_tokens * NUM_HEADS
    if first_pair >= num_pairs:
        return
    # The last token of the tile sees the most.
    last_token = gl.minimum((first_pair + BLOCK_M - 1) // NUM_HEADS, num_tokens - 1)
    seen = gl.maximum(context_len - num_tokens + last_token + 1, 0)
    tiles_per_split = gl.cdiv(gl.cdiv(seen, BLOCK_N), num_splits)
    start = split * tiles_per_split * BLOCK_N
    end = gl.minimum(seen, start + tiles_per_split * BLOCK_N)
    if start >= end:
        _store_nothing(
            out_ptr, lse_ptr, first_pair, num_pairs, query_start, first_token, stride_ot,
            stride_oh, split, num_splits, NUM_HEADS, IS_SPLIT, BLOCK_M, 2 * HALF,
        )  # fmt: skip
        return

    dtype: gl.constexpr = cache_desc.dtype
    layout: gl.constexpr = cache_desc.layout
    q_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_M, HALF], layout)
    q_rope_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, PANEL], layout)
    # Halves of each stage, one after the other.
    k_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_N, HALF], layout)
    r_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, PANEL], layout)
    p_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factor_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_M], plain)
    barriers: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], barriers)
    free = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], barriers)
    given = gl.allocate_shared_memory(gl.int64, [1], barriers)
    taken = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for i in gl.static_range(2 * STAGES):
        hopper.mbarrier.init(ready.index(i), count=1)
        hopper.mbarrier.init(free.index(i), count=1)
    hopper.mbarrier.init(given, count=1)
    hopper.mbarrier.init(taken, count=1)
    hopper.fence_async_shared()
    table_ptr = block_tables_ptr + row.to(gl.int64) * stride_tabler
    gl.warp_specialize(
        [
            (_score, (
                q_latent_ptr, q_rope_ptr, out_ptr, partial_ptr, lse_ptr,
                q_smem, q_rope_smem, k_smem, r_smem, p_smem, factor_smem,
                ready, free, given, taken,
                stride_qt, stride_qh, stride_rt, stride_rh, stride_ot, stride_oh,
                query_start, first_token, first_pair, num_pairs, context_len - num_tokens,
                split, num_splits, start, end, scale_log2,
                NUM_HEADS, IS_SPLIT, STAGES, PANEL,
            )),
            (_sum, (
                out_ptr, partial_ptr, q_smem, k_smem, p_smem, factor_smem,
                ready, free, given, taken,
                stride_ot, stride_oh, query_start, first_token, first_pair, num_pairs,
                split, num_splits, start, end, NUM_HEADS, IS_SPLIT, STAGES, PANEL,
            )),
            (_fetch, (
                cache_desc, k_smem, r_smem, ready, free, table_ptr, rows_per_block, start, end,
                BLOCK_SIZE, STAGES, PANEL,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def suits_hopper_latent(
    q_latent: Float[Tensor, "T H L"],
    q_rope: Float[Tensor, "T H R"],
    cache_layer: Float[Tensor, "P S L+R"],
) -> bool:
    """Whether these shapes fit the kernel; with fewer heads a tile would be half empty."""
    num_blocks, block_size, row = cache_layer.shape
    return (
        runs_hopper(q_latent.device)
        and q_latent.element_size() == 2
        and q_latent.dtype is q_rope.dtype is cache_layer.dtype
        and (q_latent.shape[2], q_rope.shape[2]) == (_LATENT, _ROPE)
        and q_latent.shape[1] >= _BLOCK_M
        and block_size % 16 == 0
        and (block_size % _BLOCK_N == 0 or _BLOCK_N % block_size == 0)
        and cache_layer.stride(1) == row
        and cache_layer.stride(0) % row == 0
        and num_blocks * cache_layer.stride(0) // row < 2**31
        and cache_layer.data_ptr() % 16 == 0
        and all(x.data_ptr() % 16 == x.stride(0) % 16 == x.stride(1) % 16 == 0
                for x in (q_latent, q_rope))
    )  # fmt: skip


def _choose_splits(num_tiles: int, num_programs: int) -> int:
    """As many, a power of two, as let all programs run side by side: one fills a multiprocessor."""
    wanted = num_programs // max(num_tiles, 1)
    return min(1 << max(wanted, 1).bit_length() - 1, _MAX_SPLITS)


def hopper_latent_rows(
    q_latent: Float[Tensor, "T H L"],
    q_rope: Float[Tensor, "T H R"],
    cache_layer: Float[Tensor, "P S L+R"],
    rows: AttentionRows,
    part: slice,
    tokens: slice,
    max_query_len: int,
    scale: float,
    out: Float[Tensor, "T H L"],
    *,
    may_split: bool,
) -> None:
    """As `triton.latent_attention_rows`; `suits_hopper_latent` must hold. Where rows may not be
    split, a query meets its latents in one order whatever the batch is."""
    num_blocks, block_size, row_size = cache_layer.shape
    num_heads = q_latent.shape[1]
    num_rows = part.stop - part.start
    tiles_per_row = cdiv(max_query_len * num_heads, _BLOCK_M)
    num_splits = 1
    if may_split:
        device = q_latent.device
        num_splits = _choose_splits(num_rows * tiles_per_row, num_multiprocessors(device))
    partial = lse = out
    if num_splits > 1:
        partial, lse = new_partials(out[tokens], num_splits)
    rows_per_block = cache_layer.stride(0) // row_size
    # One row for each slot, from this layer's first on.
    descriptor = TensorDescriptor(
        cache_layer,
        [(num_blocks - 1) * rows_per_block + block_size, row_size],
        [row_size, 1],
        [min(block_size, _BLOCK_N), _PANEL],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    )
    _hopper_latent_kernel[(tiles_per_row, num_splits, num_rows)](
        cache_desc=descriptor,
        q_latent_ptr=q_latent,
        q_rope_ptr=q_rope,
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
        stride_tabler=rows.block_tables.stride(0),
        stride_ot=out.stride(0),
        stride_oh=out.stride(1),
        rows_per_block=rows_per_block,
        first_row=part.start,
        first_token=tokens.start,
        num_splits=num_splits,
        scale_log2=scale * LOG2_E,
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        HALF=_LATENT // 2,
        STAGES=_STAGES,
        PANEL=_PANEL,
        IS_SPLIT=num_splits > 1,
        num_warps=4,
    )
    if num_splits > 1:
        merge_splits(partial, lse, out, tokens.start)
