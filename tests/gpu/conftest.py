# SPDX-License-Identifier: Apache-2.0
"""GPU tests run on an NVIDIA GPU, or on the CPU under Triton's interpreter where a test allows."""

import os
from collections.abc import Iterator

import pytest
import torch

# cuBLAS needs it to be deterministic, which the poisoned memory below asks for.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Other tests run beside this one, each in a process of its own.
torch.set_num_threads(2)
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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
