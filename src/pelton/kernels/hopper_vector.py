# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The product of one token on Hopper: it reads a weight once.

A kernel may start before its input exists, and programs that run then have their weights by the
time it does. Those for which there is no room start when others end, and wait for the memory. So
that more of them find room, a program holds half of its rows in registers, and has the others
copied to shared memory: weights on their way fill both.

The matrix units multiply, so that nothing is left to do to a number but to load it. Their left
operand has 16 rows: for two rows of the weight, eight runs of inputs each. Its right one has eight
columns, the token's numbers in the same runs. Of the products of all runs with all others, those of
a run with itself count. Each thread brings for both what it has loaded.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from pelton.kernels.triton_runtime import (
    cdiv,
    gl,
    gluon,
    hopper,
    next_power_of_2,
    overlap_options,
    runs_hopper,
    tl,
)
from pelton.kernels.tuning import tunable

ROWS = 8
"""Of a program."""
FEW_ROWS = 512
"""Of a weight, a router's for one: each is better a program's."""
_WARP_INPUTS = 256
"""Of a row, which a warp's threads load at once, 16 bytes each."""
_MAX_INPUTS = 4096
"""Of a row. A program asks for all of its rows at once, and would take too much room for more."""


@gluon.constexpr_function
def _product_layout(num_warps):
    """[warp, runs of two rows, runs]: each warp multiplies for itself."""
    return gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def _by_row_layout(num_warps):
    """[threads, ROWS]: sums of a row are in one warp."""
    threads = [[1 << bit, 0] for bit in range(4 + num_warps.bit_length())]
    rows = [[0, 1], [0, 2], [0, 4]]
    count = num_warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        threads[:3], threads[3:] + rows[count:], rows[:count], [], [32 * num_warps, 8]
    )


@gluon.jit
def _as_operand(tile, ROW_RUNS: gl.constexpr, num_warps: gl.constexpr):
    """[warp, runs, 32 inputs] in the order in which threads that have eight neighbours each are to
    have them."""
    tile = tile.reshape([num_warps, ROW_RUNS, 4, 4, 2]).permute((0, 1, 3, 2, 4))
    return tile.reshape([num_warps, ROW_RUNS, 32])


@gluon.jit
def _hopper_vector_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, stride_wf, out_features,
    IN_FEATURES: gl.constexpr, HAS_BIAS: gl.constexpr, ROWS: gl.constexpr, HELD: gl.constexpr,
    BLOCK_D: gl.constexpr, PIECES: gl.constexpr, OVERLAPS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    gl.static_assert(ROWS == 8 and 256 * num_warps == BLOCK_D, "the layouts are made for these")
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [num_warps], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dims = gl.arange(0, BLOCK_D, layout)
    first = gl.program_id(0) * ROWS
    copied = ()
    for row in gl.static_range(HELD, ROWS):
        is_feature = first + row < out_features
        # Rows begin at multiples of 16 bytes.
        row_ptr = weight_ptr + gl.multiple_of((first + row).to(gl.int64) * stride_wf, 8)
        for piece in gl.static_range(PIECES):
            inputs = piece * BLOCK_D + dims
            # Memory of its own: between copies to parts of one there would be barriers.
            memory = gl.allocate_shared_memory(weight_ptr.dtype.element_ty, [BLOCK_D], shared)
            mask = (inputs < IN_FEATURES) & is_feature
            hopper.async_copy.async_copy_global_to_shared(memory, row_ptr + inputs, mask=mask)
            copied = copied + (memory,)  # type: ignore[assignment] # noqa: RUF005
    if HAS_BIAS:
        # In registers, it would have the assembler load the token's numbers one after another.
        bias = gl.allocate_shared_memory(bias_ptr.dtype.element_ty, [ROWS], shared)
        features = first + gl.arange(0, ROWS, layout)
        hopper.async_copy.async_copy_global_to_shared(bias, bias_ptr + features)
    hopper.async_copy.commit_group()
    held = ()
    for row in gl.static_range(HELD):
        is_feature = first + row < out_features
        row_ptr = weight_ptr + gl.multiple_of((first + row).to(gl.int64) * stride_wf, 8)
        for piece in gl.static_range(PIECES):
            inputs = piece * BLOCK_D + dims
            mask = (inputs < IN_FEATURES) & is_feature
            held = held + (gl.load(row_ptr + inputs, mask=mask, other=0.0),)  # type: ignore[assignment] # noqa: RUF005
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()

    mma: gl.constexpr = _product_layout(num_warps)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    xs = ()
    for piece in gl.static_range(PIECES):
        inputs = piece * BLOCK_D + dims
        x = gl.load(x_ptr + inputs, mask=inputs < IN_FEATURES, other=0.0)
        x = _as_operand(x, 8, num_warps).permute((0, 2, 1))
        xs = xs + (gl.convert_layout(x, right, assert_trivial=True),)  # type: ignore[assignment] # noqa: RUF005
    hopper.async_copy.wait_group(0)
    runs = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, mma))) % 8
    columns = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, mma)))
    runs = gl.expand_dims(gl.expand_dims(runs, 0), 2)
    is_itself = runs == gl.expand_dims(gl.expand_dims(columns, 0), 1)
    sums = ()
    for pair in gl.static_range(ROWS // 2):
        acc = gl.zeros([num_warps, 16, 8], gl.float32, mma)
        for piece in gl.static_range(PIECES):
            weights = ()
            for row in gl.static_range(2 * pair, 2 * pair + 2):
                if row < HELD:
                    weight = held[row * PIECES + piece]  # type: ignore[var-annotated]
                else:
                    weight = copied[(row - HELD) * PIECES + piece].load(layout)
                weights = weights + (weight,)  # type: ignore[assignment] # noqa: RUF005
            both = gl.join(*weights).reshape([num_warps, 8, 32, 2])
            both = both.permute((0, 3, 1, 2)).reshape([num_warps, 16, 32])
            both = gl.convert_layout(_as_operand(both, 16, num_warps), left, assert_trivial=True)
            acc = hopper.mma_v2(both, xs[piece], acc)
        # What counts: a number of each thread and row.
        acc = gl.where(is_itself, acc, 0.0).reshape([num_warps, 2, 8, 4, 2])
        acc = gl.sum(acc.permute((0, 2, 3, 1, 4)), axis=4)
        sums = sums + (acc.reshape([32 * num_warps, 2]),)  # type: ignore[assignment] # noqa: RUF005
    # [threads, row of a pair, pair / 2, pair % 2]
    tile = gl.join(gl.join(sums[0], sums[2]), gl.join(sums[1], sums[3]))  # type: ignore[misc]
    tile = tile.permute((0, 2, 3, 1)).reshape([32 * num_warps, ROWS])
    by_row: gl.constexpr = _by_row_layout(num_warps)
    features = first + gl.arange(0, ROWS, gl.SliceLayout(0, by_row))
    out = gl.sum(gl.convert_layout(tile, by_row), axis=0)
    if HAS_BIAS:
        out += bias.load(gl.SliceLayout(0, by_row)).to(gl.float32)
    gl.store(out_ptr + features, out.to(out_ptr.dtype.element_ty), mask=features < out_features)


@dataclass(frozen=True, slots=True)
class HopperVectorTiles:
    held: int
    """Rows of a program in registers; the others are in shared memory."""
    num_warps: int


@tunable("hopper_vector", has_rows=False)
def tune_hopper_vector(in_features: int, out_features: int) -> HopperVectorTiles:
    """An even split takes the least of a multiprocessor: as large a part of either memory. What
    else pays may depend on how many programs there are: a table's entry is for both sizes."""
    num_loads = cdiv(in_features, _WARP_INPUTS)
    return HopperVectorTiles(held=ROWS // 2, num_warps=min(next_power_of_2(num_loads), 4))


def suits_hopper_vector(
    x: Float[Tensor, "1 D"], weight: Float[Tensor, "F D"], bias: Float[Tensor, " F"] | None
) -> bool:
    """Numbers of two bytes, whose last axes are contiguous. They are copied 16 bytes a time, a bias
    of whole programs alone; few rows of a weight are better spread over the card by `linear`'s
    kernel."""
    out_features, in_features = weight.shape
    if bias is not None and (
        out_features % ROWS or bias.dtype is not x.dtype or bias.data_ptr() % 16
    ):
        return False
    return (
        runs_hopper(x.device)
        and weight.dtype is x.dtype
        and x.element_size() == 2
        and out_features > FEW_ROWS
        and in_features <= _MAX_INPUTS
        and not (in_features % 8 or weight.stride(0) % 8)
        and not (x.data_ptr() % 16 or weight.data_ptr() % 16)
    )


def launch_hopper_vector(
    x: Float[Tensor, "1 D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None,
    out: Float[Tensor, "1 F"],
) -> None:
    out_features, in_features = weight.shape
    tiles = tune_hopper_vector(in_features, out_features)
    block_d = tiles.num_warps * _WARP_INPUTS
    _hopper_vector_kernel[(cdiv(out_features, ROWS),)](
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=weight if bias is None else bias,
        out_ptr=out,
        stride_wf=weight.stride(0),
        out_features=out_features,
        IN_FEATURES=in_features,
        HAS_BIAS=bias is not None,
        ROWS=ROWS,
        HELD=tiles.held,
        BLOCK_D=block_d,
        PIECES=cdiv(in_features, block_d),
        num_warps=tiles.num_warps,
        **overlap_options(x.device, 1),
    )
