# SPDX-License-Identifier: Apache-2.0
"""SmolLM2's real weights in float32: greedy tokens equal transformers', however work is cut.

Prompts are cut from the standard library's documentation.
"""

import pydoc_data.topics
from dataclasses import replace

import pytest
import torch

from pelton.core.clock import MonotonicClock
from pelton.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pelton.core.geometry import ModelGeometry
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.factory import load_model, make_runner
from pelton.models.checkpoint import Checkpoint
from pelton.models.language_model import LanguageModel
from pelton.serving.tokenizer import Tokenizer
from reference_model import greedy_choices_of_many, reference_of

pytestmark = pytest.mark.slow

NUM_TOKENS = 64
LENGTHS = (9, 17, 32, 33, 64)
PROMPTS_PER_LENGTH = 20
CPU = torch.device("cpu")
CONFIG = EngineConfig(
    model=ModelConfig(model="smollm2", max_model_len=256),
    cache=CacheConfig(num_blocks=800, kv_memory_bytes=1, prefix_cache=False),
    scheduler=SchedulerConfig(max_num_requests=32, max_num_batched_tokens=512, overlap=False),
)
BLOCK_SIZE = CONFIG.cache.block_size

Model = tuple[LanguageModel, ModelGeometry]
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def prompts(smollm2_checkpoint: Checkpoint) -> Tokens:
    """PROMPTS_PER_LENGTH different ones of each length, shortest first."""
    text = "\n".join(pydoc_data.topics.topics.values())
    ids = Tokenizer.load(smollm2_checkpoint).encode(text, False)
    lengths = [length for length in LENGTHS for _ in range(PROMPTS_PER_LENGTH)]
    stride = len(ids) // len(lengths)
    return [ids[stride * index :][:length] for index, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(CONFIG.model, CPU, torch.float32)


@pytest.fixture(scope="module")
def few(prompts: Tokens) -> Tokens:
    """One prompt of each length."""
    return prompts[::PROMPTS_PER_LENGTH]


@pytest.fixture(scope="module")
def expected(few: Tokens, model: Model) -> Tokens:
    """What the engine says when each prompt runs alone."""
    return [generate(make_engine(model), [prompt])[0] for prompt in few]


def make_engine(model: Model, **overrides: object) -> Engine:
    """`overrides` name fields of the scheduler's or the cache's config."""
    scheduler, cache = CONFIG.scheduler, CONFIG.cache
    for name, value in overrides.items():
        if hasattr(scheduler, name):
            scheduler = replace(scheduler, **{name: value})
        else:
            cache = replace(cache, **{name: value})
    config = replace(CONFIG, scheduler=scheduler, cache=cache)
    runner = make_runner(*model, config, CPU, torch.float32)
    return Engine(config, model[1], runner, MonotonicClock())


def generate(engine: Engine, prompts: Tokens, num_tokens: int = 16) -> Tokens:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(
            GenerateRequest(request_id=str(index), prompt_token_ids=prompt, sampling=params, seed=0)
        )
    tokens: Tokens = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output
            tokens[int(output.request_id)] += output.token_ids
    return tokens


@pytest.mark.timeout(1800)
def test_greedy_tokens_equal_transformers(smollm2_checkpoint, model, prompts) -> None:
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) >= 100
    tokens = generate(make_engine(model), prompts, NUM_TOKENS)

    reference = reference_of(smollm2_checkpoint)

    differing = []
    for first in range(0, len(prompts), 4):  # of one length
        places = slice(first, first + 4)
        choices = greedy_choices_of_many(reference, prompts[places], tokens[places])
        differing += [first for a, b in zip(choices, tokens[places], strict=True) if a != b]
    assert [len(output) for output in tokens] == [NUM_TOKENS] * len(prompts)
    assert differing == []


def test_in_one_batch(model, few, expected) -> None:
    assert generate(make_engine(model), few) == expected


@pytest.mark.parametrize("budget", [24, 100])
def test_in_chunks(model, few, expected, budget) -> None:
    engine = make_engine(model, max_num_batched_tokens=budget, max_num_requests=10)

    assert generate(engine, few) == expected


def test_with_a_cold_and_a_warm_prefix_cache(model, few, expected) -> None:
    engine = make_engine(model, prefix_cache=True)

    assert generate(engine, few) == expected
    assert generate(engine, few) == expected
    assert engine.stats().cached_tokens_total >= sum(
        (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in few
    )


def test_with_preemption(model, few, expected) -> None:
    engine = make_engine(model, num_blocks=9)

    # Of one block each at first, and three at the end.
    outputs = generate(engine, few[:1] * 7, 36)

    assert outputs == outputs[:1] * 7
    assert outputs[0][: len(expected[0])] == expected[0]
    assert engine.stats().preemptions_total >= 3


def test_with_overlap(model, few, expected) -> None:
    engine = make_engine(model, overlap=True, max_num_batched_tokens=48, max_num_requests=10)

    assert generate(engine, few) == expected
