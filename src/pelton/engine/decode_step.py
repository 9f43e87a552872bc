# SPDX-License-Identifier: Apache-2.0
"""The contract of a step that holds decodes only: what may be captured into a CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from pelton.core.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """What a step of decodes leaves on the device, valid until the next one."""

    hidden_states: Float[Tensor, "T D"]
    logits: Float[Tensor, "N V"]
    token_ids: Int[Tensor, " N"]
    """The highest logits' ids. A step without drafts has put them into the token table already."""
    is_finite: Int[Tensor, " N"]


DecodeStep = Callable[[ForwardBatch, Tensor], DecodeOutput]
"""Takes the batch and its targets, both in static buffers."""
