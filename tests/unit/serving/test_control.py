# SPDX-License-Identifier: Apache-2.0
"""What a frontend does with the workers it is told of: real sockets, engines of a stand-in."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
import zmq
from in_memory import load_text_side, make_engine

from pelton.core.config import ServerConfig
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.serving import messages, worker_client
from pelton.serving.http.control import Control
from pelton.serving.http.frontend import Frontend
from pelton.serving.worker import Worker, bind_router, make_worker_info


@asynccontextmanager
async def worker_at(address: str, *, answers: bool = True) -> AsyncIterator[None]:
    """A worker that this event loop runs. Leaving the context is its death."""
    engine = make_engine()
    with zmq.Context() as context, bind_router(context, address) as socket:

        def send(client: bytes, payload: bytes) -> bool:
            try:
                socket.send_multipart([client, payload], zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
            return True

        worker = Worker(engine, make_worker_info(engine, address), send)

        async def run() -> None:
            while True:
                await asyncio.sleep(0.001)
                while socket.poll(0):
                    worker.receive(*socket.recv_multipart(zmq.NOBLOCK))
                if worker.has_work:
                    worker.step()

        task = asyncio.create_task(run() if answers else asyncio.sleep(600))
        try:
            yield
        finally:
            task.cancel()


class Supervisor:
    """The other end of a `Control`."""

    def __init__(self) -> None:
        self.frontend = Frontend(ServerConfig(), "smollm2", *load_text_side())
        self.control = Control(self.frontend, self.take)
        self.reports: list[Any] = []

    def take(self, report: Any) -> None:
        self.reports.append(report)

    def order(self, order: messages.ToFrontend) -> None:
        self.control.orders.put_nowait(order)

    async def hear(self, report: Any) -> None:
        async with asyncio.timeout(60):
            while report not in self.reports:
                await asyncio.sleep(0.001)
        self.reports.clear()

    async def ask(self, name: str) -> int:
        """The number of tokens that a request gets."""
        sampling = SamplingParams(max_tokens=3)
        request = GenerateRequest(
            request_id=name, prompt_token_ids=[1, 2], sampling=sampling, seed=1
        )
        with self.frontend.workers.place([request]) as placement:
            await placement.start()
            outputs = [o async for batch in placement.stream for o in batch]
        return sum(len(output.token_ids) for output in outputs)


async def add_and_drain(supervisor: Supervisor, address: str, generation: int) -> None:
    async with worker_at(address):
        supervisor.order(messages.UseWorker(address, 1, generation))
        await supervisor.hear(messages.Serving(1, generation))
        assert await supervisor.ask(str(generation)) == 3
        supervisor.order(messages.DrainWorker(1, generation, 1.0))
        await supervisor.hear(messages.Released(1, generation))
    supervisor.order(messages.RemoveWorker(1))


async def add_and_kill(supervisor: Supervisor, address: str, generation: int) -> None:
    async with worker_at(address):
        supervisor.order(messages.UseWorker(address, 1, generation))
        await supervisor.hear(messages.Serving(1, generation))
    supervisor.order(messages.RemoveWorker(1))


async def add_one_that_dies_before_it_answers(
    supervisor: Supervisor, address: str, generation: int
) -> None:
    async with worker_at(address, answers=False):
        supervisor.order(messages.UseWorker(address, 1, generation))
        await asyncio.sleep(0.02)
    supervisor.order(messages.RemoveWorker(1))


async def add_one_that_is_replaced_before_it_answers(
    supervisor: Supervisor, address: str, generation: int
) -> None:
    async with worker_at(address, answers=False):
        supervisor.order(messages.UseWorker(address, 1, generation))
        await asyncio.sleep(0.02)
        supervisor.order(messages.RemoveWorker(1))
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "change",
    [
        add_and_drain,
        add_and_kill,
        add_one_that_dies_before_it_answers,
        add_one_that_is_replaced_before_it_answers,
    ],
)
def test_workers_that_come_and_go_leave_no_file_open(change: Any, tmp_path: Path) -> None:
    async def run() -> list[int]:
        supervisor = Supervisor()
        following = asyncio.create_task(supervisor.control.run())
        counts = []
        for generation in range(1, 22):
            await change(supervisor, f"ipc://{tmp_path}/{generation}", generation)
            # Orders are carried out one after the other: this answer comes once nothing is left.
            supervisor.order(messages.DrainWorker(2, 1, 0.0))
            await supervisor.hear(messages.Released(2, 1))
            assert supervisor.frontend.workers.roster.states.keys() == {0}
            counts.append(num_files())
        # ZMQ closes the last of them on a thread of its own.
        with suppress(TimeoutError):
            async with asyncio.timeout(30):
                while num_files() > counts[0]:
                    await asyncio.sleep(0.01)
        following.cancel()
        return [*counts, num_files()]

    counts = uvloop.run(run())
    assert counts[-1] <= counts[0], counts


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_frontend_of_another_version_ends_and_no_worker_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pelton was replaced while the server runs: its other frontends need the worker."""
    other_version = SimpleNamespace(**{**vars(messages), "PROTOCOL_VERSION": 0})
    monkeypatch.setattr(worker_client, "messages", other_version)
    supervisor = Supervisor()
    address = f"ipc://{tmp_path}/worker"
    async with worker_at(address), asyncio.timeout(60):
        supervisor.order(messages.UseWorker(address, 1, 1))
        await supervisor.control.run()
    (report,) = supervisor.reports
    assert isinstance(report, messages.StartFailed)
    assert "from one installation" in report.error.message
