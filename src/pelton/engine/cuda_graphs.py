# SPDX-License-Identifier: Apache-2.0
"""Decode steps, and small steps with prompts, as CUDA graphs: one replay for hundreds of launches.

A graph holds the forward pass and the highest logits (and, of steps of one token a row, the write
to the token table) for one size; a smaller step is padded up to it. Where the
model's MTP layer drafts, a second graph holds the whole chain: between the two lies the sampler,
whose work depends on what the requests ask for. Padding rows have context length 0, write to the
null block and yield nothing anybody reads. All graphs share one memory pool and are captured
largest first, so together they take little more than the largest. What a graph leaves is valid
until the next step's replay.

Replaying runs the kernels that an eager call of the same padded batch runs, with the same tiles:
the results are the same bits.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.engine.decode_step import DecodeOutput, DecodeStep, DraftStep
from pelton.engine.input_builder import StepInputs
from pelton.engine.step_padding import GraphSize


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: DecodeOutput
    draft_graph: torch.cuda.CUDAGraph | None
    drafts: Int[Tensor, "n k"] | None


class DecodeGraphs:
    """A `DecodeStep` and a `DraftStep` that replay graphs of others. Owns the graphs and their
    memory."""

    def __init__(
        self,
        decode_step: DecodeStep,
        draft_step: DraftStep | None,
        build_padding: Callable[[GraphSize], StepInputs],
    ) -> None:
        """`build_padding` fills the static buffers with padding of a size."""
        self._decode_step = decode_step
        self._draft_step = draft_step
        self._build_padding = build_padding
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[GraphSize, _Captured] = {}

    def decode(self, inputs: StepInputs) -> DecodeOutput:
        captured = self._captured.get(inputs.size) if inputs.size else None
        if captured is None:
            return self._decode_step(inputs)
        captured.graph.replay()
        return captured.output

    def draft(self, inputs: StepInputs, hidden_states: Float[Tensor, "T D"]) -> Int[Tensor, "n k"]:
        assert self._draft_step is not None, "nothing drafts"
        captured = self._captured.get(inputs.size) if inputs.size else None
        if captured is None:
            return self._draft_step(inputs, hidden_states)
        assert captured.draft_graph is not None
        assert captured.drafts is not None
        captured.draft_graph.replay()
        return captured.drafts

    @torch.inference_mode()
    def capture(self, sizes: Iterable[GraphSize]) -> None:
        """Largest first: the smaller ones then find their memory in the pool."""
        for size in sorted(sizes, key=lambda size: -size.num_tokens):
            self._captured[size] = self._capture(size)

    def _capture(self, size: GraphSize) -> _Captured:
        inputs = self._build_padding(size)
        # Compiles kernels and creates library handles, which a capture must not do.
        decoded = self._decode_step(inputs)
        if self._draft_step is not None:
            self._draft_step(inputs, decoded.hidden_states)
        del decoded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = self._decode_step(inputs)
        draft_graph = drafts = None
        if self._draft_step is not None:
            draft_graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(draft_graph, pool=self._pool):
                drafts = self._draft_step(inputs, output.hidden_states)
            drafts = _borrow(drafts)
        borrowed = DecodeOutput(
            _borrow(output.hidden_states),
            _borrow(output.logits),
            _borrow(output.token_ids),
            _borrow(output.is_finite),
        )
        return _Captured(graph, borrowed, draft_graph, drafts)


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
