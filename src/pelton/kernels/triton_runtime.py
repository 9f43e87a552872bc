# SPDX-License-Identifier: Apache-2.0
"""The one place that imports Triton.

`triton` and `tl` are the real modules where there is a GPU, or where TRITON_INTERPRET=1 asks for
Triton's interpreter on the CPU. Elsewhere they are stand-ins under which kernel files still
import, and `runs_triton` keeps dispatch from choosing a kernel.
"""

import importlib
import importlib.util
import os
from functools import cache
from typing import Any

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HAS_TRITON = (IS_INTERPRETED or torch.cuda.is_available()) and (
    importlib.util.find_spec("triton") is not None
)


class _AbsentTriton:
    """Lets a kernel file be imported; launching one of its kernels says what is missing."""

    constexpr = int

    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        return (lambda _: _AbsentKernel()) if function is None else _AbsentKernel()


class _AbsentKernel:
    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError("This kernel needs the package triton and an NVIDIA GPU.")


def _mend_interpreter() -> None:
    """Triton 3.6's interpreter turns loop bounds, arrays of one element, into integers in a way
    that numpy 2.4 and later refuse."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


triton: Any
tl: Any
if HAS_TRITON:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
    if IS_INTERPRETED:
        _mend_interpreter()
else:
    triton = tl = _AbsentTriton()

_TRITON_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def runs_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """The requirement of every Triton kernel here.

    The interpreter computes `tl.dot` on bfloat16 wrongly, so it does not take that format.
    """
    if not HAS_TRITON or dtype not in _TRITON_DTYPES:
        return False
    if IS_INTERPRETED:
        return device.type == "cpu" and dtype is not torch.bfloat16
    return device.type == "cuda"


@cache
def num_multiprocessors(device: torch.device) -> int:
    """How many thread blocks run side by side at least; sizes persistent and split grids."""
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)
