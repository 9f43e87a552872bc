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


@pytest.mark.slow
def test_repeated_text_takes_fewer_steps_with_drafts_and_stays_the_same() -> None:
    line = "The quick brown fox jumps over the lazy dog. "
    samplings = [
        SamplingParams(temperature=0, max_tokens=60),
        SamplingParams(temperature=0, max_tokens=60, stop=("lazy",), n=2),
    ]
    options = {"dtype": "float32", "kv_memory_bytes": 2**27, "max_model_len": 256}
    texts, stats = [], []
    for drafter in ("off", "ngram:4"):
        with LLM("smollm2", speculative=drafter, **options) as llm:
            results = llm.generate([line * 4] * 2, samplings, progress=False)
            stats.append(llm._local.engine.stats())
        texts.append([choice.text for result in results for choice in result.choices])

    assert texts[0] == texts[1]
    assert texts[0][1].endswith("over the ")
    assert stats[0].tokens_per_decode == 1.0
    assert stats[1].tokens_per_decode > 2
