# SPDX-License-Identifier: Apache-2.0
"""Every sampling control against a plain reference, one row at a time."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pelton.core.request import SamplingParams
from pelton.core.step import Admission
from pelton.engine import sampler
from pelton.engine.sampler import Sampled, compute_logprobs, sample
from pelton.engine.sampling_batch import SamplingBatch, make_sampling_batch
from pelton.engine.slot_table import SlotTable
from pelton.engine.uniform import uniforms
from tolerance import FLOAT32_ABS, FLOAT32_REL

CPU = torch.device("cpu")
VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)
PROMPT, OUTPUT = [3, 4, 4, 7], [7, 9, 9, 9]
EOS = (2, 11)


class Rows:
    """Requests with the tokens PROMPT + OUTPUT in slots 1, 2, ..., about to sample the next."""

    def __init__(self, *params: SamplingParams, seeds: list[int] | None = None) -> None:
        self.slots = SlotTable(len(params) + 1, 32, 4, 1, CPU)
        self.ids = np.arange(1, len(params) + 1, dtype=np.int32)
        admissions = [
            Admission(slot, PROMPT + OUTPUT, len(PROMPT), item, slot, EOS)
            for slot, item in zip(self.ids.tolist(), params, strict=True)
        ]
        if seeds is not None:
            pairs = zip(admissions, seeds, strict=True)
            admissions = [replace(item, seed=seed) for item, seed in pairs]
        self.slots._admit(admissions)

    def batch(self, length: int = len(PROMPT + OUTPUT)) -> SamplingBatch | None:
        lengths = np.full(len(self.ids), length, np.int32)
        return make_sampling_batch(self.slots.sampling, self.ids, lengths, CPU)

    def sample(self, logits: Tensor, length: int = len(PROMPT + OUTPUT)) -> Sampled:
        batch = self.batch(length)
        assert batch is not None
        return sample(logits.clone(), batch, self.slots.tokens)


def reference_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Penalties, bias and bans, token by token."""
    adjusted = logits.clone()
    for token in range(len(logits)):
        value = logits[token].item()
        if token in PROMPT + OUTPUT:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        count = OUTPUT.count(token)
        value -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        value += params.logit_bias.get(token, 0.0)
        if token in EOS and len(OUTPUT) < params.min_tokens:
            value = -math.inf
        adjusted[token] = value
    return adjusted


def reference_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The probabilities that temperature, top-k, top-p and min-p leave."""
    probabilities = (reference_logits(logits, params).double() / params.temperature).softmax(0)
    order = sorted(range(len(logits)), key=lambda token: (-probabilities[token].item(), token))
    if params.top_k > 0:
        order = order[: params.top_k]
    left = sum(probabilities[token].item() for token in order)
    kept, mass = [], 0.0
    for token in order:
        if kept and mass >= params.top_p * left:
            break
        kept.append(token)
        mass += probabilities[token].item()
    best = probabilities[order[0]].item()
    kept = [token for token in kept if probabilities[token].item() >= params.min_p * best]
    result = torch.zeros_like(probabilities)
    result[kept] = probabilities[kept]
    return result / result.sum()


CONTROLS = {
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.7),
    "repetition-below-1": SamplingParams(temperature=0.0, repetition_penalty=0.5),
    "presence": SamplingParams(temperature=0.0, presence_penalty=1.5),
    "frequency": SamplingParams(temperature=0.0, frequency_penalty=-0.9),
    "bias": SamplingParams(temperature=0.0, logit_bias={5: 3.5, 49: -100.0, 9: 1.0}),
    "min-tokens": SamplingParams(temperature=0.0, min_tokens=5),
    "all": SamplingParams(
        temperature=0.0,
        repetition_penalty=1.2,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logit_bias={4: 2.0},
        min_tokens=5,
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_change_the_logits_as_documented(name: str) -> None:
    rows = Rows(CONTROLS[name], GREEDY)
    logits = torch.randn(2, VOCAB) * 3
    changed = logits.clone()
    batch = rows.batch()
    assert batch is not None

    sampled = sample(changed, batch, rows.slots.tokens)

    expected = reference_logits(logits[0], CONTROLS[name])
    torch.testing.assert_close(changed[0], expected, rtol=FLOAT32_REL, atol=FLOAT32_ABS)
    assert torch.equal(changed[1], logits[1])
    assert sampled.token_ids.tolist() == [expected.argmax().item(), logits[1].argmax().item()]


def test_min_tokens_bans_until_that_many_are_out() -> None:
    rows = Rows(SamplingParams(temperature=0.0, min_tokens=5))
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 30] = 5.0, 4.0

    early = rows.sample(logits, len(PROMPT) + 4)
    late = rows.sample(logits, len(PROMPT) + 5)

    assert (early.token_ids.item(), late.token_ids.item()) == (30, 2)


FILTERS = {
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=3.0),
    "top-k": SamplingParams(top_k=4),
    "top-k-2": SamplingParams(top_k=2),
    "top-k-beyond-vocabulary": SamplingParams(top_k=10**6),
    "top-p": SamplingParams(top_p=0.6),
    "top-p-tiny": SamplingParams(top_p=1e-9),
    "min-p": SamplingParams(min_p=0.2),
    "min-p-1": SamplingParams(min_p=1.0),
    "all": SamplingParams(temperature=1.3, top_k=12, top_p=0.8, min_p=0.05),
    "with-penalties": SamplingParams(top_p=0.8, repetition_penalty=1.5, logit_bias={8: 2.0}),
}


@pytest.mark.parametrize("name", FILTERS)
def test_samples_follow_the_filtered_distribution(name) -> None:
    """Uniforms evenly over [0, 1) draw each token as often as its probability says."""
    num_draws = 4000
    params = FILTERS[name]
    rows = Rows(params)
    logits = torch.randn(VOCAB) * 2
    batch = rows.batch()
    assert batch is not None
    grid = (torch.arange(num_draws) + 0.5) / num_draws

    many = spread(batch, grid)
    sampled = sample(logits.repeat(num_draws, 1), many, rows.slots.tokens.repeat(1, 1))

    counts = torch.bincount(sampled.token_ids, minlength=VOCAB)
    expected = reference_distribution(logits, params)
    # Inverting a distribution on an even grid is off by at most one draw at each of its ends.
    torch.testing.assert_close(counts.double() / num_draws, expected, rtol=0, atol=2.0 / num_draws)


def spread(batch: SamplingBatch, grid: Tensor) -> SamplingBatch:
    """The batch of one row, repeated for each uniform of `grid`."""
    count = len(grid)

    def repeat(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(count, dim=0)

    assert batch.random is not None
    rows = torch.arange(count)
    repeated = {
        name: repeat(getattr(batch.random, name))
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    group = replace(batch.random, rows=rows, uniforms=grid, **repeated)
    penalties = batch.penalties
    if penalties is not None:
        names = ("slots", "lengths", "num_prompt_tokens", "repetition", "presence", "frequency")
        repeated = {name: repeat(getattr(penalties, name)) for name in names}
        penalties = replace(penalties, rows=rows, **repeated)
    bias = batch.bias
    if bias is not None:
        bias = rows.repeat_interleave(len(bias[1])), bias[1].repeat(count), bias[2].repeat(count)
    return replace(batch, random=group, penalties=penalties, bias=bias)


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, [9, 17, 40]] = 2.5
    rows = Rows(
        GREEDY, SamplingParams(top_k=1), SamplingParams(top_k=2), SamplingParams(top_p=1e-9)
    )
    batch = rows.batch()
    assert batch is not None

    first, second, third, fourth = sample(logits, batch, rows.slots.tokens).token_ids.tolist()

    assert (first, second, fourth) == (9, 9, 9)
    assert third in (9, 17)


@pytest.mark.parametrize("count", [1, 3, 5, VOCAB])
def test_highest_breaks_ties_alike_for_any_count(count: int) -> None:
    x = torch.randint(-3, 3, (20, VOCAB)).float() * torch.tensor(0.5)
    x[0, :5] = torch.tensor([0.0, -0.0, -math.inf, math.inf, -0.0])

    values, ids = sampler._highest(x, count)

    expected = [sorted(range(VOCAB), key=lambda t: (-row[t].item(), t))[:count] for row in x]
    assert ids.tolist() == expected
    assert torch.equal(values, x.gather(1, ids))


def test_seeded_row_is_the_same_alone_mixed_and_permuted() -> None:
    logits = torch.randn(6, VOCAB)
    params = [
        SamplingParams(temperature=0.9),
        SamplingParams(top_p=0.7),
        GREEDY,
        SamplingParams(top_k=5, presence_penalty=0.5),
        SamplingParams(temperature=2.0, logprobs=3),
        SamplingParams(min_p=0.1, logit_bias={3: 1.0}),
    ]
    seeds = [10, 11, 12, 13, 14, 15]
    together = Rows(*params, seeds=seeds).sample(logits).token_ids.tolist()
    order = [4, 0, 5, 2, 1, 3]

    permuted = Rows(*(params[i] for i in order), seeds=[seeds[i] for i in order])
    alone = [
        Rows(item, seeds=[seed]).sample(logits[row : row + 1]).token_ids.item()
        for row, (item, seed) in enumerate(zip(params, seeds, strict=True))
        if item is not GREEDY
    ]

    assert permuted.sample(logits[order]).token_ids.tolist() == [together[i] for i in order]
    assert alone == [token for row, token in enumerate(together) if row != 2]


def test_rows_without_controls_need_no_batch() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, top_p=0.5), SamplingParams(top_k=1)

    assert Rows(GREEDY, *params).batch() is None


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[-1e4, 1e4, 0.0, 9.9e3]])

    token = Rows(SamplingParams(temperature=temperature)).sample(logits).token_ids.item()

    assert token in (1, 3) if temperature == 100.0 else token == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.5, logprobs=2)], ids=str)
def test_rows_that_are_not_finite_are_flagged_and_hurt_no_other(bad, params) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, 20] = bad
    rows = Rows(replace(params, logprobs=2), params, replace(params, logprobs=2))

    sampled = rows.sample(logits)

    assert sampled.is_finite.tolist() == [1, 0, 1]
    assert ((sampled.token_ids >= 0) & (sampled.token_ids < VOCAB)).all()


def test_logprobs_are_of_the_raw_distribution() -> None:
    params = SamplingParams(temperature=0.0, logprobs=4, logit_bias={30: 50.0})
    logits = torch.randn(1, VOCAB)

    sampled = Rows(params).sample(logits)

    expected = logits[0].log_softmax(0)
    assert sampled.logprobs is not None
    assert sampled.token_ids.item() == 30
    assert sampled.logprobs.logprobs.item() == pytest.approx(expected[30].item(), abs=FLOAT32_ABS)
    assert sampled.logprobs.ranks.item() == 1 + (expected > expected[30]).sum().item()
    best = expected.topk(4)
    assert sampled.logprobs.top_ids[0].tolist() == best.indices.tolist()
    torch.testing.assert_close(sampled.logprobs.top_logprobs[0], best.values)


@pytest.mark.parametrize("params", [{}, {"logit_bias": {3: 9.0}}], ids=["as-is", "changed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_any_format_are_sampled_alike(dtype, params) -> None:
    """What changes no logits reads them as they are; log-probabilities are of the raw ones."""
    logits = (torch.randn(5, VOCAB) * 2).to(dtype)
    rows = Rows(*[SamplingParams(top_p=0.8, logprobs=1, **params)] * 5, seeds=[*range(5)])

    sampled = rows.sample(logits)
    expected = rows.sample(logits.float())

    assert torch.equal(sampled.token_ids, expected.token_ids)
    assert sampled.logprobs is not None
    assert expected.logprobs is not None
    for one, other in zip(sampled.logprobs.tensors(), expected.logprobs.tensors(), strict=True):
        assert torch.equal(one, other)


def test_chunks_of_rows_change_nothing(monkeypatch) -> None:
    hidden, head = torch.randn(9, 8), torch.randn(8, VOCAB)
    tokens = torch.randint(0, VOCAB, (9,))
    whole = compute_logprobs(lambda x: x @ head, hidden, tokens, 3, VOCAB)
    params = [SamplingParams(top_p=0.9, presence_penalty=1.0, logprobs=2)] * 9
    logits = hidden @ head
    sampled = Rows(*params).sample(logits)

    monkeypatch.setattr(sampler, "_CHUNK_ELEMENTS", 2 * VOCAB)
    rows_seen = []

    def make_logits(x: Tensor) -> Tensor:
        rows_seen.append(len(x))
        return x @ head

    chunked = compute_logprobs(make_logits, hidden, tokens, 3, VOCAB)

    assert rows_seen == [2, 2, 2, 2, 1]
    for one, other in zip(whole.tensors(), chunked.tensors(), strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(Rows(*params).sample(logits).token_ids, sampled.token_ids)


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_do_not_keep_the_logits_in_memory(num_top: int) -> None:
    hidden, head = torch.randn(4, 8), torch.randn(8, VOCAB)
    tokens = torch.randint(0, VOCAB, (4,))

    logprobs = compute_logprobs(lambda x: x @ head, hidden, tokens, num_top, VOCAB)

    for tensor in logprobs.tensors():
        assert tensor.untyped_storage().nbytes() <= 8 * 4 * (num_top + 1)


def test_uniforms_are_even_and_differ_by_seed_and_position() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 1000)
    positions = np.tile(np.arange(1000), 100)

    values = uniforms(seeds, positions)

    assert values.dtype == np.float32
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.bincount((values * 20).astype(int), minlength=20)
    assert abs(counts - 5000).max() < 5 * 5000**0.5
    grid = values.reshape(100, 1000)
    assert abs(np.corrcoef(grid[0], grid[1])[0, 1]) < 0.15
    assert abs(np.corrcoef(grid[:, 0], grid[:, 1])[0, 1]) < 0.4
    assert len(np.unique(values)) > 99_000


def test_neighbouring_seeds_do_not_share_a_stream() -> None:
    """Seeds that differ by the generator's increment are shifted copies in a naive mixing."""
    gamma = 0x9E3779B97F4A7C15
    positions = np.arange(50)
    first = uniforms(np.full(50, 5, np.uint64), positions)
    second = uniforms(np.full(50, (5 + gamma) % 2**64, np.uint64), positions)

    assert not np.isin(first, second).any()
