# SPDX-License-Identifier: Apache-2.0
"""SmolLM2's real weights on real text, the repository's own prose: every number format on the GPU
against float32, float32 against the CPU (which the e2e tests hold against transformers), graphs
against eager steps, and memory that holds NaN against memory that does not."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from pelton.bench.accuracy import FP8_MLPS, compare, compare_formats, cut, score
from pelton.core.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    ExecutorConfig,
    KVCacheDType,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from pelton.engine.factory import make_engine
from pelton.layers.embedding import Embedding
from pelton.models.checkpoint import open_checkpoint
from pelton.serving.tokenizer import Tokenizer
from tiny_engines import check_replays, generate, make_requests
from tolerance import (
    BFLOAT16_CHOICES,
    CARD_LOGPROB_RMS,
    FP8_KV_CHOICES,
    FP8_KV_PERPLEXITY_REL,
    FP8_MLPS_PERPLEXITY_REL,
    FP8_WEIGHTS_PERPLEXITY_REL,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PIECE = 513
CONFIG = EngineConfig(
    model=ModelConfig(dtype=DType.BFLOAT16, max_model_len=1024),
    cache=CacheConfig(num_blocks=1200, prefix_cache=False),
    scheduler=SchedulerConfig(max_num_requests=32, max_num_batched_tokens=4096),
    executor=ExecutorConfig(cuda_graphs=False, num_threads=4),
)
CACHES = pytest.mark.parametrize(
    "kv_cache_dtype", [KVCacheDType.AUTO, KVCacheDType.FP8], ids=["bfloat16-cache", "fp8-cache"]
)


@cache
def read_texts(model: str) -> list[list[int]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    prose = "\n".join(page.read_text() for page in pages)
    return cut(Tokenizer.load(open_checkpoint(model)).encode(prose), PIECE)


@pytest.fixture
def texts(smollm2: str) -> list[list[int]]:
    return read_texts(smollm2)


@pytest.fixture
def config(smollm2: str) -> EngineConfig:
    return replace(CONFIG, model=replace(CONFIG.model, model=smollm2))


def test_float32_is_the_cpus(config: EngineConfig, texts: list[list[int]]) -> None:
    exact = replace(config, model=replace(config.model, dtype=DType.FLOAT32))
    on_cpu = replace(exact, executor=replace(exact.executor, device=Device.CPU))

    found = compare(score(make_engine(exact), texts[-2:]), score(make_engine(on_cpu), texts[-2:]))

    assert found.rms_error <= CARD_LOGPROB_RMS
    assert found.largest_lost_margin <= 2 * found.largest_error


def test_every_format_is_as_near_as_its_rounding_allows(
    config: EngineConfig, texts: list[list[int]], tmp_path: Path
) -> None:
    """In bfloat16, near ties turn and nothing else. The bound on what it may turn is twice the
    largest error that it makes of the text's own tokens: they are there whatever is chosen."""
    formats = compare_formats(config, texts, tmp_path)

    for name, found in formats.items():
        print(name, found)
    assert formats["bfloat16"].num_positions >= 2000
    for name in ("bfloat16", "bfloat16, its weights"):
        assert formats[name].share_equal >= BFLOAT16_CHOICES
        assert formats[name].largest_lost_margin <= 2 * formats[name].largest_error
    assert 0 < abs(formats["FP8 weights"].perplexity_change) <= FP8_WEIGHTS_PERPLEXITY_REL
    assert 0 < abs(formats[FP8_MLPS].perplexity_change) <= FP8_MLPS_PERPLEXITY_REL
    assert 0 < abs(formats["FP8 cache"].perplexity_change) <= FP8_KV_PERPLEXITY_REL


@CACHES
def test_replay_is_bit_for_bit_the_eager_step(
    kv_cache_dtype: KVCacheDType, config: EngineConfig, texts: list[list[int]]
) -> None:
    engine = make_engine(with_graphs(config, kv_cache_dtype))

    for num_rows in (1, 7, 32):
        assert check_replays(engine, take(texts, num_rows)) >= num_rows


@pytest.mark.parametrize("drafter", ["off", "ngram:3"])
@CACHES
def test_what_is_generated_is_what_float32_would_choose(
    kv_cache_dtype: KVCacheDType, drafter: str, config: EngineConfig, texts: list[list[int]]
) -> None:
    """Decode steps, by graphs: 32 prompts of many lengths, 64 tokens each; the reference is given
    what was generated, so that one choice does not change the next. With drafts a row of a step
    has several tokens, and a padding row too."""
    requests = take(texts, 32)
    with_drafts = replace(config, speculative=SpeculativeConfig(speculative=drafter))
    tokens = generate(make_engine(with_graphs(with_drafts, kv_cache_dtype)), requests)
    exact = replace(config, model=replace(config.model, dtype=DType.FLOAT32))
    whole = [request.prompt_token_ids + tokens[request.request_id] for request in requests]

    reference = score(make_engine(exact), whole)

    ends = torch.tensor([len(text) - 1 for text in whole]).cumsum(0).tolist()
    pairs = [
        (token, reference.choices[end - 64 + place])
        for request, end in zip(requests, ends, strict=True)
        for place, token in enumerate(tokens[request.request_id])
    ]
    assert len(pairs) == 32 * 64
    least = BFLOAT16_CHOICES if kv_cache_dtype is KVCacheDType.AUTO else FP8_KV_CHOICES
    assert sum(mine == theirs for mine, theirs in pairs) >= least * len(pairs)


@CACHES
def test_unused_memory_may_hold_anything(
    kv_cache_dtype: KVCacheDType, config: EngineConfig, texts: list[list[int]]
) -> None:
    """NaN in all of the cache, the block that padding rows write to included; the prompts end
    inside blocks."""
    requests = take(texts, 9)
    engine = make_engine(with_graphs(config, kv_cache_dtype))
    clean = generate(engine, requests)
    for memory in engine._executor.caches:
        memory.view(torch.uint8).fill_(0xFF)  # a NaN in every format

    assert generate(engine, requests) == clean


@CACHES
def test_padding_rows_may_hold_anything(
    kv_cache_dtype: KVCacheDType, config: EngineConfig, texts: list[list[int]], monkeypatch
) -> None:
    """NaN in the hidden states of the rows that pad a step: the others' logits and what is written
    to the cache are the same bits."""
    engine = make_engine(with_graphs(config, kv_cache_dtype))
    runner = engine._executor
    embed = Embedding.__call__
    num_rows, num_padded = 10**9, 0

    def embed_poisoned(self, token_ids):
        embedded = embed(self, token_ids)
        embedded[num_rows:] = float("nan")
        return embedded

    def compare_steps(inputs):
        nonlocal num_rows, num_padded
        clean = runner.decode_eagerly(inputs)
        memory = inputs.batch.groups[0].cache[1:].view(torch.uint8)
        written = memory.clone()
        num_rows = len(inputs.sample_rows)
        poisoned = runner.decode_eagerly(inputs)
        assert torch.equal(clean.logits[:num_rows], poisoned.logits[:num_rows])
        assert torch.equal(memory, written)
        num_padded += inputs.batch.num_rows - num_rows
        num_rows = 10**9
        return poisoned

    monkeypatch.setattr(Embedding, "__call__", embed_poisoned)
    runner.decode_step = compare_steps
    generate(engine, take(texts, 19))

    assert num_padded > 0


def with_graphs(config: EngineConfig, kv_cache_dtype: KVCacheDType) -> EngineConfig:
    return replace(
        config,
        cache=replace(config.cache, kv_cache_dtype=kv_cache_dtype),
        executor=replace(config.executor, cuda_graphs=True),
    )


def take(texts: list[list[int]], count: int) -> list:
    """Greedy requests of 64 tokens, with prompts of many lengths."""
    lengths = [1 + 37 * index % 300 for index in range(count)]
    requests = make_requests(lengths, max_tokens=64)
    return [
        replace(request, prompt_token_ids=texts[index][:length])
        for index, (request, length) in enumerate(zip(requests, lengths, strict=True))
    ]
