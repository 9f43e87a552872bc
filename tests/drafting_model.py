# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama with a layer to draft with, whose guesses can be known without the drafter.

The layer is a second copy of the whole model with keys and values of its own. It is given the
token after each position, so its greedy chain is what the model itself would say after the same
tokens without the first: mostly what the model says, and exactly computable.
"""

from dataclasses import replace

import torch
from torch import Tensor

from pelton.core.batch import ForwardBatch
from pelton.core.geometry import ModelGeometry
from pelton.layers.attention import PagedAttention
from pelton.models.llama import Model
from pelton.models.llama_config import Config

VOCAB = 48
EOS = 0
CONFIG = Config(
    model_type="llama",
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    max_context=160,
    dtype="float32",
    eos_token_ids=(EOS,),
)


class Twin:
    def __init__(self, model: Model) -> None:
        self._model = model

    def __call__(
        self, hidden_states: Tensor, next_token_ids: Tensor, batch: ForwardBatch
    ) -> Tensor:
        assert hidden_states.shape == (batch.num_tokens, CONFIG.hidden_size)
        assert next_token_ids.shape == batch.positions.shape
        if not next_token_ids.is_cuda:  # where it would wait for the device, in a capture too
            assert ((next_token_ids >= 0) & (next_token_ids < VOCAB)).all()
        return self._model(replace(batch, token_ids=next_token_ids))

    def logits(self, hidden_states: Tensor) -> Tensor:
        return self._model.logits(hidden_states)


class DraftingModel(Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        with torch.no_grad():
            # By name: a model whose modules are made in another order has the same weights.
            for _, parameter in sorted(self.named_parameters()):
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
        twin = Model(config)
        twin.load_state_dict(self.state_dict())
        for layer, block in enumerate(twin.blocks):
            block.attention.attend = PagedAttention(
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                group=0,
                layer=config.num_layers + layer,
            )
        self.twin = twin

    def mtp_layer(self) -> Twin:
        return Twin(self.twin)


def make_drafting_model() -> tuple[DraftingModel, ModelGeometry]:
    """The same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = DraftingModel(CONFIG)
    geometry = CONFIG.geometry("tiny")
    (group,) = geometry.kv_groups
    group = replace(group, layers=tuple(range(2 * CONFIG.num_layers)))
    return model, replace(geometry, kv_groups=(group,), num_mtp_layers=1)
