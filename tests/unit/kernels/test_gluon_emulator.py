# SPDX-License-Identifier: Apache-2.0
"""What the emulator of Gluon shows: each kernel here does one thing, most of them wrong."""

import math
import sys
from random import Random

import pytest
import torch

from gluon_emulator import Fault, Hang, hopper, load_emulated, make_gluon
from gluon_emulator import language as gl
from gluon_emulator.memory import TensorDescriptor
from pelton.kernels import triton_runtime

PANELS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
ROWS, COLUMNS = 16, 128
TILE_BYTES = 2 * ROWS * COLUMNS


def launch(kernel, seed=0, grid=(1,), **arguments) -> None:
    make_gluon(Random(seed)).jit(kernel)[grid](**arguments, num_warps=4)


def make_matrix() -> tuple[torch.Tensor, TensorDescriptor]:
    matrix = torch.randn(ROWS, COLUMNS).bfloat16()
    return matrix, TensorDescriptor.from_tensor(matrix, [ROWS, 64], PANELS)


def allocate():
    """A tile and a barrier that awaits one arrival."""
    ready = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(ready, count=1)
    tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], PANELS)
    return tile, ready


def fetch(descriptor, tile, ready, num_bytes) -> None:
    """Both panels of a tile, each by a copy."""
    hopper.mbarrier.expect(ready, num_bytes)
    panels = tile._reinterpret(tile.dtype, [2, ROWS, 64], PANELS)
    for panel in range(2):
        hopper.tma.async_copy_global_to_shared(
            descriptor, [0, panel * 64], ready, panels.index(panel)
        )


def write_tile(tile, out_ptr) -> None:
    values = tile.load(None)
    rows, columns = gl.arange(0, ROWS, None), gl.arange(0, COLUMNS, None)
    gl.store(out_ptr + rows[:, None] * COLUMNS + columns[None, :], values)


def copy_tile(descriptor, out_ptr, num_bytes: gl.constexpr, waits: gl.constexpr) -> None:
    """Through shared memory, from one partition to the other."""
    tile, ready = allocate()

    def read() -> None:
        if waits:
            hopper.mbarrier.wait(ready, 0)
        write_tile(tile, out_ptr)
        hopper.mbarrier.wait(ready, 0)

    gl.warp_specialize([(read, ()), (fetch, (descriptor, tile, ready, num_bytes))], [1], [24])


@pytest.mark.parametrize("seed", range(10))
def test_a_tile_is_whole_behind_its_barrier(seed) -> None:
    matrix, descriptor = make_matrix()
    out = torch.empty_like(matrix)

    launch(copy_tile, seed, descriptor=descriptor, out_ptr=out, num_bytes=TILE_BYTES, waits=True)

    assert torch.equal(out, matrix)


def test_a_tile_that_is_not_waited_for_holds_nan_for_some_seeds() -> None:
    matrix, descriptor = make_matrix()
    missing = []
    for seed in range(20):
        out = torch.empty_like(matrix)
        launch(
            copy_tile, seed, descriptor=descriptor, out_ptr=out, num_bytes=TILE_BYTES, waits=False
        )
        missing.append(out.isnan().float().mean().item())

    assert {0.5, 1.0} <= set(missing)


def test_a_seed_always_gives_the_same_order() -> None:
    def both(out_ptr) -> None:
        tile, _ = allocate()
        order = []

        def take_turns(name) -> None:
            for _ in range(20):
                tile.load(None)
                order.append(name)

        gl.warp_specialize([(take_turns, (0,)), (take_turns, (1,))], [1], [24])
        for place, name in enumerate(order):
            gl.store(out_ptr + place, name)

    outs = []
    for seed in (1, 1, 2):
        outs.append(torch.empty(40, dtype=torch.int32))
        launch(both, seed, out_ptr=outs[-1])

    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_a_hang_names_who_waits_for_which_barrier() -> None:
    def wait_for_nobody() -> None:
        barriers = hopper.mbarrier.MBarrierLayout()
        free = gl.allocate_shared_memory(gl.int64, [3, 1], barriers)
        hopper.mbarrier.init(free.index(1), count=2)

        def wait() -> None:
            hopper.mbarrier.arrive(free.index(1))
            hopper.mbarrier.wait(free.index(1), 0)

        gl.warp_specialize([(wait, ()), (lambda: None, ())], [1], [24])

    expected = (
        r"partition 1, wait \(test_gluon_emulator.py:\d+\), waits for the phase of parity 0: "
        r"free\[1\] is in phase 0, which misses 1 of 2 arrivals and 0 bytes"
    )
    with pytest.raises(Hang, match=expected):
        launch(wait_for_nobody)


def test_bytes_that_never_come_are_a_hang() -> None:
    matrix, descriptor = make_matrix()
    arguments = {"descriptor": descriptor, "out_ptr": torch.empty_like(matrix), "waits": True}

    with pytest.raises(Hang, match=r"ready is in phase 0, .* 0 of 1 arrivals and 16 bytes"):
        launch(copy_tile, num_bytes=TILE_BYTES + 16, **arguments)


def test_bytes_that_nobody_awaits_are_a_fault() -> None:
    matrix, descriptor = make_matrix()
    arguments = {"descriptor": descriptor, "out_ptr": torch.empty_like(matrix), "waits": True}

    with pytest.raises(Fault, match=r"bytes too many: ready is in phase 0"):
        launch(copy_tile, num_bytes=TILE_BYTES - 16, **arguments)


def test_an_arrival_too_many_is_a_fault() -> None:
    def arrive_twice() -> None:
        _, ready = allocate()
        hopper.mbarrier.expect(ready, 16)
        hopper.mbarrier.arrive(ready)

    with pytest.raises(Fault, match=r"1 arrivals too many: ready"):
        launch(arrive_twice)


def multiply(out_ptr, is_fenced: gl.constexpr, is_awaited: gl.constexpr) -> None:
    tile, _ = allocate()
    tile.store(gl.full([ROWS, COLUMNS], 2.0, gl.bfloat16, None))
    if is_fenced:
        hopper.fence_async_shared()
    zeros = gl.zeros([ROWS, ROWS], gl.float32, None)
    product = hopper.warpgroup_mma(tile, tile.permute((1, 0)), zeros, is_async=True)
    if is_awaited:
        product = hopper.warpgroup_mma_wait(0, deps=[product])
        gl.store(out_ptr + gl.arange(0, ROWS * ROWS, None), product.reshape([ROWS * ROWS]))


def test_a_product_of_what_threads_wrote_needs_a_fence() -> None:
    out = torch.empty(ROWS * ROWS)

    launch(multiply, out_ptr=out, is_fenced=True, is_awaited=True)

    assert (out == 4.0 * COLUMNS).all()
    with pytest.raises(Fault, match="what threads wrote to tile, before their fence"):
        launch(multiply, out_ptr=out, is_fenced=False, is_awaited=True)


def test_a_product_must_be_waited_for() -> None:
    with pytest.raises(Fault, match=r"nobody waited for the product that multiply .* started"):
        launch(multiply, out_ptr=torch.empty(1), is_fenced=True, is_awaited=False)


def test_a_product_that_is_under_way_is_no_tile() -> None:
    def use_too_early(out_ptr) -> None:
        tile, _ = allocate()
        zeros = gl.zeros([ROWS, ROWS], gl.float32, None)
        product = hopper.warpgroup_mma(tile, tile.permute((1, 0)), zeros, is_async=True)
        product = hopper.warpgroup_mma_wait(1, deps=[product])
        gl.store(out_ptr + gl.arange(0, ROWS * ROWS, None), product.reshape([ROWS * ROWS]))

    with pytest.raises(AttributeError, match="'Product' object has no attribute 'reshape'"):
        launch(use_too_early, out_ptr=torch.empty(ROWS * ROWS))


def test_a_product_reads_its_operands_until_it_is_waited_for() -> None:
    """Memory that is written too early shows for some seeds."""

    def overwrite(out_ptr) -> None:
        tile, _ = allocate()
        tile.store(gl.full([ROWS, COLUMNS], 2.0, gl.bfloat16, None))
        hopper.fence_async_shared()
        zeros = gl.zeros([ROWS, ROWS], gl.float32, None)
        product = hopper.warpgroup_mma(tile, tile.permute((1, 0)), zeros, is_async=True)
        tile.store(gl.zeros([ROWS, COLUMNS], gl.bfloat16, None))
        hopper.fence_async_shared()
        product = hopper.warpgroup_mma_wait(0, deps=[product])
        gl.store(out_ptr + gl.arange(0, ROWS * ROWS, None), product.reshape([ROWS * ROWS]))

    outs = torch.empty(20, ROWS * ROWS)
    for seed, out in enumerate(outs):
        launch(overwrite, seed, out_ptr=out)

    assert set(outs.unique().tolist()) == {0.0, 4.0 * COLUMNS}


def test_a_copy_must_land_before_the_program_ends() -> None:
    def leave(descriptor) -> None:
        tile, ready = allocate()
        fetch(descriptor, tile, ready, TILE_BYTES)

    with pytest.raises(Fault, match=r"ended before the copy to tile that fetch .* started"):
        launch(leave, descriptor=make_matrix()[1])


def test_copies_by_threads_land_with_their_group() -> None:
    def copy(x_ptr, out_ptr) -> None:
        tile, _ = allocate()
        rows, columns = gl.arange(0, ROWS, None), gl.arange(0, COLUMNS, None)
        offsets = rows[:, None] * COLUMNS + columns[None, :]
        hopper.async_copy.async_copy_global_to_shared(
            tile, x_ptr + offsets, mask=(rows < 3)[:, None]
        )
        hopper.async_copy.commit_group()
        hopper.async_copy.wait_group(0)
        write_tile(tile, out_ptr)

    matrix, _ = make_matrix()
    for seed in range(10):
        out = torch.empty_like(matrix)
        launch(copy, seed, x_ptr=matrix[:3], out_ptr=out)
        assert torch.equal(out[:3], matrix[:3])
        assert (out[3:] == 0).all()


@pytest.mark.parametrize("place", [-1, 5])
def test_an_address_outside_a_tensor_is_a_fault(place) -> None:
    def read(x_ptr, place) -> None:
        gl.load(x_ptr + place)

    def write(x_ptr, place) -> None:
        gl.store(x_ptr + place, 1.0)

    for kernel in (read, write):
        with pytest.raises(Fault, match=f"element {place} of a tensor that has 5"):
            launch(kernel, x_ptr=torch.zeros(9)[2:7], place=place)


def test_a_box_reads_zeros_outside_its_matrix() -> None:
    matrix = torch.ones(5, 64, dtype=torch.bfloat16)
    descriptor = TensorDescriptor.from_tensor(matrix, [4, 64], PANELS)

    box = descriptor.read_box([3, -8])

    assert (box[:2, 8:] == 1).all()
    assert box.sum() == 2 * 56


def test_integers_are_the_card_s() -> None:
    def calculate(out_ptr, minus_one, large, wide) -> None:
        gl.store(out_ptr, minus_one // 128)
        gl.store(out_ptr + 1, minus_one % 128)
        gl.store(out_ptr + 2, large + large)
        gl.store(out_ptr + 3, large.to(gl.int64) + large)
        gl.store(out_ptr + gl.arange(4, 5, None), gl.arange(0, 1, None) + wide)

    out = torch.empty(5, dtype=torch.int64)
    launch(calculate, out_ptr=out, minus_one=-1, large=2**30, wide=2**40)

    assert out.tolist() == [0, -1, -(2**31), 2**31, 2**40]


def test_maxima_leave_out_nan_and_keep_infinities() -> None:
    inf, nan = math.inf, math.nan
    rows = gl.Tile(torch.tensor([[1.0, nan], [-inf, -inf], [nan, nan], [inf, 2.0]]))

    largest = gl.max(rows, axis=1).data
    with_zero = gl.maximum(rows, 0.0).data

    assert largest[:2].tolist() == [1.0, -inf]
    assert largest[2].isnan()
    assert largest[3] == inf
    assert with_zero.tolist() == [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [inf, 2.0]]


def test_programs_know_their_places() -> None:
    def mark(out_ptr) -> None:
        place = gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)
        gl.store(out_ptr + place, place)

    out = torch.empty(6, dtype=torch.int32)
    launch(mark, grid=(2, 3), out_ptr=out)

    assert out.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_modules_that_others_import_stay_as_they_are() -> None:
    name = "pelton.kernels.mla.hopper"
    copy = load_emulated(name, seed=0)
    original = sys.modules[name]

    assert copy.gl is gl
    assert copy.softmax_step is not original.softmax_step
    assert original.gl is triton_runtime.gl is not gl
    assert sys.modules["pelton.kernels.mla"].hopper is original
