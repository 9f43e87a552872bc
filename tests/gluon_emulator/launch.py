# SPDX-License-Identifier: Apache-2.0
"""Kernels as modules of Pelton define and launch them."""

import importlib
import inspect
import itertools
import sys
from collections.abc import Callable
from functools import partial
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from gluon_emulator import hopper, language
from gluon_emulator.memory import Pointer, TensorDescriptor
from gluon_emulator.schedule import Program
from gluon_emulator.values import as_scalar, scalar_range
from pelton.kernels import triton_runtime

_OPTIONS = {"num_warps", "maxnreg", "enable_fp_fusion"}
"""Of a launch, beside the kernel's own arguments."""


class Kernel:
    """A function of `gluon.jit`: called by other kernels, or launched over a grid."""

    def __init__(self, function: Callable[..., Any], random: Random) -> None:
        self._function = function
        self._random = random

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *, num_warps: int, **arguments: Any) -> None:
        """Programs run one after the other, in any order."""
        parameters = inspect.signature(self._function).parameters
        values = {
            name: value
            if parameters[name].annotation is language.constexpr
            else _as_kernel_argument(value)
            for name, value in arguments.items()
            if name not in _OPTIONS
        }
        if "num_warps" in parameters:
            values["num_warps"] = num_warps
        places = list(itertools.product(*(range(size) for size in grid)))
        self._random.shuffle(places)
        for place in places:
            program = Program(self._random, place, grid, num_warps)
            program.run(partial(self._function, **values))


def _as_kernel_argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Pointer.to(value)
    return value if isinstance(value, TensorDescriptor) else as_scalar(value)


def make_gluon(random: Random) -> Any:
    """In place of `triton.experimental.gluon`."""

    def jit(function: Any = None, **options: Any) -> Any:
        return partial(Kernel, random=random) if function is None else Kernel(function, random)

    return SimpleNamespace(jit=jit, constexpr_function=lambda function: function)


def load_emulated(name: str, seed: int, num_multiprocessors: int = 3) -> ModuleType:
    """A copy of a module of Gluon kernels that believes to be on a card. What it imports from other
    such modules are copies, too. `seed` is that of all its launches."""
    importlib.import_module(name)
    originals = {
        other: module
        for other, module in sys.modules.items()
        if other.startswith("pelton.kernels.") and hasattr(module, "gluon")
    }
    del originals[triton_runtime.__name__]
    replaced = {
        "gluon": make_gluon(Random(seed)),
        "gl": language,
        "hopper": hopper,
        "TensorDescriptor": TensorDescriptor,
        "runs_hopper": lambda device: True,
        "num_multiprocessors": lambda device: num_multiprocessors,
    }
    with patch.dict(sys.modules), patch.multiple(triton_runtime, **replaced):
        for other in originals:
            del sys.modules[other]
        copy = importlib.import_module(name)
        copies = [sys.modules[other] for other in originals if other in sys.modules]
    for copied in copies:
        vars(copied)["range"] = scalar_range
    for other, module in originals.items():
        package, _, child = other.rpartition(".")
        setattr(sys.modules[package], child, module)
    return copy
