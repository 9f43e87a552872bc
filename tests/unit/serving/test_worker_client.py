# SPDX-License-Identifier: Apache-2.0
"""Client and worker over an in-memory transport: what each end makes of the other's messages."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from in_memory import InMemoryTransport, make_engine

from pelton.core.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    UnavailableError,
    WorkerLostError,
)
from pelton.core.request import FinishReason, GenerateRequest, RequestOutput, SamplingParams
from pelton.serving import messages
from pelton.serving.stand_in import StandInEngine
from pelton.serving.worker import Worker, make_worker_info
from pelton.serving.worker_client import WorkerClient


class SilentTransport(InMemoryTransport):
    def send(self, payload: bytes) -> None:
        return


async def connect() -> tuple[WorkerClient, InMemoryTransport, StandInEngine]:
    engine = make_engine()
    transport = InMemoryTransport(engine)
    return await WorkerClient.over(transport), transport, engine


def make_request(request_id: str = "r", **sampling: int) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 3, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(request_id=request_id, prompt_token_ids=[1, 2], sampling=params, seed=5)


async def test_outputs_that_arrive_between_reads_are_handed_over_together() -> None:
    client, transport, _ = await connect()
    stream = client.submit(make_request())
    transport.worker.step()
    transport.worker.step()
    assert [len(output.token_ids) for output in await anext(stream)] == [1, 1]


async def test_stream_ends_after_the_last_choice() -> None:
    client, transport, _ = await connect()
    stream = client.submit(make_request(n=2))
    for _ in range(3):
        transport.worker.step()
    outputs = [output async for batch in stream for output in batch]
    finished = [output.index for output in outputs if output.finish_reason is FinishReason.LENGTH]
    assert (finished, client.num_live_requests) == ([0, 1], 0)


async def test_requests_submitted_together_share_a_stream() -> None:
    client, transport, _ = await connect()
    stream = client.submit(make_request("a", max_tokens=1), make_request("b", max_tokens=1))
    transport.worker.step()
    outputs = [output.request_id async for batch in stream for output in batch]
    assert outputs == ["a", "b"]


async def test_refusal_keeps_its_type_and_field() -> None:
    client, _, _ = await connect()
    bad = GenerateRequest(
        request_id="r", prompt_token_ids=[], sampling=SamplingParams(max_tokens=1), seed=1
    )
    with pytest.raises(InvalidRequestError) as caught:
        await anext(client.submit(bad))
    assert caught.value.param == "prompt"


async def test_request_id_in_use_is_refused() -> None:
    client, transport, _ = await connect()
    transport.worker.receive(b"client", messages.encode(messages.Submit(make_request("same"))))
    with pytest.raises(InvalidRequestError, match="in use"):
        await anext(client.submit(make_request("same")))


async def test_cancel_frees_the_engine_and_ends_the_stream() -> None:
    client, transport, engine = await connect()
    stream = client.submit(make_request(max_tokens=100))
    transport.worker.step()
    await anext(stream)
    stream.cancel()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert (engine.has_work, client.num_live_requests) == (False, 0)


async def test_a_cancelled_choice_ends_alone() -> None:
    client, transport, engine = await connect()
    stream = client.submit(make_request(n=3, max_tokens=4))
    transport.worker.step()
    for _ in range(2):
        stream.cancel_choice("r", 1)
    assert engine.stats().num_running == 2
    for _ in range(3):
        transport.worker.step()
    stream.cancel_choice("r", 0)
    outputs = [output for batch in [b async for b in stream] for output in batch]
    assert [output.index for output in outputs].count(1) == 1
    assert [o.index for o in outputs if o.finish_reason is FinishReason.LENGTH] == [0, 2]
    assert (engine.has_work, client.num_live_requests) == (False, 0)


async def test_a_stream_whose_choices_are_all_cancelled_is_done() -> None:
    client, _, engine = await connect()
    stream = client.submit(make_request("a", n=2), make_request("b"))
    for request_id, index in (("a", 1), ("b", 0), ("a", 0)):
        stream.cancel_choice(request_id, index)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert (engine.has_work, client.num_live_requests) == (False, 0)


async def test_lost_worker_ends_waiting_readers_with_a_typed_error() -> None:
    client, transport, _ = await connect()
    stream = client.submit(make_request())
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    transport.lose()
    with pytest.raises(WorkerLostError):
        await reader


async def test_outputs_read_before_the_loss_still_arrive() -> None:
    client, transport, _ = await connect()
    stream = client.submit(make_request())
    transport.worker.step()
    transport.lose()
    assert len(await anext(stream)) == 1
    with pytest.raises(WorkerLostError):
        await anext(stream)


async def test_submit_after_the_loss_raises() -> None:
    client, transport, _ = await connect()
    transport.lose()
    with pytest.raises(WorkerLostError):
        client.submit(make_request())


async def test_engine_error_becomes_the_error_of_its_code() -> None:
    client, _, _ = await connect()
    stream = client.submit(make_request(n=2))
    stream.push(
        RequestOutput(
            "r",
            0,
            [],
            finish_reason=FinishReason.ERROR,
            error="late",
            error_code="deadline_exceeded",
        )
    )
    with pytest.raises(DeadlineExceededError, match="late"):
        await anext(stream)


async def test_client_ends_a_request_that_a_stuck_worker_keeps_past_its_deadline() -> None:
    client, _, engine = await connect()
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=9),
        seed=1,
        deadline_s=time.monotonic() - 1.0,
    )
    with pytest.raises(DeadlineExceededError):
        await anext(client.submit(request))
    assert not engine.has_work


class OtherHost(InMemoryTransport):
    """Its worker's clock is far ahead of this host's."""

    ahead_s = 1e6

    def send(self, payload: bytes) -> None:
        self._there(lambda: super(OtherHost, self).send(payload))

    def heartbeat(self) -> None:
        self._there(self.worker.heartbeat)

    def _there(self, act: Callable[[], None]) -> None:
        here = time.monotonic
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: here() + self.ahead_s)
            patch.setattr(self, "_on_message", lambda payload: arrived.append(payload))
            arrived: list[bytes] = []
            act()
        for payload in arrived:
            self._on_message(payload)


@pytest.mark.parametrize("shares_clock", [True, False])
async def test_deadlines_and_reports_cross_from_clock_to_clock(
    shares_clock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, reports, added = OtherHost(make_engine()), [], []
    client = await WorkerClient.over(transport, shares_clock=shares_clock)
    client.on_report = reports.append
    monkeypatch.setattr(StandInEngine, "add", lambda engine, request: added.append(request))
    deadline_s = time.monotonic() + 1000.0
    client.submit(replace(make_request("a"), deadline_s=deadline_s), make_request("b"))
    transport.heartbeat()
    [with_deadline, without], [report] = added, reports
    half_s = OtherHost.ahead_s / 2

    assert (with_deadline.deadline_s > deadline_s + half_s) == (not shares_clock)
    assert without.deadline_s is None
    assert (report.at_s > time.monotonic() + half_s) == shares_clock


async def test_worker_cancels_the_requests_of_a_client_that_left() -> None:
    client, transport, engine = await connect()
    client.submit(make_request(max_tokens=100))
    transport.is_connected = False
    transport.worker.heartbeat()
    assert not engine.has_work


async def test_silent_worker_is_an_error_within_the_timeout() -> None:
    with pytest.raises(UnavailableError, match="did not answer"):
        await WorkerClient.over(SilentTransport(make_engine()), timeout_s=0.01)


async def test_stalled_worker_counts_as_lost() -> None:
    transport = InMemoryTransport(make_engine())
    client = await WorkerClient.over(transport, stall_timeout_s=0.0)
    await asyncio.wait_for(client.lost.wait(), 5)
    assert client.is_stalled


async def test_a_client_that_stood_still_itself_does_not_blame_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, _, _ = await connect()
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 1e6)
    for _ in range(2):
        client._watch_silence()
    assert not client.lost.is_set()


async def test_other_protocol_version_is_refused() -> None:
    engine = make_engine()
    answers: list[bytes] = []
    worker = Worker(
        engine, make_worker_info(engine), lambda client, payload: not answers.append(payload)
    )
    worker.receive(b"c", messages.encode(messages.Hello(messages.PROTOCOL_VERSION + 1)))
    answer = messages.decode_from_worker(answers[0])
    assert isinstance(answer, messages.Refused)
    assert isinstance(answer.error.to_error(), ConfigError)


async def test_garbage_is_refused_and_nothing_else_notices() -> None:
    client, transport, _ = await connect()
    stream = client.submit(make_request(max_tokens=1))
    transport.worker.receive(b"other", b"\xc1garbage")
    transport.worker.step()
    assert len(await anext(stream)) == 1
