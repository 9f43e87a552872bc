# SPDX-License-Identifier: Apache-2.0
"""Kernels of a step of one token, each of which starts before the one in front has ended."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Stop = Callable[[Tensor], Tensor]


def assert_same_overlapped(run: Callable[[Stop], list[Tensor]]) -> None:
    """The same bits from a graph as with a wait behind each kernel. `run` passes what each of its
    kernels gives through the function that it gets."""

    def wait(result: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return result

    expected = torch.cat(run(wait))
    assert expected.isfinite().all()
    # Poisoned memory is filled by kernels of its own, and behind them nothing starts early.
    poisons = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = run(lambda result: result)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = poisons
    for _ in range(5):
        for result in actual:
            result.fill_(math.nan)
        graph.replay()
        assert torch.equal(torch.cat(actual), expected)
