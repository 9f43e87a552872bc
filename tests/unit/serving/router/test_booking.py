# SPDX-License-Identifier: Apache-2.0
"""Booked load: held while a request is under way, returned on every path."""

from hypothesis import given
from hypothesis import strategies as st
from router_harness import distinct_prompt, make_request, make_router, make_view

from pelton.serving.router.booking import Booking
from pelton.serving.router.types import Policy, Role


@given(
    st.sampled_from(Policy),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30)), max_size=60),
)
def test_every_load_is_back_at_zero_in_the_end(
    policy: Policy, actions: list[tuple[int, int]]
) -> None:
    router, clock = make_router("abc", policy=policy)
    live: list[Booking] = []
    generation = {"a": 0, "b": 0, "c": 0}
    for number, (action, value) in enumerate(actions):
        worker = "abc"[value % 3]
        if action <= 2:
            need = (Role.MIXED, Role.PREFILL, Role.DECODE)[action]
            request = make_request(str(number), distinct_prompt(value, 20 * value), num_choices=2)
            live.append(router.route(request, need))
        elif action == 3 and live:
            live[value % len(live)].on_first_token()
        elif action == 4 and live:
            live.pop(value % len(live)).release()
        elif action == 5 and live:
            live[value % len(live)].release()
        elif action == 6:
            generation[worker] += value % 2
            router.update([make_view(worker, generation[worker], reported_at_s=clock.now_s())])
        else:
            clock.advance(value / 10)
    for booking in live:
        booking.release()
        booking.on_first_token()
    router.update([make_view(w, g, reported_at_s=clock.now_s()) for w, g in generation.items()])
    for worker in "abc":
        assert router.booked_on(worker).is_zero(), router.booked_on(worker)
        assert router.load_of(worker).is_zero(), router.load_of(worker)


def test_the_prompt_counts_until_the_first_token() -> None:
    router, _ = make_router("a")
    booking = router.route(make_request("r", distinct_prompt(1, 100)))
    load = router.load_of("a")
    assert (load.requests, load.prefill_tokens, load.blocks) == (1, 100, 7)
    booking.on_first_token()
    load = router.load_of("a")
    assert (load.requests, load.prefill_tokens, load.blocks) == (1, 0, 7)


def test_a_report_replaces_bookings_it_includes_and_is_added_to_those_it_cannot() -> None:
    router, clock = make_router("a", report_delay_s=0.25)
    old = router.route(make_request("old", distinct_prompt(1)))
    clock.advance(1)
    young = router.route(make_request("young", distinct_prompt(2)))
    router.update([make_view("a", num_running=5, reported_at_s=clock.now_s())])
    assert router.load_of("a").requests == 6
    old.release()
    young.release()
    assert router.load_of("a").requests == 4
    router.update([make_view("a", num_running=0, reported_at_s=clock.now_s())])
    assert router.load_of("a").is_zero()


def test_a_booking_on_an_earlier_generation_does_not_touch_the_next() -> None:
    router, clock = make_router("a")
    booking = router.route(make_request("r", distinct_prompt(1)))
    router.update([make_view("a", 1, reported_at_s=clock.now_s())])
    assert router.load_of("a").is_zero()
    booking.on_first_token()
    booking.release()
    assert router.load_of("a").is_zero()
    router.update([make_view("a", 0, num_running=50)])
    assert router.load_of("a").is_zero()
