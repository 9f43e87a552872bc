# SPDX-License-Identifier: Apache-2.0
"""The LLM object on real models, beside transformers on the same weights."""

import pytest
import torch

from pelton import LLM, SamplingParams
from reference_model import greedy_choices, reference_of

PROMPT = "The capital of France is"


@pytest.mark.slow
def test_smollm2_says_paris_as_transformers_does(smollm2_checkpoint) -> None:
    options = {"dtype": "float32", "kv_memory_bytes": 2**27, "max_model_len": 256}
    with LLM("smollm2", **options) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=12)
        [result] = llm.generate(PROMPT, sampling, progress=False)
    [choice] = result.choices
    assert choice.text.startswith(" Paris")
    reference = reference_of(smollm2_checkpoint)
    ids = result.prompt_token_ids
    assert greedy_choices(reference, ids, choice.token_ids) == choice.token_ids


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_a_hugging_face_folder_answers_as_transformers_does(tiny_llama, layout: str) -> None:
    from transformers import LlamaForCausalLM

    folder = getattr(tiny_llama, layout)
    prompts = ["hello", "a longer prompt, of several blocks of tokens", "x" * 50]
    with LLM(str(folder), dtype="float32", kv_memory_bytes=2**24) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        results = llm.generate(prompts, sampling, progress=False)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for result in results:
        tokens = result.choices[0].token_ids
        assert len(tokens) == 20
        assert greedy_choices(model, result.prompt_token_ids, tokens) == tokens
