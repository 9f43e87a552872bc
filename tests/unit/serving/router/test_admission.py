# SPDX-License-Identifier: Apache-2.0
"""Early refusals, the order of those who wait, and measured rates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_harness import (
    distinct_prompt,
    make_hashes,
    make_request,
    make_router,
    make_view,
    stored,
)

from pelton.core.errors import (
    DeadlineExceededError,
    DeadlineUnreachableError,
    OverloadedError,
    UnavailableError,
)
from pelton.serving.router.admission import AdmissionQueue, RateMeter
from pelton.serving.router.types import Role


def test_a_deadline_that_no_worker_can_meet_is_refused_at_once() -> None:
    router, clock = make_router("ab")
    router.update(
        [
            make_view("a", prefill_tokens_per_s=1000.0, num_pending_prefill_tokens=5000),
            make_view("b", prefill_tokens_per_s=1000.0, num_pending_prefill_tokens=3000),
        ]
    )
    request = make_request("r", distinct_prompt(1, 1000), deadline_s=clock.now_s() + 2)
    with pytest.raises(DeadlineUnreachableError, match=r"4\.0 s on the least busy of 2") as error:
        router.route(request)
    assert (error.value.status, error.value.retry_after_s) == (429, 2)
    assert router.booked_on("a").is_zero()
    assert router.booked_on("b").is_zero()


def test_only_workers_in_time_are_candidates_and_cached_blocks_count() -> None:
    router, clock = make_router("ab")
    router.update(
        [
            make_view("a", prefill_tokens_per_s=1000.0, num_used_blocks=900),
            make_view("b", prefill_tokens_per_s=1000.0, num_pending_prefill_tokens=1000),
        ]
    )
    prompt = distinct_prompt(1, 1600)
    router.apply_events("a", 0, [stored(0, make_hashes(prompt))])
    booking = router.route(make_request("r", prompt, deadline_s=clock.now_s() + 1))
    assert list(booking.decision.scores) == ["a"]


def test_waiting_for_a_slot_counts() -> None:
    router, clock = make_router("a")
    router.update([make_view("a", num_slots=4, num_running=4, num_waiting=5, requests_per_s=2.0)])
    with pytest.raises(DeadlineUnreachableError):
        router.route(make_request("r", distinct_prompt(1), deadline_s=clock.now_s() + 2.9))
    router.route(make_request("r", distinct_prompt(1), deadline_s=clock.now_s() + 3.1))


def test_nobody_is_refused_on_a_guess() -> None:
    router, clock = make_router("a")
    router.update([make_view("a", num_running=64, num_waiting=900)])
    router.route(make_request("r", distinct_prompt(1), deadline_s=clock.now_s() + 0.001))


def test_a_deadline_that_passed_is_its_own_error() -> None:
    router, clock = make_router("a")
    with pytest.raises(DeadlineExceededError):
        router.route(make_request("r", distinct_prompt(1), deadline_s=clock.now_s()))


def test_full_workers_refuse_and_recover_with_the_next_report() -> None:
    router, _ = make_router("ab")
    full = {"num_slots": 4, "max_waiting": 2, "num_running": 4, "num_waiting": 2}
    router.update([make_view("a", **full), make_view("b", **full)])
    with pytest.raises(OverloadedError, match="Each of 2 workers"):
        router.route(make_request("r", distinct_prompt(1)))
    router.update([make_view("a", num_slots=4), make_view("b", **full)])
    assert router.route(make_request("r", distinct_prompt(1))).worker_id == "a"


def test_without_a_worker_that_may_take_it_a_request_is_told_so() -> None:
    router, _ = make_router("")
    with pytest.raises(UnavailableError, match="No worker for mixed work"):
        router.route(make_request("r", distinct_prompt(1)))
    router.update(
        [
            make_view("c"),
            make_view("d", role=Role.DECODE),
        ]
    )
    request = make_request("r", distinct_prompt(1), excluded=frozenset("c"))
    with pytest.raises(UnavailableError, match="down or draining"):
        router.route(request)


def test_who_waits_behind_others_is_refused_if_that_takes_too_long() -> None:
    router, clock = make_router("ab")
    busy = {"num_slots": 4, "num_running": 4, "num_waiting": 4, "requests_per_s": 2.0}
    router.update([make_view("a", **busy), make_view("b", **busy)])
    request = make_request("r", distinct_prompt(1), deadline_s=clock.now_s() + 5)
    router.check_wait(request, 9)  # 9 at 4 a second, then 5 at 2 a second
    with pytest.raises(DeadlineUnreachableError) as error:
        router.check_wait(request, 11)
    assert error.value.status == 429
    router.update([make_view("b", **(busy | {"requests_per_s": 0.0}))])
    router.check_wait(request, 11)


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.none() | st.integers(0, 9)), max_size=30),
    st.sets(st.integers(0, 29)),
)
def test_the_queue_serves_by_priority_then_deadline_then_arrival(
    arrivals: list[tuple[int, int | None]], left: set[int]
) -> None:
    queue = AdmissionQueue()
    requests = [
        make_request(str(number), [], priority=priority, deadline_s=deadline_s)
        for number, (priority, deadline_s) in enumerate(arrivals)
    ]

    def place(number: int) -> tuple[int, float, int]:
        priority, deadline_s = arrivals[number]
        return (priority, 99 if deadline_s is None else deadline_s, number)

    for number, request in enumerate(requests):
        assert queue.count_before(request) == sum(place(n) < place(number) for n in range(number))
        queue.add(request)
    for number in left:
        assert queue.withdraw(str(number)) == (number < len(requests))
        assert not queue.withdraw(str(number))
    expected = sorted((n for n in range(len(requests)) if n not in left), key=place)
    served = []
    while (first := queue.first) is not None:
        assert next(queue.backwards()).request_id == str(expected[-1])
        served.append(int(first.request_id))
        queue.withdraw(first.request_id)
    assert served == expected
    assert len(queue) == 0


def test_a_rate_is_measured_only_while_there_is_work() -> None:
    meter = RateMeter(half_life_s=5.0)
    meter.sample(0.0, 0, True)
    meter.sample(1.0, 1000, True)
    assert meter.per_s == 1000
    meter.sample(2.0, 1000, False)
    meter.sample(100.0, 1001, True)
    assert meter.per_s == 1000
    meter.sample(105.0, 11_001, True)
    assert meter.per_s == 1500
    meter.sample(106.0, 0, True)
    assert meter.per_s == 1500


def test_a_session_leaves_a_worker_that_would_be_late() -> None:
    router, clock = make_router("ab")
    home = router.route(make_request("0", distinct_prompt(0), session="s")).worker_id
    busy = {"prefill_tokens_per_s": 1000.0, "num_pending_prefill_tokens": 9000}
    router.update([make_view(home, **busy)])
    request = make_request("1", distinct_prompt(1), session="s", deadline_s=clock.now_s() + 5)
    assert router.route(request).worker_id != home
