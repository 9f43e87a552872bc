# SPDX-License-Identifier: Apache-2.0
"""Published config.json files, word for word, and the tensors that belong to them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from published import CONFIGS, index_of, published

from pelton.core.errors import CheckpointError
from pelton.models.loader import match_tensors
from pelton.models.registry import find_architecture

GEOMETRIES = {
    # Millions of parameters, layers and heads by KV group, bytes of KV a token in 16 bits.
    "Llama-3.1-8B-Instruct": (8030, 131072),
    "Llama-3.1-70B-Instruct": (70553, 327680),
    "Llama-3.1-405B-Instruct": (405853, 516096),
    "Meta-Llama-3.1-8B-Instruct-FP8": (8030, 131072),
    "Meta-Llama-3.1-70B-Instruct-FP8-dynamic": (70553, 327680),
    "Llama-3.1-405B-Instruct-FP8": (405853, 516096),
    "DeepSeek-R1": (671026, 70272),
    "gpt-oss-20b": (20914, 49152),
    "gpt-oss-120b": (116829, 73728),
}


class Index:
    """Names and shapes, and nothing to read."""

    name, path = "published", Path("published")

    def __init__(self, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        self.config = config
        self._shapes = shapes

    @property
    def tensor_names(self) -> Sequence[str]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]


def match(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], *, mtp: bool = False) -> set:
    architecture = find_architecture(config)
    model_config = architecture.config_from_hf(config)
    if mtp:
        model_config = architecture.with_mtp(model_config)
    with torch.device("meta"):
        model = architecture.build(model_config)
    fills = match_tensors(model, architecture.weights(model_config), Index(config, shapes))
    return {fill.source for fill in fills}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_config_gives_the_geometry(name: str) -> None:
    config = published(name)

    geometry = find_architecture(config).config_from_hf(config).geometry(name)

    bytes_a_token = sum(group.block_bytes(1, 2) for group in geometry.kv_groups)
    assert (geometry.num_parameters // 10**6, bytes_a_token) == GEOMETRIES[name]
    assert geometry.max_context == config["max_position_embeddings"]
    eos = config["eos_token_id"]
    assert list(geometry.eos_token_ids) == (eos if isinstance(eos, list) else [eos])
    assert geometry.num_mtp_layers == config.get("num_nextn_predict_layers", 0)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "DeepSeek-R1"])
def test_every_tensor_of_the_published_index_has_its_place(name: str) -> None:
    config = published(name)
    index = index_of(config)

    assert match(config, index) == {name for name in index if not name.endswith(".input_scale")}


@pytest.fixture(scope="module")
def deepseek() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """At full size, and the first MoE layer and the MTP layer of all 61."""
    config = published("DeepSeek-R1", num_hidden_layers=4)
    return config, index_of(config)


def test_every_tensor_of_deepseek_has_its_place(deepseek) -> None:
    config, index = deepseek
    last = "model.layers.4."
    own = {name for name in index if name.startswith(last)}
    copies = {last + "embed_tokens.weight", last + "shared_head.head.weight"}

    assert match(config, index) == set(index) - own
    assert match(config, index, mtp=True) == set(index) - copies


@pytest.mark.parametrize(
    ("changed", "shape", "message"),
    [
        ("model.layers.3.mlp.experts.255.up_proj.weight_scale_inv", None, "lacks 1 .*255.up_proj"),
        ("model.layers.3.mlp.experts.7.down_proj.weight", None, "lacks 1 .*7.down_proj.weight"),
        ("model.layers.3.mlp.experts.256.up_proj.weight", (1,), "holds 1 .*has not.*experts.256"),
        (
            "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv",
            (4, 56),
            r"\[4, 56\] inst",
        ),
        ("model.layers.3.mlp.gate.e_score_correction_bias", (255,), r"\[255\] instead of \[256\]"),
        ("model.layers.4.eh_proj.weight", (7168, 7168), r"instead of \[7168, 14336\]"),
        ("model.layers.4.mlp.experts.0.gate_proj.weight", None, "lacks 1 .*layers.4.*gate_proj"),
        ("model.layers.4.enorm.weight", None, "lacks 1 .*layers.4.enorm"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_a_tensor_that_is_missing_surplus_or_cut_is_named(
    deepseek, changed, shape, message
) -> None:
    config, index = deepseek
    damaged = {name: own for name, own in index.items() if name != changed}
    if shape is not None:
        damaged[changed] = shape

    with pytest.raises(CheckpointError, match=message):
        match(config, damaged, mtp=True)


@pytest.mark.parametrize(
    ("changed", "shape", "message"),
    [
        ("self_attn.sinks", (63,), r"sinks is \[63\] instead of \[64\]"),
        ("mlp.experts.gate_up_proj_scales", (32, 5760, 45), r"\[32, 5760, 45\] instead"),
        ("mlp.experts.down_proj_blocks", (31, 2880, 90, 16), r"\[31, 2880, 90, 16\] instead"),
        ("mlp.experts.gate_up_proj_scales", None, "lacks 1 .*gate_up_proj_scales"),
        ("mlp.experts.gate_up_proj", (32, 2880, 5760), "holds 1 .*experts.gate_up_proj"),
        ("self_attn.q_proj.bias", None, "lacks 1 .*q_proj.bias"),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_what_is_wrong_in_gpt_oss_is_named(changed, shape, message) -> None:
    config = published("gpt-oss-20b", num_hidden_layers=2, layer_types=None)
    index = index_of(config)
    name = f"model.layers.1.{changed}"
    index.pop(name, None)
    if shape is not None:
        index[name] = shape

    with pytest.raises(CheckpointError, match=message):
        match(config, index)
