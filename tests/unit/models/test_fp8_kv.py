# SPDX-License-Identifier: Apache-2.0
"""Keys and values in FP8 on a CPU: beside transformers on rounded ones, beside those in float32,
and however the work is cut.

A product that rounds otherwise in another batch can move a key to the next e4m3 number; that is
rare in float32, and too small to change a greedy token here.
"""

import random
from typing import Any

import pytest
import torch
from tiny_models import RoundingCache, TinyModel, make_request, make_tiny_model, run, tokens_of
from torch import Tensor

from pelton.core.config import KVCacheDType
from pelton.engine.engine import Engine
from pelton.layers.attention import PagedAttention
from tolerance import FP8_KV_LOGPROB, LOGIT_ABS

LENGTHS = (2, 5, 16, 17, 40, 63)
FP8 = KVCacheDType.FP8


def layers_of(tiny: TinyModel) -> list[PagedAttention]:
    return [block.attention.attend for block in tiny.model.blocks]


@pytest.fixture(scope="module", params=["llama", "llama3-rope-tied", "mistral-window"])
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    """With scales of its own in each layer."""
    tiny = make_tiny_model(request.param)
    for number, layer in enumerate(layers_of(tiny)):
        layer.k_scale, layer.v_scale = 0.03 + 0.01 * number, 0.02 - 0.005 * number
    return tiny


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(211) for _ in range(length)] for length in LENGTHS]


def make_requests(prompts: list[list[int]], **sampling: Any) -> list:
    return [make_request(str(i), prompt, **sampling) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(tiny: TinyModel, prompts) -> dict[tuple[str, int], list[int]]:
    """One request at a time, each prompt in one step, nothing reused."""
    engine = tiny.make_engine(kv_cache_dtype=FP8, max_num_requests=1, prefix_cache=False)
    return tokens_of(run(engine, make_requests(prompts)))


def test_a_block_has_a_byte_a_number(tiny: TinyModel) -> None:
    engine = tiny.make_engine(kv_cache_dtype=FP8)

    (cache,) = engine._executor.caches
    assert cache.dtype is torch.float8_e4m3fn
    assert cache[0].nbytes == tiny.geometry.kv_groups[0].block_bytes(4, 1)


def prompt_logprobs(engine: Engine, prompts: list[list[int]]) -> list[Tensor]:
    outputs = run(engine, make_requests(prompts, max_tokens=1, prompt_logprobs=0))
    entries = [outputs[str(i), 0].prompt_logprobs[1:] for i in range(len(prompts))]
    return [torch.tensor([entry.logprob for entry in row]) for row in entries]


def test_logprobs_are_those_of_transformers_on_rounded_keys_and_values(tiny, prompts) -> None:
    found = prompt_logprobs(
        tiny.make_engine(kv_cache_dtype=FP8, max_num_batched_tokens=23), prompts
    )

    num_equal = 0
    for prompt, got in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        cache = RoundingCache([(layer.k_scale, layer.v_scale) for layer in layers_of(tiny)])
        with torch.no_grad():
            logits = tiny.reference(ids, cache=cache, use_cache=True).logits[0]
        wanted = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        num_equal += torch.allclose(got, wanted, rtol=0, atol=LOGIT_ABS)
    assert num_equal >= len(prompts) - 1, num_equal


@pytest.mark.parametrize("has_scales", [True, False], ids=["scales", "no scales"])
def test_logprobs_are_near_those_of_float32(prompts, has_scales: bool) -> None:
    tiny = make_tiny_model("llama")
    exact = torch.cat(prompt_logprobs(tiny.make_engine(), prompts))
    for layer in layers_of(tiny):
        layer.k_scale, layer.v_scale = (0.03, 0.02) if has_scales else (1.0, 1.0)

    rounded = torch.cat(prompt_logprobs(tiny.make_engine(kv_cache_dtype=FP8), prompts))

    assert 0 < (rounded - exact).abs().mean() <= FP8_KV_LOGPROB


@pytest.mark.parametrize(
    "overrides",
    [{}, {"max_num_batched_tokens": 13}, {"overlap": True, "max_num_batched_tokens": 16}],
    ids=["batch", "chunks", "overlap"],
)
def test_tokens_do_not_depend_on_how_work_is_cut(tiny, prompts, expected, overrides) -> None:
    engine = tiny.make_engine(kv_cache_dtype=FP8, **overrides)

    assert tokens_of(run(engine, make_requests(prompts))) == expected


def test_prefix_hits(tiny, prompts, expected) -> None:
    engine = tiny.make_engine(kv_cache_dtype=FP8)
    cold = run(engine, make_requests(prompts))

    warm = run(engine, make_requests(prompts))

    assert tokens_of(cold) == tokens_of(warm) == expected
    assert warm["5", 0].num_cached_tokens >= 48


def test_preemption(tiny) -> None:
    length = 3 if tiny.geometry.kv_groups[0].window else 16
    prompts = [[(7 * i + 3 * p) % 211 for p in range(length)] for i in range(7)]
    requests = make_requests(prompts, max_tokens=20)
    undisturbed = run(tiny.make_engine(kv_cache_dtype=FP8), requests)
    engine = tiny.make_engine(kv_cache_dtype=FP8, num_blocks=19, prefix_cache=False)

    outputs = run(engine, requests)

    assert engine.stats().preemptions_total >= 3
    assert tokens_of(outputs) == tokens_of(undisturbed)
