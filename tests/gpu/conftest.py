# SPDX-License-Identifier: Apache-2.0
"""GPU tests run on an NVIDIA GPU, or on the CPU under Triton's interpreter where a test allows."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

# cuBLAS needs it to be deterministic, which the poisoned memory below asks for.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Other tests run beside this one, each in a process of its own.
torch.set_num_threads(2)
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def sum_products_exactly() -> None:
    """Makes the interpreter sum a tile's products in float64 and round once. In which order a CPU's
    library sums in float32 depends on the tile's shape, on some CPUs more than on others, which
    would show in tests that compare bits."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32:
            return multiply(self, a, b, d, *options)
        zeros = TensorHandle(np.zeros(d.data.shape), tl.float64)
        product = multiply(self, a, b, zeros, *options).data.astype(np.float32)
        return TensorHandle(product + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


if IS_INTERPRETED:
    sum_products_exactly()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") and not (
            IS_INTERPRETED and "interpretable" in item.fixturenames
        ):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda:0")


@pytest.fixture
def interpretable() -> None:
    """Asked for by tests that Triton's interpreter can run."""


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20)


@pytest.fixture
def device_generator(device: torch.device) -> torch.Generator:
    """For weights of real size, which take a CPU many seconds to draw."""
    return torch.Generator(device).manual_seed(20)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody wrote reads as NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
