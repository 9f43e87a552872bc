# SPDX-License-Identifier: Apache-2.0
"""Refusals, cancels and bursts at the moments at which they hurt most."""

from dataclasses import replace

import pytest

from kv_cases import make_engine_of, make_request, pair_of, prefill_only, run_alone, run_pair
from kv_pair import assert_all_is_given_back
from pelton.core.config import Role
from pelton.core.errors import PeltonError


def test_a_request_that_is_refused_where_it_decodes_asks_nothing_of_another_engine() -> None:
    request = make_request("a", 100)
    unknown_token = replace(request, prompt_token_ids=[*request.prompt_token_ids, 10**6])
    too_long = make_request("b", 600)
    with pair_of("llama") as pair:
        for refused in (unknown_token, too_long):
            with pytest.raises(PeltonError):
                pair.add(refused)
        pair.settle()
        assert pair._decode_link.num_peers == 0
        assert pair.prefill.stats().steps_total == 0


@pytest.mark.parametrize("num_steps", range(6))
def test_a_prefill_that_is_cancelled_with_steps_in_flight_holds_nothing(num_steps: int) -> None:
    """Of three chunks, the last of which is in flight after three steps."""
    engine = make_engine_of("llama", Role.PREFILL, None, overlap=True)
    engine.leases.open("a", b"me", [0])
    engine.add(prefill_only("a", 100))
    for _ in range(num_steps):
        if engine.has_work:
            engine.step()
    engine.leases.close("a", b"me")
    engine.cancel("a")
    while engine.has_work:
        engine.step()

    assert_all_is_given_back(engine)
    request = make_request("b", 100)
    fresh = make_engine_of("llama", Role.MIXED, None)
    tokens = run_alone(engine, [request])["b", 0].token_ids
    assert tokens == run_alone(fresh, [request])["b", 0].token_ids


def test_a_short_prompt_waits_for_at_most_one_chunk_of_one_whose_client_left() -> None:
    with pair_of("llama") as pair:
        pair.add(make_request("long", 400))
        pair.until(lambda: pair.prefill.leases.num_blocks > 0)
        num_steps = pair.prefill.stats().steps_total
        pair.decode.cancel("long")
        pair.add(make_request("short", 33, max_tokens=2))
        pair.decode.step()
        pair.deliver(2)  # the end of the one, and the other
        pair.until(lambda: pair.decode.stats().pulls_total == 1)
        assert pair.prefill.stats().steps_total <= num_steps + 2
        assert pair.prefill.stats().cancelled_total == 1
        pair.until(lambda: not pair.decode.has_work)
        pair.until_given_back()


def test_a_burst_on_pools_that_hold_two_prompts_ends_with_the_right_tokens() -> None:
    requests = [make_request(str(n), 140 + n, max_tokens=3) for n in range(20)]
    expected = run_alone(make_engine_of("llama", Role.MIXED, None, prefix_cache=False), requests)
    with pair_of("llama", num_blocks=21, prefix_cache=False) as pair:
        answers = run_pair(pair, requests)
        assert pair.decode.stats().pulls_total > 0
    assert {key: answer.token_ids for key, answer in answers.items()} == {
        key: answer.token_ids for key, answer in expected.items()
    }
