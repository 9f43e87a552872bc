# SPDX-License-Identifier: Apache-2.0
"""Every op has what an op must have: a reference, a kernel, a cost, a grid of shapes."""

import importlib
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest

import pelton.kernels
from pelton.kernels.dispatch import registered_ops

TESTS = Path(__file__).parents[2]
WITHOUT_TRITON = {
    "quantize_rows": "of 8-bit weights, which are computed on a CPU only",
    "scale_rows": "likewise",
}


@cache
def ops() -> dict[str, object]:
    for module in pkgutil.walk_packages(pelton.kernels.__path__, "pelton.kernels."):
        if ".native." not in module.name:  # these need Numba, and are loaded by name
            importlib.import_module(module.name)
    return {name: op for name, op in registered_ops().items() if name != "probe"}


def grid_files(has_triton: bool) -> list[Path]:
    """Those of Triton kernels run on a card and under the interpreter."""
    folder = TESTS / "gpu" if has_triton else TESTS / "unit" / "kernels"
    return [*folder.glob("test_*.py"), *TESTS.glob("*.py")]


def test_there_are_ops() -> None:
    assert len(ops()) >= 26
    assert set(WITHOUT_TRITON) <= set(ops())


@pytest.mark.parametrize("name", list(ops()))
def test_an_op_has_a_reference_a_kernel_and_a_cost(name: str) -> None:
    op = ops()[name]

    assert op.names[0] == "meta"
    assert op.names[-1] == "reference"
    assert ("triton" in op.names) is (name not in WITHOUT_TRITON)
    meta = inspect.getsource(op.named("meta"))
    assert f'"{name}"' in meta
    assert re.search(r"log_(cost|product)\(", meta)


@pytest.mark.parametrize("name", list(ops()))
def test_an_ops_implementations_are_compared_over_a_grid(name: str) -> None:
    has_triton = name not in WITHOUT_TRITON
    calls = rf"\b{name.upper()}\.named\(|\b{name}\(|\b{name.upper()}\b"

    found = [file.name for file in grid_files(has_triton)
             if "parametrize" in (text := file.read_text()) and re.search(calls, text)]  # fmt: skip

    assert found, f"no parametrised test compares the implementations of {name}"
