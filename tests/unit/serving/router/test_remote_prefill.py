# SPDX-License-Identifier: Apache-2.0
"""Which prompts are computed by workers of their own, and by which."""

from dataclasses import replace
from typing import Any

from router_harness import distinct_prompt, make_request, make_router, make_view, stored

from pelton.core.config import Role
from pelton.serving.remote_prefill import book_prefill
from pelton.serving.router.booking import Booking
from pelton.serving.router.router import Router
from pelton.serving.router.types import Policy, RouteRequest

MIN_TOKENS = 100


def make_roles(policy: Policy = Policy.LEAST_LOADED, **prefill: Any) -> Router:
    router, _ = make_router([], policy=policy)
    router.update([make_view(name, role=Role.DECODE) for name in ("d0", "d1")])
    router.update([make_view(name, role=Role.PREFILL, **prefill) for name in ("p0", "p1")])
    return router


def book(router: Router, request: RouteRequest) -> tuple[Booking, Booking | None]:
    booking = router.route(request, Role.DECODE)
    return booking, book_prefill(router, request, booking.decision, MIN_TOKENS)


def test_each_role_gets_its_own_work() -> None:
    decode, prefill = book(make_roles(), make_request("a", distinct_prompt(0, 100)))
    assert decode.worker_id in ("d0", "d1")
    assert prefill is not None
    assert prefill.worker_id in ("p0", "p1")
    assert (decode.load.prefill_tokens, prefill.load.prefill_tokens) == (0, 100)


def test_short_prompts_stay() -> None:
    _, prefill = book(make_roles(), make_request("a", distinct_prompt(0, 99)))
    assert prefill is None


def test_what_is_cached_where_it_decodes_does_not_count() -> None:
    router = make_roles(Policy.KV_AWARE)
    prompt = distinct_prompt(0, 320)
    request = make_request("a", prompt)
    for name in ("d0", "d1"):
        router.apply_events(name, 0, [stored(0, request.block_hashes[:14])])
    _, prefill = book(router, request)
    assert prefill is None
    _, prefill = book(router, make_request("b", [*prompt, 7, 7, 7, 7]))
    assert prefill is not None


def test_the_fewest_pending_tokens_win_whatever_the_policy_for_decodes() -> None:
    router = make_roles(Policy.ROUND_ROBIN)
    _, long = book(router, make_request("long", distinct_prompt(0, 1000)))
    assert long is not None
    others = [book(router, make_request(str(n), distinct_prompt(n, 200)))[1] for n in (1, 2, 3)]
    assert {other.worker_id for other in others if other} == {"p0", "p1"} - {long.worker_id}
    assert long.decision.policy is Policy.INPUT_LENGTH
    for booking in (long, *others):
        assert booking is not None
        booking.release()
    assert router.load_of("p0").is_zero()
    assert router.load_of("p1").is_zero()


def test_workers_that_decode_take_turns_whoever_computes_the_prompts() -> None:
    router = make_roles(Policy.ROUND_ROBIN)
    requests = [make_request(str(n), distinct_prompt(n, 200)) for n in range(4)]
    assert [book(router, r)[0].worker_id for r in requests] == ["d0", "d1", "d0", "d1"]


def test_a_prompt_goes_where_its_prefix_was_computed() -> None:
    router = make_roles(Policy.KV_AWARE)
    request = make_request("a", distinct_prompt(0, 640))
    router.apply_events("p1", 0, [stored(0, request.block_hashes[:30])])
    _, prefill = book(router, request)
    assert prefill is not None
    assert prefill.worker_id == "p1"


def test_without_prefill_workers_prompts_stay() -> None:
    router = make_roles()
    request = make_request("a", distinct_prompt(0, 640))
    _, prefill = book(router, replace(request, excluded=frozenset({"p0", "p1"})))
    assert prefill is None
    full = make_roles(num_slots=1)
    for name in ("p0", "p1"):
        full.remove(name)
    assert book(full, request)[1] is None


def test_a_deadline_that_passes_between_the_two_bookings_is_the_decoding_workers_to_report() -> (
    None
):
    router, clock = make_router([], policy=Policy.LEAST_LOADED)
    router.update([make_view("d", role=Role.DECODE), make_view("p", role=Role.PREFILL)])
    request = make_request("a", distinct_prompt(0, 100), deadline_s=clock.now_s() + 1.0)
    booking = router.route(request, Role.DECODE)
    clock.advance(1.0)
    assert book_prefill(router, request, booking.decision, MIN_TOKENS) is None
