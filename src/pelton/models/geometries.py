# SPDX-License-Identifier: Apache-2.0
"""Real geometries by name, as Hugging Face config.json keys: what random weights are made in.

Needs no torch. Quantisation is as published, so a geometry's bytes are those of its checkpoint.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pelton.core.config import ModelConfig
from pelton.core.errors import ConfigError

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128009,
}
_LLAMA_8B = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_LLAMA_70B = {
    **_LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_LLAMA_405B = {
    **_LLAMA,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
_FP8_ARGUMENTS = {"num_bits": 8, "type": "float", "symmetric": True}
_FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_FP8_ARGUMENTS, "strategy": "channel"},
            "input_activations": {**_FP8_ARGUMENTS, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}
_FBGEMM_405B = {
    "quant_method": "fbgemm_fp8",
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["self_attn", "model.layers.0", "model.layers.125", "lm_head"],
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
    "bos_token_id": 199998,
    "eos_token_id": [200002, 199999, 200012],
}

GEOMETRIES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "llama-3.1-8b": _LLAMA_8B,
        "llama-3.1-8b-fp8": {**_LLAMA_8B, "quantization_config": _FP8_DYNAMIC},
        "llama-3.1-70b": _LLAMA_70B,
        "llama-3.1-70b-fp8": {**_LLAMA_70B, "quantization_config": _FP8_DYNAMIC},
        "llama-3.1-405b": _LLAMA_405B,
        "llama-3.1-405b-fp8": {**_LLAMA_405B, "quantization_config": _FBGEMM_405B},
        "smollm2-135m": {
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "deepseek-v3": {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1,
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 40.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
            "tie_word_embeddings": False,
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
        "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    }
)


def find_geometry(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """The config of that name, cut to its first `num_layers` layers if a number is given. Raises
    `ConfigError` that lists the names."""
    if name not in GEOMETRIES:
        raise ConfigError(
            f"--random-weights must be one of {', '.join(GEOMETRIES)}, got {name!r}.",
            param="random_weights",
        )
    config = dict(GEOMETRIES[name])
    if num_layers is not None:
        if num_layers > config["num_hidden_layers"]:
            raise ConfigError(
                f"--layers must be at most {config['num_hidden_layers']}, what {name} has, got"
                f" {num_layers}.",
                param="layers",
            )
        config["num_hidden_layers"] = num_layers
    return config


def random_vocab_size(config: ModelConfig) -> int:
    """Of the geometry that `config` asks random weights of; 0: of none. Raises `ConfigError`."""
    if not config.random_weights:
        return 0
    vocab_size: int = find_geometry(config.random_weights)["vocab_size"]
    return vocab_size
