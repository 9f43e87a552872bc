# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import pytest

from pelton.core.errors import CheckpointError
from pelton.models.llama_config import Config
from pelton.models.registry import find_architecture

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_of(**changes: Any) -> Config:
    return Config.from_hf({**SMALL, **changes})


def test_geometry_counts_parameters_and_groups_all_layers() -> None:
    geometry = config_of(eos_token_id=[2, 3], max_position_embeddings=77).geometry("x")
    per_layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert geometry.num_parameters == 2 * per_layer + 2 * 100 * 64 + 64
    assert (geometry.name, geometry.max_context, geometry.eos_token_ids) == ("x", 77, (2, 3))
    [group] = geometry.kv_groups
    assert (group.layers, group.num_kv_heads, group.head_dim, group.window) == ((0, 1), 2, 16, 0)


def test_mistral_has_a_window_and_qwen2_has_biases() -> None:
    mistral = config_of(model_type="mistral", sliding_window=32)
    assert mistral.window == mistral.geometry().kv_groups[0].window == 32
    qwen2 = config_of(model_type="qwen2", sliding_window=32, use_sliding_window=False)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.window) == (True, False, 0)


@pytest.mark.parametrize(("first", "window"), [(0, 32), (2, 0), (28, 0)])
def test_qwen2_window_is_for_all_layers_or_none(first: int, window: int) -> None:
    config = config_of(
        model_type="qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=first
    )
    assert config.window == window


def test_rope_settings_are_found_in_old_and_new_files() -> None:
    old = config_of(rope_theta=5e5, rope_scaling=LLAMA3)
    new = config_of(rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert old == new
    assert old.rope_theta == 5e5
    assert config_of(rope_scaling={"type": "linear", "factor": 2}).rope_factors == (2.0,) * 8


def test_llama3_factors_match_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    reference_config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=32768,
        rope_parameters={**LLAMA3, "rope_theta": 5e5},
    )
    inverse_frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](reference_config, "cpu")
    factors = config_of(rope_theta=5e5, rope_scaling=LLAMA3).rope_factors
    ours = [5e5 ** (-2 * pair / 16) / factor for pair, factor in enumerate(factors)]
    assert ours == pytest.approx(inverse_frequencies.tolist())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0]}}, "factors"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window"),
        ({"eos_token_id": ["2"]}, "eos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            "max_window_layers",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        config_of(**changes)


def test_registry_finds_by_class_then_by_model_type() -> None:
    assert find_architecture({"architectures": ["Qwen2ForCausalLM"]}).name == "llama"
    assert find_architecture({"model_type": "mistral"}).name == "llama"


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["GPT2LMHeadModel"]},
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        {"model_type": "gpt2"},
        {"architectures": "LlamaForCausalLM"},
        {},
    ],
)
def test_registry_refuses_others_and_lists_what_is_supported(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"MistralForCausalLM, Qwen2ForCausalLM"):
        find_architecture(config)
