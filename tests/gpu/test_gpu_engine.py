# SPDX-License-Identifier: Apache-2.0
"""The engine on a GPU: graphs, padding, overlap and batch size change no token."""

import random
from dataclasses import replace

import pytest
import torch

from pelton.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ExecutorConfig,
    KVCacheDType,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.factory import make_engine
from pelton.models.random_weights import GEOMETRIES, make_random_model

pytestmark = pytest.mark.gpu

TINY = {
    **GEOMETRIES["llama-3.1-8b"],
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
CONFIG = EngineConfig(
    model=ModelConfig(model="tiny", dtype=DType.FLOAT32),
    cache=CacheConfig(num_blocks=400, prefix_cache=False),
    scheduler=SchedulerConfig(max_num_requests=24, max_num_batched_tokens=256, overlap=True),
    executor=ExecutorConfig(cuda_graphs=True),
)
PROMPT_LENGTHS = [1, 15, 16, 17, 40, 3, 100, 64, 65, 31, 200]


@pytest.fixture(autouse=True)
def _exact_products():
    """float32 products must not be rounded to tf32."""
    assert not torch.backends.cuda.matmul.allow_tf32


def load_tiny(config, device, dtype):
    model, geometry = make_random_model("tiny", TINY, device, dtype)
    return model, geometry


def make_requests(sampling: SamplingParams, lengths=PROMPT_LENGTHS) -> list[GenerateRequest]:
    source = random.Random(5)
    return [
        GenerateRequest(
            request_id=str(index),
            prompt_token_ids=[source.randrange(1000) for _ in range(length)],
            sampling=sampling,
            seed=index,
        )
        for index, length in enumerate(lengths)
    ]


def generate(engine: Engine, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
    return tokens


GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
RANDOM = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Greedy tokens, one request at a time, eager, step by step."""
    config = replace(
        CONFIG,
        scheduler=SchedulerConfig(max_num_requests=1, max_num_batched_tokens=512, overlap=False),
        executor=ExecutorConfig(cuda_graphs=False),
    )
    engine = make_engine(config, load=load_tiny)
    tokens: dict[str, list[int]] = {}
    for request in make_requests(GREEDY):
        tokens |= generate(engine, [request])
    assert len({tuple(value) for value in tokens.values()}) == len(PROMPT_LENGTHS)
    return tokens


@pytest.mark.parametrize("overlap", [False, True], ids=["step-by-step", "overlap"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("budget", [64, 512], ids=lambda n: f"budget{n}")
def test_greedy_tokens_are_those_of_each_request_alone(overlap, graphs, budget, expected) -> None:
    config = replace(
        CONFIG,
        scheduler=replace(CONFIG.scheduler, overlap=overlap, max_num_batched_tokens=budget),
        executor=ExecutorConfig(cuda_graphs=graphs),
    )

    tokens = generate(make_engine(config, load=load_tiny), make_requests(GREEDY))

    assert tokens == expected


def test_preempted_requests_get_the_same_tokens(expected) -> None:
    config = replace(CONFIG, cache=CacheConfig(num_blocks=36, prefix_cache=False))

    engine = make_engine(replace(config, model=replace(CONFIG.model, max_model_len=300)),
                         load=load_tiny)  # fmt: skip
    tokens = generate(engine, make_requests(GREEDY))

    assert engine.stats().preemptions_total > 0
    assert tokens == expected


def test_seeded_sampling_does_not_depend_on_graphs() -> None:
    eager = replace(CONFIG, executor=ExecutorConfig(cuda_graphs=False))

    by_graphs = generate(make_engine(CONFIG, load=load_tiny), make_requests(RANDOM))
    by_eager = generate(make_engine(eager, load=load_tiny), make_requests(RANDOM))

    assert by_graphs == by_eager


@pytest.mark.parametrize("kv_cache_dtype", [KVCacheDType.AUTO, KVCacheDType.FP8], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 8, 21])
def test_replay_is_bit_for_bit_the_eager_step(num_rows, kv_cache_dtype) -> None:
    """In bfloat16, on the same padded batch: logits, tokens and the KV cache."""
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, dtype=DType.BFLOAT16),
        cache=replace(CONFIG.cache, kv_cache_dtype=kv_cache_dtype),
    )
    engine = make_engine(config, load=load_tiny)
    runner = engine._executor
    replay = runner.decode_step
    assert replay != runner.decode_eagerly
    sizes = []

    def compare(inputs):
        batch = inputs.batch
        eager = runner.decode_eagerly(inputs)
        # As integers: memory that was never written may hold a NaN, which equals nothing.
        cache = batch.groups[0].cache[1:].view(torch.uint8)
        cache_before = cache.clone()
        replayed = replay(inputs)
        assert eager.is_finite.all()
        assert torch.equal(eager.logits, replayed.logits)
        assert torch.equal(eager.token_ids, replayed.token_ids)
        assert torch.equal(cache, cache_before)
        sizes.append(batch.num_rows)
        return replayed

    runner.decode_step = compare
    generate(engine, make_requests(GREEDY, [5 + 9 * row for row in range(num_rows)]))

    assert len(sizes) >= 25
    assert max(sizes) >= num_rows


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("budget", [64, 512], ids=lambda n: f"budget{n}")
def test_drafts_looked_up_change_no_token(graphs, budget, expected) -> None:
    """Prompts that repeat themselves, so that rows have drafts, and few of them at the ends."""
    config = replace(
        CONFIG,
        scheduler=replace(CONFIG.scheduler, max_num_batched_tokens=budget),
        executor=ExecutorConfig(cuda_graphs=graphs),
    )
    requests = [
        replace(request, prompt_token_ids=request.prompt_token_ids * 6)
        for request in make_requests(replace(GREEDY, max_tokens=40), [5] * 12)
    ]
    plain = generate(make_engine(config, load=load_tiny), requests)
    engine = make_engine(
        replace(config, speculative=SpeculativeConfig(speculative="ngram:4")), load=load_tiny
    )

    assert generate(engine, requests) == plain
    assert generate(engine, make_requests(GREEDY)) == expected
    assert sum(engine.stats().drafted_total) > 0


def test_bfloat16_mostly_agrees_with_float32() -> None:
    """Next tokens of many prompts: rounding may flip a near tie, no more."""
    lengths = [7 + index for index in range(200)]
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    config = replace(CONFIG, model=replace(CONFIG.model, dtype=DType.BFLOAT16))

    exact = generate(make_engine(CONFIG, load=load_tiny), make_requests(one, lengths))
    rounded = generate(make_engine(config, load=load_tiny), make_requests(one, lengths))

    agreeing = sum(exact[name] == rounded[name] for name in exact)
    assert agreeing >= 180


def with_fp8_kv(config: EngineConfig) -> EngineConfig:
    return replace(config, cache=replace(config.cache, kv_cache_dtype=KVCacheDType.FP8))


def test_with_an_fp8_cache_tokens_hardly_depend_on_how_work_is_cut() -> None:
    """A product that rounds otherwise in another batch may move a key to the next e4m3 number, and
    that a near tie; all requests but one or two must not notice."""
    alone = replace(
        CONFIG,
        scheduler=SchedulerConfig(max_num_requests=1, max_num_batched_tokens=512, overlap=False),
        executor=ExecutorConfig(cuda_graphs=False),
    )
    chunks = replace(CONFIG, scheduler=replace(CONFIG.scheduler, max_num_batched_tokens=64))
    reusing = replace(CONFIG, cache=replace(CONFIG.cache, prefix_cache=True))
    engine = make_engine(with_fp8_kv(reusing), load=load_tiny)

    found = [
        generate(make_engine(with_fp8_kv(alone), load=load_tiny), make_requests(GREEDY)),
        generate(make_engine(with_fp8_kv(chunks), load=load_tiny), make_requests(GREEDY)),
        generate(engine, make_requests(GREEDY)),
        generate(engine, make_requests(GREEDY)),  # from cached prefixes
    ]

    for tokens in found[1:]:
        assert sum(tokens[name] == found[0][name] for name in tokens) >= len(PROMPT_LENGTHS) - 2


def test_an_fp8_cache_mostly_agrees_with_float32() -> None:
    """Next tokens of many prompts; a CPU with weights of its own has 188 equal."""
    lengths = [7 + index for index in range(200)]
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

    exact = generate(make_engine(CONFIG, load=load_tiny), make_requests(one, lengths))
    rounded = generate(
        make_engine(with_fp8_kv(CONFIG), load=load_tiny), make_requests(one, lengths)
    )

    agreeing = sum(exact[name] == rounded[name] for name in exact)
    assert agreeing >= 170
