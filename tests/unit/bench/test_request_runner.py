# SPDX-License-Identifier: Apache-2.0
"""One request against systems that behave and misbehave: the record tells, nothing escapes."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from pelton.bench.measurements import BUCKET_NS, RequestRecord
from pelton.bench.request_runner import RequestRunner
from pelton.bench.traffic import Sample
from pelton.core.errors import OverloadedError
from pelton.core.ports import TokenArrival
from pelton.core.request import FinishReason

GOOD = [
    TokenArrival(1000, [5]),
    TokenArrival(2000, [6, 7]),
    TokenArrival(BUCKET_NS + 1, [8], FinishReason.LENGTH),
    TokenArrival(BUCKET_NS + 2, [], num_prompt_tokens=3, num_cached_tokens=1),
]


class ScriptedSut:
    """Yields what it was given, then raises if it was given an error."""

    def __init__(self, arrivals: Sequence[TokenArrival], error: Exception | None = None) -> None:
        self._arrivals, self._error = arrivals, error

    async def generate(self, sample: Sample, request_id: str) -> AsyncGenerator[TokenArrival, None]:
        for arrival in self._arrivals:
            yield arrival
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        pass


async def run(sut: ScriptedSut) -> tuple[RequestRecord, list[str], RequestRunner]:
    runner = RequestRunner(sut, [Sample(prompt="x")], timeout_s=5.0)
    record = runner.make_record(0, issued_ns=500)
    events: list[str] = []
    await runner.run(
        record,
        on_first=lambda tokens: events.append(f"first {list(tokens)}"),
        on_finish=lambda tokens: events.append(f"finish {list(tokens)}"),
    )
    return record, events, runner


async def test_a_good_request_is_recorded_in_full() -> None:
    record, events, runner = await run(ScriptedSut(GOOD))

    assert events == ["first [5]", "finish [5, 6, 7, 8]"]
    assert record.is_ok
    assert (record.first_token_ns, record.last_token_ns) == (1000, BUCKET_NS + 1)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (3, 4)
    assert record.num_cached_tokens == 1
    assert runner.tokens_by_bucket == {0: 3, 1: 1}
    assert (runner.num_completed, runner.num_failed) == (1, 0)


@pytest.mark.parametrize(
    ("sut", "message"),
    [
        (ScriptedSut([], ValueError("boom")), "ValueError: boom"),
        (ScriptedSut(GOOD[:1], ConnectionResetError("gone")), "ConnectionResetError: gone"),
        (ScriptedSut([], OverloadedError("The queue is full.")), "The queue is full."),
        (ScriptedSut([TokenArrival(1, [5], FinishReason.STOP)]), "1 output tokens came back"),
        (ScriptedSut([TokenArrival(1, [], FinishReason.STOP)]), "0 output tokens came back"),
    ],
)
async def test_a_bad_request_is_recorded_and_never_finished(sut: ScriptedSut, message: str) -> None:
    record, events, runner = await run(sut)

    assert record.error is not None
    assert message in record.error
    assert not any(event.startswith("finish") for event in events)
    assert (runner.num_failed, runner.num_failed_in_a_row) == (1, 1)


async def test_a_stream_without_an_end_is_no_answer() -> None:
    record, _, runner = await run(ScriptedSut(GOOD[:2]))

    assert not record.is_ok
    assert runner.num_failed == 1


async def test_silence_becomes_a_failure_when_the_time_is_over() -> None:
    class SilentSut(ScriptedSut):
        async def generate(
            self, sample: Sample, request_id: str
        ) -> AsyncGenerator[TokenArrival, None]:
            await asyncio.Event().wait()
            yield GOOD[0]

    runner = RequestRunner(SilentSut([]), [Sample(prompt="x")], timeout_s=0.01)
    record = runner.make_record(0, issued_ns=0)

    await runner.run(record)

    assert record.error == "No complete answer within 0.01 s."


async def test_request_ids_never_repeat() -> None:
    runner = RequestRunner(ScriptedSut([]), [Sample(prompt="x")], timeout_s=1.0)
    other = RequestRunner(ScriptedSut([]), [Sample(prompt="x")], timeout_s=1.0)
    ids = [r.make_record(0, 0).request_id for r in (runner, runner, other, other)]

    assert len(set(ids)) == 4
