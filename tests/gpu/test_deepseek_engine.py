# SPDX-License-Identifier: Apache-2.0
"""What is DeepSeek-V3's own on a GPU: products in FP8, and the drafts of its MTP layer."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from pelton.core.config import Device, DType, SpeculativeConfig
from pelton.engine.factory import make_engine
from pelton.engine.speculative.mtp import MTPDrafter
from pelton.layers.norm import InputNorm
from tiny_engines import (
    CONFIG,
    DEEPSEEK,
    FP8_DEEPSEEK,
    LOADS,
    eager_and_alone,
    generate,
    load_from,
    make_requests,
    prompt_logprobs,
)

pytestmark = pytest.mark.gpu

load_with_mtp = load_from(DEEPSEEK, has_mtp=True, gain=4)


def test_products_in_fp8_agree_with_dequantised_ones() -> None:
    """The CPU multiplies what the card multiplies in FP8: the same logits but for what three
    mantissa bits of activations leave: a few percent of each of a dozen products."""
    load = load_from(FP8_DEEPSEEK, gain=4)

    on_cpu, on_gpu = (prompt_logprobs(device, load) for device in (Device.CPU, Device.CUDA))

    assert torch.corrcoef(torch.stack([on_cpu, on_gpu]))[0, 1] > 0.9
    assert (on_gpu - on_cpu).mean().abs() < 0.05 * on_cpu.std()


def test_norms_that_quantise_change_no_logprob() -> None:
    load = load_from(FP8_DEEPSEEK, gain=4)

    def load_apart(*arguments):
        model, geometry = load(*arguments)
        for module in model.modules():
            if isinstance(module, InputNorm):
                assert module._then is not None
                module._then = None
        return model, geometry

    together, apart = (prompt_logprobs(Device.CUDA, each) for each in (load, load_apart))

    assert torch.equal(together, apart)


@cache
def expected() -> dict[str, list[int]]:
    engine = make_engine(eager_and_alone(CONFIG), load=LOADS["deepseek"])
    return generate(engine, make_requests())


@pytest.mark.parametrize(
    ("drafter", "graphs", "budget"),
    [("mtp:1", True, 64), ("mtp:3", False, 512), ("mtp:3", True, 512), ("ngram:3", True, 64)],
    ids=str,
)
def test_drafts_change_no_token(drafter, graphs, budget) -> None:
    config = replace(
        CONFIG,
        scheduler=replace(CONFIG.scheduler, max_num_batched_tokens=budget),
        executor=replace(CONFIG.executor, cuda_graphs=graphs),
        speculative=SpeculativeConfig(speculative=drafter),
    )
    engine = make_engine(config, load=load_with_mtp)

    cold = generate(engine, make_requests())
    warm = generate(engine, make_requests())

    assert cold == warm == expected()
    if drafter != "ngram:3":
        assert engine.stats().drafted_total[0] > 100


@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_replayed_drafts_are_bit_for_bit_the_eager_ones(num_rows) -> None:
    """In bfloat16, on the same padded batch: logits, drafts and both layers' caches."""
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, dtype=DType.BFLOAT16),
        speculative=SpeculativeConfig(speculative="mtp:2"),
    )
    engine = make_engine(config, load=load_with_mtp)
    runner = engine._executor
    eager_draft = MTPDrafter(runner._model.mtp_layer(), runner._slots, 2).draft
    replay, replay_draft = runner.decode_step, runner.draft_step
    num_compared = []

    def compare(inputs):
        eager = runner.decode_eagerly(inputs)
        replayed = replay(inputs)
        count = len(inputs.sample_rows)
        assert torch.equal(eager.logits[:count], replayed.logits[:count])
        return replayed

    def compare_drafts(inputs, hidden_states):
        count = len(set(inputs.sample_rows.tolist()))
        # As integers: memory that was never written may hold a NaN, which equals nothing.
        cache = inputs.batch.groups[0].cache[1:].view(torch.int16)
        tokens = runner._slots.tokens
        known = tokens.clone()
        eager = eager_draft(inputs, hidden_states.clone())[:count]
        tokens.copy_(known)  # the drafts that it holds now would be read as known tokens
        cache_of_eager = cache.clone()
        replayed = replay_draft(inputs, hidden_states)
        assert torch.equal(eager, replayed[:count])
        assert torch.equal(cache, cache_of_eager)
        num_compared.append(inputs.row_len)
        return replayed

    runner.decode_step, runner.draft_step = compare, compare_drafts
    generate(engine, make_requests()[:num_rows])

    assert num_compared.count(3) >= 10
