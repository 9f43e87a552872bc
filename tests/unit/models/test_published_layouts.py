# SPDX-License-Identifier: Apache-2.0
"""Every published layout loads unchanged and computes what transformers does on its values."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import LAYOUTS, VOCAB, Layout, write_deepseek, write_gpt_oss
from tiny_models import make_request, run, tokens_of

from pelton.core.clock import ManualClock
from pelton.core.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from pelton.engine.engine import Engine
from pelton.engine.factory import make_engine
from tolerance import LOGIT_ABS

LENGTHS = (1, 2, 13, 16, 17, 40, 63, 64, 65, 163, 300)
NUM_NEW = 8


@pytest.fixture(scope="module", params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return LAYOUTS[request.param](tmp_path_factory.mktemp("layout"), request.param)


def engine_of(layout: Layout, speculative: str = "off", **overrides: Any) -> Engine:
    scheduler = {"max_num_requests": 12, "max_num_batched_tokens": 64, "overlap": False}
    cache = {"block_size": 4, "num_blocks": 600, "prefix_cache": True}
    for name, value in overrides.items():
        (scheduler if name in scheduler else cache)[name] = value
    config = EngineConfig(
        model=ModelConfig(model=str(layout.folder), dtype=DType.FLOAT32, max_model_len=320),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**scheduler),
        executor=ExecutorConfig(device=Device.CPU, num_threads=1),
        speculative=SpeculativeConfig(speculative=speculative),
    )
    return make_engine(config, ManualClock())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = random.Random(3)
    text = [source.randrange(VOCAB) for _ in range(300)]
    return [text[:length] for length in LENGTHS]


def requests_of(prompts: list[list[int]], **sampling: Any) -> list:
    sampling = {"max_tokens": NUM_NEW, **sampling}
    return [make_request(str(index), prompt, **sampling) for index, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(layout: Layout, prompts: list[list[int]]) -> dict[tuple[str, int], list[int]]:
    """Each prompt continued greedily by transformers, alone."""
    tokens = {}
    for index, prompt in enumerate(prompts):
        ids = list(prompt)
        for _ in range(NUM_NEW):
            with torch.no_grad():
                logits = layout.reference(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
        tokens[str(index), 0] = ids[len(prompt) :]
    return tokens


@pytest.mark.parametrize("chunk", [512, 37], ids=["whole", "chunks"])
def test_logits_of_every_position_equal_transformers(layout, prompts, chunk) -> None:
    """Of a prompt past the window and past the original context."""
    requests = requests_of(prompts[-1:], max_tokens=1, prompt_logprobs=0)

    outputs = run(engine_of(layout, max_num_batched_tokens=chunk), requests)

    ids = torch.tensor(prompts[-1:])
    with torch.no_grad():
        reference = layout.reference(ids, use_cache=False).logits[0].log_softmax(dim=-1)
    wanted = reference[:-1].gather(1, ids[0, 1:, None])[:, 0]
    got = [entry.logprob for entry in outputs["0", 0].prompt_logprobs[1:]]
    torch.testing.assert_close(torch.tensor(got), wanted, rtol=0, atol=LOGIT_ABS)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"max_num_batched_tokens": 13}, {"overlap": True}],
    ids=["batch", "chunks", "overlap"],
)
def test_greedy_tokens_equal_transformers(layout, prompts, expected, overrides) -> None:
    assert tokens_of(run(engine_of(layout, **overrides), requests_of(prompts))) == expected


def test_prefix_hits_change_nothing(layout, prompts, expected) -> None:
    engine = engine_of(layout)
    cold = run(engine, requests_of(prompts))

    warm = run(engine, requests_of(prompts))

    assert tokens_of(cold) == tokens_of(warm) == expected
    assert warm[str(len(prompts) - 1), 0].num_cached_tokens >= 296


def test_preemption_changes_nothing(layout) -> None:
    prompts = [[(7 * row + 3 * place) % VOCAB for place in range(60)] for row in range(7)]
    requests = requests_of(prompts, max_tokens=40)
    undisturbed = run(engine_of(layout), requests)
    engine = engine_of(layout, num_blocks=112, prefix_cache=False)

    outputs = run(engine, requests)

    assert engine.stats().preemptions_total >= 1
    assert tokens_of(outputs) == tokens_of(undisturbed)


def test_the_mtp_layer_of_the_published_layout_drafts_and_changes_nothing(
    tmp_path: Path, prompts
) -> None:
    layout = write_deepseek(tmp_path)
    plain = tokens_of(run(engine_of(layout), requests_of(prompts)))

    assert tokens_of(run(engine_of(layout, "mtp:2"), requests_of(prompts))) == plain


@pytest.mark.parametrize("write", [write_deepseek, write_gpt_oss])
def test_scales_may_be_stored_as_powers_of_two(tmp_path: Path, write) -> None:
    """e8m0, which is MXFP4's byte by its own name, and what some FP8 checkpoints' scales are."""
    layout = write(tmp_path, scale_dtype=torch.float8_e8m0fnu)
    ids = torch.arange(40)[None]
    request = make_request("0", ids[0].tolist(), max_tokens=1, prompt_logprobs=0)

    outputs = run(engine_of(layout), [request])

    with torch.no_grad():
        reference = layout.reference(ids, use_cache=False).logits[0].log_softmax(dim=-1)
    wanted = reference[:-1].gather(1, ids[0, 1:, None])[:, 0]
    got = [entry.logprob for entry in outputs["0", 0].prompt_logprobs[1:]]
    torch.testing.assert_close(torch.tensor(got), wanted, rtol=0, atol=LOGIT_ABS)
