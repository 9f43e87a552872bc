# SPDX-License-Identifier: Apache-2.0
"""The Llama family against transformers, and against itself however the work is cut."""

import random

import pytest
import torch
from tiny_models import FAMILIES, TinyModel, make_request, make_tiny_model, run, tokens_of

from pelton.core.request import RequestOutput
from tolerance import LOGIT_ABS

LENGTHS = (1, 5, 16, 17, 40, 63)


@pytest.fixture(scope="module", params=list(FAMILIES))
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    return make_tiny_model(request.param)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(211) for _ in range(length)] for length in LENGTHS]


def make_requests(prompts: list[list[int]]) -> list:
    return [make_request(str(index), prompt) for index, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(tiny: TinyModel, prompts: list[list[int]]) -> dict[tuple[str, int], list[int]]:
    """Each prompt continued greedily by transformers, alone."""
    tokens = {}
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        for _ in range(12):
            logits = tiny.reference(ids).logits[:, -1]
            ids = torch.cat((ids, logits.argmax(dim=1, keepdim=True)), dim=1)
        tokens[str(index), 0] = ids[0, len(prompt) :].tolist()
    return tokens


def test_prompt_logprobs_equal_transformers(tiny: TinyModel, prompts: list[list[int]]) -> None:
    requests = [
        make_request(str(index), prompt, max_tokens=1, prompt_logprobs=0)
        for index, prompt in enumerate(prompts)
    ]

    outputs = run(tiny.make_engine(max_num_batched_tokens=23), requests)

    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            reference = tiny.reference(ids).logits[0].log_softmax(dim=-1)
        wanted = reference[:-1].gather(1, ids[0, 1:, None])[:, 0]
        got = logprobs_of(outputs[str(index), 0])
        assert len(got) == len(prompt) - 1
        torch.testing.assert_close(torch.tensor(got), wanted, rtol=0, atol=LOGIT_ABS)


def logprobs_of(output: RequestOutput) -> list[float]:
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    return [entry.logprob for entry in output.prompt_logprobs[1:] if entry is not None]


def test_batch_equals_transformers(tiny, prompts, expected) -> None:
    assert tokens_of(run(tiny.make_engine(), make_requests(prompts))) == expected


def test_one_request_at_a_time(tiny, prompts, expected) -> None:
    engine = tiny.make_engine(max_num_requests=1)

    assert tokens_of(run(engine, make_requests(prompts))) == expected


@pytest.mark.parametrize("budget", [8, 13, 33])
def test_chunked_prefill(tiny, prompts, expected, budget: int) -> None:
    engine = tiny.make_engine(max_num_batched_tokens=budget)

    assert tokens_of(run(engine, make_requests(prompts))) == expected


def test_prefix_cache_cold_and_warm(tiny, prompts, expected) -> None:
    engine = tiny.make_engine()
    cold = run(engine, make_requests(prompts))

    warm = run(engine, make_requests(prompts))

    assert tokens_of(cold) == tokens_of(warm) == expected
    assert warm["5", 0].num_cached_tokens >= 48


def growing_prompts(tiny: TinyModel) -> list[list[int]]:
    """Prompts that start together and outgrow a small pool together."""
    length = 3 if tiny.geometry.kv_groups[0].window else 16
    return [[(7 * index + 3 * position) % 211 for position in range(length)] for index in range(7)]


def test_preemption(tiny: TinyModel) -> None:
    requests = [
        make_request(str(i), prompt, max_tokens=20)
        for i, prompt in enumerate(growing_prompts(tiny))
    ]
    undisturbed = run(tiny.make_engine(), requests)
    engine = tiny.make_engine(num_blocks=19, prefix_cache=False)

    outputs = run(engine, requests)

    assert engine.stats().preemptions_total >= 3
    assert tokens_of(outputs) == tokens_of(undisturbed)


def test_overlap(tiny, prompts, expected) -> None:
    engine = tiny.make_engine(overlap=True, max_num_batched_tokens=16)

    assert tokens_of(run(engine, make_requests(prompts))) == expected


def test_seeded_and_logprobs_survive_preemption(tiny: TinyModel) -> None:
    requests = [
        make_request(str(i), prompt, seed=i, temperature=1.0, logprobs=3, prompt_logprobs=2,
                     max_tokens=20, repetition_penalty=1.3, frequency_penalty=0.4)
        for i, prompt in enumerate(growing_prompts(tiny))
    ]  # fmt: skip
    undisturbed = run(tiny.make_engine(prefix_cache=False), requests)
    engine = tiny.make_engine(num_blocks=19, prefix_cache=False)

    preempted = run(engine, requests)

    assert engine.stats().preemptions_total >= 3
    assert tokens_of(preempted) == tokens_of(undisturbed)
    for key, output in preempted.items():
        assert_same_logprobs(output.logprobs, undisturbed[key].logprobs)
        assert_same_logprobs(output.prompt_logprobs, undisturbed[key].prompt_logprobs)


def assert_same_logprobs(actual: list, expected: list) -> None:
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        if got is None or wanted is None:
            assert got is wanted
            continue
        assert (got.token_id, got.rank) == (wanted.token_id, wanted.rank)
        assert [token for token, _ in got.top] == [token for token, _ in wanted.top]
        assert got.logprob == pytest.approx(wanted.logprob, abs=LOGIT_ABS)


def test_parameters_are_counted(tiny: TinyModel) -> None:
    counted = sum(parameter.numel() for parameter in tiny.reference.parameters())

    assert tiny.geometry.num_parameters == counted
