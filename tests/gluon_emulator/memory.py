# SPDX-License-Identifier: Apache-2.0
"""Memory of the card, which kernels reach by pointers and descriptors, and shared memory."""

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gluon_emulator.schedule import Fault, Partition, current
from gluon_emulator.values import NVMMASharedLayout, SharedLinearLayout, Tile


def _extent(shape: Any, strides: Any) -> int:
    """Elements from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def poison_of(dtype: torch.dtype) -> float | int:
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


class Pointer:
    """Addresses of a tensor's elements. Only those from its first to its last may be used."""

    def __init__(self, memory: Tensor, offsets: Tensor) -> None:
        self._memory = memory
        self._offsets = offsets

    @staticmethod
    def to(tensor: Tensor) -> "Pointer":
        extent = _extent(tensor.shape, tensor.stride())
        return Pointer(tensor.as_strided((extent,), (1,)), torch.tensor(0))

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self._memory.dtype)

    def __add__(self, offsets: Any) -> "Pointer":
        steps = offsets.data if isinstance(offsets, Tile) else torch.tensor(offsets)
        return Pointer(self._memory, self._offsets + steps.long())

    def expand_dims(self, axis: int) -> "Pointer":
        return Pointer(self._memory, self._offsets.unsqueeze(axis))

    def load(self, mask: Any = None, other: Any = None) -> Tensor:
        """What is masked reads as `other`, or as anything."""
        is_read, places = self._places(mask)
        fill = poison_of(self._memory.dtype) if other is None else other
        values = torch.full(is_read.shape, fill, dtype=self._memory.dtype)
        values[is_read] = self._memory[places]
        return values

    def store(self, values: Any, mask: Any = None) -> None:
        is_written, places = self._places(mask)
        data = values.data if isinstance(values, Tile) else torch.tensor(values)
        data = data.to(self._memory.dtype).expand(is_written.shape)
        self._memory[places] = data[is_written]

    def _places(self, mask: Any) -> tuple[Tensor, Tensor]:
        used = torch.tensor(True) if mask is None else mask.data
        shape = torch.broadcast_shapes(used.shape, self._offsets.shape)
        used = used.expand(shape)
        places = self._offsets.expand(shape)[used]
        for place in places.aminmax() if places.numel() else ():
            if not 0 <= place < self._memory.numel():
                raise Fault(
                    f"element {place} of a tensor that has {self._memory.numel()} from the first "
                    "to the last"
                )
        return used, places


class TensorDescriptor:
    """A matrix, or more axes, of which the copy engine brings boxes. What of a box is outside reads
    as zeros."""

    def __init__(
        self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int],
        layout: NVMMASharedLayout,
    ) -> None:  # fmt: skip
        item = base.element_size()
        assert strides[-1] == 1, strides
        assert not any(x * item % 16 for x in strides[:-1]), strides
        assert base.data_ptr() % 16 == 0, base.data_ptr()
        assert max(block_shape) <= 256, block_shape
        # A wider box than a panel takes several, which must be whole.
        width, num_bytes = layout.swizzle_byte_width, block_shape[-1] * item
        assert not width or num_bytes <= width or num_bytes % width == 0, (block_shape, layout)
        extent = _extent(base.shape, base.stride())
        if _extent(shape, strides) > extent:
            raise Fault(f"a descriptor of {shape} elements, over a tensor that has {extent}")
        self._matrix = base.as_strided(shape, strides)
        self.block_shape = block_shape
        self.layout = layout
        self.dtype = base.dtype

    @staticmethod
    def from_tensor(
        tensor: Tensor, block_shape: list[int], layout: NVMMASharedLayout
    ) -> "TensorDescriptor":
        shape, strides = list(tensor.shape), list(tensor.stride())
        return TensorDescriptor(tensor, shape, strides, block_shape, layout)

    def read_box(self, corner: list[int]) -> Tensor:
        box = torch.zeros(self.block_shape, dtype=self.dtype)
        inside = [
            slice(max(start, 0), max(min(start + size, limit), 0))
            for start, size, limit in zip(corner, box.shape, self._matrix.shape, strict=True)
        ]
        values = self._matrix[tuple(inside)]
        if values.numel():
            parts = zip(inside, corner, values.shape, strict=True)
            place = [slice(x.start - start, x.start - start + size) for x, start, size in parts]
            box[tuple(place)] = values
        return box


@cache
def _places(shape: tuple[int, ...], panel: int) -> Tensor:
    """Where a view's elements lie: rows of a panel one after the other, panel after panel."""
    if panel >= shape[-1]:
        return torch.arange(math.prod(shape)).view(shape)
    assert shape[-1] % panel == 0, (shape, panel)
    by_panel = (*shape[:-2], shape[-1] // panel, shape[-2], panel)
    places = torch.arange(math.prod(shape)).view(by_panel)
    return places.transpose(-3, -2).reshape(shape)


def _panel_of(layout: Any, shape: list[int]) -> int:
    return layout.panel if isinstance(layout, NVMMASharedLayout) else shape[-1]


class SharedMemory:
    """A view of an allocation. NaN, or the largest integer, until it is written."""

    def __init__(self, name: str, memory: Tensor, hidden: Tensor, places: Tensor, layout: Any):
        self.name = name
        self.layout = layout
        self._memory = memory
        self._hidden = hidden
        """Elements that threads wrote, and that no fence shows to products yet."""
        self._places = places

    @staticmethod
    def allocate(name: str, dtype: torch.dtype, shape: list[int], layout: Any) -> "SharedMemory":
        memory = torch.full((math.prod(shape),), poison_of(dtype), dtype=dtype)
        hidden = torch.zeros(memory.shape, dtype=torch.bool)
        places = _places(tuple(shape), _panel_of(layout, shape))
        return SharedMemory(name, memory, hidden, places, layout)

    dtype = property(lambda self: self._memory.dtype)
    shape = property(lambda self: list(self._places.shape))

    def index(self, index: Any) -> "SharedMemory":
        place = index.__index__()
        if not 0 <= place < self.shape[0]:
            raise Fault(f"{self.name} has {self.shape[0]} parts, and none of number {place}")
        return self._view(self._places[place])

    def permute(self, axes: tuple[int, ...]) -> "SharedMemory":
        return self._view(self._places.permute(axes))

    def slice(self, start: int, length: int) -> "SharedMemory":
        return self._view(self._places[start : start + length])

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "SharedMemory":
        """Of all that the view shows, which lies in one run, in the same number format."""
        assert dtype is self.dtype, (dtype, self.dtype)
        assert self._places.numel() == math.prod(shape), (self.shape, shape)
        first, last = (place.item() for place in self._places.aminmax())
        assert last - first + 1 == self._places.numel(), self.name
        if isinstance(layout, SharedLinearLayout):
            places = layout.places(shape)
        else:
            places = _places(tuple(shape), _panel_of(layout, shape))
        return SharedMemory(self.name, self._memory, self._hidden, first + places, layout)

    def load(self, layout: Any) -> Tile:
        current().pause()
        return Tile(self._memory[self._places], layout)

    def store(self, values: Tile) -> None:
        current().pause()
        self.write(values.data)
        self.hide(current())

    def write(self, values: Tensor) -> None:
        """As the copy engine does: products see it."""
        assert values.shape == self._places.shape, (self.name, values.shape, self.shape)
        assert values.dtype is self.dtype, (self.name, values.dtype, self.dtype)
        self._memory[self._places] = values
        self._hidden[self._places] = False

    def poison(self) -> None:
        """While a copy is under way to it."""
        self._memory[self._places] = poison_of(self.dtype)

    def hide(self, writer: Partition) -> None:
        """From products, until the writer's next fence."""
        self._hidden[self._places] = True
        writer.unfenced.append(self)

    def show(self) -> None:
        self._hidden[self._places] = False

    def read_by_product(self) -> Tensor:
        if self._hidden[self._places].any():
            raise Fault(f"a product reads what threads wrote to {self.name}, before their fence")
        return self._memory[self._places].float()

    def _view(self, places: Tensor) -> "SharedMemory":
        return SharedMemory(self.name, self._memory, self._hidden, places, self.layout)
