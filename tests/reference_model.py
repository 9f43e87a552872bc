# SPDX-License-Identifier: Apache-2.0
"""transformers' model on a checkpoint's weights: what greedy tokens are compared with."""

from typing import Any

import torch

from pelton.models.checkpoint import Checkpoint


def reference_of(checkpoint: Checkpoint) -> Any:
    """transformers' model in float32, filled through our checkpoint reader."""
    from transformers import LlamaConfig, LlamaForCausalLM

    refused = ("architectures", "model_type", "dtype", "rope_scaling")
    config = {key: value for key, value in checkpoint.config.items() if key not in refused}
    model = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    weights = {name: checkpoint.read(name).float() for name in checkpoint.tensor_names}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])
    model.tie_weights()
    return model


@torch.inference_mode()
def greedy_choices(model: Any, prompt_ids: list[int], output_ids: list[int]) -> list[int]:
    """The likeliest token after the prompt and after each output token but the last: equal to
    `output_ids` if and only if they are the model's own greedy output."""
    logits = model(torch.tensor([prompt_ids + output_ids[:-1]])).logits[0]
    return logits[len(prompt_ids) - 1 :].argmax(-1).tolist()
