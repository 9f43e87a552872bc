# SPDX-License-Identifier: Apache-2.0
"""The engine on a GPU: graphs, padding, overlap and batch size change no token of any family."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from pelton.core.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    KVCacheDType,
    SpeculativeConfig,
)
from pelton.engine.factory import make_engine
from tiny_engines import (
    CONFIG,
    LENGTHS,
    LOADS,
    check_replays,
    eager_and_alone,
    generate,
    make_requests,
    prompt_logprobs,
)
from tolerance import LOGIT_ABS

pytestmark = pytest.mark.gpu

FAMILIES = pytest.mark.parametrize("family", LOADS)
LLAMA = LOADS["llama"]
MANY = [7 + index for index in range(200)]
COLD = replace(CONFIG, cache=replace(CONFIG.cache, prefix_cache=False))


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    """float32 products must not be rounded to tf32."""
    assert not torch.backends.cuda.matmul.allow_tf32


@cache
def expected(family: str) -> dict[str, list[int]]:
    """Greedy tokens, one request at a time, eager, step by step."""
    tokens = generate(make_engine(eager_and_alone(CONFIG), load=LOADS[family]), make_requests())
    assert len({tuple(value) for value in tokens.values()}) == len(LENGTHS)
    return tokens


# Of any two of the three settings, every pair of values.
@pytest.mark.parametrize(
    ("overlap", "graphs", "budget"),
    [(False, False, 64), (True, False, 512), (False, True, 512), (True, True, 64)],
    ids=[
        "eager-budget64",
        "overlap-eager-budget512",
        "graphs-budget512",
        "overlap-graphs-budget64",
    ],
)
@FAMILIES
def test_greedy_tokens_are_those_of_each_request_alone(family, overlap, graphs, budget) -> None:
    config = replace(
        CONFIG,
        scheduler=replace(CONFIG.scheduler, overlap=overlap, max_num_batched_tokens=budget),
        executor=replace(CONFIG.executor, cuda_graphs=graphs),
    )
    engine = make_engine(config, load=LOADS[family])

    cold = generate(engine, make_requests())
    warm = generate(engine, make_requests())  # from cached prefixes

    assert cold == warm == expected(family)


@FAMILIES
def test_preempted_requests_keep_their_tokens(family) -> None:
    config = replace(CONFIG, cache=CacheConfig(num_blocks=36, prefix_cache=False))
    engine = make_engine(config, load=LOADS[family])

    assert generate(engine, make_requests()) == expected(family)
    assert engine.stats().preemptions_total >= 1


@FAMILIES
def test_prompt_logprobs_are_those_of_the_cpu(family) -> None:
    on_cpu, on_gpu = (
        prompt_logprobs(device, LOADS[family]) for device in (Device.CPU, Device.CUDA)
    )

    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=LOGIT_ABS)


def test_seeded_sampling_does_not_depend_on_graphs() -> None:
    eager = replace(COLD, executor=replace(COLD.executor, cuda_graphs=False))

    by_graphs, by_eager = (
        generate(make_engine(config, load=LLAMA), make_requests(temperature=0.8, top_p=0.9))
        for config in (COLD, eager)
    )

    assert by_graphs == by_eager


@pytest.mark.parametrize("kv_cache_dtype", [KVCacheDType.AUTO, KVCacheDType.FP8], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 21])
def test_replay_is_bit_for_bit_the_eager_step(num_rows, kv_cache_dtype) -> None:
    """In bfloat16, on the same padded batch: logits, tokens and the KV cache."""
    config = replace(
        COLD,
        model=replace(COLD.model, dtype=DType.BFLOAT16),
        cache=replace(COLD.cache, kv_cache_dtype=kv_cache_dtype),
    )
    engine = make_engine(config, load=LLAMA)

    assert (
        check_replays(engine, make_requests([5 + 9 * row for row in range(num_rows)])) >= num_rows
    )


@pytest.mark.parametrize(
    ("graphs", "budget"), [(False, 512), (True, 64)], ids=["eager-budget512", "graphs-budget64"]
)
def test_drafts_looked_up_change_no_token(graphs, budget) -> None:
    """Prompts that repeat themselves, so that rows have drafts, and few of them at the ends."""
    config = replace(
        COLD,
        scheduler=replace(COLD.scheduler, max_num_batched_tokens=budget),
        executor=replace(COLD.executor, cuda_graphs=graphs),
    )
    requests = [
        replace(request, prompt_token_ids=request.prompt_token_ids * 6)
        for request in make_requests([5] * 12, max_tokens=40)
    ]
    plain = generate(make_engine(config, load=LLAMA), requests)
    engine = make_engine(
        replace(config, speculative=SpeculativeConfig(speculative="ngram:4")), load=LLAMA
    )

    assert generate(engine, requests) == plain
    assert generate(engine, make_requests()) == expected("llama")
    assert sum(engine.stats().drafted_total) > 0


def with_fp8_kv(config: EngineConfig) -> EngineConfig:
    return replace(config, cache=replace(config.cache, kv_cache_dtype=KVCacheDType.FP8))


@pytest.mark.parametrize(
    ("rounding", "least"),
    [
        (replace(COLD, model=replace(COLD.model, dtype=DType.BFLOAT16)), 180),
        (with_fp8_kv(COLD), 170),
    ],
    ids=["bfloat16", "fp8-cache"],
)
def test_what_rounds_mostly_agrees_with_float32(rounding: EngineConfig, least: int) -> None:
    """Next tokens of many prompts: rounding may turn a near tie, no more. A CPU with weights of its
    own has 188 of 200 equal with an FP8 cache."""
    exact, rounded = (
        generate(make_engine(config, load=LLAMA), make_requests(MANY, max_tokens=1))
        for config in (COLD, rounding)
    )

    assert sum(exact[name] == rounded[name] for name in exact) >= least


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_with_an_fp8_cache_tokens_hardly_depend_on_how_work_is_cut(family) -> None:
    """A product that rounds otherwise in another batch may move a key to the next e4m3 number, and
    that a near tie; all requests but one or two must not notice."""
    config = with_fp8_kv(CONFIG)
    chunks = replace(config, scheduler=replace(CONFIG.scheduler, max_num_batched_tokens=64))
    load = LOADS[family]
    alone = generate(make_engine(eager_and_alone(config), load=load), make_requests())
    engine = make_engine(config, load=load)

    found = [
        generate(make_engine(chunks, load=load), make_requests()),
        generate(engine, make_requests()),
        generate(engine, make_requests()),  # from cached prefixes
    ]

    for tokens in found:
        assert sum(tokens[name] == alone[name] for name in tokens) >= len(LENGTHS) - 2
