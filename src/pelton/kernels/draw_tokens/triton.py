# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Finds where the kept tokens end by a 16-way search over the distances, without a sort.

    narrow x 6 (top-k) + 6 (top-p)   sums of the tokens nearer than 16 distances, the next interval
    sum_blocks                       sums of the kept weights, block by block
    pick                             the block, then the token, where the running sum passes u

A row is split over several programs, which add up their integers atomically: the order changes
nothing. Launches are the only barrier between them. Each program of a pass works out for itself
what the pass before it has found, from that pass's sums; the row's first one writes it down for
the next pass. A row that is done costs its programs a few loads.
"""

from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.draw_tokens.reference import RandomRows
from pelton.kernels.triton_runtime import cdiv, next_power_of_2, num_multiprocessors, tl, triton

_PASSES = 6
"""16^6 is at least the 2^23 distances."""
_RECORD = 26
"""Numbers that a pass leaves of a row: 16 sums, the ends of what it met, its state; and one that
keeps every record at a multiple of 16 bytes, so that one compiled kernel serves all."""
_BLOCK = 2048
"""Tokens of which a sum of kept weights is kept."""


@triton.jit
def _weigh_in_parts(distances):
    """Two unsigned integers below 2^24 whose product is the weight."""
    x = (((distances & 0x3FFFF) << 5) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    inner = x * -0.0009396980167366564 + 0.009193893522024155
    inner = inner * x + -0.055288009345531464
    inner = inner * x + 0.24017725884914398
    inner = inner * x + -0.6931434273719788
    halves = (inner * x + 2.0).to(tl.int32, bitcast=True) - 0x3F800000
    shift = 17 - (distances >> 18)
    halves = tl.where(distances < 8388607, halves, 0)
    parts = halves >> tl.maximum(-shift, 0)
    return parts.to(tl.uint32), (1 << tl.maximum(shift, 0)).to(tl.uint32)


@triton.jit
def _weigh(distances):
    part, power = _weigh_in_parts(distances)
    return part.to(tl.int64) * power.to(tl.int64)


@triton.jit
def _load_distances(logits_ptr, ids, vocab_size, highest, scale):
    logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    distances = (highest - logits.to(tl.float32)) * scale
    # A NaN is not below: it has no weight.
    distances = tl.where(distances < 8388607.0, distances, 8388607.0)
    return (distances + 8388608.0).to(tl.int32, bitcast=True) & 0x7FFFFF


@triton.jit
def _locate_row(logits_ptr, rows_ptr, highest_ids_ptr, temperature_ptr, stride_ln):
    """A pointer to the row's logits, its highest one, and distance per logit."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    row_ptr = logits_ptr + row * stride_ln
    highest = tl.load(row_ptr + tl.load(highest_ids_ptr + row)).to(tl.float32)
    temperature = tl.maximum(tl.load(temperature_ptr + index), 1e-20)
    return row_ptr, highest, tl.div_rn(tl.full((), 378193.84375, tl.float32), temperature)


@triton.jit
def _at_least(share, total):
    """The least integer that is at least that share of the total, and not 0."""
    exact = share.to(tl.float64) * total.to(tl.float64)
    least = exact.to(tl.int64)
    least = tl.where(least.to(tl.float64) < exact, least + 1, least)
    return tl.maximum(least, 1)


@triton.jit
def _advance(record_ptr, top_k, top_p):
    """(phase, low, high, base, wanted, last, ties) of the next pass, from a pass's record.

    Phase 0: nothing was done yet; 1: top-k is searched for; 2: top-p; 3: done. Kept so far are the
    tokens nearer than `last` and the first `ties` at that distance. The end is in [low, high), the
    sum below low is `base`, and `wanted` is to be reached (top-p: 0 until the total is known).
    """
    phase = tl.load(record_ptr + 18)
    low = tl.load(record_ptr + 19)
    high = tl.load(record_ptr + 20)
    base = tl.load(record_ptr + 21)
    wanted = tl.load(record_ptr + 22)
    last = tl.load(record_ptr + 23)
    ties = tl.load(record_ptr + 24)
    if phase == 0:
        is_found = True
        last = tl.full((), 8388607, tl.int64)
        ties = tl.zeros((), tl.int64)
    else:
        sums = tl.load(record_ptr + tl.arange(0, 16))  # [16]
        nearest = 8388607 - tl.load(record_ptr + 16)
        farthest = tl.load(record_ptr + 17) - 1
        if wanted == 0:
            tie_weight = _weigh(last.to(tl.int32))
            wanted = _at_least(top_p, tl.max(sums, axis=0) + ties * tie_weight)
        num_below = tl.sum((sums < wanted).to(tl.int32), axis=0)
        base = tl.max(tl.where(sums < wanted, sums, base), axis=0)
        step = (high - low + 15) // 16
        is_beyond = num_below == 16
        is_alike = nearest == farthest
        found = tl.where(is_beyond, last, tl.where(is_alike, nearest, low + num_below * step))
        high = tl.minimum(low + (num_below + 1) * step, high)
        low = low + num_below * step
        is_found = is_beyond | is_alike | (high - low == 1)
        if is_found & (phase < 3):
            each = tl.where(phase == 1, 1, tl.maximum(_weigh(found.to(tl.int32)), 1))
            last = found
            ties = (wanted - base + each - 1) // each
    if is_found & (phase < 3):
        phase += 1
        if (phase == 1) & (top_k == 0):
            phase += 1
        if (phase == 2) & (top_p >= 1.0):
            phase += 1
        low = tl.zeros((), tl.int64)
        high = last
        base = tl.zeros((), tl.int64)
        wanted = tl.where(phase == 1, top_k, 0).to(tl.int64)
    return phase, low, high, base, wanted, last, ties


@triton.jit
def _narrow_kernel(
    logits_ptr,
    rows_ptr,
    highest_ids_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    record_ptr,
    next_record_ptr,
    stride_ln,
    vocab_size,
    span,
    RECORD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UNROLL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    phase, low, high, base, wanted, last, ties = _advance(
        record_ptr + index * RECORD, tl.load(top_k_ptr + index), tl.load(top_p_ptr + index)
    )
    next_ptr = next_record_ptr + index * RECORD
    if split == 0:
        tl.store(next_ptr + 18, phase)
        tl.store(next_ptr + 19, low)
        tl.store(next_ptr + 20, high)
        tl.store(next_ptr + 21, base)
        tl.store(next_ptr + 22, wanted)
        tl.store(next_ptr + 23, last)
        tl.store(next_ptr + 24, ties)
    if phase < 3:
        row_ptr, highest, scale = _locate_row(
            logits_ptr, rows_ptr, highest_ids_ptr, temperature_ptr, stride_ln
        )
        step = (high - low + 15) // 16
        edges = tl.minimum(low + (tl.arange(0, 16) + 1) * step, high).to(tl.int32)  # [16]
        low_id, high_id = low.to(tl.int32), high.to(tl.int32)
        offsets = tl.arange(0, BLOCK_V)  # [BLOCK_V]
        sums = tl.zeros([16, BLOCK_V], tl.uint64)
        nearest = tl.full([BLOCK_V], 8388607, tl.int32)
        farthest = tl.full([BLOCK_V], -1, tl.int32)
        first = split * span
        for start in range(first, tl.minimum(first + span, vocab_size), UNROLL * BLOCK_V):
            for part in tl.static_range(UNROLL):
                ids = start + part * BLOCK_V + offsets
                distances = _load_distances(row_ptr, ids, vocab_size, highest, scale)
                amounts, factors = _weigh_in_parts(distances)
                if phase == 1:
                    amounts = tl.full([BLOCK_V], 1, tl.uint32)
                    factors = tl.full([BLOCK_V], 1, tl.uint32)
                is_nearer = distances[None, :] < edges[:, None]  # [16, BLOCK_V]
                # A wide multiply-add: cheaper than the choice of a 64-bit number and its sum.
                factors = tl.where(is_nearer, factors[None, :], 0)
                sums += amounts[None, :].to(tl.uint64) * factors.to(tl.uint64)
                nearest = tl.minimum(nearest, tl.where(distances >= low_id, distances, 8388607))
                farthest = tl.maximum(farthest, tl.where(distances < high_id, distances, -1))
        row_sums = tl.sum(sums, axis=1).to(tl.int64)
        tl.atomic_add(next_ptr + tl.arange(0, 16), row_sums, sem="relaxed")
        from_far = 8388607 - tl.min(nearest, axis=0)
        tl.atomic_max(next_ptr + 16, from_far.to(tl.int64), sem="relaxed")
        tl.atomic_max(next_ptr + 17, tl.max(farthest, axis=0).to(tl.int64) + 1, sem="relaxed")


@triton.jit(do_not_specialize=["blocks_each"])
def _sum_blocks_kernel(
    logits_ptr,
    rows_ptr,
    highest_ids_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    record_ptr,
    sums_ptr,
    num_ties_ptr,
    ends_ptr,
    stride_ln,
    vocab_size,
    num_blocks,
    blocks_each,
    RECORD: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    _, _, _, _, _, last, ties = _advance(
        record_ptr + index * RECORD, tl.load(top_k_ptr + index), tl.load(top_p_ptr + index)
    )
    row_ptr, highest, scale = _locate_row(
        logits_ptr, rows_ptr, highest_ids_ptr, temperature_ptr, stride_ln
    )
    least = _at_least(tl.load(min_p_ptr + index), tl.full((), 1 << 40, tl.int64))
    if _weigh(last.to(tl.int32)) < least:
        ties = tl.zeros((), tl.int64)
    split = tl.program_id(1)
    if split == 0:
        tl.store(ends_ptr + index * 3, last)
        tl.store(ends_ptr + index * 3 + 1, ties)
        tl.store(ends_ptr + index * 3 + 2, least)
    last_id = last.to(tl.int32)
    first = split * blocks_each
    for block in range(first, tl.minimum(first + blocks_each, num_blocks)):
        ids = block * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
        distances = _load_distances(row_ptr, ids, vocab_size, highest, scale)
        weights = _weigh(distances)
        is_kept = (distances < last_id) & (weights >= least)
        place = index * num_blocks + block
        tl.store(sums_ptr + place, tl.sum(tl.where(is_kept, weights, 0), axis=0))
        tl.store(num_ties_ptr + place, tl.sum((distances == last_id).to(tl.int32), axis=0))


@triton.jit
def _pick_kernel(
    logits_ptr,
    rows_ptr,
    highest_ids_ptr,
    temperature_ptr,
    uniforms_ptr,
    sums_ptr,
    num_ties_ptr,
    ends_ptr,
    token_ids_ptr,
    stride_ln,
    vocab_size,
    num_blocks,
    BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    last = tl.load(ends_ptr + index * 3)
    ties = tl.load(ends_ptr + index * 3 + 1)
    least = tl.load(ends_ptr + index * 3 + 2)
    tie_weight = _weigh(last.to(tl.int32))
    blocks = tl.arange(0, BLOCKS)  # [BLOCKS]
    is_block = blocks < num_blocks
    num_ties = tl.load(num_ties_ptr + index * num_blocks + blocks, mask=is_block, other=0)
    num_ties = num_ties.to(tl.int64)
    ties_before = tl.cumsum(num_ties, axis=0) - num_ties
    num_kept = tl.minimum(tl.maximum(ties - ties_before, 0), num_ties)
    sums = tl.load(sums_ptr + index * num_blocks + blocks, mask=is_block, other=0)
    sums += num_kept * tie_weight
    ends = tl.cumsum(sums, axis=0)
    uniform = tl.load(uniforms_ptr + index).to(tl.float64)
    point = (uniform * tl.sum(sums, axis=0).to(tl.float64)).to(tl.int64)
    block = tl.sum((ends <= point).to(tl.int32), axis=0)
    point -= tl.sum(tl.where(blocks < block, sums, 0), axis=0)
    ties -= tl.sum(tl.where(blocks < block, num_ties, 0), axis=0)

    row_ptr, highest, scale = _locate_row(
        logits_ptr, rows_ptr, highest_ids_ptr, temperature_ptr, stride_ln
    )
    ids = block * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    distances = _load_distances(row_ptr, ids, vocab_size, highest, scale)
    weights = _weigh(distances)
    is_tie = distances == last.to(tl.int32)
    is_early = tl.cumsum(is_tie.to(tl.int32), axis=0) <= ties
    is_kept = ((distances < last.to(tl.int32)) | (is_tie & is_early)) & (weights >= least)
    ends = tl.cumsum(tl.where(is_kept, weights, 0), axis=0)
    token_id = block * BLOCK_V + tl.sum((ends <= point).to(tl.int32), axis=0)
    tl.store(token_ids_ptr + index, tl.minimum(token_id, vocab_size - 1))


def draw_tokens_triton(
    logits: Float[Tensor, "N V"], highest_ids: Int[Tensor, " N"], rows: RandomRows
) -> Int[Tensor, " n"]:
    num_rows, vocab_size = rows.rows.shape[0], logits.shape[1]
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return token_ids
    num_blocks = cdiv(vocab_size, _BLOCK)
    # A few programs on each multiprocessor, none with less than a block.
    splits = min(cdiv(4 * num_multiprocessors(logits.device), num_rows), num_blocks)
    blocks_each = cdiv(num_blocks, splits)
    grid = num_rows, cdiv(num_blocks, blocks_each)
    records = logits.new_zeros(
        (1 + _PASSES * (rows.has_top_k + rows.has_top_p), num_rows, _RECORD), dtype=torch.int64
    ).unbind()
    ends = torch.empty((num_rows, 3), dtype=torch.int64, device=logits.device)
    sums = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=logits.device)
    num_ties = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    shared = {
        "logits_ptr": logits,
        "rows_ptr": rows.rows,
        "highest_ids_ptr": highest_ids,
        "temperature_ptr": rows.temperature,
        "stride_ln": logits.stride(0),
        "vocab_size": vocab_size,
        # A fused multiply-add rounds once where the reference rounds twice.
        "enable_fp_fusion": False,
    }
    filters = {"top_k_ptr": rows.top_k, "top_p_ptr": rows.top_p}
    for record, next_record in pairwise(records):
        _narrow_kernel[grid](
            **shared,
            **filters,
            record_ptr=record,
            next_record_ptr=next_record,
            span=blocks_each * _BLOCK,
            RECORD=_RECORD,
            BLOCK_V=256,
            UNROLL=8,
            num_warps=8,
        )
    _sum_blocks_kernel[grid](
        **shared,
        **filters,
        min_p_ptr=rows.min_p,
        record_ptr=records[-1],
        sums_ptr=sums,
        num_ties_ptr=num_ties,
        ends_ptr=ends,
        num_blocks=num_blocks,
        blocks_each=blocks_each,
        RECORD=_RECORD,
        BLOCK_V=_BLOCK,
        num_warps=8,
    )
    _pick_kernel[(num_rows,)](
        **shared,
        uniforms_ptr=rows.uniforms,
        sums_ptr=sums,
        num_ties_ptr=num_ties,
        ends_ptr=ends,
        token_ids_ptr=token_ids,
        num_blocks=num_blocks,
        BLOCKS=next_power_of_2(num_blocks),
        BLOCK_V=_BLOCK,
        num_warps=8,
    )
    return token_ids
