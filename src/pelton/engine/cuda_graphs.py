# SPDX-License-Identifier: Apache-2.0
"""Decode steps as CUDA graphs: one replay instead of hundreds of launches.

A graph holds the forward pass, the highest logits and the write to the token table, for one number
of rows on a dense ladder; a step with fewer rows is padded up to it. Padding rows have context
length 0, write to the null block and yield zeros. All graphs share one memory pool and are
captured largest first, so together they take little more than the largest. What a graph leaves is
valid until the next replay of any of them.

Replaying runs the kernels that an eager call of the same padded batch runs, with the same tiles:
the results are the same bits.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from pelton.core.batch import ForwardBatch
from pelton.engine.decode_step import DecodeOutput, DecodeStep
from pelton.engine.input_builder import StepInputs


def decode_ladder(max_rows: int) -> tuple[int, ...]:
    """Row counts with a graph: steps of 8 up to 128, then of 64; `max_rows` is the last."""
    sizes = {1, 2, 4, 8, *range(16, 129, 8), *range(192, max_rows, 64), max_rows}
    return tuple(sorted(size for size in sizes if size <= max_rows))


def make_padding(ladder: Sequence[int]) -> Callable[[int], int]:
    """The rule from a step's rows to the rows of the graph that runs it."""

    def padded_rows(num_rows: int) -> int:
        return ladder[bisect_left(ladder, num_rows)]

    return padded_rows


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: DecodeOutput


class DecodeGraphs:
    """A `DecodeStep` that replays graphs of another one. Owns the graphs and their memory."""

    def __init__(self, decode_step: DecodeStep, build_padding: Callable[[int], StepInputs]) -> None:
        """`build_padding(n)` fills the static buffers with n padding rows."""
        self._decode_step = decode_step
        self._build_padding = build_padding
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, _Captured] = {}

    def __call__(self, batch: ForwardBatch, targets: Int[Tensor, " N"]) -> DecodeOutput:
        captured = self._captured.get(batch.num_rows)
        if captured is None:
            return self._decode_step(batch, targets)
        captured.graph.replay()
        return captured.output

    @torch.inference_mode()
    def capture(self, ladder: Sequence[int]) -> None:
        """Largest first: the smaller ones then find their memory in the pool."""
        for num_rows in sorted(ladder, reverse=True):
            self._captured[num_rows] = self._capture(num_rows)

    def _capture(self, num_rows: int) -> _Captured:
        inputs = self._build_padding(num_rows)
        # Compiles kernels and creates library handles, which a capture must not do.
        self._decode_step(inputs.batch, inputs.targets)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = self._decode_step(inputs.batch, inputs.targets)
        borrowed = DecodeOutput(
            _borrow(output.hidden_states),
            _borrow(output.logits),
            _borrow(output.token_ids),
            _borrow(output.is_finite),
        )
        return _Captured(graph, borrowed)


class _DeviceMemory:
    """Memory described to torch without owning it."""

    def __init__(self, tensor: Tensor) -> None:
        flat = tensor.view(torch.uint8)
        self.__cuda_array_interface__ = {
            "shape": tuple(flat.shape),
            "typestr": "|u1",
            "data": (flat.data_ptr(), False),
            "version": 3,
        }


def _borrow(tensor: Tensor) -> Tensor:
    """The same memory, returned to the graphs' pool when `tensor` goes: the next graph to be
    captured may then use it too, where each owning its logits would add up to gigabytes."""
    assert tensor.is_contiguous(), tensor.stride()
    borrowed = torch.as_tensor(_DeviceMemory(tensor), device=tensor.device)
    return borrowed.view(tensor.dtype)
