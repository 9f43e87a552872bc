# SPDX-License-Identifier: Apache-2.0
"""The state machine of a choice, its limits, its seed and its hash chain."""

import pytest
from engine_harness import EOS, make_request

from pelton.core.block_hash import hash_block, make_root_hash
from pelton.engine.request_state import (
    TRANSITIONS,
    LiveRequest,
    RequestState,
    State,
    choice_seed,
)

ROOT = make_root_hash({"model": "tiny"})


def make_choice(index: int = 0, *, max_model_len: int = 64, **sampling: object) -> RequestState:
    request = make_request("r", [5, 6, 7, 8, 9], n=3, seed=11, **sampling)
    return add_choice(LiveRequest(request), index, max_model_len=max_model_len)


def add_choice(live: LiveRequest, index: int, *, max_model_len: int = 64) -> RequestState:
    choice = RequestState(
        live,
        index,
        arrival=index,
        root_hash=ROOT,
        eos_token_ids=(EOS,),
        max_model_len=max_model_len,
    )
    live.choices.append(choice)
    return choice


@pytest.mark.parametrize("start", State)
@pytest.mark.parametrize("end", State)
def test_only_moves_of_the_table_are_possible(start: State, end: State) -> None:
    choice = make_choice()
    choice.state = start
    if end in TRANSITIONS[start]:
        choice.advance(end)
        assert choice.state is end
    else:
        with pytest.raises(AssertionError, match=f"cannot become {end.value}"):
            choice.advance(end)
        assert choice.state is start


def test_every_state_but_the_last_may_finish() -> None:
    may_finish = {state for state in State if State.FINISHED in TRANSITIONS[state]}
    assert may_finish == set(State) - {State.FINISHED}


def test_later_choices_start_parked() -> None:
    """Whichever is first: one that goes on after its worker died may have lost the others."""
    live = LiveRequest(make_request("r", [5, 6, 7], n=3, seed=11))

    assert [add_choice(live, index).state for index in (1, 2)] == [State.WAITING, State.PARKED]


def test_each_choice_has_its_own_stream_of_the_seed() -> None:
    seeds = [make_choice(index).seed for index in range(3)]
    assert seeds[0] == 11
    assert len(set(seeds)) == 3


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_choice_seeds_are_stable_and_in_range(seed: int) -> None:
    assert choice_seed(seed, 3) == choice_seed(seed, 3)
    assert -(2**63) <= choice_seed(seed, 3) < 2**63
    assert choice_seed(seed, 0) == seed


def test_the_seed_of_a_choice_never_changes_between_versions() -> None:
    assert choice_seed(0, 1) == -5294474406814537825


def test_the_context_limits_the_length_when_max_tokens_does_not() -> None:
    assert make_choice(max_tokens=4).max_len == 9
    assert make_choice(max_tokens=400).max_len == 64
    assert make_choice().max_len == 64


def test_the_first_token_that_may_stop_comes_after_min_tokens() -> None:
    assert make_choice(min_tokens=3).first_stop_len == 5 + 3 + 1


def test_a_block_that_is_not_full_of_accepted_tokens_has_no_hash() -> None:
    with pytest.raises(AssertionError, match="block 3"):
        make_choice().chain(3, 2)


def test_stop_tokens_are_end_of_sequence_unless_ignored_and_those_asked_for() -> None:
    assert make_choice(stop_token_ids=(3, EOS)).eos_token_ids == (EOS, 3)
    assert make_choice(stop_token_ids=(3,), ignore_eos=True).eos_token_ids == (3,)


def test_the_chain_grows_and_is_a_function_of_the_tokens() -> None:
    choice = make_choice()
    first = hash_block(ROOT, [5, 6])
    assert choice.chain(2, 2) == [first, hash_block(first, [7, 8])]
    assert choice.chain(1, 2) == [first]
