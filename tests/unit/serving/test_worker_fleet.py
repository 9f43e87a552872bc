# SPDX-License-Identifier: Apache-2.0
"""Workers that are added, drained and replaced, and what is refused: on processes that are none."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from pelton.core.config import EngineConfig, ModelConfig, Role, ServerConfig
from pelton.core.errors import ConfigError, ConflictError, InvalidRequestError, PeltonError
from pelton.serving import messages
from pelton.serving.restart_policy import RestartLimitError
from pelton.serving.worker_fleet import WorkerFleet


class FakeWorker:
    """A `WorkerHandle` that is ready at once, or fails."""

    returncode: int | None = None

    def __init__(
        self,
        number: int,
        generation: int,
        on_exit: Callable[[int], None],
        events: list[str],
        holds_device: bool,
        error: PeltonError | None,
    ) -> None:
        self.name = self.address = f"{number}.{generation}"
        self.num_heartbeats = 0
        self.holds_device = holds_device
        self._on_exit, self._events, self._error = on_exit, events, error
        events.append(f"start {self.name}")

    def wait_ready(self, timeout_s: float) -> None:
        if self._error is not None:
            raise self._error

    def kill(self) -> None:
        self.stop()

    def ask_to_end(self) -> None:
        self.stop()

    def stop(self, grace_s: float = 0.0) -> None:
        if self.returncode is None:
            self.returncode = 0
            self._events.append(f"end {self.name}")
            self._on_exit(0)


class Fakes:
    """A launcher and frontends that write down what they are told."""

    def __init__(self, *, holds_device: bool = False) -> None:
        self.events: list[str] = []
        self.error: PeltonError | None = None
        self.drained = asyncio.Event()
        self.drained.set()
        self._holds_device = holds_device

    def launch(
        self,
        start: messages.StartWorker,
        generation: int,
        *,
        on_progress: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> FakeWorker:
        number = start.place.index
        return FakeWorker(number, generation, on_exit, self.events, self._holds_device, self.error)

    def close(self) -> None: ...

    def use(self, worker: int, generation: int, address: str) -> None:
        self.events.append(f"use {address}")

    def forget(self, worker: int) -> None:
        self.events.append(f"forget {worker}")

    async def until_used(self, worker: int, generation: int, timeout_s: float) -> None: ...

    async def drain(self, worker: int, generation: int, timeout_s: float) -> None:
        self.events.append(f"drain {worker}.{generation}")
        await self.drained.wait()


@asynccontextmanager
async def running(fakes: Fakes, **options: int) -> AsyncIterator[WorkerFleet]:
    config = ServerConfig(worker_heartbeat_s=1000.0, **options)  # type: ignore[arg-type]
    engine = EngineConfig(model=ModelConfig(model="smollm2"))
    fleet = WorkerFleet(engine, config, fakes, fakes, on_progress=print)
    task = asyncio.create_task(fleet.run())
    async with asyncio.timeout(10):
        while len(fleet.ready()) < len(config.roles):
            await asyncio.sleep(0.005)
    fakes.events.clear()
    try:
        yield fleet
    finally:
        fleet.is_stopping = True
        for handle in fleet.handles():
            handle.stop()
        task.cancel()
        with suppress(asyncio.CancelledError, PeltonError):
            await task


async def finish(fleet: WorkerFleet) -> str | None:
    """The error of the operation that was begun last, once it is done."""
    operation = fleet.operation
    assert operation is not None
    async with asyncio.timeout(10):
        while not operation.is_done:
            await asyncio.sleep(0.005)
    return operation.error


async def test_an_added_worker_takes_the_lowest_free_number() -> None:
    fakes = Fakes()
    async with running(fakes, workers=3) as fleet:
        fleet.drain(1, 1.0)
        assert await finish(fleet) is None
        assert fakes.events == ["drain 1.1", "end 1.1", "forget 1"]
        fleet.add(Role.MIXED, 2)
        assert await finish(fleet) is None
        assert {worker.entry().process for worker in fleet.workers.values()} == {
            *("0.1", "1.2", "2.1", "3.1")
        }


async def test_a_worker_that_cannot_start_is_no_worker_and_the_server_goes_on() -> None:
    fakes = Fakes()
    async with running(fakes, workers=1) as fleet:
        fakes.error = ConfigError("There is no such GPU.")
        fleet.add(Role.MIXED, 1)
        assert await finish(fleet) == "There is no such GPU."
        async with asyncio.timeout(10):
            while len(fleet.workers) > 1:
                await asyncio.sleep(0.005)
        assert fakes.events == ["start 1.1", "end 1.1", "forget 1"]


async def test_a_roll_starts_each_replacement_before_it_drains() -> None:
    fakes = Fakes()
    async with running(fakes, workers=1) as fleet:
        fleet.roll(1.0)
        assert await finish(fleet) is None
    assert fakes.events[:4] == ["start 1.1", "use 1.1", "drain 0.1", "end 0.1"]


async def test_a_roll_on_gpus_gives_each_back_before_its_replacement_takes_it() -> None:
    fakes = Fakes(holds_device=True)
    async with running(fakes, workers=2) as fleet:
        fleet.roll(1.0)
        assert await finish(fleet) is None
        assert sorted(fleet.workers) == [0, 1]
        expected = [
            *("drain 0.1", "end 0.1", "start 0.2", "use 0.2"),
            *("drain 1.1", "end 1.1", "start 1.2", "use 1.2"),
        ]
        assert fakes.events == expected


async def test_a_roll_that_cannot_start_a_replacement_leaves_the_others() -> None:
    fakes = Fakes()
    async with running(fakes, workers=2) as fleet:
        fakes.error = ConfigError("The disk is full.")
        fleet.roll(1.0)
        assert await finish(fleet) == "The disk is full."
        assert [worker.phase for worker in fleet.workers.values()][:2] == ["ready", "ready"]


async def test_a_worker_that_dies_while_it_drains_is_gone_and_one_that_dies_is_replaced() -> None:
    fakes = Fakes()
    async with running(fakes, workers=2) as fleet:
        fakes.drained.clear()
        fleet.drain(0, 1.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        fleet.handles()[0].kill()
        fakes.drained.set()
        assert await finish(fleet) is None
        assert sorted(fleet.workers) == [1]
        fleet.kill(1, 1)
        async with asyncio.timeout(10):
            while fleet.ready() != [(1, 2, "1.2")]:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("options", "number"), [({"workers": 1}, 0), ({"prefill": 2, "decode": 1}, 2)]
)
async def test_the_last_worker_that_decodes_is_not_drained(
    options: dict[str, int], number: int
) -> None:
    async with running(Fakes(), **options) as fleet:
        with pytest.raises(ConflictError, match="only one that can decode"):
            fleet.drain(number, 1.0)
        assert [worker.phase for worker in fleet.workers.values()] == ["ready"] * len(fleet.workers)


async def test_every_prefill_worker_may_be_drained() -> None:
    async with running(Fakes(), prefill=1, decode=1) as fleet:
        fleet.drain(0, 1.0)
        assert await finish(fleet) is None
        assert sorted(fleet.workers) == [1]


async def test_what_cannot_be_is_refused_with_a_sentence() -> None:
    fakes = Fakes(holds_device=True)
    async with running(fakes, prefill=1, decode=1) as fleet:
        with pytest.raises(InvalidRequestError, match="give role prefill or decode"):
            fleet.add(Role.MIXED, 1)
        with pytest.raises(InvalidRequestError, match="at most 64"):
            fleet.add(Role.DECODE, 63)
        with pytest.raises(InvalidRequestError, match="no worker 7; there are 0, 1"):
            fleet.drain(7, 1.0)
        with pytest.raises(ConflictError, match="no room for a second"):
            fleet.roll(1.0)
        assert fakes.events == []
        fleet.add(Role.DECODE, 1)
        with pytest.raises(ConflictError, match="wait until that is done"):
            fleet.roll(1.0)
        await finish(fleet)


async def test_a_server_ends_with_its_last_worker_that_decodes() -> None:
    async with running(Fakes(), prefill=1, decode=2) as fleet:
        error = RestartLimitError("It died.")
        prefill, first, last = fleet.workers.values()
        fleet._give_up(first, error)
        with pytest.raises(RestartLimitError):
            fleet._give_up(last, error)
        assert prefill.phase == "ready"
        last.phase = "ready"
        fleet.drain(first.number, 1.0)
        assert await finish(fleet) is None
        assert sorted(fleet.workers) == [0, 2]
