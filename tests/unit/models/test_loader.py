# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pelton.core.errors import CheckpointError
from pelton.models.checkpoint import open_checkpoint
from pelton.models.loader import load_weights
from pelton.models.weight_table import Weight


class Fused(nn.Module):
    """A weight whose first axis several tensors share."""

    def __init__(self, parts: tuple[int, ...], columns: int) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.full((sum(parts), columns), float("nan")))


class Tiny(nn.Module):
    """The parameters of the tiny Llama, with query, key and value fused."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = Fused((400,), 64)
        self.qkv = nn.ModuleList(Fused((64, 32, 32), 64) for _ in range(2))
        self.rest = nn.ModuleDict(
            {
                "output": nn.ModuleList(Fused((64,), 64) for _ in range(2)),
                "gate_up": nn.ModuleList(Fused((128, 128), 64) for _ in range(2)),
                "down": nn.ModuleList(Fused((64,), 128) for _ in range(2)),
            }
        )
        self.norms = nn.ParameterList(torch.zeros(64) for _ in range(5))
        self.head = Fused((400,), 64)
        if is_tied:
            self.head.weight = self.embedding.weight


LAYER = "model.layers.{layer}."
WEIGHTS = [
    Weight("model.embed_tokens.weight", "embedding.weight"),
    *(
        Weight(f"{LAYER}self_attn.{name}_proj.weight", "qkv.{layer}.weight", part)
        for part, name in enumerate("qkv")
    ),
    Weight(LAYER + "self_attn.o_proj.weight", "rest.output.{layer}.weight"),
    Weight(LAYER + "mlp.gate_proj.weight", "rest.gate_up.{layer}.weight", 0),
    Weight(LAYER + "mlp.up_proj.weight", "rest.gate_up.{layer}.weight", 1),
    Weight(LAYER + "mlp.down_proj.weight", "rest.down.{layer}.weight"),
    Weight("model.layers.0.input_layernorm.weight", "norms.0"),
    Weight("model.layers.0.post_attention_layernorm.weight", "norms.1"),
    Weight("model.layers.1.input_layernorm.weight", "norms.2"),
    Weight("model.layers.1.post_attention_layernorm.weight", "norms.3"),
    Weight("model.norm.weight", "norms.4"),
    Weight("lm_head.weight", "head.weight"),
]
TIED_WEIGHTS = WEIGHTS[:-1]


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Sets tensors of the folder's weights; None removes one. Dots are written as double
    underscores."""
    file = folder / "model.safetensors"
    held = load_file(file)
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        if tensor is None:
            del held[name]
        else:
            held[name] = tensor
    save_file(held, file)


def test_every_parameter_is_filled_part_by_part(tiny_llama) -> None:
    model, checkpoint = Tiny(), open_checkpoint(str(tiny_llama.sharded))
    load_weights(model, WEIGHTS, checkpoint)
    attention = "model.layers.1.self_attn."
    fused = torch.cat([checkpoint.read(f"{attention}{name}_proj.weight") for name in "qkv"])
    assert torch.equal(model.qkv[1].weight, fused)
    assert torch.equal(model.head.weight, checkpoint.read("lm_head.weight"))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_parameters_keep_their_format(tiny_llama) -> None:
    model, checkpoint = Tiny().to(torch.bfloat16), open_checkpoint(str(tiny_llama.single))
    load_weights(model, WEIGHTS, checkpoint)
    assert model.head.weight.dtype is torch.bfloat16
    assert torch.equal(model.head.weight, checkpoint.read("lm_head.weight").bfloat16())


def test_inverse_frequencies_are_no_weights(tiny_copy: Path) -> None:
    change(tiny_copy, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load_weights(Tiny(), WEIGHTS, open_checkpoint(str(tiny_copy)))


def test_missing_tensors_are_named_and_counted(tiny_copy: Path) -> None:
    change(tiny_copy, model__norm__weight=None, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(CheckpointError, match=r"lacks 2 .*layers\.1\.mlp\.up_proj\.weight"):
        load_weights(Tiny(), WEIGHTS, open_checkpoint(str(tiny_copy)))


def test_surplus_tensors_are_named_up_to_a_few(tiny_copy: Path) -> None:
    extra = {f"model__layers__{n}__mlp__up_proj__weight": torch.ones(1) for n in range(2, 10)}
    change(tiny_copy, **extra)
    with pytest.raises(CheckpointError, match=r"holds 8 .*layers\.2\..* and 3 more"):
        load_weights(Tiny(), WEIGHTS, open_checkpoint(str(tiny_copy)))


def test_wrong_shapes_are_named_and_nothing_is_filled(tiny_copy: Path) -> None:
    change(tiny_copy, lm_head__weight=torch.ones(400, 63))
    model = Tiny()
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is \[400, 63\] .* \[400, 64\]"):
        load_weights(model, WEIGHTS, open_checkpoint(str(tiny_copy)))
    assert model.embedding.weight.isnan().all()


def tie(folder: Path) -> None:
    config = folder / "config.json"
    text = config.read_text()
    assert '"tie_word_embeddings": false' in text
    config.write_text(text.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))


def test_a_tied_head_may_be_absent_or_equal(tiny_copy: Path) -> None:
    tie(tiny_copy)
    change(tiny_copy, lm_head__weight=None)
    load_weights(Tiny(is_tied=True), TIED_WEIGHTS, open_checkpoint(str(tiny_copy)))
    embedding = load_file(tiny_copy / "model.safetensors")["model.embed_tokens.weight"]
    change(tiny_copy, lm_head__weight=embedding.clone())
    load_weights(Tiny(is_tied=True), TIED_WEIGHTS, open_checkpoint(str(tiny_copy)))


def test_a_tied_head_that_differs_is_refused(tiny_copy: Path) -> None:
    tie(tiny_copy)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .* differs"):
        load_weights(Tiny(is_tied=True), TIED_WEIGHTS, open_checkpoint(str(tiny_copy)))


def test_a_table_that_leaves_out_a_parameter_is_a_mistake(tiny_llama) -> None:
    with pytest.raises(AssertionError, match="head"):
        load_weights(Tiny(), TIED_WEIGHTS, open_checkpoint(str(tiny_llama.single)))
