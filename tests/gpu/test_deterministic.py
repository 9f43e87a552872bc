# SPDX-License-Identifier: Apache-2.0
"""`--deterministic`: a request's log-probabilities are the same bits whatever runs beside it."""

from dataclasses import replace
from functools import cache

import pytest

from pelton.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ExecutorConfig,
    KVCacheDType,
    SchedulerConfig,
    SpeculativeConfig,
)
from pelton.core.request import GenerateRequest, TokenLogprobs
from pelton.engine.factory import make_engine
from tiny_engines import (
    CONFIG,
    DEEPSEEK,
    FP8_DEEPSEEK,
    GPT_OSS,
    LENGTHS,
    LLAMA,
    VOCAB,
    eager_and_alone,
    load_from,
    make_requests,
    run,
)

pytestmark = pytest.mark.gpu

_SMALLEST = {
    "hidden_size": 64,
    "vocab_size": 96,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
SMALLEST = {
    "smallest-llama": {**LLAMA, **_SMALLEST},
    "smallest-gpt-oss": {**GPT_OSS, **_SMALLEST, "num_local_experts": 4},
    "smallest-deepseek": {
        **DEEPSEEK, **_SMALLEST,
        "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
}  # fmt: skip
LOADS = {
    "llama": load_from(LLAMA),
    "gpt-oss": load_from(GPT_OSS, gain=5),
    "deepseek": load_from(DEEPSEEK, gain=4),
    "deepseek-fp8": load_from(FP8_DEEPSEEK, gain=4),
}
PLAIN = list(LOADS)
# One process a model, so that each says it alone once.
MODELS = pytest.mark.parametrize(
    "model", [pytest.param(model, marks=pytest.mark.xdist_group(model)) for model in PLAIN]
)
LOADS["deepseek-mtp"] = load_from(DEEPSEEK, has_mtp=True, gain=4)
LOADS |= {name: load_from(geometry, gain=4) for name, geometry in SMALLEST.items()}
BASE = replace(
    CONFIG,
    model=replace(CONFIG.model, dtype=DType.BFLOAT16),
    executor=ExecutorConfig(deterministic=True, num_threads=2),
)
Said = dict[str, list[TokenLogprobs]]


def say(
    config: EngineConfig,
    model: str,
    *,
    rounds: int = 1,
    one_by_one: bool = False,
    lengths: list[int] = LENGTHS,
    max_tokens: int = 16,
    vocab_size: int = VOCAB,
    **sampling: float,
) -> Said:
    """In the last of `rounds`, before which prompts and outputs are in the prefix cache."""
    engine = make_engine(config, load=LOADS[model])
    said: Said = {}

    def start(requests: list[GenerateRequest]) -> None:
        said.update({request.request_id: [] for request in requests})
        run(engine, requests, lambda output: said[output.request_id].extend(output.logprobs or []))

    for _ in range(rounds):
        requests = make_requests(
            lengths, vocab_size=vocab_size, logprobs=5, max_tokens=max_tokens, **sampling
        )
        for group in [[request] for request in requests] if one_by_one else [requests]:
            start(group)
    assert all(len(entries) == max_tokens for entries in said.values())
    return said


@cache
def say_alone(model: str) -> Said:
    return say(eager_and_alone(BASE), model, one_by_one=True)


@MODELS
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("budget", [24, 64, 1024], ids=lambda n: f"budget{n}")
def test_the_batch_chunks_and_graphs_change_no_bit(model, graphs, budget) -> None:
    config = replace(
        BASE,
        scheduler=replace(BASE.scheduler, max_num_batched_tokens=budget),
        executor=replace(BASE.executor, cuda_graphs=graphs),
    )

    assert say(config, model) == say_alone(model)


@MODELS
def test_a_cached_prefix_changes_no_bit(model) -> None:
    assert say(BASE, model, rounds=2) == say_alone(model)


@MODELS
def test_preemption_changes_no_bit(model) -> None:
    """What a request lost is computed again as a prompt: decodes and prefills agree."""
    config = replace(BASE, cache=CacheConfig(num_blocks=36, prefix_cache=False))

    assert say(config, model) == say_alone(model)


@pytest.mark.parametrize("model", ["llama", "gpt-oss"])
def test_an_fp8_cache_changes_no_bit(model) -> None:
    config = replace(BASE, cache=replace(BASE.cache, kv_cache_dtype=KVCacheDType.FP8))

    assert say(config, model) == say(eager_and_alone(config), model, one_by_one=True)


@MODELS
def test_drafts_change_no_bit(model) -> None:
    """A draft's position is computed among others of its row."""
    drafted, drafter = ("deepseek-mtp", "mtp:2") if model == "deepseek" else (model, "ngram:3")
    config = replace(BASE, speculative=SpeculativeConfig(speculative=drafter))

    assert say(config, drafted) == say_alone(model)


@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_sampled_tokens_are_the_same(model) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5}
    chunks = replace(BASE, scheduler=replace(BASE.scheduler, max_num_batched_tokens=48))
    said = say(eager_and_alone(BASE), model, one_by_one=True, **sampling)

    assert say(chunks, model, **sampling) == said


@pytest.mark.parametrize("model", list(SMALLEST))
def test_small_models_in_float32(model, interpretable) -> None:
    """Small enough for the interpreter."""
    config = replace(BASE, model=CONFIG.model)
    sizes = {"lengths": [1, 18], "max_tokens": 2, "vocab_size": 96}
    chunks = replace(config, scheduler=replace(BASE.scheduler, max_num_batched_tokens=7))

    said = say(eager_and_alone(config), model, one_by_one=True, **sizes)

    assert say(chunks, model, **sizes) == said
    assert say(config, model, rounds=2, **sizes) == said


def test_without_it_bits_depend_on_the_batch() -> None:
    """Or the tests above could not fail."""
    config = replace(BASE, executor=ExecutorConfig(num_threads=2))
    scheduler = SchedulerConfig(max_num_requests=24, max_num_batched_tokens=1024)
    config = replace(config, scheduler=scheduler)

    assert say(config, "llama") != say(eager_and_alone(config), "llama", one_by_one=True)
