# SPDX-License-Identifier: Apache-2.0
"""The scheduler's policy, one rule a test."""

import gc

import pytest
from engine_harness import (
    EOS,
    POISON,
    Harness,
    expected_tokens,
    make_config,
    make_geometry,
    make_request,
)

from pelton.core.clock import ManualClock
from pelton.core.errors import InvalidRequestError
from pelton.core.request import FinishReason, RequestOutput
from pelton.engine.request_state import RequestState, choice_seed
from pelton.engine.scheduler import Scheduler
from pelton.engine.stand_in import StandInExecutor


def plan_rows(harness: Harness, index: int) -> list[tuple[int, int]]:
    plan = harness.plans[index]
    return list(zip(plan.starts, plan.num_tokens, strict=True))


def first_tokens(harness: Harness) -> list[int]:
    """The first prompt token of each admission, in order: which request started when."""
    return [a.token_ids[0] for plan in harness.plans for a in plan.admissions]


def test_decodes_come_first_and_prompts_share_what_the_budget_leaves() -> None:
    harness = Harness(make_config(budget=8))
    harness.engine.add(make_request("a", [1, 2, 3], max_tokens=9, ignore_eos=True))
    harness.step()
    harness.engine.add(make_request("b", [4] * 10, max_tokens=9, ignore_eos=True))
    harness.engine.add(make_request("c", [5] * 10, max_tokens=9, ignore_eos=True))
    for _ in range(3):
        harness.step()
    assert plan_rows(harness, 1) == [(3, 1), (0, 7)]
    assert plan_rows(harness, 2) == [(4, 1), (7, 3), (0, 4)]
    assert harness.plans[2].samples == [True, True, False]
    assert harness.plans[2].num_decodes == 1
    assert plan_rows(harness, 3) == [(5, 1), (10, 1), (4, 6)]


def test_lower_priority_values_start_first_whenever_they_came() -> None:
    harness = Harness(make_config(slots=1))
    harness.run(
        make_request("late", [1], priority=2, max_tokens=1),
        make_request("normal", [2], priority=1, max_tokens=1),
        make_request("urgent", [3], priority=0, max_tokens=1),
    )
    assert first_tokens(harness) == [3, 2, 1]


def test_nobody_overtakes_a_head_of_the_queue_that_does_not_fit() -> None:
    harness = Harness(make_config(num_blocks=17, block_size=4))
    harness.engine.add(make_request("running", [1] * 20, max_tokens=12, ignore_eos=True))
    harness.step()
    harness.run(
        make_request("big", [2] * 50, max_tokens=1), make_request("small", [3], max_tokens=1)
    )
    assert first_tokens(harness) == [1, 2, 3]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_urgent_request_takes_the_slot_of_a_lower_priority(overlap: bool) -> None:
    harness = Harness(make_config(slots=2, overlap=overlap))
    low = make_request("low", [1], priority=5, max_tokens=20, ignore_eos=True)
    mid = make_request("mid", [2], priority=3, max_tokens=20, ignore_eos=True)
    harness.engine.add(low)
    harness.engine.add(mid)
    for _ in range(4):
        harness.step()
    harness.run(make_request("urgent", [3], priority=0, max_tokens=4, ignore_eos=True))
    assert first_tokens(harness) == [2, 1, 3, 1]
    assert harness.engine.stats().preemptions_total == 1
    for request in (low, mid):
        tokens, _ = expected_tokens(request, 0, 64)
        assert harness.tokens(request.request_id) == tokens


def test_an_urgent_request_takes_the_blocks_of_lower_priorities() -> None:
    harness = Harness(make_config(num_blocks=17, block_size=4, budget=100))
    for index in range(3):
        harness.engine.add(make_request(f"low{index}", [index + 1] * 12, priority=1, max_tokens=30))
    harness.step()
    harness.run(make_request("urgent", [9] * 30, priority=0, max_tokens=2))
    stats = harness.engine.stats()
    assert stats.preemptions_total >= 1
    assert stats.finished_total == 4
    urgent_plan = next(
        plan for plan in harness.plans if plan.admissions and plan.admissions[0].token_ids[0] == 9
    )
    assert urgent_plan.step_id == 1


def test_an_urgent_request_that_cannot_be_helped_preempts_nobody() -> None:
    harness = Harness(make_config(num_blocks=17, block_size=4, budget=100))
    harness.engine.add(make_request("peer", [1] * 40, priority=0, max_tokens=8, ignore_eos=True))
    harness.engine.add(make_request("low", [2] * 8, priority=1, max_tokens=4, ignore_eos=True))
    harness.step()
    harness.run(make_request("urgent", [9] * 50, priority=0, max_tokens=2))
    assert harness.engine.stats().preemptions_total == 0


def test_equal_priority_never_preempts_for_admission() -> None:
    harness = Harness(make_config(slots=1))
    harness.engine.add(make_request("first", [1], max_tokens=9, ignore_eos=True))
    harness.step()
    harness.run(make_request("second", [2], max_tokens=9, ignore_eos=True))
    assert harness.engine.stats().preemptions_total == 0


def test_the_newest_of_the_lowest_priority_gives_way_when_blocks_run_out() -> None:
    harness = Harness(make_config(num_blocks=17, block_size=4, budget=100))
    for index in range(4):
        harness.engine.add(
            make_request(f"r{index}", [index + 1] * 8, max_tokens=20, ignore_eos=True)
        )
    harness.run()
    admitted_again = first_tokens(harness)[4:]
    assert admitted_again
    assert 1 not in admitted_again
    assert admitted_again[0] == 4 or admitted_again[0] == 3


def test_a_preempted_request_waits_for_its_results_in_flight() -> None:
    scheduler = Scheduler(make_config(slots=1, overlap=True), make_geometry(), ManualClock())
    executor = StandInExecutor(24)
    scheduler.add(make_request("low", [1] * 3, priority=1, ignore_eos=True))
    plans = [scheduler.plan()]
    scheduler.add(make_request("urgent", [2] * 3, max_tokens=1))
    plans += [scheduler.plan(), scheduler.plan()]
    scheduler.cancel("urgent")
    assert scheduler.plan() is None
    first, second, third = plans
    assert first is not None
    assert second is not None
    assert third is None
    (token,) = scheduler.commit(first, executor.launch(first).wait())[1].token_ids
    assert scheduler.commit(second, executor.launch(second).wait()) == []
    resumed = scheduler.plan()
    assert resumed is not None
    assert resumed.admissions[0].token_ids == [1, 1, 1, token]


def test_a_step_that_preempted_for_blocks_admits_nobody() -> None:
    harness = Harness(make_config(num_blocks=17, block_size=4, budget=100))
    for index in range(6):
        harness.engine.add(
            make_request(f"r{index}", [index + 1] * 6, max_tokens=30, ignore_eos=True)
        )
    num_preemptions = 0
    while harness.engine.has_work:
        harness.step()
        stats = harness.engine.stats()
        if stats.preemptions_total > num_preemptions:
            assert harness.plans[-1].admissions == []
        num_preemptions = stats.preemptions_total
    assert num_preemptions > 0


@pytest.mark.parametrize(("prompt_len", "is_admitted"), [(40, True), (41, False)])
def test_admission_leaves_a_block_for_each_running_request(
    prompt_len: int, is_admitted: bool
) -> None:
    harness = Harness(make_config(num_blocks=17, block_size=4, budget=100))
    for index in range(2):
        harness.engine.add(make_request(f"r{index}", [index + 1] * 4, ignore_eos=True))
    harness.step()
    harness.engine.add(make_request("new", [9] * prompt_len, max_tokens=1))
    harness.step()
    assert bool(harness.plans[1].admissions) is is_admitted


def test_a_resumed_request_finds_its_own_past_in_the_cache() -> None:
    harness = Harness(make_config(slots=1, prefix_cache=False))
    low = make_request("low", [1] * 17, priority=1, max_tokens=20, ignore_eos=True)
    harness.engine.add(low)
    for _ in range(6):
        harness.step()
    harness.run(make_request("urgent", [2], max_tokens=1))
    resumed = [plan for plan in harness.plans if plan.admissions][-1]
    assert len(resumed.admissions[0].token_ids) > 20
    assert resumed.starts[0] == 20
    assert harness.tokens("low") == expected_tokens(low, 0, 64)[0]


# Prefix cache.


def cached_tokens(harness: Harness, request_id: str, index: int = 0) -> int:
    last = harness.outputs[request_id, index].last
    assert last is not None
    return last.num_cached_tokens


@pytest.mark.parametrize(
    ("prefix_cache", "salts", "expected"),
    [(True, ("", ""), 8), (True, ("a", "b"), 0), (True, ("a", "a"), 8), (False, ("", ""), 0)],
)
def test_who_shares_cached_blocks(
    prefix_cache: bool, salts: tuple[str, str], expected: int
) -> None:
    harness = Harness(make_config(prefix_cache=prefix_cache))
    for request_id, salt in zip(("cold", "warm"), salts, strict=True):
        harness.run(make_request(request_id, [1] * 12, max_tokens=2, cache_salt=salt))
    assert cached_tokens(harness, "warm") == expected
    assert harness.engine.stats().cached_tokens_total == expected
    assert harness.engine.stats().prompt_tokens_total == 24


def test_an_id_that_is_used_again_shares_nothing_when_the_cache_is_off() -> None:
    harness = Harness(make_config(prefix_cache=False))
    for _ in range(2):
        harness.outputs.clear()
        harness.run(make_request("same", [1] * 12, max_tokens=2))
    assert cached_tokens(harness, "same") == 0


def test_output_tokens_are_cached_for_the_next_turn() -> None:
    harness = Harness(make_config())
    harness.run(make_request("first", [1] * 6, max_tokens=10, ignore_eos=True))
    history = [1] * 6 + harness.tokens("first")
    harness.run(make_request("second", [*history, 5], max_tokens=1))
    assert cached_tokens(harness, "second") == 12


def test_prompt_logprobs_compute_every_position() -> None:
    harness = Harness(make_config())
    harness.run(make_request("cold", [1] * 12, max_tokens=2))
    harness.run(make_request("scored", [1] * 12, max_tokens=2, prompt_logprobs=0))
    assert cached_tokens(harness, "scored") == 0
    prompt_logprobs = harness.outputs["scored", 0].prompt_logprobs
    assert prompt_logprobs is not None
    assert [entry and entry.token_id for entry in prompt_logprobs] == [None] + [1] * 11


def test_a_prompt_of_one_token_has_no_logprob_to_report() -> None:
    harness = Harness(make_config())
    harness.run(make_request("r", [1], max_tokens=2, prompt_logprobs=0))
    assert harness.outputs["r", 0].prompt_logprobs == [None]
    assert all(plan.prompt_logprob_rows == [] for plan in harness.plans)


# Choices.


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_choices_wait_for_the_first_and_share_its_prompt(prefix_cache: bool, overlap: bool) -> None:
    harness = Harness(make_config(prefix_cache=prefix_cache, overlap=overlap, budget=5))
    request = make_request("r", [1] * 17, n=3, seed=4, max_tokens=5)
    harness.run(request)
    assert [cached_tokens(harness, "r", index) for index in range(3)] == [0, 16, 16]
    for index in range(3):
        assert harness.tokens("r", index) == expected_tokens(request, choice_seed(4, index), 64)[0]


def test_choices_go_on_when_the_first_one_fails() -> None:
    harness = Harness(make_config())
    harness.run(make_request("r", [1, POISON], n=2))
    assert [harness.finish("r", index) for index in range(2)] == [FinishReason.ERROR] * 2
    harness.assert_idle()


def test_cancelling_ends_parked_choices_too() -> None:
    harness = Harness(make_config(budget=2))
    harness.engine.add(make_request("r", [1] * 9, n=3))
    harness.step()
    harness.engine.cancel("r")
    harness.run()
    assert [harness.finish("r", index) for index in range(3)] == [FinishReason.CANCELLED] * 3
    assert harness.engine.stats().cancelled_total == 3
    harness.assert_idle()


def test_cancelling_one_choice_leaves_the_others_alone() -> None:
    harness = Harness(make_config())
    request = make_request("r", [1] * 5, n=3, max_tokens=8, ignore_eos=True)
    harness.engine.add(request)
    for _ in range(3):
        harness.step()
    harness.engine.cancel("r", 1)
    harness.engine.cancel("r", 1)
    harness.engine.cancel("r", 7)
    harness.run()
    ends = [harness.finish("r", index) for index in range(3)]
    assert ends == [FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.LENGTH]
    assert len(harness.tokens("r", 1)) < 3
    for index in (0, 2):
        tokens, _ = expected_tokens(request, choice_seed(request.seed, index), 64)
        assert harness.tokens("r", index) == tokens
    harness.assert_idle()


def test_cancelling_every_choice_ends_the_request() -> None:
    harness = Harness(make_config())
    harness.engine.add(make_request("r", [1] * 5, n=2))
    harness.step()
    for index in (0, 1):
        harness.engine.cancel("r", index)
    with pytest.raises(InvalidRequestError, match="has not ended"):
        harness.engine.add(make_request("r", [2]))
    harness.run()
    harness.assert_idle()


# Ends.


def test_stop_tokens_end_the_output_and_are_part_of_it() -> None:
    harness = Harness(make_config())
    request = make_request("r", [1, 2], stop_token_ids=tuple(range(1, 12)))
    harness.run(request)
    tokens, reason = expected_tokens(request, 0, 64)
    last = harness.outputs["r", 0].last
    assert last is not None
    assert (harness.tokens("r"), last.finish_reason) == (tokens, reason)
    assert last.stop_token_id == tokens[-1]


def test_no_stop_token_ends_the_output_before_min_tokens() -> None:
    harness = Harness(make_config())
    stops = tuple(range(1, 20))
    request = make_request("r", [1, 2], min_tokens=5, stop_token_ids=stops)
    harness.run(request)
    assert len(harness.tokens("r")) > 5
    assert harness.plans[0].admissions[0].eos_token_ids == (EOS, *stops)


def test_with_overlap_a_certain_end_is_not_planned_past() -> None:
    harness = Harness(make_config(overlap=True))
    harness.run(make_request("r", [1, 2], max_tokens=3, ignore_eos=True))
    assert [plan.starts for plan in harness.plans] == [[0], [2], [3]]


def test_with_overlap_an_end_by_token_drops_the_step_that_ran_meanwhile() -> None:
    harness = Harness(make_config(overlap=True, slots=1))
    stopping = make_request("stopping", [1, 2], stop_token_ids=tuple(range(1, 23)))
    harness.run(stopping, make_request("next", [3], max_tokens=2, ignore_eos=True))
    assert len(harness.tokens("stopping")) == 1
    assert [plan.starts for plan in harness.plans] == [[0], [2], [0], [1]]
    assert harness.plans[2].slots == harness.plans[1].slots
    assert len(harness.tokens("next")) == 2


def test_a_late_result_is_not_given_to_a_new_request_of_the_same_id() -> None:
    harness = Harness(make_config(overlap=True, slots=1))
    harness.engine.add(make_request("r", [1] * 3, ignore_eos=True))
    harness.step()
    harness.step()
    harness.engine.cancel("r")
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = harness.engine.step()
    assert [output.finish_reason for output in outputs] == [FinishReason.CANCELLED]
    harness.outputs.clear()
    again = make_request("r", [2] * 5, max_tokens=6)
    harness.run(again)
    assert harness.tokens("r") == expected_tokens(again, 0, 64)[0]


def test_cancel_may_be_repeated_and_may_name_anything() -> None:
    harness = Harness(make_config())
    harness.engine.add(make_request("r", [1]))
    for request_id in ("r", "r", "unknown"):
        harness.engine.cancel(request_id)
    assert harness.engine.has_work
    harness.run()
    assert harness.finish("r") is FinishReason.CANCELLED
    assert harness.plans == []


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_an_expired_request_ends_with_an_error_in_any_state(steps_before: int) -> None:
    harness = Harness(make_config(budget=4, slots=1, overlap=True))
    harness.engine.add(make_request("blocker", [1] * 9, max_tokens=30, ignore_eos=True))
    harness.engine.add(make_request("r", [1] * 9, n=2, deadline_s=10.0, priority=-1))
    for _ in range(steps_before):
        harness.step()
    harness.clock.advance(10.0)
    harness.run()
    for index in range(2):
        last = harness.outputs["r", index].last
        assert last is not None
        assert last.finish_reason is FinishReason.ERROR
        assert last.error_code == "deadline_exceeded"
        assert last.error
    assert harness.finish("blocker") is FinishReason.LENGTH
    assert harness.engine.stats().failed_total == 2
    harness.assert_idle()


def test_a_deadline_that_holds_changes_nothing() -> None:
    harness = Harness(make_config())
    harness.run(make_request("r", [1], max_tokens=3, ignore_eos=True, deadline_s=1.0))
    harness.clock.advance(5.0)
    assert harness.step() == []
    assert harness.finish("r") is FinishReason.LENGTH


def test_logits_that_are_not_finite_end_only_their_request_and_its_cached_blocks() -> None:
    harness = Harness(make_config(budget=8))
    healthy = make_request("healthy", [1] * 9, max_tokens=9)
    harness.run(healthy, make_request("sick", [POISON] * 30))
    last = harness.outputs["sick", 0].last
    assert last is not None
    assert (last.finish_reason, last.error_code) == (FinishReason.ERROR, "non_finite_logits")
    assert harness.tokens("healthy") == expected_tokens(healthy, 0, 64)[0]
    harness.run(make_request("again", [POISON] * 30))
    assert cached_tokens(harness, "again") == 0


def test_a_failed_choice_of_many_leaves_the_others_their_blocks() -> None:
    harness = Harness(make_config(overlap=True), make_geometry((0, 5)))
    harness.run(
        make_request("sick", [2] * 20 + [POISON], n=2), make_request("well", [2] * 20, max_tokens=4)
    )
    assert harness.finish("well") is not FinishReason.ERROR
    harness.assert_idle()


def test_results_must_come_in_the_order_of_the_plans() -> None:
    harness = Harness(make_config(overlap=True))
    scheduler = harness.engine._scheduler
    scheduler.add(make_request("r", [1, 2], ignore_eos=True))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None
    assert second is not None
    harness.executor.launch(first)
    with pytest.raises(AssertionError, match="step 1 committed before 0"):
        scheduler.commit(second, harness.executor.launch(second).wait())


def test_debug_mode_checks_the_blocks_at_every_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELTON_DEBUG", "1")
    harness = Harness(make_config())
    harness.engine.add(make_request("r", [1, 2], ignore_eos=True))
    harness.engine.step()
    harness.engine._scheduler._running.tables.pools[0]._empty.pop()
    with pytest.raises(AssertionError):
        harness.engine.step()


def test_a_request_that_has_ended_is_gone_without_the_cyclic_collector() -> None:
    """A busy worker does not collect what has lived for long."""
    harness = Harness(make_config())
    gc.collect()
    gc.disable()
    try:
        harness.run(make_request("gone", [1, 2, 3], n=3), make_request("late", [1], deadline_s=0.0))
        harness.run(make_request("next", [1]))
        choices = [item for item in gc.get_objects() if type(item) is RequestState]
    finally:
        gc.enable()
    assert not {choice.request_id for choice in choices} & {"gone", "late"}
