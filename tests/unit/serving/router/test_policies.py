# SPDX-License-Identifier: Apache-2.0
"""Who gets a request under each policy."""

from collections import Counter

import pytest
from router_harness import (
    distinct_prompt,
    make_hashes,
    make_request,
    make_router,
    make_view,
    stored,
)

from pelton.core.errors import ConfigError
from pelton.serving.router.router import Router
from pelton.serving.router.types import Policy, Role, RouterConfig

WORKERS = ("a", "b", "c", "d")


def route_ids(router: Router, num_requests: int) -> list[str]:
    return [
        router.route(make_request(str(n), distinct_prompt(n))).worker_id
        for n in range(num_requests)
    ]


def test_round_robin_goes_round() -> None:
    router, _ = make_router(WORKERS, policy=Policy.ROUND_ROBIN)
    assert route_ids(router, 9) == [*"abcd", *"abcd", "a"]


def test_round_robin_skips_who_left_and_includes_who_came() -> None:
    router, _ = make_router("abd", policy=Policy.ROUND_ROBIN)
    assert route_ids(router, 2) == ["a", "b"]
    router.update([make_view("c")])
    router.remove("d")
    assert route_ids(router, 3) == ["c", "a", "b"]


def test_random_uses_every_worker_and_repeats_with_its_seed() -> None:
    router, _ = make_router(WORKERS, policy=Policy.RANDOM, seed=7)
    again, _ = make_router(WORKERS, policy=Policy.RANDOM, seed=7)
    chosen = route_ids(router, 400)
    assert chosen == route_ids(again, 400)
    assert min(Counter(chosen).values()) > 60
    assert len(Counter(chosen)) == 4


def test_least_loaded_counts_requests_for_the_slots_there_are() -> None:
    router, _ = make_router("ab", policy=Policy.LEAST_LOADED)
    router.update([make_view("a", num_slots=10, num_running=6), make_view("b", num_running=20)])
    assert route_ids(router, 1) == ["b"]


def test_input_length_takes_the_smallest_sum_of_pending_prompt_tokens() -> None:
    router, _ = make_router("ab", policy=Policy.INPUT_LENGTH)
    router.update([make_view("a", num_pending_prefill_tokens=300, num_running=1)])
    router.update([make_view("b", num_pending_prefill_tokens=0, num_running=60)])
    assert route_ids(router, 3) == ["b", "b", "a"]


def test_idle_workers_take_turns() -> None:
    router, _ = make_router(WORKERS)
    chosen = []
    for number in range(12):
        booking = router.route(make_request(str(number), distinct_prompt(number)))
        chosen.append(booking.worker_id)
        booking.release()
    assert Counter(chosen) == dict.fromkeys(WORKERS, 3)


def test_kv_aware_prefers_cached_blocks_until_load_outweighs_them() -> None:
    router, _ = make_router("ab")
    prompt = list(range(640))
    router.apply_events("a", 0, [stored(0, make_hashes(prompt))])
    assert router.route(make_request("0", prompt)).worker_id == "a"
    router.update([make_view("a", num_used_blocks=39)])
    assert router.route(make_request("1", prompt)).worker_id == "a"
    router.update([make_view("a", num_used_blocks=200), make_view("b")])
    assert router.route(make_request("2", prompt)).worker_id == "b"


@pytest.mark.parametrize(
    ("weight", "expected"), [(0.5, "b"), (4.0, "a")], ids=["cheap transfer", "dear transfer"]
)
def test_a_decode_worker_is_weighed_by_the_blocks_it_must_pull(
    weight: float, expected: str
) -> None:
    router, _ = make_router("", transfer_weight=weight)
    router.update(
        [
            make_view("a", role=Role.DECODE, num_used_blocks=100, num_pending_prefill_tokens=10**6),
            make_view("b", role=Role.DECODE),
            make_view("p", role=Role.PREFILL),
        ]
    )
    prompt = list(range(640))
    router.apply_events("a", 0, [stored(0, make_hashes(prompt))])
    booking = router.route(make_request("r", prompt), Role.DECODE)
    assert booking.worker_id == expected
    assert booking.load.prefill_tokens == 0
    assert router.route(make_request("r", prompt), Role.PREFILL).worker_id == "p"


def test_cached_tokens_never_cover_the_whole_prompt() -> None:
    router, _ = make_router("a")
    prompt = list(range(64))
    router.apply_events("a", 0, [stored(0, make_hashes(prompt))])
    booking = router.route(make_request("r", prompt))
    assert (booking.decision.cached_tokens, booking.load.prefill_tokens) == (63, 1)


def test_a_hole_in_the_cache_is_found_before_its_worker_is_chosen() -> None:
    router, _ = make_router("ab")
    hashes = make_hashes(prompt := list(range(64 * 16)))
    router.apply_events("a", 0, [stored(0, hashes[:4] + hashes[6:])])
    router.apply_events("b", 0, [stored(0, hashes[:16])])
    booking = router.route(make_request("r", prompt))
    assert (booking.worker_id, booking.decision.cached_tokens) == ("b", 16 * 16)


def test_temperature_spreads_and_still_prefers_the_cheapest() -> None:
    router, _ = make_router("ab", temperature=1.0)
    router.update([make_view("a", num_used_blocks=500)])
    counts: Counter[str] = Counter()
    for number in range(400):
        booking = router.route(make_request(str(number), distinct_prompt(number)))
        counts[booking.worker_id] += 1
        booking.release()
    assert 50 < counts["a"] < 160


def test_siblings_of_a_burst_land_together_before_any_event() -> None:
    router, _ = make_router(WORKERS)
    chosen: dict[int, set[str]] = {}
    for number in range(64):
        family = number % 4
        prompt = [*distinct_prompt(family, 800), number, *range(60)]
        booking = router.route(make_request(str(number), prompt))
        chosen.setdefault(family, set()).add(booking.worker_id)
    assert [len(workers) for workers in chosen.values()] == [1, 1, 1, 1]
    assert len(set.union(*chosen.values())) == 4


def test_a_decision_counts_as_cached_only_while_events_may_be_on_their_way() -> None:
    router, clock = make_router("a", event_delay_s=2.0)
    router.route(make_request("0", range(640))).release()
    assert router.route(make_request("1", range(640))).decision.cached_tokens == 639
    clock.advance(4.1)
    assert router.route(make_request("2", range(640))).decision.cached_tokens == 0


def test_without_events_the_routers_own_decisions_are_the_index() -> None:
    router, clock = make_router("", eventless_memory_s=120.0)
    router.update([make_view(worker, publishes_events=False) for worker in WORKERS])
    home = router.route(make_request("0", range(640)))
    home.release()
    clock.advance(100)
    again = router.route(make_request("1", range(640)))
    assert (again.worker_id, again.decision.cached_tokens) == (home.worker_id, 639)


def test_a_tenants_salt_hides_its_blocks_from_others() -> None:
    router, _ = make_router("a")
    router.route(make_request("0", range(640), salt="one")).release()
    assert router.route(make_request("1", range(640), salt="two")).decision.cached_tokens == 0
    assert router.route(make_request("2", range(640), salt="one")).decision.cached_tokens == 639


@pytest.mark.parametrize("policy", Policy)
def test_a_session_stays_with_its_worker_while_it_can_take_it(policy: Policy) -> None:
    router, clock = make_router(WORKERS, policy=policy, session_ttl_s=600.0)
    home = router.route(make_request("0", distinct_prompt(0), session="s")).worker_id
    route_ids(router, 21)
    for number in range(3):
        request = make_request(str(number), distinct_prompt(number), session="s")
        assert router.route(request).worker_id == home
    away = make_request("4", distinct_prompt(4), session="s", excluded=frozenset({home}))
    moved = router.route(away).worker_id
    assert moved != home
    assert router.route(make_request("5", distinct_prompt(5), session="s")).worker_id == moved
    clock.advance(601)
    late = router.route(make_request("6", distinct_prompt(6), session="s"))
    assert not late.decision.reason.startswith("session")


def test_several_frontends_agree_where_a_session_lives() -> None:
    routers = [make_router(WORKERS, num_frontends=3, seed=seed)[0] for seed in range(3)]
    homes: dict[str, str] = {}
    for number in range(40):
        chosen = {
            r.route(
                make_request(str(number), distinct_prompt(number), session=str(number))
            ).worker_id
            for r in routers
        }
        (homes[str(number)],) = chosen
    assert len(set(homes.values())) == 4
    for router in routers:
        router.remove("b")
    for session, home in homes.items():
        request = make_request(session, distinct_prompt(0), session=session)
        moved = {router.route(request).worker_id for router in routers}
        assert len(moved) == 1
        assert (moved == {home}) == (home != "b")


def test_sessions_are_bounded() -> None:
    router, _ = make_router(WORKERS, max_sessions=3)
    for number in range(10):
        router.route(make_request(str(number), distinct_prompt(number), session=str(number)))
    assert len(router._sessions) == 3


def test_a_decision_says_what_was_weighed() -> None:
    router, _ = make_router("ab", num_explained=2, prefill_weight=1.0)
    router.update([make_view("a", num_used_blocks=50), make_view("b", num_used_blocks=10)])
    for number in range(3):
        booking = router.route(make_request(str(number), distinct_prompt(number)))
    decision = booking.decision
    assert decision.scores == {"a": 82.0, "b": 106.0}
    assert decision.header == (
        "worker=a; cached=0; reason=kv-aware of 2: 256 of 256 tokens to prefill behind 0,"
        " 50 blocks held, 0 requests; scores=a:82,b:106"
    )
    assert [d.request_id for d in router.recent] == ["1", "2"]


def test_blocks_of_another_size_are_refused() -> None:
    router, _ = make_router("ab")
    with pytest.raises(ConfigError, match="same block size"):
        router.update([make_view("c", block_size=32)])


@pytest.mark.parametrize(("name", "value"), [("temperature", -1.0), ("num_frontends", 0)])
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        RouterConfig(**{name: value})  # type: ignore[arg-type]  # by name
