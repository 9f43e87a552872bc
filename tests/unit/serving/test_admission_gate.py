# SPDX-License-Identifier: Apache-2.0
"""Requests that wait in the frontend for a worker with room: who goes first, and who is refused."""

import asyncio
import time
from collections.abc import Callable

import pytest
from in_memory import Reply, running_server

from pelton.core.clock import ManualClock
from pelton.core.errors import (
    DeadlineExceededError,
    DeadlineUnreachableError,
    OverloadedError,
    UnavailableError,
)
from pelton.serving.admission_gate import AdmissionGate
from pelton.serving.router.booking import Booking
from pelton.serving.router.router import Router
from pelton.serving.router.types import RouterConfig, RouteRequest, WorkerView


class Gate(AdmissionGate):
    """Before one worker with a slot and a place to wait."""

    def __init__(self) -> None:
        self.router = Router(RouterConfig(report_delay_s=0.0), ManualClock())
        self.start_worker()
        super().__init__(self.router.route, self.router.check_wait)

    def start_worker(self, **fields: float) -> None:
        view = WorkerView(
            id="w",
            generation=0,
            num_slots=1,
            max_waiting=1,
            num_blocks=100,
            block_size=16,
            **fields,  # type: ignore[arg-type]
        )
        self.router.update([view])

    def enter(
        self, name: str, *, is_patient: bool = False, has_begun: bool = False, **fields: float
    ) -> "Entry":
        request = RouteRequest(request_id=name, num_prompt_tokens=1, **fields)  # type: ignore[arg-type]
        booking = self.book(request, is_patient=is_patient, has_begun=has_begun)
        return asyncio.ensure_future(booking)

    def leave(self, booking: Booking | None) -> None:
        assert booking is not None
        booking.release()
        self.pump()


Entry = asyncio.Future[Booking | None]


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def fill(gate: Gate) -> list[Booking | None]:
    return [await gate.enter(name) for name in ("first", "second")]


async def test_who_waits_is_served_by_priority_then_deadline_then_arrival() -> None:
    gate = Gate()
    running = await fill(gate)
    waits = {
        "late": gate.enter("late", deadline_s=time.monotonic() + 90),
        "low": gate.enter("low", priority=1),
        "soon": gate.enter("soon", deadline_s=time.monotonic() + 60),
        "high": gate.enter("high", priority=-1),
    }
    order: list[str] = []
    await settle()
    assert gate.num_waiting == 4
    while waits:
        gate.leave(running.pop(0))
        await settle()
        (name,) = [name for name, entry in waits.items() if entry.done()]
        running.append(waits.pop(name).result())
        order.append(name)
    assert order == ["high", "soon", "late", "low"]
    for booking in running:
        gate.leave(booking)
    assert gate.router.booked_on("w").is_zero()


async def test_a_newcomer_of_higher_priority_passes_who_waits() -> None:
    gate = Gate()
    running = await fill(gate)
    waiting = gate.enter("waiting")
    await settle()
    booking = running.pop()
    assert booking is not None
    booking.release()  # nobody is told yet
    assert await gate.enter("urgent", priority=-1) is not None
    assert not waiting.done()
    gate.withdraw("waiting")
    assert await waiting is None


async def test_who_gives_up_leaves_nothing_behind() -> None:
    gate = Gate()
    running = await fill(gate)
    cancelled, withdrawn = gate.enter("cancelled"), gate.enter("withdrawn")
    await settle()
    cancelled.cancel()
    gate.withdraw("withdrawn")
    gate.withdraw("never was")
    gate.leave(running.pop())  # before the cancelled one has noticed
    assert await withdrawn is None
    await settle()
    assert gate.num_waiting == 0
    gate.leave(running.pop())
    assert gate.router.booked_on("w").is_zero()


async def test_a_booking_that_comes_with_the_cancellation_is_returned() -> None:
    gate = Gate()
    running = await fill(gate)
    entry, next_entry = gate.enter("unlucky"), gate.enter("next")
    await settle()
    gate.leave(running.pop())
    entry.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entry
    gate.leave(await asyncio.wait_for(next_entry, 1))
    gate.leave(running.pop())
    assert gate.router.booked_on("w").is_zero()


async def test_waiting_ends_at_the_deadline() -> None:
    gate = Gate()
    await fill(gate)
    with pytest.raises(DeadlineExceededError):
        await gate.enter("r", deadline_s=time.monotonic() + 0.02)
    assert gate.num_waiting == 0


async def test_who_could_not_be_in_time_does_not_wait() -> None:
    gate = Gate()
    await fill(gate)
    gate.start_worker(num_running=1, num_waiting=1, requests_per_s=0.5)
    with pytest.raises(DeadlineUnreachableError) as error:
        await gate.enter("r", deadline_s=3.9)  # the turn comes after 4 s of the router's clock
    assert error.value.retry_after_s == 1
    assert gate.num_waiting == 0


async def test_the_last_may_be_displaced_by_a_higher_priority() -> None:
    gate = Gate()
    await fill(gate)
    low = gate.enter("low", priority=2)
    await settle()
    assert [gate.has_lower(priority) for priority in (1, 2, 3)] == [True, False, False]
    gate.displace_last()
    with pytest.raises(OverloadedError, match="higher priority"):
        await low
    assert not gate.has_lower(-100)


async def test_what_has_begun_is_not_displaced() -> None:
    gate = Gate()
    await fill(gate)
    low = gate.enter("low", priority=2)
    begun = gate.enter("begun", has_begun=True, priority=9)
    await settle()
    gate.displace_last()
    with pytest.raises(OverloadedError, match="higher priority"):
        await low
    assert not gate.has_lower(-100)
    assert not begun.done()
    begun.cancel()


async def test_only_the_patient_wait_for_a_worker_to_come_up() -> None:
    gate = Gate()
    gate.router.remove("w")
    with pytest.raises(UnavailableError):
        await gate.enter("new")
    migrating = gate.enter("migrating", is_patient=True)
    await settle()
    gate.pump()
    gate.start_worker()
    gate.pump()
    assert await migrating is not None


async def test_nobody_waits_behind_who_waits_for_a_worker_to_come_up() -> None:
    gate = Gate()
    await fill(gate)
    queued, urgent = gate.enter("queued"), gate.enter("urgent", priority=-1)
    migrating = gate.enter("migrating", is_patient=True, has_begun=True, priority=-2)
    await settle()
    gate.router.remove("w")
    gate.pump()
    entries = await asyncio.gather(queued, urgent, gate.enter("new"), return_exceptions=True)
    assert [type(entry) for entry in entries] == [UnavailableError] * 3
    assert gate.num_waiting == 1
    gate.start_worker()
    gate.pump()
    assert await migrating is not None


async def test_a_closed_gate_refuses_who_waits_and_who_comes_later() -> None:
    gate = Gate()
    await fill(gate)
    entries = [gate.enter(str(i)) for i in range(3)]
    await settle()
    gate.close(UnavailableError("The end."))
    entries.append(gate.enter("migrating", is_patient=True, has_begun=True))
    assert [type(e) for e in await asyncio.gather(*entries, return_exceptions=True)] == [
        UnavailableError
    ] * 4


async def test_over_http_the_last_gives_way_and_is_told_so() -> None:
    async with running_server("?max_num_requests=1", max_queue=10) as server:
        server.num_steps_left = 0

        def send(**fields: int) -> asyncio.Task[Reply]:
            body = {"prompt": "a", "max_tokens": 1, **fields}
            return asyncio.create_task(server.post("/v1/completions", body))

        replies = [send() for _ in range(9)]
        await settle_until(lambda: server.frontend.metrics.num_live == 9)
        low = send(priority=5)
        await settle_until(lambda: server.frontend.workers.gate.num_waiting == 1)
        assert (await send(priority=5)).error["code"] == "queue_full"
        urgent = send(priority=-1)
        refused = await low
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        assert "pelton_requests_queued 1.0" in (await server.get("/metrics")).body.decode()
        server.num_steps_left = -1
        assert {reply.status for reply in await asyncio.gather(urgent, *replies)} == {200}


async def test_over_http_a_client_that_leaves_the_queue_leaves_nothing_behind() -> None:
    async with running_server("?max_num_requests=1") as server:
        server.num_steps_left = 0
        gate, leave = server.frontend.workers.gate, asyncio.Event()
        body = {"prompt": "a", "max_tokens": 1}
        replies = [
            asyncio.create_task(server.post("/v1/completions", body, leave=leave))
            for _ in range(12)
        ]
        await settle_until(lambda: gate.num_waiting == 3)
        leave.set()
        assert {reply.status for reply in await asyncio.gather(*replies)} == {0}
        assert (gate.num_waiting, server.frontend.metrics.num_aborted) == (0, 12)
        assert server.frontend.metrics.num_live == 0
        assert server.frontend.workers._router.booked_on("0").is_zero()


async def test_over_http_one_reply_may_hold_more_prompts_than_workers_have_room_for() -> None:
    async with running_server("?max_num_requests=1") as server:
        body = {"prompt": [f"a{i}" for i in range(30)], "max_tokens": 2, "n": 2}
        async with asyncio.timeout(20):
            reply = await server.post("/v1/completions", body)
        assert [choice["index"] for choice in reply.json["choices"]] == list(range(60))
        assert server.frontend.workers._router.booked_on("0").is_zero()


async def settle_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)
