# SPDX-License-Identifier: Apache-2.0
"""In place of `triton.experimental.gluon.language`: what the kernels use of it."""

import builtins
import functools
import linecache
import re
from collections.abc import Callable
from typing import Any

import torch

from gluon_emulator.barriers import Barrier, BarrierArray
from gluon_emulator.memory import Pointer, SharedMemory
from gluon_emulator.schedule import current, kernel_frame
from gluon_emulator.values import (
    Layout,
    NVMMASharedLayout,
    SharedLinearLayout,
    SliceLayout,
    Tile,
    as_scalar,
)

__all__ = ["NVMMASharedLayout", "SharedLinearLayout", "SliceLayout"]

uint8, int32, int64 = torch.uint8, torch.int32, torch.int64
uint32 = torch.uint32
float16, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32
float8e4nv = torch.float8_e4m3fn
static_range = builtins.range
BlockedLayout = DotOperandLayout = NVMMADistributedLayout = SwizzledSharedLayout = Layout


class DistributedLinearLayout(Layout):
    def __init__(
        self, reg_bases: Any, lane_bases: Any, warp_bases: Any, block_bases: Any, shape: Any
    ) -> None:
        self.reg_bases, self.lane_bases, self.warp_bases = reg_bases, lane_bases, warp_bases


class constexpr:
    """Marks parameters that are known when compiling."""


class MBarrierLayout:
    """Memory of this layout holds barriers."""


def program_id(axis: int) -> Tile:
    return as_scalar(current().program.place[axis])


def num_programs(axis: int) -> Tile:
    return as_scalar(current().program.grid[axis])


def warp_specialize(
    partitions: list[tuple[Callable[..., None], tuple[Any, ...]]],
    num_warps: list[int],
    num_registers: list[int],
) -> None:
    functions = [functools.partial(function, *arguments) for function, arguments in partitions]
    current().program.run_partitions(functions, num_warps)


def thread_barrier() -> None:
    """Of a partition, which is one thread here."""


def static_assert(condition: bool, message: str) -> None:
    assert condition, message


def _assigned_name() -> str:
    """What the kernel calls the result of the call that is under way."""
    frame = kernel_frame()
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    name = re.match(r"\s*(\w+) = ", line)
    return name[1] if name else f"the memory of line {frame.f_lineno}"


def allocate_shared_memory(
    dtype: torch.dtype, shape: list[int], layout: Any, value: Tile | None = None
) -> Any:
    name = _assigned_name()
    if value is not None:
        memory = SharedMemory.allocate(name, dtype, shape, layout)
        memory.store(value)
        return memory
    if not isinstance(layout, MBarrierLayout):
        return SharedMemory.allocate(name, dtype, shape, layout)
    return Barrier(name) if len(shape) == 1 else BarrierArray(name, shape[0])


def load(pointer: Pointer, mask: Tile | None = None, other: Any = None) -> Tile:
    return Tile(pointer.load(mask, other))


def store(pointer: Pointer, value: Any, mask: Tile | None = None) -> None:
    pointer.store(value, mask)


def arange(start: int, end: int, layout: Any) -> Tile:
    return Tile(torch.arange(start, end, dtype=int32), layout)


def full(shape: list[int], value: float, dtype: torch.dtype, layout: Any) -> Tile:
    return Tile(torch.full(shape, value, dtype=dtype), layout)


def zeros(shape: list[int], dtype: torch.dtype, layout: Any) -> Tile:
    return full(shape, 0, dtype, layout)


def zeros_like(tile: Tile) -> Tile:
    return Tile(torch.zeros_like(tile.data), tile.layout)


def convert_layout(tile: Tile, layout: Any, assert_trivial: bool = False) -> Tile:
    return Tile(tile.data, layout)


def expand_dims(tile: Any, axis: int) -> Any:
    """Whose layout is the one that the tile's is a slice of; or of a pointer's addresses."""
    if isinstance(tile, Pointer):
        return tile.expand_dims(axis)
    return Tile(tile.data.unsqueeze(axis), getattr(tile.layout, "parent", None))


def join(first: Tile, second: Tile) -> Tile:
    return Tile(torch.stack((first.data, second.data), dim=-1))


def split(tile: Tile) -> tuple[Tile, Tile]:
    first, second = tile.data.unbind(-1)
    return Tile(first), Tile(second)


def _promote(*values: Any) -> tuple[list[torch.Tensor], Any]:
    """As tensors of one type, and the layout of the first that has one."""
    tiles = [value for value in values if isinstance(value, Tile)]
    dtype = functools.reduce(torch.promote_types, [tile.dtype for tile in tiles])
    tensors = [
        value.data.to(dtype) if isinstance(value, Tile) else torch.tensor(value, dtype=dtype)
        for value in values
    ]
    return tensors, next((tile.layout for tile in tiles if tile.layout), None)


def where(condition: Tile | bool, value: Any, other: Any) -> Any:
    if isinstance(condition, bool):
        return value if condition else other
    tensors, layout = _promote(value, other)
    return Tile(torch.where(condition.data, *tensors), layout or condition.layout)


def maximum(left: Any, right: Any) -> Tile:
    """That which is a number, where the other is a NaN; so do `minimum` and `max`."""
    tensors, layout = _promote(left, right)
    return Tile(torch.fmax(*tensors), layout)


def minimum(left: Any, right: Any) -> Tile:
    tensors, layout = _promote(left, right)
    return Tile(torch.fmin(*tensors), layout)


def max(tile: Tile, axis: int) -> Tile:
    largest = tile.data.amax(axis)
    if tile.dtype.is_floating_point:
        is_nan = tile.data.isnan()
        largest = tile.data.masked_fill(is_nan, float("-inf")).amax(axis)
        largest = largest.masked_fill(is_nan.all(axis), float("nan"))
    return Tile(largest, SliceLayout(axis, tile.layout))


def min(tile: Tile, axis: int) -> Tile:
    """Of integers."""
    assert not tile.dtype.is_floating_point, tile.dtype
    return Tile(tile.data.amin(axis), SliceLayout(axis, tile.layout))


def sum(tile: Tile, axis: int) -> Tile:
    return Tile(tile.data.sum(axis), SliceLayout(axis, tile.layout))


def cdiv(value: Any, divisor: Any) -> Any:
    return (value + (divisor - 1)) // divisor


def fma(left: Tile, right: Any, addend: Any) -> Tile:
    """Rounded twice."""
    return left * right + addend


def multiple_of(tile: Tile, divisor: int) -> Tile:
    assert not (tile.data % divisor).any(), divisor
    return tile


def abs(tile: Tile) -> Tile:
    return Tile(tile.data.abs(), tile.layout)


def exp(tile: Tile) -> Tile:
    return Tile(tile.data.exp(), tile.layout)


def exp2(tile: Tile) -> Tile:
    return Tile(tile.data.exp2(), tile.layout)


def log2(tile: Tile) -> Tile:
    return Tile(tile.data.log2(), tile.layout)
