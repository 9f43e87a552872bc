# SPDX-License-Identifier: Apache-2.0
"""The steps that GPU memory is measured on are steps that an executor can run."""

from dataclasses import replace

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
    SpeculativeConfig,
)
from pelton.engine import sampler
from pelton.engine.factory import make_runner
from pelton.engine.gpu_memory import largest_plans, plans_of_all_sizes
from pelton.engine.model_runner import ModelRunner
from pelton.engine.sampler import sample
from pelton.engine.step_padding import pad_for_graphs
from pelton.kernels.paged_attention.unpack_fp8 import UNPACKED_TOKENS
from pelton.layers.latent_rows import WORKSPACE_TOKENS, runs_unabsorbed
from pelton.models.random_weights import GEOMETRIES, make_random_model

TINY = {
    **GEOMETRIES["smollm2-135m"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 96,
}
CONFIG = EngineConfig(
    model=ModelConfig(model="tiny", dtype=DType.FLOAT32, max_model_len=16),
    cache=CacheConfig(num_blocks=2),
    executor=ExecutorConfig(device=Device.CPU, num_threads=1),
)


def make_tiny_runner(config: EngineConfig) -> ModelRunner:
    device, dtype = torch.device("cpu"), torch.float32
    model, geometry = make_random_model("tiny", TINY, device, dtype)
    return make_runner(model, geometry, config, device, dtype)


@pytest.mark.parametrize("max_tokens", [8, 15, 16, 31, 64], ids=lambda n: f"budget{n}")
@pytest.mark.parametrize("max_requests", [1, 3, 8], ids=lambda n: f"rows{n}")
def test_largest_plans_run_and_fill_the_limits(max_tokens: int, max_requests: int) -> None:
    config = replace(
        CONFIG,
        scheduler=SchedulerConfig(
            max_num_requests=max_requests, max_num_batched_tokens=max_tokens, overlap=False
        ),
    )
    runner = make_tiny_runner(config)

    plans = prefill, chunks, short, decode = list(largest_plans(config, 96))
    results = [runner.launch(plan).wait() for plan in plans]

    assert sum(prefill.num_tokens) == min(max_tokens, 15 * max_requests)
    assert sum(chunks.num_tokens) == min(max_tokens, 8 * max_requests)
    assert min(chunks.starts) >= 7
    assert sum(short.num_tokens) == min(max_tokens, 15 * max_requests)
    assert short.num_rows == decode.num_rows == min(max_requests, max_tokens)
    assert [len(result.sampled) for result in results] == [plan.num_rows for plan in plans]


@pytest.mark.parametrize("max_tokens", [8, 31, 64], ids=lambda n: f"budget{n}")
def test_a_step_full_of_drafts_is_measured_too(max_tokens: int) -> None:
    config = replace(
        CONFIG,
        scheduler=SchedulerConfig(
            max_num_requests=8, max_num_batched_tokens=max_tokens, overlap=False
        ),
        speculative=SpeculativeConfig(speculative="ngram:3"),
    )
    runner = make_tiny_runner(config)

    *_, drafted = plans = list(largest_plans(config, 96))
    results = [runner.launch(plan).wait() for plan in plans]

    assert len(plans) == 5
    assert len(drafted.drafts) == min((max_tokens - 8) // 2 // 3, 8)
    assert all(results[-1].sampled)


@pytest.mark.parametrize("drafter", ["off", "ngram:3"])
def test_a_grammar_masks_the_largest_steps(drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its kernel compiles before a request has one, and its masks are measured."""
    config = replace(
        CONFIG,
        scheduler=SchedulerConfig(max_num_requests=5, max_num_batched_tokens=31, overlap=False),
        speculative=SpeculativeConfig(speculative=drafter),
    )
    runner = make_tiny_runner(config)
    masked: list[list[int]] = []
    monkeypatch.setattr(
        sampler, "apply_token_mask", lambda logits, rows, masks: masked.append(rows.tolist())
    )

    plans = list(largest_plans(config, 96))
    results = [runner.launch(plan).wait() for plan in plans]

    num_logits = [plan.num_rows + 3 * len(plan.drafts) for plan in (plans[0], *plans[2:])]
    assert masked == [list(range(count)) for count in num_logits]
    assert not any(result.grammar_failures for result in results)


@pytest.mark.parametrize(
    ("max_tokens", "max_requests", "max_len", "sizes"),
    [
        (64, 8, 64, [1, 2, 3, 5, 9, 17, 33]),
        (65, 8, 100, [1, 2, 3, 5, 9, 17, 33, 65]),
        (64, 8, 16, [1, 2, 3, 5, 9]),
        (64, 8, 17, [1, 2, 3, 5, 9]),
        (64, 8, 18, [1, 2, 3, 5, 9, 17]),
        (8, 1, 16, [1, 2, 3, 5]),
        (1, 1, 16, [1]),
    ],
)
def test_steps_of_all_sizes_run(max_tokens, max_requests, max_len, sizes) -> None:
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, max_model_len=max_len),
        scheduler=SchedulerConfig(
            max_num_requests=max_requests, max_num_batched_tokens=max_tokens, overlap=False
        ),
    )
    runner = make_tiny_runner(config)

    *plans, several = list(plans_of_all_sizes(config))
    results = [runner.launch(plan).wait() for plan in plans]

    assert len(runner.launch(several).wait().sampled) == several.num_rows == min(max_requests, 8)
    assert sum(several.num_tokens) <= max_tokens
    padding = pad_for_graphs(max_requests, max_tokens, SpeculativeConfig())
    assert all(padding.size(plan) is None for plan in (*plans, several))
    assert [sum(plan.num_tokens) for plan in plans] == sizes
    assert [plan.num_decodes for plan in plans[1:]] == [min(max_requests - 1, 1)] * (len(sizes) - 1)
    for plan, result in zip(plans, results, strict=True):
        assert [len(tokens) for tokens in result.sampled] == [1] * plan.num_decodes + [0]


@pytest.mark.parametrize(
    ("max_tokens", "max_requests", "num_rows"),
    [(64, 8, [1, 2, 4, 8]), (64, 15, [1, 2, 4, 8]), (8, 16, [1, 2, 4, 8]), (8, 1, [1])],
)
def test_without_graphs_decodes_alone_run_too(max_tokens, max_requests, num_rows) -> None:
    """Of a context that is cut for many programs, as the captures of graphs are."""
    config = replace(
        CONFIG,
        scheduler=SchedulerConfig(
            max_num_requests=max_requests, max_num_batched_tokens=max_tokens, overlap=False
        ),
        executor=replace(CONFIG.executor, cuda_graphs=False),
    )
    runner = make_tiny_runner(config)

    with_graphs = list(plans_of_all_sizes(replace(config, executor=CONFIG.executor)))
    plans = list(plans_of_all_sizes(config))
    decodes = plans[len(with_graphs) :]
    results = [runner.launch(plan).wait() for plan in decodes]

    assert plans[: len(with_graphs)] == with_graphs
    assert [plan.num_rows for plan in decodes] == num_rows
    assert all(plan.num_decodes == plan.num_rows for plan in decodes)
    assert all(set(plan.starts) == {15} for plan in decodes)
    assert [len(result.sampled) for result in results] == num_rows


@pytest.mark.parametrize("max_tokens", [512, 2048, 8192, 16384])
@pytest.mark.parametrize("max_len", [512, 1024, 4096, 8192, 131_072])
def test_chunks_behind_prefixes_fill_the_workspaces(max_tokens: int, max_len: int) -> None:
    """Of latents in full, of unpacked keys and values at least half."""
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, max_model_len=max_len),
        scheduler=SchedulerConfig(max_num_requests=512, max_num_batched_tokens=max_tokens),
    )

    _, chunks, *_ = largest_plans(config, 96)

    contexts = [start + n for start, n in zip(chunks.starts, chunks.num_tokens, strict=True)]
    assert sum(chunks.num_tokens) == max_tokens
    assert max(contexts) < max_len
    unabsorbed = [
        start
        for start, n, context in zip(chunks.starts, chunks.num_tokens, contexts, strict=True)
        if runs_unabsorbed(n, context, 128, 128, 512)
    ]
    possible = max_tokens // 192 * (max_len - 1 - 192)
    assert sum(unabsorbed) >= min(WORKSPACE_TOKENS, possible // 2)
    assert sum(contexts) >= min(UNPACKED_TOKENS, possible) // 2


@pytest.mark.parametrize("max_requests", [64, 512])
@pytest.mark.parametrize("max_tokens", [512, 8192, 16384])
@pytest.mark.parametrize("max_len", [64, 512, 4096, 131_072])
def test_short_rows_share_the_budget_and_run_absorbed(
    max_tokens: int, max_len: int, max_requests: int
) -> None:
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, max_model_len=max_len),
        scheduler=SchedulerConfig(max_num_requests=max_requests, max_num_batched_tokens=max_tokens),
    )

    _, _, short, *_ = largest_plans(config, 96)

    contexts = [start + n for start, n in zip(short.starts, short.num_tokens, strict=True)]
    assert short.num_rows == max_requests
    assert max(contexts) < max_len
    most = max_requests * (160 if max_len > 2208 else 63)
    assert sum(short.num_tokens) == min(max_tokens, most)
    assert not any(
        runs_unabsorbed(n, context, 128, 128, 512)
        for n, context in zip(short.num_tokens, contexts, strict=True)
    )


@pytest.mark.parametrize("speculative", ["off", "ngram:3"])
def test_the_sampler_is_measured_with_all_that_changes_logits(speculative, monkeypatch) -> None:
    batches = []

    def note(logits, batch, tokens):
        batches.append((len(logits), batch))
        return sample(logits, batch, tokens)

    monkeypatch.setattr("pelton.engine.model_runner.sample", note)
    config = replace(
        CONFIG,
        scheduler=SchedulerConfig(max_num_requests=8, max_num_batched_tokens=64, overlap=False),
        speculative=SpeculativeConfig(speculative=speculative),
    )
    runner = make_tiny_runner(config)

    for plan in largest_plans(config, 96):
        assert not runner.launch(plan).wait().grammar_failures

    _, unchanged = batches.pop(1)
    assert not unchanged.changes_logits
    for num_logits, batch in batches:
        assert len(batch.penalties.rows) == len(batch.logprobs.rows) == num_logits
        assert len(batch.masks[0]) == num_logits
        assert len(batch.bias[0]) == num_logits * 96
        assert len(batch.bans[0]) == num_logits * 48
    assert max(num_logits for num_logits, _ in batches) == (32 if speculative != "off" else 8)
