# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The MXFP4 experts' products of one token on Hopper.

As `hopper`, whose unpacking and two e4m3 numbers for an activation it takes. With two or three
programs on a multiprocessor the time from a load to its use is what counts, so nothing in the loop
waits for another thread: weights are loaded straight into the registers of the thread that unpacks
them, some rounds ahead, and the token's activations lie in shared memory from the start. Nothing
is sorted before, nor even chosen: a program finds its expert by the router's logits.

A program has two warpgroups where all programs then run at once: both have the same features, and
each a half of the inputs. Otherwise it has one, so that three of them fit. A matrix instruction has
eight columns at least: they are the high and low parts of the warpgroups' inputs in two rounds, or
in four, and in the end a warpgroup takes of a round's sums the columns that were meant for it.

Where a result may not depend on the batch, a program has one warpgroup, keeps all rounds' sums, and
adds them up in the end in the order of the inputs: the bits are those of `hopper`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import must_be_invariant
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product.hopper_tiles import CHUNK, TILE_F, scale_of, unpack
from pelton.kernels.moe.routing import SoftmaxTopK
from pelton.kernels.triton_runtime import (
    cdiv,
    gl,
    gluon,
    hopper,
    next_power_of_2,
    num_multiprocessors,
    overlap_options,
    tl,
)


@dataclass(frozen=True, slots=True)
class LoneToken:
    """A step's one token, whose experts the products choose themselves, as `softmax_top_k` does."""

    logits: Float[Tensor, "1 E"]
    weights: Float[Tensor, "1 k"]
    """Of its experts' results, the likeliest first; the second product writes them."""

    @classmethod
    def of(cls, routing: SoftmaxTopK) -> "LoneToken":
        logits = routing.logits
        assert logits.shape[0] == logits.stride(1) == 1, (logits.shape, logits.stride())
        assert 1 <= routing.top_k <= logits.shape[1], (routing.top_k, logits.shape)
        weights = torch.empty((1, routing.top_k), dtype=torch.float32, device=logits.device)
        return cls(logits, weights)

    @property
    def num_rows(self) -> int:
        return self.weights.numel()

    @property
    def top_k(self) -> int:
        return self.num_rows


_AHEAD = 4
"""Rounds between the load of weights and their use."""
_AHEAD_IN_ORDER = 8
"""The same where sums are kept."""
_MAX_REGISTERS = {1: 168, 2: 128}
"""Of a thread, by a program's warpgroups: for three programs on a multiprocessor, and two. With 128
and 80 one more of each fits, and registers spill: slower."""


@gluon.constexpr_function
def _in_each_warp(size, num_warps):
    """[size]: all in each warp, so that none waits for another."""
    registers = [[1 << bit] for bit in range(5, size.bit_length() - 1)]
    lanes, warps = [[1], [2], [4], [8], [16]], [[0]] * (num_warps.bit_length() - 1)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [size])


@gluon.jit
def _rank(
    logits_ptr, NUM_EXPERTS: gl.constexpr, BLOCK_E: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    """-> [BLOCK_E] experts, and integers that are in the order of their logits."""
    layout: gl.constexpr = _in_each_warp(BLOCK_E, num_warps)
    LOWEST: gl.constexpr = -(2**31)
    experts = gl.arange(0, BLOCK_E, layout)
    is_expert = experts < NUM_EXPERTS
    logits = gl.load(logits_ptr + experts, mask=is_expert, other=0.0).to(gl.float32)
    # A NaN has no order, and there is one zero. Integers in the order of the logits:
    logits = gl.where(gl.abs(logits) > 0.0, logits, 0.0)
    bits = logits.to(gl.int32, bitcast=True)
    keys = gl.where(is_expert, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)
    return experts, keys


@gluon.jit
def _logit_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def _take_highest(keys, experts):
    """-> (the highest key; the expert that has it, the lowest of several; the keys without its)."""
    LOWEST: gl.constexpr = -(2**31)
    highest = gl.max(keys, axis=0)
    expert = gl.min(gl.where(keys == highest, experts, experts.shape[0]), axis=0)
    return highest, expert, gl.where(experts == expert, LOWEST, keys)


@gluon.jit
def _choose_expert(
    logits_ptr, place, NUM_EXPERTS: gl.constexpr, BLOCK_E: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    """The expert at a place of the token's choices, the likeliest first."""
    experts, keys = _rank(logits_ptr, NUM_EXPERTS, BLOCK_E, num_warps)
    for _ in range(place):
        _, _, keys = _take_highest(keys, experts)
    _, expert, _ = _take_highest(keys, experts)
    return expert


@gluon.jit
def _write_weights(
    logits_ptr, weights_ptr, TOP_K: gl.constexpr, NUM_EXPERTS: gl.constexpr,
    BLOCK_E: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Of all the token's choices."""
    experts, keys = _rank(logits_ptr, NUM_EXPERTS, BLOCK_E, num_warps)
    top = _logit_of(gl.max(keys, axis=0))
    places = gl.zeros_like(keys) - 1
    shares = gl.zeros_like(keys).to(gl.float32)
    total = 0.0
    for choice in gl.static_range(TOP_K):
        highest, expert, keys = _take_highest(keys, experts)
        share = gl.exp(_logit_of(highest) - top)
        # In the order of the choices, as in `softmax_top_k`: its bits.
        total += share
        places = gl.where(experts == expert, choice, places)
        shares = gl.where(experts == expert, share, shares)
    gl.store(weights_ptr + places, shares / total, mask=places >= 0)


@gluon.jit
def _split_columns(tile):
    """[F, 4], of which a thread has whole rows: the four [F]."""
    even, odd = gl.split(tile.reshape([tile.shape[0], 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def _add_in_order(kept, ROUNDS: gl.constexpr, num_warps: gl.constexpr):
    """[F] of all rounds' sums, as `hopper_tiles.add_part` adds them; each tile has [F, high and low
    parts of four rounds]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [num_warps, 1], [1, 0])
    features: gl.constexpr = gl.SliceLayout(1, layout)
    BLOCK_F: gl.constexpr = kept[0].shape[0]
    total = gl.zeros([BLOCK_F], gl.float32, features)
    for step in gl.static_range(ROUNDS):
        if step % 4 == 0:
            highs, lows = gl.split(kept[step // 4].load(layout).reshape([BLOCK_F, 4, 2]))
            highs, lows = _split_columns(highs), _split_columns(lows)
        high = gl.convert_layout(highs[step % 4], features, assert_trivial=True)
        low = gl.convert_layout(lows[step % 4], features, assert_trivial=True)
        total = total + high + low * 0.0625
    return total


@gluon.jit
def _mxfp4_one_token_kernel(
    x_ptr, words_ptr, scales_ptr, bias_ptr, logits_ptr, weights_ptr, out_ptr,
    stride_xn, stride_be, stride_se, stride_biase, stride_on,
    in_features, num_scales, alpha, limit, offset,
    NUM_EXPERTS: gl.constexpr, BLOCK_E: gl.constexpr, TOP_K: gl.constexpr,
    IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK_F: gl.constexpr, BLOCK_D: gl.constexpr, CHUNK: gl.constexpr, ROUNDS: gl.constexpr,
    AHEAD: gl.constexpr, SPLITS: gl.constexpr, IS_ORDERED: gl.constexpr,
    OVERLAPS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        # Behind a gate the next kernel is the down product, which reads the router's logits and
        # writes the results' weights before this one has ended: it may start when the logits are
        # there.
        if IS_GATED:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = gl.program_id(1)
    row_layout: gl.constexpr = gl.BlockedLayout([8], [32], [num_warps], [0])
    dims = gl.arange(0, BLOCK_D, row_layout)
    x_row_ptr = x_ptr if IS_GATED else x_ptr + place.to(gl.int64) * stride_xn
    if IS_GATED:
        # In front of the weights, which it would otherwise come behind.
        x = gl.load(x_row_ptr + dims, mask=dims < in_features, other=0.0)
    expert = _choose_expert(logits_ptr, place, NUM_EXPERTS, BLOCK_E, num_warps).to(gl.int64)

    ROWS: gl.constexpr = SPLITS * BLOCK_F
    # Rounds of which the columns of an instruction have the inputs.
    ROUNDS_SHOWN: gl.constexpr = 4 // SPLITS
    # [rows of the left operand, blocks of a chunk, words of a block].
    words_3d: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0], [64, 0, 0]][: SPLITS + 1], block_bases=[],
        shape=[ROWS, 4, 4],
    )  # fmt: skip
    words_2d: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]][: SPLITS + 1], block_bases=[], shape=[ROWS, 16],
    )  # fmt: skip
    scales_layout: gl.constexpr = gl.SliceLayout(2, words_3d)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 8, 32])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    # A feature and the one 8 rows behind it, its up-projection, in one thread.
    feature_layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[8]], lane_bases=[[1], [2], [4], [0], [0]],
        warp_bases=[[16], [32], [0]][: SPLITS + 1], block_bases=[], shape=[BLOCK_F],
    )  # fmt: skip

    tile = gl.program_id(0) * num_scales * BLOCK_F
    scales_tile_ptr = scales_ptr + expert * stride_se
    scales_tile_ptr += gl.program_id(0) * (num_scales + 1) * BLOCK_F
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, scales_layout))
    first_block = rows // BLOCK_F * (ROUNDS * (CHUNK // 32))
    rows = rows % BLOCK_F
    blocks = gl.arange(0, 4, gl.SliceLayout(0, scales_layout))
    blocks_left = num_scales - (first_block[:, None] + blocks[None, :])
    starts = (first_block[:, None] + blocks[None, :]) * BLOCK_F
    scale_ptrs = scales_tile_ptr + starts + rows[:, None]
    # `hopper_tiles` says where a row of a block stands.
    starts = (starts + (rows[:, None] ^ blocks[None, :] * 2)) * 4
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, words_3d)))
    w_ptrs = words_ptr + expert * stride_be + tile * 4
    w_ptrs = gl.expand_dims(w_ptrs + starts, 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)

    # A step is CHUNK inputs of each part.
    words = ()
    scales = ()
    for step in gl.static_range(AHEAD):
        is_block = blocks_left > step * 4
        is_word = gl.expand_dims(is_block, 2)
        words = words + (gl.load(w_ptrs + step * (CHUNK * BLOCK_F // 8), mask=is_word, other=0),)  # type: ignore[assignment] # noqa: RUF005
        scales = scales + (gl.load(scale_ptrs + step * (4 * BLOCK_F), mask=is_block, other=0),)  # type: ignore[assignment] # noqa: RUF005
    features = gl.arange(0, BLOCK_F, feature_layout)
    largest = gl.load(scales_tile_ptr + num_scales * BLOCK_F + features)
    if HAS_BIAS:
        feature = gl.program_id(0) * BLOCK_F
        feature += features // 16 * 16 + features % 8 * 2 + features % 16 // 8
        bias = gl.load(bias_ptr + expert * stride_biase + feature).to(gl.float32)

    if not IS_GATED:
        # So far nothing was read that the kernel in front writes, which let this one start late.
        if (gl.program_id(0) == 0) & (place == 0):
            _write_weights(logits_ptr, weights_ptr, TOP_K, NUM_EXPERTS, BLOCK_E, num_warps)
        if OVERLAPS:
            tl.extra.cuda.gdc_wait()
        x = gl.load(x_row_ptr + dims, mask=dims < in_features, other=0.0)
    # The token: its scale, then its parts, in the order of the unpacked weights.
    top = gl.max(x.to(gl.float32).to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    # The power of two that brings the row's largest to [128, 256).
    exponent = gl.maximum(top >> 23, 40) - 7
    factor = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    x_scale = gl.where(top < 0x7F800000, exponent << 23, 0x7FC00000).to(gl.float32, bitcast=True)
    x_layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, SPLITS], [1, 0])
    spots = gl.arange(0, CHUNK, gl.SliceLayout(0, x_layout))
    inputs = spots // 4 % 4 * 32 + spots // 32 * 8 + spots // 16 % 2 * 4 + spots % 4
    chunks = gl.arange(0, 4, gl.SliceLayout(1, x_layout))
    chunks = chunks // SPLITS + chunks % SPLITS * ROUNDS
    inputs = (chunks * CHUNK)[:, None] + inputs[None, :]
    x_shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    # A tile each: between the writes to parts of one there would be barriers.
    x_tiles = ()
    for step in gl.static_range(0, ROUNDS, ROUNDS_SHOWN):
        is_input = inputs + step * CHUNK < in_features
        x = gl.load(x_row_ptr + step * CHUNK + inputs, mask=is_input, other=0.0)
        x = x.to(gl.float32) * factor
        high = x.to(gl.float8e4nv)
        low = ((x - high.to(gl.float32)) * 16.0).to(gl.float8e4nv)
        parts = gl.join(high, low).permute((0, 2, 1)).reshape([8, CHUNK])
        x_tiles = x_tiles + (gl.allocate_shared_memory(gl.float8e4nv, [8, CHUNK], x_shared, parts),)  # type: ignore[assignment] # noqa: RUF005
    hopper.fence_async_shared()
    gl.thread_barrier()

    zeros = gl.zeros([ROWS, 8], gl.float32, acc_layout)
    columns = gl.arange(0, 8, gl.SliceLayout(0, acc_layout))
    shown_sums, kept = zeros, ()
    if IS_ORDERED:
        gl.static_assert(SPLITS == 1, "a program adds up all inputs")
        kept_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        # Memory of its own: in that of tiles that are done with there would be barriers.
        for _ in gl.static_range(0, ROUNDS, ROUNDS_SHOWN):
            memory = gl.allocate_shared_memory(gl.float32, [ROWS, 8], kept_layout)
            kept = kept + (memory,)  # type: ignore[assignment] # noqa: RUF005
    # Of the rounds that have the same columns; the next round's first.
    sums = ()
    for _ in gl.static_range(ROUNDS_SHOWN):
        sums = sums + (zeros,)  # type: ignore[assignment] # noqa: RUF005
    # Unrolled, so that what is on its way stays in its registers; `fits_rows` bounds the rounds.
    for step in gl.static_range(ROUNDS):
        exponents = gl.expand_dims(scales[step].to(gl.int32), 2)
        exponents = exponents + gl.zeros([ROWS, 4, 4], gl.int32, words_3d)
        exponents = gl.convert_layout(exponents.reshape([ROWS, 16]), words_2d, assert_trivial=True)
        codes = gl.convert_layout(words[step].reshape([ROWS, 16]), words_2d, assert_trivial=True)
        if step + AHEAD < ROUNDS:
            is_block = blocks_left > (step + AHEAD) * 4
            is_word = gl.expand_dims(is_block, 2)
            new = gl.load(w_ptrs + (step + AHEAD) * (CHUNK * BLOCK_F // 8), mask=is_word, other=0)
            words = words + (new,)  # noqa: RUF005
            new = gl.load(scale_ptrs + (step + AHEAD) * (4 * BLOCK_F), mask=is_block, other=0)
            scales = scales + (new,)  # noqa: RUF005
        left = gl.convert_layout(unpack(codes, exponents), left_layout, assert_trivial=True)
        part = hopper.warpgroup_mma(
            left, x_tiles[step // ROUNDS_SHOWN].permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        part = hopper.warpgroup_mma_wait(0, deps=[part])
        if IS_ORDERED:
            is_shown = columns // 2 == step % ROUNDS_SHOWN
            shown_sums = gl.where(is_shown[None, :], part, shown_sums)
            if (step + 1) % ROUNDS_SHOWN == 0 or step + 1 == ROUNDS:
                kept[step // ROUNDS_SHOWN].store(shown_sums)
        else:
            sums = sums[1:] + (sums[0] + part,)  # noqa: RUF005

    if IS_ORDERED:
        total = _add_in_order(kept, ROUNDS, num_warps)
    else:
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))
        acc = zeros
        for shown in gl.static_range(ROUNDS_SHOWN):
            is_shown = columns // (2 * SPLITS) == (ROUNDS + shown) % ROUNDS_SHOWN
            acc = gl.where(is_shown[None, :], sums[shown], acc)
        acc = gl.where((columns % 2 == 1)[None, :], acc * 0.0625, acc)
        acc = gl.where(rows[:, None] // BLOCK_F == columns[None, :] // 2 % SPLITS, acc, 0.0)
        total = gl.sum(acc, axis=1)
        if SPLITS > 1:
            total = gl.sum(total.reshape([SPLITS, BLOCK_F]), axis=0)
    total = gl.convert_layout(total, feature_layout) * scale_of(largest) * x_scale
    if HAS_BIAS:
        total += bias
    low, high = gl.split(total.reshape([BLOCK_F // 16, 2, 8]).permute((0, 2, 1)))
    low = low.reshape([BLOCK_F // 2])
    high = high.reshape([BLOCK_F // 2])
    pair = gl.program_id(0) * (BLOCK_F // 2) + gl.arange(0, BLOCK_F // 2, low.type.layout)
    if IS_GATED:
        # Written so that a NaN stays one.
        low = gl.where(low > limit, limit, low)
        high = gl.where(high > limit, limit, gl.where(high < -limit, -limit, high))
        gated = low / (1.0 + gl.exp(-alpha * low)) * (high + offset)
        gl.store(out_ptr + place.to(gl.int64) * stride_on + pair, gated.to(gl.bfloat16))
    else:
        out_row_ptr = out_ptr + place.to(gl.int64) * stride_on
        gl.store(out_row_ptr + 2 * pair, low.to(gl.bfloat16))
        gl.store(out_row_ptr + 2 * pair + 1, high.to(gl.bfloat16))


def tune(num_programs: int, num_multiprocessors: int) -> int:
    """The warpgroups of a program: two, if the two programs that then fit on a multiprocessor are
    enough."""
    return 2 if num_programs <= 2 * num_multiprocessors else 1


def launch_one_token_product(
    x: Float[Tensor, "n D"],
    token: LoneToken,
    words: Tensor,
    scales: Tensor,
    bias: Float[Tensor, "E F"] | None,
    gate: Gate | None,
    out: Float[Tensor, "k f"],
) -> None:
    """Writes all of `out`; without a gate the token's weights, too. The product without a gate has
    the one with it in front, or a kernel that does not overlap: it reads the logits and writes the
    weights before that has ended."""
    num_tiles, num_scales = words.shape[1:3]
    is_ordered = must_be_invariant()
    splits, ahead = 1, _AHEAD_IN_ORDER
    if not is_ordered:
        splits, ahead = tune(num_tiles * token.num_rows, num_multiprocessors(x.device)), _AHEAD
    rounds = cdiv(x.shape[1], splits * CHUNK)
    numbers = gate or Gate()
    _mxfp4_one_token_kernel[(num_tiles, token.num_rows)](
        x_ptr=x,
        words_ptr=words,
        scales_ptr=scales,
        bias_ptr=x if bias is None else bias,
        logits_ptr=token.logits,
        weights_ptr=token.weights,
        out_ptr=out,
        stride_xn=x.stride(0),
        stride_be=words.stride(0),
        stride_se=scales.stride(0),
        stride_biase=0 if bias is None else bias.stride(0),
        stride_on=out.stride(0),
        in_features=x.shape[1],
        num_scales=num_scales,
        alpha=numbers.alpha,
        limit=numbers.limit,
        offset=numbers.offset,
        NUM_EXPERTS=token.logits.shape[1],
        BLOCK_E=max(next_power_of_2(token.logits.shape[1]), 32),
        TOP_K=token.top_k,
        IS_GATED=gate is not None,
        HAS_BIAS=bias is not None,
        BLOCK_F=TILE_F,
        BLOCK_D=next_power_of_2(x.shape[1]),
        CHUNK=CHUNK,
        ROUNDS=rounds,
        AHEAD=min(ahead, rounds),
        SPLITS=splits,
        IS_ORDERED=is_ordered,
        num_warps=splits * TILE_F // 16,
        maxnreg=_MAX_REGISTERS[splits],
        **overlap_options(x.device, 1),
    )
