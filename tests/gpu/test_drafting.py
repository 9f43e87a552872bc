# SPDX-License-Identifier: Apache-2.0
"""On a GPU, drafts that are mostly right change no token, under any control and engine setting."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from drafting_model import VOCAB, make_drafting_model
from pelton.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.factory import make_engine
from tolerance import LOGIT_ABS

pytestmark = pytest.mark.gpu

REPEATED = [5, 6, 7, 8, 9] * 4
CONFIG = EngineConfig(
    model=ModelConfig(model="tiny", dtype=DType.FLOAT32, max_model_len=96),
    cache=CacheConfig(num_blocks=400),
    scheduler=SchedulerConfig(max_num_requests=24, max_num_batched_tokens=256),
)
CONTROLS: dict[str, dict[str, object]] = {
    "plain": {},
    "bias": {"logit_bias": {7: -100.0, 9: 3.0}},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.1, "frequency_penalty": 0.7},
    "logprobs": {"logprobs": 3},
    "stop": {"stop_token_ids": tuple(range(0, VOCAB, 6)), "min_tokens": 9},
    "to-the-wall": {"ignore_eos": True, "max_tokens": None},
    "seeded": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    **{f"length-{count}": {"max_tokens": count} for count in (1, 2, 3, 5)},
}


def load(config: ModelConfig, device: torch.device, dtype: torch.dtype):
    model, geometry = make_drafting_model()
    return model.to(device=device, dtype=dtype), geometry


def make_requests() -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=name,
            prompt_token_ids=REPEATED[index % 5 :],
            sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 30, **control}),
            seed=index,
        )
        for index, (name, control) in enumerate(CONTROLS.items())
    ]


def run(engine: Engine) -> tuple[dict[str, list[int]], list[float]]:
    tokens: dict[str, list[int]] = {name: [] for name in CONTROLS}
    logprobs = []
    for request in make_requests():
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs or []]
    return tokens, logprobs


@cache
def plain() -> tuple[dict[str, list[int]], list[float]]:
    return run(make_engine(replace(CONFIG, executor=ExecutorConfig(cuda_graphs=False)), load=load))


# Of any two of the four settings, every pair of values; the CPU's tests have all combinations.
@pytest.mark.parametrize(
    ("graphs", "overlap", "budget", "prefix_cache"),
    [
        (False, False, 40, False),
        (False, True, 256, True),
        (True, False, 256, True),
        (True, True, 40, True),
        (True, True, 256, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("drafter", ["off", "mtp:1", "mtp:3", "ngram:4"])
def test_tokens_are_those_of_plain_decoding(drafter, graphs, overlap, budget, prefix_cache) -> None:
    config = replace(
        CONFIG,
        cache=replace(CONFIG.cache, prefix_cache=prefix_cache),
        scheduler=replace(CONFIG.scheduler, overlap=overlap, max_num_batched_tokens=budget),
        executor=ExecutorConfig(cuda_graphs=graphs),
        speculative=SpeculativeConfig(speculative=drafter),
    )
    engine = make_engine(config, load=load)

    first, second = run(engine), run(engine)

    for tokens, logprobs in (first, second):
        assert tokens == plain()[0]
        assert logprobs == pytest.approx(plain()[1], abs=LOGIT_ABS)
    if drafter != "off":
        assert engine.stats().accepted_total[0] > 0
