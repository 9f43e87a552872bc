# SPDX-License-Identifier: Apache-2.0
"""Bugs that users of serving engines have met, as far as they arise in scheduling and KV policy."""

import random

import pytest
from engine_harness import (
    VOCAB_SIZE,
    Harness,
    expected_tokens,
    logprobs_of,
    make_config,
    make_geometry,
    make_request,
)

from pelton.core.errors import CapacityError, ContextLengthError
from pelton.core.request import FinishReason, GenerateRequest
from pelton.engine.resolve import resolve


def random_requests(count: int, *, longest_prompt: int, most_tokens: int) -> list[GenerateRequest]:
    draw = random.Random(5)
    return [
        make_request(
            f"r{i}",
            [draw.randrange(1, VOCAB_SIZE - 1) for _ in range(draw.randint(1, longest_prompt))],
            max_tokens=draw.randint(1, most_tokens),
            seed=i,
        )
        for i in range(count)
    ]


def assert_as_alone(harness: Harness, requests: list[GenerateRequest]) -> None:
    longest = harness.config.model.max_model_len
    assert isinstance(longest, int)
    for request in requests:
        tokens, reason = expected_tokens(request, request.seed, longest)
        assert harness.tokens(request.request_id) == tokens
        assert harness.finish(request.request_id) is reason
    harness.assert_idle()


def test_nothing_but_padding_ever_touches_the_null_block() -> None:
    """The null block is written by padding; if a request read or published it, it read garbage."""
    harness = Harness(make_config(num_blocks=30, budget=7), make_geometry((0, 5)))
    harness.run(*random_requests(30, longest_prompt=20, most_tokens=20))
    assert all(update.block_id != 0 for plan in harness.plans for update in plan.block_updates)
    pools = harness.engine._scheduler._running.tables.pools
    assert all(0 not in pool._block_of.values() for pool in pools)


@pytest.mark.parametrize("windows", [(0,), (0, 6), (6,)])
@pytest.mark.parametrize("length", [4, 5, 16, 17, 31])
def test_a_repeated_prompt_hits_every_full_block_before_its_last_token(
    windows: tuple[int, ...], length: int
) -> None:
    """Hit rates halved elsewhere because the last block was dropped and then aligned again."""
    harness = Harness(make_config(block_size=4), make_geometry(windows))
    prompt = [1 + i % 20 for i in range(length)]
    for request_id in ("cold", "warm"):
        harness.run(make_request(request_id, prompt, max_tokens=1))
    last = harness.outputs["warm", 0].last
    assert last is not None
    assert last.num_cached_tokens == (length - 1) // 4 * 4


def test_a_pool_too_small_for_one_request_is_refused_before_any_is_taken() -> None:
    """Elsewhere such a request passed the length check and then waited forever."""
    with pytest.raises(CapacityError):
        resolve(
            make_config(max_model_len=64, block_size=4, num_blocks=16),
            make_geometry(),
            kv_bytes_available=2**20,
            device="cpu",
            element_bytes=4,
        )


def test_a_request_at_the_wall_of_pool_and_context_ends_with_length() -> None:
    harness = Harness(make_config(max_model_len=64, block_size=4, num_blocks=17))
    requests = [
        make_request(f"r{i}", [i + 1] * 40, max_tokens=1000, ignore_eos=True) for i in range(3)
    ]
    harness.run(*requests)
    for request in requests:
        assert len(harness.tokens(request.request_id)) == 24
        assert harness.finish(request.request_id) is FinishReason.LENGTH
    with pytest.raises(ContextLengthError):
        harness.engine.add(make_request("too-long", [1] * 64))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_thousand_mixed_requests_in_tiny_chunks_get_their_own_tokens(overlap: bool) -> None:
    """Elsewhere the next step was built before the tokens of the previous one were applied."""
    config = make_config(budget=24, slots=16, num_blocks=60, overlap=overlap)
    harness = Harness(config)
    requests = random_requests(1000, longest_prompt=12, most_tokens=8)
    harness.run(*requests, max_steps=20_000)
    assert_as_alone(harness, requests)


def test_a_request_that_skips_steps_is_never_fed_a_placeholder() -> None:
    """The executor asserts that a row computes tokens that are known by then. Here a prompt in
    small chunks runs out of blocks and skips steps while older requests decode."""
    harness = Harness(make_config(budget=4, num_blocks=19, block_size=4))
    old = [make_request(f"old{i}", [i + 1], max_tokens=40, ignore_eos=True) for i in range(3)]
    new = make_request("new", [9] * 30, max_tokens=4)
    for request in old:
        harness.engine.add(request)
    for _ in range(4):
        harness.step()
    harness.engine.add(new)
    num_skipped = 0
    while harness.engine.has_work:
        harness.step()
        stats = harness.engine.stats()
        num_skipped += stats.num_running > stats.batch_rows
    assert num_skipped > 0
    assert_as_alone(harness, [*old, new])


def test_an_urgent_prompt_in_chunks_takes_blocks_back_from_lower_priorities() -> None:
    harness = Harness(make_config(budget=4, num_blocks=22, block_size=4))
    low = [
        make_request(f"low{i}", [i + 1], priority=1, max_tokens=60, ignore_eos=True)
        for i in range(3)
    ]
    urgent = make_request("urgent", [9] * 50, max_tokens=4, ignore_eos=True)
    for request in low:
        harness.engine.add(request)
    for _ in range(4):
        harness.step()
    harness.run(urgent)
    admissions = [admission for plan in harness.plans for admission in plan.admissions]
    assert sum(admission.token_ids[0] == 9 for admission in admissions) == 1
    assert_as_alone(harness, [*low, urgent])


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_requests_lose_no_token_and_no_logprob(overlap: bool) -> None:
    """Elsewhere outputs were recomputed as prompt, or a result in flight was applied twice."""
    harness = Harness(make_config(num_blocks=17, budget=16, overlap=overlap))
    requests = [
        make_request(
            f"r{i}",
            [i + 1, 3, 5, 7, 9, 11][: 3 + i],
            max_tokens=40,
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=1,
            seed=i,
        )
        for i in range(4)
    ]
    harness.run(*requests)
    assert harness.engine.stats().preemptions_total >= 3
    assert_as_alone(harness, requests)
    for request in requests:
        collected = harness.outputs[request.request_id, 0]
        history = request.prompt_token_ids + collected.token_ids
        expected = [logprobs_of(history[:p], history[p]) for p in range(1, len(history))]
        assert collected.prompt_logprobs is not None
        assert collected.prompt_logprobs[1:] + collected.logprobs == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_a_thousand_cancels_at_random_phases_leak_nothing(overlap: bool) -> None:
    """Elsewhere a cancel while queued or in flight had no path that gave KV and slots back."""
    draw = random.Random(7)
    harness = Harness(make_config(num_blocks=40, budget=20, overlap=overlap), make_geometry((0, 6)))
    waiting = random_requests(1000, longest_prompt=20, most_tokens=12)
    live: list[str] = []
    while waiting or harness.engine.has_work:
        for request in waiting[:3]:
            harness.engine.add(request)
            live.append(request.request_id)
        del waiting[:3]
        draw.shuffle(live)
        for _ in range(min(len(live), draw.randint(0, 5))):
            harness.engine.cancel(live.pop())
        harness.step()
    stats = harness.engine.stats()
    assert stats.cancelled_total > 300
    assert stats.cancelled_total + stats.finished_total == 1000
    assert len(harness.outputs) == 1000
    harness.assert_idle()
