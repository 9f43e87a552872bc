# SPDX-License-Identifier: Apache-2.0
"""The one place that imports Triton.

`triton` and `tl` are the real modules where there is a GPU, or where TRITON_INTERPRET=1 asks for
Triton's interpreter on the CPU. Elsewhere they are stand-ins under which kernel files still
import, and `runs_triton` keeps dispatch from choosing a kernel.

`gluon`, `gl` and `hopper` are the language below it, in which a kernel places its tiles itself;
its kernels run on a GPU of compute capability 9 only (`runs_hopper`), never interpreted. In tests
`tests/gluon_emulator` stands in for them on the CPU.
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

    @staticmethod
    def constexpr_function(function: Any) -> Any:
        return function


class _AbsentKernel:
    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError("This kernel needs the package triton and an NVIDIA GPU.")

    def warmup(self, *arguments: Any, **options: Any) -> Any:
        return self[()]


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
gluon: Any
gl: Any
hopper: Any
TensorDescriptor: Any
if HAS_TRITON:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
    if IS_INTERPRETED:
        _mend_interpreter()
else:
    triton = tl = _AbsentTriton()
if HAS_TRITON and not IS_INTERPRETED:
    gluon = importlib.import_module("triton.experimental.gluon")
    gl = importlib.import_module("triton.experimental.gluon.language")
    hopper = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    _descriptors = importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    TensorDescriptor = _descriptors.TensorDescriptor
else:
    gluon = gl = hopper = TensorDescriptor = _AbsentTriton()

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
def runs_hopper(device: torch.device) -> bool:
    """Whether kernels that use Hopper's copy engine and warpgroup products can run."""
    if not HAS_TRITON or IS_INTERPRETED or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


_OVERLAP = {"OVERLAPS": True, "launch_pdl": True}
_NO_OVERLAP = {"OVERLAPS": False}


@cache
def _can_overlap(device: torch.device) -> bool:
    if not HAS_TRITON or IS_INTERPRETED or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def overlap_options(device: torch.device, num_tokens: int) -> dict[str, bool]:
    """Keyword arguments of a kernel that may start before the one in front of it has ended
    (programmatic dependent launch, from Hopper on).

    A kernel with OVERLAPS first says that the next one may start (`gdc_launch_dependents`). It may
    then read constants such as weights, and a step's inputs: kernels write those that do not
    overlap, and another such one, the embedding, has run since. Before it reads or writes anything
    else that another kernel writes or reads, it calls `gdc_wait`. The wait ends when the kernel in
    front has ended, which itself waited for the one in front of it: so everything earlier has ended
    too; a program without work may end at once if another of its kernel waits. A kernel that waits
    first and says it then (`hopper_one`) lets the next one read at once everything but its results,
    and write what it neither reads nor writes.

    On for one token only, where every kernel of a step is one of ours. From two on the library's
    products stand between, which do not overlap, and the programs that wait only take up room.
    """
    return _OVERLAP if num_tokens == 1 and _can_overlap(device) else _NO_OVERLAP


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
