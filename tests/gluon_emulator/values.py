# SPDX-License-Identifier: Apache-2.0
"""What kernels compute with: tiles and scalars, and the layouts that they carry along."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Layout:
    """Any arrangement of a tile over threads: kept as it was named, and of no effect."""

    def __init__(self, *numbers: Any, **named: Any) -> None:
        self.numbers = numbers
        self.named = named


@dataclass(frozen=True)
class SliceLayout:
    dim: int
    parent: Any


@dataclass(frozen=True)
class NVMMASharedLayout:
    """Panels whose rows are `swizzle_byte_width` bytes wide, one after the other; 0: whole rows."""

    swizzle_byte_width: int
    element_bitwidth: int
    rank: int = 2

    @property
    def panel(self) -> int:
        return (self.swizzle_byte_width or sys.maxsize) * 8 // self.element_bitwidth


@dataclass(frozen=True)
class SharedLinearLayout:
    """What each bit of an element's place adds to its coordinates, without a carry."""

    offset_bases: Sequence[Sequence[int]]

    def places(self, shape: Sequence[int]) -> Tensor:
        """Where a view's elements lie: each place has one."""
        count = math.prod(shape)
        assert count == 2 ** len(self.offset_bases), (shape, self.offset_bases)
        coordinates = torch.zeros(count, len(shape), dtype=torch.int64)
        for bit, basis in enumerate(self.offset_bases):
            is_set = (torch.arange(count) >> bit & 1)[:, None]
            coordinates ^= is_set * torch.tensor(basis)
        places = torch.full(shape, -1)
        places[tuple(coordinates.unbind(1))] = torch.arange(count)
        assert (places >= 0).all(), self.offset_bases
        return places


def _calculate(function: Callable[..., Tensor], left: Any, right: Any) -> "Tile":
    """A Python number takes the type of the other side, a scalar of the kernel need not."""
    layouts = [side.layout for side in (left, right) if isinstance(side, Tile)]
    if isinstance(left, Tile) and isinstance(right, Tile) and left.dtype != right.dtype:
        dtype = torch.promote_types(left.dtype, right.dtype)
        left, right = left.to(dtype), right.to(dtype)
    left, right = (side.data if isinstance(side, Tile) else side for side in (left, right))
    return Tile(function(left, right), next((layout for layout in layouts if layout), None))


def _divide(left: Any, right: Any) -> Tensor:
    """Of integers, as C does it."""
    return torch.div(left, right, rounding_mode="trunc")


def _remainder(left: Any, right: Any) -> Tensor:
    return left - _divide(left, right) * right


def _forward(function: Callable[..., Tensor]) -> Callable[[Any, Any], Any]:
    def operator(self: Any, other: Any) -> Any:
        if not isinstance(other, (Tile, int, float)):
            return NotImplemented
        return _calculate(function, self, other)

    return operator


def _backward(function: Callable[..., Tensor]) -> Callable[[Any, Any], Any]:
    def operator(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        return _calculate(function, other, self)

    return operator


class Tile:
    """A tensor in registers, or a scalar where it has no axes. Never changed in place."""

    def __init__(self, data: Tensor, layout: Any = None) -> None:
        self.data = data
        self.layout = layout

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: list(self.data.shape))
    type = property(lambda self: SimpleNamespace(layout=self.layout))

    __add__, __radd__ = _forward(torch.add), _backward(torch.add)
    __sub__, __rsub__ = _forward(torch.sub), _backward(lambda x, y: x - y)
    __mul__, __rmul__ = _forward(torch.mul), _backward(torch.mul)
    __truediv__, __rtruediv__ = _forward(torch.div), _backward(lambda x, y: x / y)
    __floordiv__ = _forward(_divide)
    __mod__ = _forward(_remainder)
    __and__ = _forward(lambda x, y: x & y)
    __xor__ = _forward(lambda x, y: x ^ y)
    __lshift__ = _forward(lambda x, y: x << y)
    __rshift__ = _forward(lambda x, y: x >> y)
    __lt__, __le__ = _forward(torch.lt), _forward(torch.le)
    __gt__, __ge__ = _forward(torch.gt), _forward(torch.ge)
    __eq__ = _forward(torch.eq)
    __ne__ = _forward(torch.ne)
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> "Tile":
        return Tile(-self.data, self.layout)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return self.data.__index__()

    def __getitem__(self, axes: tuple[slice | None, ...]) -> "Tile":
        """New axes only, which give a slice the layout that it is a slice of."""
        return Tile(self.data[axes], getattr(self.layout, "parent", None))

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Tile":
        if dtype is torch.uint32:
            # PyTorch does not compare those: their values as wider numbers.
            return Tile(self.data.long() & 0xFFFFFFFF, self.layout)
        return Tile(self.data.view(dtype) if bitcast else self.data.to(dtype), self.layout)

    def permute(self, axes: tuple[int, ...]) -> "Tile":
        return Tile(self.data.permute(axes))

    def reshape(self, shape: list[int]) -> "Tile":
        return Tile(self.data.reshape(shape))


def as_scalar(number: int | float) -> Tile:
    """As a kernel takes its arguments."""
    if isinstance(number, float):
        return Tile(torch.tensor(number, dtype=torch.float32))
    is_short = -(2**31) <= number < 2**31
    return Tile(torch.tensor(number, dtype=torch.int32 if is_short else torch.int64))


def scalar_range(*bounds: Any) -> Any:
    """In place of `range`: counts in integers of the card where a bound is one."""
    if not any(isinstance(bound, Tile) for bound in bounds):
        return range(*bounds)
    return _count(range(*(bound.__index__() for bound in bounds)))


def _count(numbers: range) -> Iterator[Tile]:
    for number in numbers:
        yield as_scalar(number)
