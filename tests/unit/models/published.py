# SPDX-License-Identifier: Apache-2.0
"""config.json as published, and which tensors (name: shape) the published index names.

Written from the checkpoints' own documentation, not from Pelton's weight tables.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def llama(**sizes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": 128256,
        **sizes,
    }


def _arguments(strategy: str, *, dynamic: bool) -> dict[str, Any]:
    return {
        "block_structure": None,
        "dynamic": dynamic,
        "group_size": None,
        "num_bits": 8,
        "observer": "memoryless" if dynamic else "minmax",
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": True,
        "type": "float",
    }


def compressed_tensors(weights: str, inputs: str, *, dynamic: bool) -> dict[str, Any]:
    return {
        "config_groups": {
            "group_0": {
                "input_activations": _arguments(inputs, dynamic=dynamic),
                "output_activations": None,
                "targets": ["Linear"],
                "weights": _arguments(weights, dynamic=False),
            }
        },
        "format": "float-quantized",
        "global_compression_ratio": 1.239290831149584,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "frozen",
    }


def fbgemm(num_layers: int) -> dict[str, Any]:
    """Attention everywhere and the whole first and last layer stay as they were."""
    attention = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(num_layers) for p in "qkvo"]
    ends = [
        f"model.layers.{layer}.mlp.{name}_proj"
        for layer in (0, num_layers - 1)
        for name in ("down", "gate", "up")
    ]
    return {
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": [*ends, *attention, "lm_head"],
        "quant_method": "fbgemm_fp8",
    }


SIZES_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
SIZES_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
SIZES_405B = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
}
STATIC = compressed_tensors("tensor", "tensor", dynamic=False)
DYNAMIC = compressed_tensors("channel", "token", dynamic=True)

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def gpt_oss(num_layers: int, num_experts: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 8,
        "num_local_experts": num_experts,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": 201088,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B-Instruct": llama(**SIZES_8B),
    "Llama-3.1-70B-Instruct": llama(**SIZES_70B),
    "Llama-3.1-405B-Instruct": llama(**SIZES_405B),
    "Meta-Llama-3.1-8B-Instruct-FP8": llama(**SIZES_8B, quantization_config=STATIC),
    "Meta-Llama-3.1-70B-Instruct-FP8-dynamic": llama(**SIZES_70B, quantization_config=DYNAMIC),
    "Llama-3.1-405B-Instruct-FP8": llama(**SIZES_405B, quantization_config=fbgemm(126)),
    "DeepSeek-R1": DEEPSEEK,
    "gpt-oss-20b": gpt_oss(24, 32),
    "gpt-oss-120b": gpt_oss(36, 128),
}


def published(name: str, **changes: Any) -> dict[str, Any]:
    return {**deepcopy(CONFIGS[name]), **changes}


def index_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that the published model.safetensors.index.json names."""
    tensors = {"llama": _llama, "deepseek_v3": _deepseek, "gpt_oss": _gpt_oss}
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    ends = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    return {**ends, **dict(tensors[config["model_type"]](config))}


def _llama(config: dict[str, Any]) -> Shapes:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    settings = config.get("quantization_config", {})
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, shape in (
            ("self_attn.q_proj", (query, hidden)),
            ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.v_proj", (kv, hidden)),
            ("self_attn.o_proj", (hidden, query)),
            ("mlp.gate_proj", (ffn, hidden)),
            ("mlp.up_proj", (ffn, hidden)),
            ("mlp.down_proj", (hidden, ffn)),
        ):
            yield prefix + name + ".weight", shape
            if settings and prefix + name not in settings.get("modules_to_not_convert", ()):
                is_tensor = settings["quant_method"] == "compressed-tensors" and (
                    settings["config_groups"]["group_0"]["weights"]["strategy"] == "tensor"
                )
                yield prefix + name + ".weight_scale", (1,) if is_tensor else (shape[0], 1)
                if is_tensor:
                    yield prefix + name + ".input_scale", (1,)


def _deepseek(config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value, latent, query = config["v_head_dim"], config["kv_lora_rank"], config["q_lora_rank"]
    num_layers = config["num_hidden_layers"]
    for layer in range(num_layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_a_layernorm.weight", (query,)
        yield prefix + "self_attn.kv_a_layernorm.weight", (latent,)
        products = [
            ("self_attn.q_a_proj", query, hidden),
            ("self_attn.q_b_proj", heads * (nope + rope), query),
            ("self_attn.kv_a_proj_with_mqa", latent + rope, hidden),
            ("self_attn.kv_b_proj", heads * (nope + value), latent),
            ("self_attn.o_proj", hidden, heads * value),
        ]
        if layer < config["first_k_dense_replace"]:
            products += _gated("mlp.", hidden, config["intermediate_size"])
        else:
            size, experts = config["moe_intermediate_size"], config["n_routed_experts"]
            yield prefix + "mlp.gate.weight", (experts, hidden)
            yield prefix + "mlp.gate.e_score_correction_bias", (experts,)
            products += _gated("mlp.shared_experts.", hidden, size * config["n_shared_experts"])
            for expert in range(experts):
                products += _gated(f"mlp.experts.{expert}.", hidden, size)
        for name, rows, columns in products:
            yield f"{prefix}{name}.weight", (rows, columns)
            yield f"{prefix}{name}.weight_scale_inv", (-(-rows // 128), -(-columns // 128))
        if layer >= num_layers:
            yield prefix + "embed_tokens.weight", (config["vocab_size"], hidden)
            yield prefix + "enorm.weight", (hidden,)
            yield prefix + "hnorm.weight", (hidden,)
            yield prefix + "eh_proj.weight", (hidden, 2 * hidden)
            yield prefix + "shared_head.norm.weight", (hidden,)
            yield prefix + "shared_head.head.weight", (config["vocab_size"], hidden)


def _gated(prefix: str, hidden: int, size: int) -> list[tuple[str, int, int]]:
    return [
        (prefix + "gate_proj", size, hidden),
        (prefix + "up_proj", size, hidden),
        (prefix + "down_proj", hidden, size),
    ]


def _gpt_oss(config: dict[str, Any]) -> Shapes:
    hidden, ffn, experts = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_local_experts"],
    )
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    query, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, rows, columns in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.router", experts, hidden),
        ):
            yield f"{prefix}{name}.weight", (rows, columns)
            yield f"{prefix}{name}.bias", (rows,)
        yield prefix + "self_attn.sinks", (heads,)
        for name, rows, columns in (("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, ffn)):
            yield f"{prefix}mlp.experts.{name}_blocks", (experts, rows, columns // 32, 16)
            yield f"{prefix}mlp.experts.{name}_scales", (experts, rows, columns // 32)
            yield f"{prefix}mlp.experts.{name}_bias", (experts, rows)
