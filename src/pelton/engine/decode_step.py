# SPDX-License-Identifier: Apache-2.0
"""The contract of a step of a padded size: what may be captured into CUDA graphs."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from pelton.engine.input_builder import StepInputs


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """What such a step leaves on the device, valid until the next one."""

    hidden_states: Float[Tensor, "M D"]
    """What the model returned: of all tokens, or of those whose logits are wanted."""
    logits: Float[Tensor, "N V"]
    token_ids: Int[Tensor, " N"]
    """The highest logits' ids. A step of one token a row has put them into the token table."""
    is_finite: Int[Tensor, " N"]


DecodeStep = Callable[[StepInputs], DecodeOutput]

DraftStep = Callable[[StepInputs, Float[Tensor, "T D"]], Int[Tensor, "n k"]]
"""Guesses what follows each row that samples, from the model's hidden states, once the tokens
sampled are in the token table."""
