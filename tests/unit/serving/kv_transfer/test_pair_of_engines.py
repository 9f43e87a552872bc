# SPDX-License-Identifier: Apache-2.0
"""A prompt computed by another engine gives what it gives in one engine: tokens, usage, drafts."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from msgspec import structs

from kv_cases import (
    BLOCK,
    FAMILIES,
    LENGTHS,
    MOST,
    Answers,
    make_engine_of,
    make_request,
    make_requests,
    pair_of,
    run_alone,
    run_pair,
)
from kv_pair import Pair
from pelton.core.config import Role
from pelton.core.kv_transfer import PullResult
from pelton.core.trace import Phase
from pelton.serving import messages
from pelton.serving.kv_transfer.decode import DecodeSide


@cache
def expected(family: str) -> Answers:
    return run_alone(make_engine_of(family, Role.MIXED, None), make_requests())


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_one_engine(family: str) -> None:
    with pair_of(family) as pair:
        answers = run_pair(pair, make_requests())
        stats = pair.decode.stats()

    assert answers == expected(family)
    assert (family == "twin-mtp") <= any(answer.num_accepted for answer in answers.values())
    assert (stats.pulls_total, stats.pull_fallbacks_total) == (len(LENGTHS) - 1, 0)
    assert pair.prefill.stats().prefills_total == len(LENGTHS) - 1
    assert stats.pulled_bytes_total > 0
    assert stats.pull_copy_s_total > 0


@pytest.mark.parametrize("family", MOST)
def test_one_after_the_other_with_every_kind_of_hit(family: str) -> None:
    requests = make_requests((3 * BLOCK + 1, 2 * BLOCK))
    prompt = requests[0].prompt_token_ids + make_request("", 40, seed=9).prompt_token_ids
    longer = replace(requests[0], request_id="longer", prompt_token_ids=prompt)
    order = [*requests, longer, *(replace(r, request_id=r.request_id + "'") for r in requests)]
    alone = make_engine_of(family, Role.MIXED, None)
    with pair_of(family) as pair:
        for request in order:
            assert run_pair(pair, [request]) == run_alone(alone, [request])
        # The second time, all but the last token of the first prompt was found where it decodes:
        # too little was left to ask for. With an MTP drafter a block is left besides.
        num_near = int(family != "deepseek-mtp")
        assert pair.prefill.stats().prefills_total == len(order) - num_near


@pytest.mark.parametrize("hit", ["none", "partial", "full"])
@pytest.mark.parametrize("family", [*MOST, "twin-mtp"])
def test_every_length_with_every_kind_of_hit(family: str, hit: str) -> None:
    """One after the other, so that drafts are the same too."""
    num_accepted = 0
    alone = make_engine_of(family, Role.MIXED, None)
    with pair_of(family) as pair:
        for request in make_requests((1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1)):
            found = {"none": 0, "partial": 2 * BLOCK, "full": None}[hit]
            before = request.prompt_token_ids[:found]
            if before:
                first = replace(request, request_id="before", prompt_token_ids=before)
                assert run_pair(pair, [first]) == run_alone(alone, [first])
            answers, wanted = run_pair(pair, [request]), run_alone(alone, [request])
            num_accepted += sum(answer.num_accepted for answer in answers.values())
            assert answers == wanted
    assert (family == "twin-mtp") <= (num_accepted > 0)


def test_blocks_move_before_their_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    early = [0]
    go_on = DecodeSide._go_on

    def watch(side: DecodeSide, pull: Any, room: int) -> list[PullResult]:
        results = go_on(side, pull, room)
        if not pair.prefill.stats().prefills_total:
            early.append(pull.num_bytes)
        return results

    monkeypatch.setattr(DecodeSide, "_go_on", watch)
    with pair_of("llama") as pair:
        run_pair(pair, [make_request("a", 100)])
        assert 0 < max(early) < pair.decode.stats().pulled_bytes_total


@pytest.mark.parametrize("hit", ["none", "partial", "full"])
@pytest.mark.parametrize("family", ["llama", "twin-mtp"])
def test_what_goes_on_elsewhere_is_the_same(family: str, hit: str) -> None:
    """Each request loses its engine after one token, then after six."""
    requests, whole = make_requests(), expected(family)
    engine = make_engine_of(family, Role.MIXED, None)
    if hit != "none":
        parts = {"partial": 2 * BLOCK, "full": None}
        prompts = [r.prompt_token_ids[: parts[hit]] for r in requests]
        run_alone(
            engine,
            [replace(r, prompt_token_ids=p) for r, p in zip(requests, prompts, strict=True)],
        )
    num_drafts = num_accepted = 0
    for count in (1, 6):
        rest = [replace(r, resumed={0: whole[r.request_id, 0].token_ids[:count]}) for r in requests]
        for key, answer in run_alone(engine, rest).items():
            assert answer.token_ids == whole[key].token_ids[count:]
            assert answer.finish_reason == whole[key].finish_reason
            num_drafts += answer.num_drafts
            num_accepted += answer.num_accepted
    if family == "twin-mtp":
        rate = sum(a.num_accepted for a in whole.values()) / sum(
            a.num_drafts for a in whole.values()
        )
        assert 0.8 * rate < num_accepted / num_drafts < 1.25 * rate


def test_what_is_cached_here_is_not_sent_again() -> None:
    request = make_request("a", 4 * BLOCK + 1)
    longer = make_request("b", 2 * BLOCK)
    longer.prompt_token_ids[:0] = request.prompt_token_ids[: 4 * BLOCK]
    with pair_of("llama") as pair:
        run_pair(pair, [request])
        first = pair.decode.stats().pulled_bytes_total
        run_pair(pair, [longer])
        second = pair.decode.stats().pulled_bytes_total - first

    assert first == 4 * (second // 2)


@pytest.mark.parametrize("family", ["deepseek-mtp"])
def test_controls_and_choices(family: str) -> None:
    requests = [
        make_request("seeded", 70, temperature=1.0, seed=3, top_p=0.9, logprobs=2),
        make_request("choices", 70, temperature=1.0, n=3),
        make_request("penalty", 33, repetition_penalty=1.5, frequency_penalty=0.5),
        make_request("short", 34, max_tokens=1),
        make_request("every-logprob", 40, prompt_logprobs=1),
    ]
    alone = run_alone(make_engine_of(family, Role.MIXED, None), requests)
    with pair_of(family) as pair:
        assert run_pair(pair, requests) == alone
        # Log-probabilities of the prompt need all of it to be computed here.
        assert pair.decode.stats().pulls_total == len(requests) - 1


@pytest.mark.parametrize("family", ["gpt-oss"])
def test_without_prefix_cache(family: str) -> None:
    requests = make_requests()
    alone = run_alone(make_engine_of(family, Role.MIXED, None, prefix_cache=False), requests)
    with pair_of(family, prefix_cache=False) as pair:
        assert run_pair(pair, requests) == alone


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_few_blocks_on_both_sides(family: str) -> None:
    requests = make_requests((100, 90, 80, 70, 60, 50), max_tokens=40)
    with pair_of(family, num_blocks=21, prefix_cache=False) as pair:
        answers = run_pair(pair, requests)
        assert pair.decode.stats().preemptions_total > 0
    alone = run_alone(make_engine_of(family, Role.MIXED, None, prefix_cache=False), requests)
    assert {key: a.token_ids for key, a in answers.items()} == {
        key: a.token_ids for key, a in alone.items()
    }


def test_short_prompts_are_computed_where_they_are_decoded() -> None:
    with Pair(partial(make_engine_of, "llama"), min_tokens=48) as pair:
        answers = run_pair(pair, make_requests())
        assert answers == expected("llama")
        assert pair.prefill.stats().prefills_total == sum(n >= 48 for n in LENGTHS)


def test_a_traced_request_says_what_both_engines_did() -> None:
    traced = replace(make_request("a", 100), traceparent="00-1-2-01")
    with pair_of("llama") as pair:
        pair.add(traced)
        phases: list[Phase] = []
        while pair.decode.has_work:
            pair.pump()
            phases += pair.decode.take_phases().get("a", [])
        stats = pair.decode.stats()

    told = [(phase.name, phase.is_remote) for phase in phases]
    here, there = [(name, False) for name in ("queue", "kv_pull", "decode")], ("queue", "prefill")
    assert [item for item in told if not item[1]] == here
    assert [item for item in told if item[1]] == [(name, True) for name in there]
    pull = next(phase for phase in phases if phase.name == "kv_pull")
    assert pull.attributes == {
        "pelton.kv.bytes": stats.pulled_bytes_total,
        "pelton.kv.copy_s": stats.pull_copy_s_total,
    }
    assert pull.start_ns <= min(phase.start_ns for phase in phases if phase.is_remote)
    assert pull.end_ns >= max(phase.end_ns for phase in phases if phase.is_remote)


def test_a_traced_request_whose_kv_does_not_come_says_why() -> None:
    with pair_of("llama") as pair:
        pair.change = lambda message: (
            replace_digest(message) if isinstance(message, messages.Blocks) else message
        )
        pair.add(replace(make_request("a", 100), traceparent="00-1-2-01"))
        phases: list[Phase] = []
        while pair.decode.has_work:
            pair.pump()
            phases += pair.decode.take_phases().get("a", [])

    assert [phase.name for phase in phases] == ["queue", "kv_pull", "queue", "prefill", "decode"]
    assert "not those that were computed" in str(phases[1].attributes["error.type"])


def replace_digest(message: messages.Blocks) -> messages.Blocks:
    runs = [structs.replace(run, digest=b"wrong") for run in message.runs]
    return structs.replace(message, runs=runs)
