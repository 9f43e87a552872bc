# SPDX-License-Identifier: Apache-2.0
"""The stand-in executor: tokens follow from the history, steps take the time they should."""

import time

import pytest
from engine_harness import EOS, make_config, make_geometry, make_request

from pelton.core.clock import ManualClock
from pelton.core.request import FinishReason, GenerateRequest, RequestOutput
from pelton.engine.engine import Engine
from pelton.engine.stand_in import StandInExecutor

VOCAB_SIZE = 1000


def run(
    executor: StandInExecutor,
    *requests: GenerateRequest,
    clock: ManualClock | None = None,
    **config: object,
) -> dict[tuple[str, int], list[RequestOutput]]:
    engine = Engine(
        make_config(**config),  # type: ignore[arg-type]
        make_geometry(vocab_size=VOCAB_SIZE),
        executor,
        clock or ManualClock(),
    )
    outputs: dict[tuple[str, int], list[RequestOutput]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [3, 100])
@pytest.mark.parametrize("num_blocks", [17, 200])
def test_the_same_request_gets_the_same_tokens(overlap: bool, budget: int, num_blocks: int) -> None:
    requests = [make_request(f"r{i}", [i + 1] * 20, max_tokens=20, seed=i) for i in range(4)]
    alone = [
        tokens(run(StandInExecutor(VOCAB_SIZE), request)[request.request_id, 0])
        for request in requests
    ]
    together = run(
        StandInExecutor(VOCAB_SIZE),
        *requests,
        overlap=overlap,
        budget=budget,
        num_blocks=num_blocks,
    )
    assert [tokens(together[request.request_id, 0]) for request in requests] == alone


def test_choices_differ_unless_they_are_greedy() -> None:
    sampled = run(StandInExecutor(VOCAB_SIZE), make_request("r", [1], n=2, max_tokens=9))
    assert tokens(sampled["r", 0]) != tokens(sampled["r", 1])
    greedy = run(
        StandInExecutor(VOCAB_SIZE), make_request("r", [1], n=2, max_tokens=9, temperature=0)
    )
    assert tokens(greedy["r", 0]) == tokens(greedy["r", 1])


def test_end_of_sequence_comes_where_it_was_asked_for_and_nowhere_else() -> None:
    outputs = run(StandInExecutor(VOCAB_SIZE, eos_after=7), make_request("r", [1]))["r", 0]
    assert tokens(outputs)[-1] == EOS
    assert len(tokens(outputs)) == 7
    assert outputs[-1].finish_reason is FinishReason.STOP
    endless = run(StandInExecutor(5), make_request("r", [1], stop_token_ids=(1, 2)))["r", 0]
    assert set(tokens(endless)) == {3, 4}
    assert endless[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_take_their_time_one_after_the_other(overlap: bool) -> None:
    clock = ManualClock(100.0)
    executor = StandInExecutor(VOCAB_SIZE, step_time_s=0.5, clock=clock)
    run(executor, make_request("r", [1], max_tokens=6), clock=clock, overlap=overlap)
    assert clock.now_s() == 103.0


def test_on_a_real_clock_a_step_is_slept_through(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    run(StandInExecutor(VOCAB_SIZE, step_time_s=1000.0), make_request("r", [1], max_tokens=1))
    assert len(slept) == 1
    assert 0 < slept[0] <= 1000.0


def test_logprobs_come_as_asked_for() -> None:
    request = make_request("r", [3, 4, 5, 6], max_tokens=2, logprobs=2, prompt_logprobs=1)
    outputs = run(StandInExecutor(VOCAB_SIZE), request, budget=3)["r", 0]
    for output in outputs:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert len(output.logprobs[0].top) == 2
    prompt_logprobs = outputs[0].prompt_logprobs
    assert prompt_logprobs is not None
    assert [entry and entry.token_id for entry in prompt_logprobs] == [None, 4, 5, 6]
