# SPDX-License-Identifier: Apache-2.0
"""Moves a step's host arrays to the device: one asynchronous copy in, one out.

On a GPU the host side is pinned memory from torch's caching allocator, which does not hand a
buffer out again before the copies that use it are done: launching step N+1 never disturbs the
copy of step N. On a CPU host and device are the same memory and nothing is copied.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int32]
HostArray = npt.NDArray[np.int32] | npt.NDArray[np.float32]


class StaticInputs:
    """Named int32 arrays of fixed capacity at fixed device addresses, refilled each step."""

    def __init__(self, capacities: Mapping[str, int], device: torch.device) -> None:
        self._slices: dict[str, slice] = {}
        total = 0
        for name, capacity in capacities.items():
            self._slices[name] = slice(total, total + capacity)
            # Each array starts at a multiple of 64 bytes.
            total += -(-capacity // 16) * 16
        self._buffer = torch.zeros(total, dtype=torch.int32, device=device)
        self._host = self._buffer if device.type == "cpu" else None
        self.tensors = {name: self._buffer[part] for name, part in self._slices.items()}

    def begin(self) -> dict[str, IntArray]:
        """Host arrays to fill; what is not filled has no defined value. Ends with `flush`."""
        if self._buffer.device.type != "cpu":
            self._host = torch.empty(self._buffer.shape, dtype=torch.int32, pin_memory=True)
        assert self._host is not None
        host: IntArray = self._host.numpy()
        return {name: host[part] for name, part in self._slices.items()}

    def flush(self) -> None:
        if self._buffer.device.type != "cpu":
            assert self._host is not None, "flush without begin"
            self._buffer.copy_(self._host, non_blocking=True)
            self._host = None


def upload(arrays: Mapping[str, HostArray], device: torch.device) -> dict[str, Tensor]:
    """New device tensors with the arrays' values, by one copy. All elements have four bytes. Each
    tensor starts at a multiple of 16 bytes, which Triton compiles for."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    total = sum(-(-array.size // 4) * 4 for array in arrays.values())
    host = torch.empty(total, dtype=torch.int32, pin_memory=True)
    packed: IntArray = host.numpy()
    start, parts = 0, {}
    for name, array in arrays.items():
        parts[name] = slice(start, start + array.size)
        packed[parts[name]] = array.view(np.int32).ravel()
        start += -(-array.size // 4) * 4
    on_device = host.to(device, non_blocking=True)
    tensors = {}
    for name, array in arrays.items():
        part = on_device[parts[name]].view(array.shape)
        tensors[name] = part.view(torch.float32) if array.dtype == np.float32 else part
    return tensors


class Download:
    """An asynchronous copy of four-byte device tensors to the host. `wait` may be called once."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        if not tensors or tensors[0].device.type == "cpu":
            return
        packed = torch.cat([tensor.view(torch.int32).flatten() for tensor in tensors])
        self._host = torch.empty(packed.shape, dtype=torch.int32, pin_memory=True)
        self._host.copy_(packed, non_blocking=True)
        self._event = torch.cuda.current_stream().record_event()

    def wait(self) -> list[npt.NDArray[Any]]:
        """The tensors' values, in order, once they are on the host."""
        if self._event is None:
            return [tensor.numpy() for tensor in self._tensors]
        self._event.synchronize()
        values, start = [], 0
        for tensor in self._tensors:
            part = self._host[start : start + tensor.numel()].view(tensor.shape)
            values.append(part.view(tensor.dtype).numpy())
            start += tensor.numel()
        return values
