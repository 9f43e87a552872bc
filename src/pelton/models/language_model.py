# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of every model that predicts tokens."""

from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn

from pelton.core.batch import ForwardBatch
from pelton.layers.linear import Linear
from pelton.quantization.format import WeightFormat


@runtime_checkable
class Absorbing(Protocol):
    """A module that turns what was loaded into another form before products are packed."""

    def absorb(self) -> None: ...


class MTPLayer(Protocol):
    """A multi-token prediction layer: guesses the token after the next one. Its keys and values
    have a layer of their own in the batch's cache."""

    def __call__(
        self,
        hidden_states: Float[Tensor, "T D"],
        next_token_ids: Int[Tensor, " T"],
        batch: ForwardBatch,
    ) -> Float[Tensor, "T D"]:
        """From what the model (or this layer, in a chain) returned for each token of `batch` and
        the token that follows it. `batch.token_ids` is not read."""
        ...

    def logits(self, hidden_states: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        """Of the token two after each, from what a call returned."""
        ...


class LanguageModel(nn.Module, ABC):
    """Stateless between calls: keys and values live in the batch's cache."""

    head: Linear
    """Gives the logits."""
    unused_tensors: tuple[str, ...] = ()
    """Beginnings of the names of tensors that a checkpoint may hold and this model leaves out."""
    has_experts = False
    """Whether most weights are experts', which keep the checkpoint's format."""

    @abstractmethod
    def __call__(self, batch: ForwardBatch) -> Float[Tensor, "N D"]:
        """Normed hidden states of `batch.hidden_rows`, or of every token in the step."""

    @abstractmethod
    def logits(self, hidden_states: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]: ...

    def mtp_layer(self) -> MTPLayer | None:
        """The layer to draft with, if the model was built with it."""
        return None

    def pack(
        self,
        weight_format: WeightFormat,
        head_format: WeightFormat | None = None,
        float32_format: WeightFormat | None = None,
    ) -> None:
        """Turns every product's weight into `weight_format`; the head's into `head_format`, those
        whose readers take float32 into `float32_format`, where one is given. Call once, after
        loading."""
        for module in self.modules():
            if isinstance(module, Absorbing):
                module.absorb()
        for module in self.modules():
            if isinstance(module, Linear):
                own_format = float32_format if module.gives_float32 else None
                module.pack((head_format if module is self.head else own_format) or weight_format)
