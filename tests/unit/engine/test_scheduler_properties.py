# SPDX-License-Identifier: Apache-2.0
"""What must hold for every workload: generated requests, cancels and deadlines on tiny pools.

The checking executor asserts the shape of every plan (budget, slots, one writer a block) and that
every row reads its own history; the harness checks block conservation at every step.
"""

from dataclasses import dataclass

from engine_harness import (
    POISON,
    VOCAB_SIZE,
    Harness,
    expected_tokens,
    logprobs_of,
    make_config,
    make_geometry,
    make_request,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.core.config import EngineConfig
from pelton.core.geometry import ModelGeometry
from pelton.core.request import FinishReason, GenerateRequest
from pelton.engine.kv.block_tables import max_tokens_in_flight, peak_blocks, window_blocks
from pelton.engine.request_state import State, choice_seed

MAX_MODEL_LEN = 40

quick = settings(max_examples=60, deadline=None)


@dataclass(frozen=True)
class Arrival:
    request: GenerateRequest
    add_at: int
    cancel_at: int | None
    cancel_index: int | None
    """None: all choices."""


@dataclass(frozen=True)
class Workload:
    config: EngineConfig
    geometry: ModelGeometry
    arrivals: list[Arrival]


@st.composite
def engines(draw: st.DrawFn) -> tuple[EngineConfig, ModelGeometry]:
    windows = draw(st.sampled_from([(0,), (0,), (6,), (0, 1), (0, 9), (3, 0, 12)]))
    geometry = make_geometry(windows)
    settings_ = {
        "max_model_len": MAX_MODEL_LEN,
        "block_size": draw(st.integers(1, 5)),
        "slots": draw(st.integers(1, 5)),
        "budget": draw(st.sampled_from([1, 2, 3, 7, 16, 100])),
        "overlap": draw(st.booleans()),
        "prefix_cache": draw(st.booleans()),
        "speculative": draw(st.sampled_from(["off", "off", "mtp:1", "mtp:4", "ngram:3"])),
    }
    config = make_config(**settings_)
    least = max(
        peak_blocks(
            group,
            config.cache.block_size,
            MAX_MODEL_LEN,
            max_tokens_in_flight(config.scheduler),
        )
        for group in geometry.kv_groups
    )
    # Few blocks, so that choices preempt each other, or more than windows can use.
    num_blocks = 1 + least + draw(st.one_of(st.integers(0, 12), st.just(300)))
    return make_config(**settings_, num_blocks=num_blocks), geometry


@st.composite
def arrivals(draw: st.DrawFn, index: int) -> Arrival:
    # Prompts are prefixes of two texts with a tail, so that they often share blocks.
    text = [1 + (7 * draw(st.integers(0, 1)) + i * i) % (VOCAB_SIZE - 2) for i in range(40)]
    prompt = text[: draw(st.integers(1, 30))] + draw(
        st.lists(st.integers(0, VOCAB_SIZE - 2), max_size=6)
    )
    if draw(st.integers(0, 11)) == 0:
        prompt[-1] = POISON
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 14)))
    add_at = draw(st.integers(0, 20))
    is_cancelled = draw(st.integers(0, 4)) == 0
    is_timed = draw(st.integers(0, 4)) == 0
    request = make_request(
        f"r{index}",
        prompt,
        priority=draw(st.sampled_from([0, 0, 0, 1, 2])),
        seed=draw(st.integers(0, 3)),
        deadline_s=add_at + draw(st.integers(0, 30)) if is_timed else None,
        cache_salt=draw(st.sampled_from(["", "", "tenant"])),
        n=draw(st.sampled_from([1, 1, 1, 2, 4])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(4, max_tokens or 4))),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (3, 5)])),
        logprobs=draw(st.sampled_from([None, None, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 2])),
    )
    cancel_at = add_at + draw(st.integers(0, 30)) if is_cancelled else None
    cancel_index = draw(st.one_of(st.none(), st.integers(0, request.sampling.n - 1)))
    return Arrival(request, add_at, cancel_at, cancel_index)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    config, geometry = draw(engines())
    num_requests = draw(st.integers(1, 8))
    return Workload(config, geometry, [draw(arrivals(index)) for index in range(num_requests)])


def play(workload: Workload) -> Harness:
    harness = Harness(workload.config, workload.geometry)
    horizon = max(max(arrival.add_at, arrival.cancel_at or 0) for arrival in workload.arrivals)
    for now in range(3000):
        for arrival in workload.arrivals:
            if arrival.add_at == now:
                harness.engine.add(arrival.request)
            if arrival.cancel_at == now:
                harness.engine.cancel(arrival.request.request_id, arrival.cancel_index)
        if now > horizon and not harness.engine.has_work:
            return harness
        harness.step()
        check_windows(harness)
        harness.clock.advance(1.0)
    raise AssertionError(f"not done after 3000 steps: {harness.engine.stats()}")


def check_windows(harness: Harness) -> None:
    """A choice that decodes holds its window and one block, and never more than admission counts
    with, whatever is in flight; but for the places of drafts and of what drafting leaves."""
    running = harness.engine._scheduler._running
    block_size, scheduler = harness.config.cache.block_size, harness.config.scheduler
    num_drafts = harness.config.speculative.num_drafts
    for choice in (*running.decoding, *running.prefilling):
        if choice.table is None:
            continue  # ended since the last plan
        held = running.tables.held_blocks(choice.table)
        in_flight = choice.num_planned - choice.num_computed
        for group, count in zip(harness.geometry.kv_groups, held, strict=True):
            most = max_tokens_in_flight(scheduler) + num_drafts
            assert count <= peak_blocks(group, block_size, choice.max_len, most)
            # A window of one token passes a block before the block is known to be computed.
            if group.window > 1 and choice.state is State.DECODING and in_flight <= 1:
                assert count <= window_blocks(group.window + 2 * num_drafts, block_size)


def check_choice(harness: Harness, arrival: Arrival, index: int) -> None:
    """The choice ended once, and gave the tokens that it would give alone."""
    request = arrival.request
    collected = harness.outputs[request.request_id, index]
    seed = choice_seed(request.seed, index)
    tokens, reason = expected_tokens(request, seed, MAX_MODEL_LEN)
    finish = harness.finish(request.request_id, index)
    if finish in (FinishReason.STOP, FinishReason.LENGTH):
        assert (collected.token_ids, finish) == (tokens, reason)
    else:
        assert collected.token_ids == tokens[: len(collected.token_ids)]
    if finish is FinishReason.CANCELLED:
        assert arrival.cancel_at is not None
    if finish is FinishReason.ERROR:
        assert collected.last is not None
        is_poisoned = POISON in request.prompt_token_ids
        allowed = {
            "non_finite_logits": is_poisoned,
            "deadline_exceeded": request.deadline_s is not None,
        }
        assert allowed[collected.last.error_code or ""]
    history = request.prompt_token_ids + collected.token_ids
    num_prompt = len(request.prompt_token_ids)
    if request.sampling.logprobs is not None:
        assert collected.logprobs == [
            logprobs_of(history[:position], history[position])
            for position in range(num_prompt, len(history))
        ]
    if request.sampling.prompt_logprobs is not None and index == 0 and collected.token_ids:
        assert collected.prompt_logprobs == [None] + [
            logprobs_of(history[:position], history[position]) for position in range(1, num_prompt)
        ]


@given(workload=workloads())
@quick
def test_every_choice_ends_with_the_tokens_it_gives_alone(workload: Workload) -> None:
    harness = play(workload)
    for arrival in workload.arrivals:
        for index in range(arrival.request.sampling.n):
            check_choice(harness, arrival, index)
    harness.assert_idle()


@given(workload=workloads())
@settings(quick, max_examples=20)
def test_the_same_workload_gets_the_same_plans(workload: Workload) -> None:
    assert play(workload).plans == play(workload).plans


@given(engine=engines(), lengths=st.lists(st.integers(1, 30), min_size=2, max_size=12))
@settings(quick, max_examples=30)
def test_equal_priorities_start_in_the_order_of_arrival(
    engine: tuple[EngineConfig, ModelGeometry], lengths: list[int]
) -> None:
    harness = Harness(*engine)
    requests = [
        make_request(f"r{i}", [i + 1] * length, max_tokens=9, ignore_eos=True)
        for i, length in enumerate(lengths)
    ]
    harness.run(*requests)
    starts: list[int] = []
    for plan in harness.plans:
        for admission in plan.admissions:
            if admission.token_ids[0] not in starts:
                starts.append(admission.token_ids[0])
    assert starts == [i + 1 for i in range(len(lengths))]
