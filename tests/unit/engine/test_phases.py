# SPDX-License-Identifier: Apache-2.0
"""What an engine says of the phases of traced requests, and that it says nothing of others."""

from dataclasses import replace
from itertools import pairwise

from engine_harness import CheckingExecutor, make_config, make_geometry, make_request

from pelton.core.clock import ManualClock
from pelton.core.request import GenerateRequest
from pelton.core.trace import Phase
from pelton.engine.engine import Engine

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def make_engine(num_blocks: int = 200, *, overlap: bool = False) -> Engine:
    config, geometry = make_config(num_blocks=num_blocks, overlap=overlap), make_geometry()
    return Engine(config, geometry, CheckingExecutor(config, geometry), ManualClock())


def make_traced(name: str, num_tokens: int = 8, **sampling: object) -> GenerateRequest:
    settings = {"max_tokens": 12, "ignore_eos": True, **sampling}
    prompt = [1 + i % 7 for i in range(num_tokens)]
    request = make_request(name, prompt, cache_salt=name, **settings)  # type: ignore[arg-type]
    return replace(request, traceparent=PARENT)


def run(engine: Engine, *requests: GenerateRequest) -> dict[str, list[Phase]]:
    for request in requests:
        engine.add(request)
    phases: dict[str, list[Phase]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        engine.step()
        for request_id, ended in engine.take_phases().items():
            phases[request_id] += ended
    return phases


def names(phases: list[Phase]) -> list[str]:
    for before, after in pairwise(phases):
        assert before.end_ns <= after.start_ns
    return [phase.name for phase in phases]


def test_a_request_waits_prefills_and_decodes() -> None:
    for overlap in (False, True):
        phases = run(make_engine(overlap=overlap), make_traced("a"))
        assert names(phases["a"]) == ["queue", "prefill", "decode"]


def test_an_untraced_request_beside_it_is_not_mentioned() -> None:
    untraced = replace(make_traced("b"), traceparent="")
    phases = run(make_engine(), make_traced("a"), untraced)
    assert phases["b"] == []
    assert len(phases["a"]) == 3


def test_each_of_several_choices_is_followed() -> None:
    phases = run(make_engine(), make_traced("a", n=3, temperature=1.0))["a"]
    each = [[phase for phase in phases if phase.index == index] for index in range(3)]
    assert [names(own) for own in each] == [["queue", "prefill", "decode"]] * 3
    assert [phase.next_name for phase in each[2]] == ["prefill", "decode", ""]
    assert each[1][0].end_ns >= each[0][1].end_ns  # it waits for the prompt that it shares


def test_a_preempted_request_waits_and_prefills_again() -> None:
    """Room for one and a half requests: the later one gives way and goes on after the other."""
    engine = make_engine(num_blocks=1 + 7)
    phases = run(engine, make_traced("a"), make_traced("b"))

    assert engine.stats().preemptions_total > 0
    assert names(phases["a"]) == ["queue", "prefill", "decode"]
    assert names(phases["b"])[:5] == ["queue", "prefill", "decode", "queue", "prefill"]
    assert names(phases["b"])[-1] == "decode"


def test_a_row_in_flight_when_its_choice_was_preempted_is_no_phase() -> None:
    engine = make_engine(num_blocks=1 + 7, overlap=True)
    phases = run(engine, make_traced("a"), make_traced("b"))

    assert engine.stats().preemptions_total > 0
    assert names(phases["b"]) == ["queue", "prefill", "decode"] * (len(phases["b"]) // 3)


def test_a_cancelled_request_leaves_nothing_open() -> None:
    engine = make_engine()
    for name in "abc":
        engine.add(make_traced(name))
        engine.step()
        engine.cancel(name)
    while engine.has_work:
        engine.step()
    assert set(engine.take_phases()) == set("abc")
    assert engine.take_phases() == {}
    assert not engine._scheduler.phases._open
