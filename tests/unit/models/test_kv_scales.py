# SPDX-License-Identifier: Apache-2.0
"""Scales of an FP8 cache: read under each published name, refused where they are no use."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import StateCheckpoint, TinyModel, make_tiny_model
from torch import Tensor

from pelton.core.clock import ManualClock
from pelton.core.config import CacheConfig, EngineConfig, KVCacheDType, ModelConfig
from pelton.core.errors import CheckpointError
from pelton.engine.factory import make_engine
from pelton.models import llama
from pelton.models.kv_scales import load_kv_scales
from pelton.models.loader import load_weights

K, V = [0.5, 0.25], [0.125, 2.0]


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return make_tiny_model("llama")


def checkpoint_of(tiny: TinyModel, extra: dict[str, Tensor], scheme: Any = None) -> StateCheckpoint:
    config = tiny.reference.config.to_dict()
    if scheme is not None:
        config["quantization_config"] = {"kv_cache_scheme": scheme}
    return StateCheckpoint(config, {**tiny.reference.state_dict(), **extra})


def scales_in(checkpoint: StateCheckpoint, tiny: TinyModel) -> list[tuple[float, float]]:
    """What a fresh model's layers have after loading."""
    model = llama.Model(tiny.model.config)
    load_weights(model, llama.weights(tiny.model.config), checkpoint)
    load_kv_scales(model, checkpoint)
    layers = [block.attention.attend for block in model.blocks]
    return [(layer.k_scale, layer.v_scale) for layer in layers]


def named(name: str, values: list[float], shape: tuple[int, ...] = ()) -> dict[str, Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.full(shape, value)
        for layer, value in enumerate(values)
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_each_layer_gets_its_own(tiny, key: str, value: str, shape) -> None:
    static = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
    extra = {**named(key, K, shape), **named(value, V, shape)}

    assert scales_in(checkpoint_of(tiny, extra, static), tiny) == list(zip(K, V, strict=True))


def test_one_scale_may_serve_both(tiny) -> None:
    extra = named("kv_scale", K)

    assert scales_in(checkpoint_of(tiny, extra, "static"), tiny) == list(zip(K, K, strict=True))


def test_without_scales_they_are_1(tiny) -> None:
    assert scales_in(checkpoint_of(tiny, {}), tiny) == [(1.0, 1.0)] * 2


@pytest.mark.parametrize(
    ("extra", "scheme", "message"),
    [
        (named("k_scale", K), None, "2 of the 4 scales .* use --kv-cache-dtype auto"),
        ({}, {"num_bits": 8}, "0 of the 4 scales"),
        ({}, {"num_bits": 4, "type": "int"}, "in int4 with a scale a tensor"),
        ({}, {"num_bits": 8, "strategy": "attn_head"}, "with a scale a attn_head"),
        (named("kv_scale", [0.0, 1.0]), None, "one positive number"),
        (named("kv_scale", [1.0, float("nan")]), None, "one positive number"),
        (named("kv_scale", K, (2,)), None, "one positive number"),
        (named("kv_scale", [*K, 1.0]), None, "layers.2.* a scale of no layer's KV"),
        ({"model.k_scale": torch.ones(1)}, None, "model.k_scale, a scale of no"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_scales_that_do_not_fit_are_refused(tiny, extra, scheme, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        scales_in(checkpoint_of(tiny, extra, scheme), tiny)


def test_without_an_fp8_cache_they_are_skipped(tiny) -> None:
    checkpoint = checkpoint_of(tiny, named("k_scale", [float("nan")]))
    model = llama.Model(tiny.model.config)

    load_weights(model, llama.weights(tiny.model.config), checkpoint)


@pytest.mark.parametrize("kv_cache_dtype", [KVCacheDType.FP8, KVCacheDType.AUTO], ids=str)
def test_an_engine_reads_them_if_its_cache_is_in_fp8(tiny_copy: Path, kv_cache_dtype) -> None:
    file = tiny_copy / "model.safetensors"
    save_file({**load_file(file), **named("k_scale", K), **named("v_scale", V)}, file)
    config = EngineConfig(
        model=ModelConfig(model=str(tiny_copy)),
        cache=CacheConfig(num_blocks=40, kv_cache_dtype=kv_cache_dtype),
    )

    engine = make_engine(config, ManualClock())

    is_fp8 = kv_cache_dtype is KVCacheDType.FP8
    layers = [block.attention.attend for block in engine._executor._model.blocks]
    scales = [(layer.k_scale, layer.v_scale) for layer in layers]
    assert scales == (list(zip(K, V, strict=True)) if is_fp8 else [(1.0, 1.0)] * 2)
    assert (engine._executor.caches[0].dtype is torch.float8_e4m3fn) == is_fp8
    assert engine.config.cache.kv_cache_dtype == ("fp8" if is_fp8 else engine.config.model.dtype)
