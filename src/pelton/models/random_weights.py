# SPDX-License-Identifier: Apache-2.0
"""Models of a real geometry with random weights: for measuring speed where no checkpoint is.

Norms are 1, matrices N(0, 0.02), biases 0; drawn on the device itself, so nothing is read or
copied. Whatever is measured on such a model must be labelled random.
"""

from collections.abc import Mapping
from typing import Any

import torch

from pelton.core.geometry import ModelGeometry
from pelton.models.language_model import LanguageModel
from pelton.models.registry import find_architecture

STANDARD_DEVIATION = 0.02

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128009,
    },
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
}
"""Hugging Face config.json keys by name."""


def make_random_model(
    name: str,
    config: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> tuple[LanguageModel, ModelGeometry]:
    """The same seed, device type and dtype give the same weights. Not packed yet."""
    architecture = find_architecture(config)
    model_config = architecture.config_from_hf(config)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = architecture.build(model_config)
    finally:
        torch.set_default_dtype(previous)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, STANDARD_DEVIATION, generator=generator)
            else:
                parameter.fill_(1.0 if parameter_name.endswith("norm.weight") else 0.0)
    return model, model_config.geometry(f"{name} (random weights)")
