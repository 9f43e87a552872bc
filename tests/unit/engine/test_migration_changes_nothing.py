# SPDX-License-Identifier: Apache-2.0
"""A request that loses its engine and goes on in another gets the tokens that it gets in one.

The requests of `test_drafts_change_nothing` have every sampling control, stops, grammars, several
choices, logprobs and seeds; all of them lose their engine after the same steps.
"""

from collections.abc import Sequence

import pytest
from test_drafts_change_nothing import Run, assert_same, make_engine, make_requests, plain

from pelton.core.errors import InvalidRequestError
from pelton.core.request import GenerateRequest, RequestOutput, SamplingParams
from pelton.engine.engine import Engine
from pelton.serving.request_stream import RequestStream


class MigratedRun(Run):
    """Takes a new engine after each of `losses` steps."""

    def __init__(self, losses: Sequence[int], **settings: object) -> None:
        self.losses, self.settings = losses, settings
        self.num_resumed = 0
        self.cached_tokens: dict[tuple[str, int], set[int]] = {}
        super().__init__(make_engine(**settings), make_requests())

    def cancel_request(self, request_id: str, index: int | None = None) -> None:
        self.engine.cancel(request_id, index)

    def forget(self, request_id: str) -> None:
        return

    def run(self) -> None:
        self.streams = {r.request_id: RequestStream([r], keeps_tokens=True) for r in self.requests}
        self.start(self.requests)
        num_steps = 0
        while self.engine.has_work:
            for output in self.engine.step():
                self.push(output)
            num_steps += 1
            if num_steps in self.losses:
                self.lose()

    def start(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            self.streams[request.request_id].carried_by(self, request.request_id)
            self.engine.add(request)

    def push(self, output: RequestOutput) -> None:
        assert output.error is None, output.error
        stream, key = self.streams[output.request_id], (output.request_id, output.index)
        stream.push(output)
        is_open = self.choices[key].finish_reason is None
        if is_open:
            self.cached_tokens.setdefault(key, set()).add(output.num_cached_tokens)
        self.take(output)
        if self.choices[key].finish_reason is not None:
            stream.cancel_choice(*key)

    def lose(self) -> None:
        self.engine = make_engine(**self.settings)
        rest = [s.remainder(request_id) for request_id, s in self.streams.items()]
        requests = [request for request in rest if request is not None]
        self.num_resumed += sum(bool(request.resumed) for request in requests)
        self.start(requests)


@pytest.mark.parametrize("losses", [(3,), (20,), (9, 30, 60)], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap": True, "budget": 24}, {"speculative": "mtp:3"}, {"speculative": "ngram:4"}],
    ids=str,
)
async def test_the_tokens_are_the_same(
    losses: tuple[int, ...], settings: dict[str, object]
) -> None:
    run = MigratedRun(losses, **settings)
    assert_same(run)
    assert run.num_resumed >= len(losses)
    assert all(len(counts) == 1 for counts in run.cached_tokens.values()), "usage changed"


def make_resumed(resumed: dict[int, list[int]], **sampling: int) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, **{"max_tokens": 4, "n": 2, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(
        request_id="r", prompt_token_ids=[5, 6, 7], sampling=params, seed=1, resumed=resumed
    )


@pytest.mark.parametrize("resumed", [{2: []}, {-1: []}, {0: [1, 2, 3, 4]}, {0: [10_000]}], ids=str)
def test_what_cannot_be_resumed_is_refused(resumed: dict[int, list[int]]) -> None:
    with pytest.raises(InvalidRequestError, match="resumed must hold"):
        make_engine().add(make_resumed(resumed))


def finish(engine: Engine, request: GenerateRequest) -> list[RequestOutput]:
    engine.add(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_only_choices_that_had_not_ended_run_again() -> None:
    outputs = finish(make_engine(), make_resumed({1: []}))
    assert {output.index for output in outputs} == {1}
    assert sum(len(output.token_ids) for output in outputs) == 4


def test_a_resumed_request_finds_what_is_cached_and_says_so_of_its_prompt_only() -> None:
    engine = make_engine()
    whole = plain().tokens["plain", 0]
    (request,) = [r for r in make_requests() if r.request_id == "plain"]
    finish(engine, request)
    before = engine.stats().cached_tokens_total
    rest = GenerateRequest(
        request_id="again",
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        seed=request.seed,
        resumed={0: whole[:9]},
    )
    outputs = finish(engine, rest)
    assert [token for output in outputs for token in output.token_ids] == whole[9:]
    num_prompt = len(request.prompt_token_ids)
    assert engine.stats().cached_tokens_total - before > num_prompt
    assert {output.num_cached_tokens for output in outputs} == {num_prompt}
