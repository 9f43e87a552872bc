# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention of decode rows over a cache in FP8, in Gluon.

The matrix units take values of two neighbouring positions in one register, and a cache in bytes has
a position's dimensions side by side: Triton gathers them byte by byte from shared memory, which
takes longer than reading the cache. Here a thread loads the same dimensions of two positions as
words and interleaves them in registers. For that the dimensions of queries, keys and results stand
in an order of their own (`_query_dim`, `_value_dim`). Each warp has a KV head of its own, and a
program reads those of all its warps in one run.

What a program computes is what `triton_decode` computes, in another order.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.triton_runtime import cdiv, gl, gluon, hopper, runs_hopper

_NUM_WARPS = 4
_MAX_SPLITS = 32
_UNSPLIT_WINDOW = 256
_MAX_WASTE = 1.35
"""Places of all waves over programs."""
_FEWEST_TILE_ROWS = 256
"""Rows times KV heads from which this kernel is faster."""


@gluon.jit
def _query_dim(place, HEAD_DIM: gl.constexpr):
    """The dimension at a column of the queries' operand: thread t of four holds the t-th quarter,
    and a register the same byte of two words."""
    return place // 2 % 4 * (HEAD_DIM // 4) + place // 32 * 8 + place % 2 * 4 + place // 8 % 4


@gluon.jit
def _value_dim(place, HEAD_DIM: gl.constexpr):
    """The dimension at a column of the values' operand: thread g of eight holds the g-th eighth."""
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


@gluon.jit
def _to_float16_pairs(words):
    """int32 [N, W] of four e4m3 to float16 [N, W, 4]. Two of a thread's words, one register after
    the other, become four registers of a byte of each."""
    dims = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 both;
        .reg .b16 low, high;
        prmt.b32 both, $4, $5, 0x5140;
        mov.b32 {low, high}, both;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        prmt.b32 both, $4, $5, 0x7362;
        mov.b32 {low, high}, both;
        cvt.rn.f16x2.e4m3x2 $2, low;
        cvt.rn.f16x2.e4m3x2 $3, high;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,r,r",
        args=[words],
        dtype=(gl.float16,) * 4,
        is_pure=True,
        pack=2,
    )
    tile = gl.join(gl.join(dims[0], dims[2]), gl.join(dims[1], dims[3]))
    return tile.reshape([words.shape[0], words.shape[1], 4])


@gluon.jit
def _heads(warps, members, GROUP_SIZE: gl.constexpr, num_warps: gl.constexpr):
    """[warp, member]: query heads."""
    return (gl.program_id(0) * num_warps + warps)[:, None] * GROUP_SIZE + members[None, :]


@gluon.jit
def _block_ids(table_ptr, start, low, end, rows, BLOCK_SIZE: gl.constexpr):
    positions = start + rows
    return gl.load(
        table_ptr + positions // BLOCK_SIZE, mask=(positions >= low) & (positions < end), other=0
    )


@gluon.jit
def _fetch(
    k_tile, v_tile, heads_ptr, block_ids, start, low, end, rows, words,
    stride_cachep, stride_cachekv, stride_caches, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Starts to copy a tile of keys and values; zeros where a position is not seen."""
    positions = start + rows
    is_seen = (positions >= low) & (positions < end)
    offsets = block_ids.to(gl.int64) * stride_cachep + positions % BLOCK_SIZE * stride_caches
    ptrs = heads_ptr + offsets[:, None] + words[None, :]
    mask = is_seen[:, None] & (words >= 0)[None, :]
    hopper.async_copy.async_copy_global_to_shared(k_tile, ptrs, mask=mask)
    hopper.async_copy.async_copy_global_to_shared(v_tile, ptrs + stride_cachekv, mask=mask)
    hopper.async_copy.commit_group()


@gluon.jit(do_not_specialize=["num_splits", "window"])
def _fp8_decode_kernel(
    q_ptr, cache_ptr, block_tables_ptr, context_lens_ptr, sinks_ptr, out_ptr, partial_ptr, lse_ptr,
    stride_qt, stride_qh, stride_cachep, stride_cachekv, stride_caches, stride_tabler,
    stride_ot, stride_oh, num_heads, num_splits, scale_log2, v_scale, window,
    BLOCK_SIZE: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, IS_SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr,
    BLOCK_N: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    gl.static_assert(BLOCK_N == 32 and num_warps == 4, "the layouts below are made for these")
    # A warp has a KV head, the program its neighbours too: one run of bytes of a position.
    split = gl.program_id(1)
    row = gl.program_id(2).to(gl.int64)
    WORDS: gl.constexpr = HEAD_DIM // 4

    context_len = gl.load(context_lens_ptr + row)
    low = gl.maximum(context_len - window, 0)
    first_tile = low // BLOCK_N
    num_tiles = gl.cdiv(context_len, BLOCK_N) - first_tile
    tiles_per_split = gl.cdiv(num_tiles, num_splits)
    start = (first_tile + split * tiles_per_split) * BLOCK_N
    end = gl.minimum(context_len, start + tiles_per_split * BLOCK_N)

    # [warp, member of the group, position or dimension]
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    copy: gl.constexpr = gl.BlockedLayout([1, 4], [32 // WORDS, WORDS], [num_warps, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    k_words: gl.constexpr = _key_layout(WORDS)
    v_words: gl.constexpr = _value_layout(WORDS, False)
    v_pairs: gl.constexpr = _value_layout(WORDS, True)

    k_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, num_warps * WORDS], shared)
    v_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, num_warps * WORDS], shared)
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copy))
    words = gl.arange(0, num_warps * WORDS, gl.SliceLayout(0, copy))
    table_ptr = block_tables_ptr + row * stride_tabler
    heads_ptr = cache_ptr + gl.program_id(0) * (num_warps * WORDS)
    AHEAD: gl.constexpr = STAGES - 1
    for early in gl.static_range(AHEAD):
        early_start = start + early * BLOCK_N
        ids = _block_ids(table_ptr, early_start, low, end, rows, BLOCK_SIZE)
        _fetch(
            k_tiles.index(early), v_tiles.index(early), heads_ptr, ids, early_start, low, end,
            rows, words, stride_cachep, stride_cachekv, stride_caches, BLOCK_SIZE,
        )  # fmt: skip
    ids = _block_ids(table_ptr, start + AHEAD * BLOCK_N, low, end, rows, BLOCK_SIZE)

    of_heads: gl.constexpr = gl.SliceLayout(2, left)
    members = gl.arange(0, 16, gl.SliceLayout(0, of_heads))
    warps = gl.arange(0, num_warps, gl.SliceLayout(1, of_heads))
    heads = _heads(warps, members, GROUP_SIZE, num_warps)
    is_member = (members < GROUP_SIZE)[None, :] & (warps >= 0)[:, None]
    dims = _query_dim(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(0, left))), HEAD_DIM)
    dims = gl.expand_dims(gl.expand_dims(dims, 0), 0)
    q = gl.load(
        q_ptr + row * stride_qt + gl.expand_dims(heads * stride_qh, 2) + dims,
        mask=gl.expand_dims(is_member, 2) & (dims >= 0),
        other=0.0,
    ).to(gl.float16)

    by_head: gl.constexpr = gl.SliceLayout(2, mma)
    members = gl.arange(0, 16, gl.SliceLayout(0, by_head))
    warps = gl.arange(0, num_warps, gl.SliceLayout(1, by_head))
    heads = _heads(warps, members, GROUP_SIZE, num_warps)
    is_member = (members < GROUP_SIZE)[None, :] & (warps >= 0)[:, None]
    running_max = gl.full([num_warps, 16], float("-inf"), gl.float32, by_head)
    running_sum = gl.zeros([num_warps, 16], gl.float32, by_head)
    if HAS_SINKS and not IS_SPLIT:  # splits get it when they are merged
        # The softmax starts with the sink, which has weight and no value.
        sinks = gl.load(sinks_ptr + heads, mask=is_member, other=0.0).to(gl.float32)
        running_max = sinks * 1.4426950408889634
        running_sum += 1.0
    acc = gl.zeros([num_warps, 16, HEAD_DIM], gl.float32, mma)
    tile_positions = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(0, mma)))
    stage = 0
    for tile_start in range(start, end, BLOCK_N):
        hopper.async_copy.wait_group(AHEAD - 1)
        # This tile has landed for all warps, and all have done with the one before, whose place
        # the next copies take.
        gl.thread_barrier()
        next_start = tile_start + AHEAD * BLOCK_N
        next_stage = gl.where(stage == 0, STAGES - 1, stage - 1)
        _fetch(
            k_tiles.index(next_stage), v_tiles.index(next_stage), heads_ptr, ids, next_start, low,
            end, rows, words, stride_cachep, stride_cachekv, stride_caches, BLOCK_SIZE,
        )  # fmt: skip
        ids = _block_ids(table_ptr, next_start + BLOCK_N, low, end, rows, BLOCK_SIZE)

        k = _to_float16_pairs(k_tiles.index(stage).load(k_words))
        k = k.reshape([BLOCK_N, num_warps, 4, HEAD_DIM // 32, 2, 4]).permute((1, 3, 5, 2, 4, 0))
        k = gl.convert_layout(k.reshape([num_warps, HEAD_DIM, BLOCK_N]), right)
        scores = gl.zeros([num_warps, 16, BLOCK_N], gl.float32, mma)
        scores = hopper.mma_v2(q, k, scores) * scale_log2
        positions = tile_start + tile_positions
        is_seen = (positions >= low) & (positions < end)
        is_seen = gl.expand_dims(gl.expand_dims(is_seen, 0), 0)
        scores = gl.where(is_seen, scores, float("-inf"))
        # Each tile of a split holds a seen position, so the maximum is finite.
        new_max = gl.maximum(running_max, gl.max(scores, axis=2))
        probabilities = gl.exp2(scores - gl.expand_dims(new_max, 2))
        correction = gl.exp2(running_max - new_max)
        running_sum = running_sum * correction + gl.sum(probabilities, axis=2)
        running_max = new_max
        acc = acc * gl.expand_dims(correction, 2)
        v = _to_float16_pairs(gl.convert_layout(v_tiles.index(stage).load(v_words), v_pairs))
        v = v.reshape([BLOCK_N, num_warps, 8, HEAD_DIM // 32, 4]).permute((1, 0, 3, 4, 2))
        v = gl.convert_layout(v.reshape([num_warps, BLOCK_N, HEAD_DIM]), right)
        acc = hopper.mma_v2(gl.convert_layout(probabilities.to(gl.float16), left), v, acc)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    hopper.async_copy.wait_group(0)

    divisor = gl.where(running_sum == 0.0, 1.0, running_sum)
    acc = acc / gl.expand_dims(divisor, 2) * v_scale
    dims = _value_dim(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(0, mma))), HEAD_DIM)
    dims = gl.expand_dims(gl.expand_dims(dims, 0), 0)
    mask = gl.expand_dims(is_member, 2) & (dims >= 0)
    if IS_SPLIT:
        place = (row * num_heads + heads) * num_splits + split
        # Minus infinity where the split is empty: running_max never moved.
        gl.store(lse_ptr + place, running_max + gl.log2(divisor), mask=is_member)
        # The merge does not read an empty split's accumulator.
        tile_ptr = partial_ptr + gl.expand_dims(place * HEAD_DIM, 2) + dims
        gl.store(tile_ptr, acc, mask=mask & (start < end))
    else:
        tile_ptr = out_ptr + row * stride_ot + gl.expand_dims(heads * stride_oh, 2) + dims
        gl.store(tile_ptr, acc.to(out_ptr.dtype.element_ty), mask=mask)


_BLOCK_N = 32
"""Positions of a tile, for each of a program's KV heads."""


def runs_fp8_decode(q: Float[Tensor, "R H K"], cache_layer: Float[Tensor, "P 2 S G K"]) -> bool:
    num_kv_heads = cache_layer.shape[3]
    return (
        cache_layer.dtype is torch.float8_e4m3fn
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in (64, 128)
        and q.shape[0] * num_kv_heads >= _FEWEST_TILE_ROWS
        and num_kv_heads % _NUM_WARPS == 0
        and q.shape[1] // num_kv_heads <= 16
        and cache_layer.stride(3) == q.shape[2]  # heads side by side
        and not any(stride % 4 for stride in cache_layer.stride()[:3])  # read as words
        and runs_hopper(q.device)
    )


def tune_fp8_decode(
    num_rows: int, num_kv_heads: int, head_dim: int, window: int, num_multiprocessors: int
) -> int:
    """The fewest splits whose programs come in waves of which the last is nearly full. A window
    that is not longer than a few tiles is not split."""
    places = num_multiprocessors * (3 if head_dim == 128 else 4)
    num_splits = 1
    while num_splits < _MAX_SPLITS and not 0 < window <= _UNSPLIT_WINDOW:
        num_programs = num_rows * num_kv_heads // _NUM_WARPS * num_splits
        if cdiv(num_programs, places) * places <= _MAX_WASTE * num_programs:
            break
        num_splits *= 2
    return num_splits


def launch_fp8_decode(
    q: Float[Tensor, "R H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    block_tables: Int[Tensor, "R B"],
    context_lens: Int[Tensor, " R"],
    scale_log2: float,
    window: int,
    sinks: Float[Tensor, " H"] | None,
    v_scale: float,
    num_splits: int,
    partial: Float[Tensor, "R H N K"],
    lse: Float[Tensor, "R H N"],
    out: Float[Tensor, "R H K"],
) -> None:
    """`triton_decode` says what the arguments are. Writes `out` with one split, else the others."""
    num_rows, num_heads, head_dim = q.shape
    words = cache_layer.view(torch.int32)
    num_kv_heads = words.shape[3]
    _fp8_decode_kernel[(num_kv_heads // _NUM_WARPS, num_splits, num_rows)](
        q_ptr=q,
        cache_ptr=words,
        block_tables_ptr=block_tables,
        context_lens_ptr=context_lens,
        sinks_ptr=q if sinks is None else sinks,
        out_ptr=out,
        partial_ptr=partial,
        lse_ptr=lse,
        stride_qt=q.stride(0),
        stride_qh=q.stride(1),
        stride_cachep=words.stride(0),
        stride_cachekv=words.stride(1),
        stride_caches=words.stride(2),
        stride_tabler=block_tables.stride(0),
        stride_ot=out.stride(0),
        stride_oh=out.stride(1),
        num_heads=num_heads,
        num_splits=num_splits,
        scale_log2=scale_log2,
        v_scale=v_scale,
        window=window,
        BLOCK_SIZE=words.shape[2],
        GROUP_SIZE=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        STAGES=2 if head_dim == 128 else 3,
        IS_SPLIT=num_splits > 1,
        HAS_SINKS=sinks is not None,
        BLOCK_N=_BLOCK_N,
        num_warps=_NUM_WARPS,
    )
