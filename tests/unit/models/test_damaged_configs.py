# SPDX-License-Identifier: Apache-2.0
"""Configs with anything in any field, and formats of weights that are not supported: each is
taken as it is or refused in one sentence, never a traceback or memory by the terabyte."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from published import compressed_tensors, published

from pelton.core.errors import CheckpointError
from pelton.models.loader import match_tensors
from pelton.models.registry import find_architecture

SMALL: dict[str, dict[str, Any]] = {
    "Meta-Llama-3.1-70B-Instruct-FP8-dynamic": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 200000,
    },
    "DeepSeek-R1": {
        "hidden_size": 192,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "q_lora_rank": 128,
        "kv_lora_rank": 32,
    },
    "gpt-oss-20b": {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
    },
}
VALUES: tuple[Any, ...] = (
    None, "x", "", -1, 0, 1, 7, 10**12, 1.5, 0.0, -2.0, True, [], {}, [1], ["x"], [None], {"a": 1},
    math.nan, math.inf, 1e308, 1e-320, ["re:("],
)  # fmt: skip


def small(name: str, **changes: Any) -> dict[str, Any]:
    return published(name, **{**SMALL[name], "max_position_embeddings": 512, **changes})


class Nothing:
    """A checkpoint without tensors."""

    name = path = "empty"
    tensor_names = ()

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config


def outline(config: dict[str, Any]) -> None:
    """Everything up to comparing names, which an empty checkpoint cannot pass."""
    architecture = find_architecture(config)
    model_config = architecture.config_from_hf(config)
    if model_config.num_layers > 8:
        raise CheckpointError("These are more layers than this test builds.")
    with torch.device("meta"):
        model = architecture.build(model_config)
    model_config.geometry()
    match_tensors(model, architecture.weights(model_config), Nothing(config))


def paths(node: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in node.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    node = config
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return config


@pytest.mark.parametrize("name", list(SMALL))
def test_any_value_in_any_field_is_taken_or_refused_in_a_sentence(name: str) -> None:
    config = small(name)
    for path in paths(config):
        for value in VALUES:
            with pytest.raises(CheckpointError) as caught:
                outline(changed(config, path, value))
            assert len(caught.value.message) < 500, (path, value)
            assert caught.value.message.endswith("."), (path, value, caught.value.message)


LLAMA, DEEPSEEK, GPT_OSS = SMALL


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (DEEPSEEK, {"num_experts_per_tok": 9}, r"num_experts_per_tok .* at most 4"),
        (DEEPSEEK, {"n_group": 3}, r"n_group .* divisor of n_routed_experts \(8\)"),
        (DEEPSEEK, {"topk_group": 5}, r"topk_group .* at most n_group \(4\)"),
        (DEEPSEEK, {"qk_rope_head_dim": 15}, "qk_rope_head_dim .* even"),
        (DEEPSEEK, {"n_routed_experts": 10**9}, "n_routed_experts .* at most 4096"),
        (DEEPSEEK, {"moe_intermediate_size": 0}, "moe_intermediate_size .* positive integer"),
        (DEEPSEEK, {"intermediate_size": 100}, "multiples of 128, .* fuses one of 100 rows"),
        (GPT_OSS, {"num_experts_per_tok": 7}, r"at most num_local_experts \(6\)"),
        (GPT_OSS, {"sliding_window": 0}, "sliding_window .* positive integer"),
        (GPT_OSS, {"sliding_window": -128}, "sliding_window .* positive integer"),
        (GPT_OSS, {"layer_types": ["full_attention"]}, "layer_types .* a list of 2"),
        (GPT_OSS, {"head_dim": 7}, "head_dim .* even"),
        (GPT_OSS, {"intermediate_size": 33}, "multiples of 32, got 64 and 33"),
        (GPT_OSS, {"vocab_size": 0}, "vocab_size .* positive integer"),
        (GPT_OSS, {"eos_token_id": -1}, "eos_token_id .* a token id"),
        (LLAMA, {"num_hidden_layers": 10**12}, "num_hidden_layers .* at most 1024"),
        (LLAMA, {"max_position_embeddings": 2**40}, "max_position_embeddings .* at most 16777216"),
        (LLAMA, {"head_dim": 15}, "head_dim must be even"),
        (LLAMA, {"rope_scaling": {"factor": 8.0}}, "rope_type .* name of a rule"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_field_that_is_wrong_is_named(name, changes, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        outline(small(name, **changes))


@pytest.mark.parametrize("name", list(SMALL))
def test_tokens_outside_the_vocabulary_end_nothing(name: str) -> None:
    config = small(name, vocab_size=100, eos_token_id=[99, 100, 10**12], bos_token_id=100)

    geometry = find_architecture(config).config_from_hf(config).geometry()

    assert (geometry.eos_token_ids, geometry.bos_token_id) == ((99,), None)


@pytest.mark.parametrize("factor", [0, -1.0, "8", None, math.nan])
@pytest.mark.parametrize("name", list(SMALL))
def test_a_rope_factor_that_is_no_positive_number_is_named(name, factor) -> None:
    with pytest.raises(CheckpointError, match=r"rope_scaling\.factor .* a positive number"):
        outline(changed(small(name), ("rope_scaling", "factor"), factor))


CHANNEL = compressed_tensors("channel", "token", dynamic=True)
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT8}},
}
FORMATS: dict[str, tuple[Any, str]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "'awq'"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "'gptq'"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt'"),
    "quark": ({"quant_method": "quark"}, "'quark'"),
    "hqq": ({"quant_method": "hqq"}, "'hqq'"),
    "no method": ({"bits": 4}, "None"),
    "not an object": ("fp8", "'fp8'"),
    "int4": (PACKED, "'pack-quantized'|'compressed-tensors'"),
    "w8a8": (W8A8, "'int-quantized'|'compressed-tensors'"),
}
NEAREST = {
    LLAMA: "compressed-tensors FP8 with dynamic activations",
    DEEPSEEK: r"fp8 with weight_block_size \[128, 128\]",
    GPT_OSS: "'mxfp4' as published",
}


@pytest.mark.parametrize("format_name", list(FORMATS))
@pytest.mark.parametrize("name", list(SMALL))
def test_a_format_that_is_not_supported_is_named_with_the_nearest(name, format_name) -> None:
    settings, found = FORMATS[format_name]
    nearest = NEAREST[name]
    if name == LLAMA and format_name in ("awq", "gptq", "bitsandbytes"):
        nearest = "the unquantised checkpoint with --quantization int"

    with pytest.raises(CheckpointError, match=f"{found}.*; the nearest supported one is {nearest}"):
        outline(small(name, quantization_config=settings))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (LLAMA, {"quant_method": "mxfp4"}, "'mxfp4'.*FP8-dynamic"),
        (GPT_OSS, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "'fp8'.*'mxfp4'"),
        (GPT_OSS, CHANNEL, "compressed-tensors.*mxfp4"),
        (DEEPSEEK, CHANNEL, r"a channel.*\[128, 128\]"),
        (DEEPSEEK, {"quant_method": "fp8"}, r"scale a tensor.*\[128, 128\]"),
        (DEEPSEEK, {"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\].*\[128, 1"),
        (LLAMA, {"quant_method": "fp8", "fmt": "e5m2"}, "e5m2.*e4m3"),
        (
            LLAMA,
            {**CHANNEL, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse-24-bitmask.*FP8-dynamic",
        ),
    ],
)  # fmt: skip
def test_a_format_of_another_family_is_refused_too(name, settings, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        outline(small(name, quantization_config=settings))


@pytest.mark.parametrize("scheme", [None, {"num_bits": 8, "type": "float", "dynamic": False}])
@pytest.mark.parametrize("is_dynamic", [True, False])
def test_kv_cache_schemes_and_fixed_activation_scales_are_taken(is_dynamic, scheme) -> None:
    settings = compressed_tensors("tensor", "tensor", dynamic=is_dynamic)

    with pytest.raises(CheckpointError, match=r"lacks .*q_proj\.weight"):
        outline(small(LLAMA, quantization_config={**settings, "kv_cache_scheme": scheme}))
