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


def greedy_choices(model: Any, prompt_ids: list[int], output_ids: list[int]) -> list[int]:
    """The likeliest token after the prompt and after each output token but the last: equal to
    `output_ids` if and only if they are the model's own greedy output."""
    [choices] = greedy_choices_of_many(model, [prompt_ids], [output_ids])
    return choices


@torch.inference_mode()
def greedy_choices_of_many(
    model: Any, prompts: list[list[int]], outputs: list[list[int]]
) -> list[list[int]]:
    """As `greedy_choices`, for prompts of one length with outputs of one length."""
    rows = [prompt + output[:-1] for prompt, output in zip(prompts, outputs, strict=True)]
    logits = model(torch.tensor(rows), logits_to_keep=len(outputs[0])).logits
    choices: list[list[int]] = logits.argmax(-1).tolist()
    return choices
