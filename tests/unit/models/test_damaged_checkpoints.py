# SPDX-License-Identifier: Apache-2.0
"""Files that are cut and tensors that are damaged: one sentence that names them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from layouts import write_deepseek, write_gpt_oss, write_llama, write_safetensors
from safetensors.torch import load_file
from torch import Tensor

from pelton.core.config import ModelConfig, SpeculativeConfig
from pelton.core.errors import CapacityError, CheckpointError, ConfigError
from pelton.engine.factory import load_model
from pelton.models import geometries
from pelton.models.geometries import GEOMETRIES

CPU = torch.device("cpu")
Write = Callable[..., Any]


def write_fp8_llama(folder: Path) -> None:
    write_llama(folder, "Meta-Llama-3.1-70B-Instruct-FP8-dynamic")


@pytest.fixture(params=[write_fp8_llama, write_deepseek, write_gpt_oss])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param(tmp_path)
    return tmp_path


def load(folder: Path, speculative: str = "off") -> None:
    load_model(
        ModelConfig(model=str(folder)), CPU, torch.float32,
        speculative=SpeculativeConfig(speculative=speculative),
    )  # fmt: skip


def file_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def damage(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    file = file_of(folder, name)
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    write_safetensors(file, tensors)


@pytest.mark.parametrize("kept", [0, 7, 300, -1], ids=["nothing", "7", "header cut", "one short"])
def test_a_file_that_ends_early_is_named(folder: Path, kept: int) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:kept])

    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors cannot be read"):
        load(folder)


def test_a_shard_that_is_missing_is_named(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"00001-of-00002\.safetensors', which is missing"):
        load(folder)


def test_a_tensor_that_is_there_twice_is_named(folder: Path) -> None:
    """Such as an expert's, in both shards."""
    name = "model.layers.1.input_layernorm.weight"
    first, second = (folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    other = first if file_of(folder, name) == second else second
    tensors = load_file(other)
    write_safetensors(other, {**tensors, name: torch.ones(64)})

    with pytest.raises(CheckpointError, match=r"holds 'model\.layers\.1\.input.* not place there"):
        load(folder)


DEEPSEEK_SCALE = "model.layers.1.mlp.experts.5.up_proj.weight_scale_inv"
LLAMA_SCALE = "model.layers.1.mlp.up_proj.weight_scale"


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e38])
@pytest.mark.parametrize(
    ("write", "name"), [(write_deepseek, DEEPSEEK_SCALE), (write_fp8_llama, LLAMA_SCALE)]
)
def test_scales_that_no_weight_can_have_are_named(tmp_path, write: Write, name, value) -> None:
    write(tmp_path)

    def spoil(scales: Tensor) -> Tensor:
        scales[0, 0] = value
        return scales

    damage(tmp_path, name, spoil)

    with pytest.raises(CheckpointError, match=f"{name} holds scales .* positive, finite: .*again"):
        load(tmp_path)


@pytest.mark.parametrize("code", [253, 255])
def test_mxfp4_scales_that_are_not_finite_are_named(tmp_path: Path, code: int) -> None:
    write_gpt_oss(tmp_path)
    name = "model.layers.3.mlp.experts.down_proj_scales"
    damage(tmp_path, name, lambda scales: scales.index_fill(0, torch.tensor(4), code))

    with pytest.raises(CheckpointError, match=f"{name} holds scales from 122 to {code}, .* 252"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("write", "name", "change", "message"),
    [
        (write_deepseek, DEEPSEEK_SCALE, lambda s: s[:, :1], r"\[1, 1\] instead of \[1, 2\]"),
        (write_fp8_llama, LLAMA_SCALE, lambda s: s[:, 0], r"\[96\] instead of \[96, 1\]"),
        (
            write_gpt_oss,
            "model.layers.0.self_attn.sinks",
            lambda sinks: sinks[:7],
            r"sinks is \[7\] instead of \[8\]",
        ),
        (
            write_gpt_oss,
            "model.layers.0.mlp.experts.gate_up_proj_blocks",
            lambda blocks: blocks.float(),
            "gate_up_proj_blocks holds torch.float32 .* torch.uint8 .* different weight formats",
        ),
        (
            write_deepseek,
            "model.layers.1.mlp.experts.5.up_proj.weight",
            lambda weight: weight.bfloat16(),
            r"up_proj.weight holds torch.bfloat16 .*float8_e4m3fn",
        ),
        (
            write_fp8_llama,
            "model.layers.1.input_layernorm.weight",
            lambda weight: weight.to(torch.float8_e4m3fn),
            "input_layernorm.weight holds torch.float8_e4m3fn",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_of_another_shape_or_type_is_named(
    tmp_path: Path, write: Write, name, change, message
) -> None:
    write(tmp_path)
    damage(tmp_path, name, change)

    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_plain_tensors_may_have_any_wide_float_format(folder: Path, dtype: torch.dtype) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        write_safetensors(file, {
            name: tensor.to(dtype) if tensor.dtype is torch.bfloat16 else tensor
            for name, tensor in tensors.items()
        })  # fmt: skip

    load(folder)


def drop(folder: Path, beginning: str) -> None:
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        write_safetensors(file, {k: v for k, v in tensors.items() if not k.startswith(beginning)})
    weight_map = index["weight_map"]
    index["weight_map"] = {k: v for k, v in weight_map.items() if not k.startswith(beginning)}
    index_file.write_text(json.dumps(index))


@pytest.mark.parametrize("lost", ["model.layers.3.", "model.layers.3.mlp.experts.4."])
def test_an_mtp_layer_that_is_lost_is_needed_only_to_draft(tmp_path: Path, lost: str) -> None:
    write_deepseek(tmp_path)
    drop(tmp_path, lost)

    load(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors .*model\.layers\.3\."):
        load(tmp_path, "mtp:1")


@pytest.mark.parametrize("write", [write_fp8_llama, write_gpt_oss])
def test_drafting_with_a_layer_that_a_family_has_not_is_refused(tmp_path, write: Write) -> None:
    write(tmp_path)

    with pytest.raises(ConfigError, match=r"--speculative mtp:1 needs .* MTP layer.*ngram:1"):
        load(tmp_path, "mtp:1")


@pytest.mark.parametrize(
    ("file", "method"),
    [
        ("hf_quant_config.json", "modelopt"),
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
    ],
)
def test_a_format_named_in_a_file_of_its_own_is_found(tmp_path: Path, file, method) -> None:
    write_llama(tmp_path, "Llama-3.1-8B-Instruct")
    (tmp_path / file).write_text("{}")

    with pytest.raises(CheckpointError, match=f"'{method}' in .*; the nearest supported one is"):
        load(tmp_path)


def test_a_config_that_promises_more_than_the_file_is_refused_before_memory_is_taken(
    folder: Path,
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 2**24}))
    before = psutil.Process().memory_info().vms

    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is \[211, .*\[16777216, "):
        load(folder)

    assert psutil.Process().memory_info().vms - before < 2**28


def test_weights_that_memory_cannot_hold_are_refused_with_both_figures(monkeypatch) -> None:
    tiny = {**GEOMETRIES["deepseek-v3"], "num_hidden_layers": 4}
    monkeypatch.setattr(geometries, "GEOMETRIES", {"deepseek-v3": tiny})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10**9}))

    with pytest.raises(CapacityError, match=r"deepseek-v3 take 3\d,\d+,\d+,\d+ bytes .* 1,000,000"):
        load_model(ModelConfig(random_weights="deepseek-v3", layers=4), CPU, torch.bfloat16)


@pytest.mark.parametrize(
    "text", ["{", "[" * 10**5, '{"hidden_size": 1' + "0" * 5000 + "}", "[]", "\x00", '"config"'],
    ids=["cut", "deep", "digits", "list", "zero byte", "text"],
)  # fmt: skip
def test_a_config_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(CheckpointError, match=r"config\.json (is not JSON|must hold a JSON obj)"):
        load(tmp_path)


def test_a_config_of_millions_of_experts_is_refused_without_counting_them(tmp_path: Path) -> None:
    write_deepseek(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"n_routed_experts": 4096, "num_hidden_layers": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors"):
        load(tmp_path)
