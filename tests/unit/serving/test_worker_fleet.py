# SPDX-License-Identifier: Apache-2.0
"""Workers that are added, drained and replaced, and what is refused: on processes that are none."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from pelton.core.config import EngineConfig, ModelConfig, Role, ServerConfig
from pelton.core.errors import (
    ConfigError,
    ConflictError,
    InvalidRequestError,
    PeltonError,
    UnavailableError,
)
from pelton.core.kv_transfer import KVLayout
from pelton.serving import messages, worker_fleet
from pelton.serving.fleet_operations import FleetOperations
from pelton.serving.restart_policy import RestartLimitError
from pelton.serving.worker_fleet import WorkerFleet

ENGINE = EngineConfig(model=ModelConfig(model="smollm2"))
LAYOUT = KVLayout(
    model="m", device="cpu", fingerprint="f", dtype="float32", block_size=16, groups=()
)


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
        may_be_ready: threading.Event,
        layout: KVLayout | None,
    ) -> None:
        self.name = self.address = f"{number}.{generation}"
        self.num_heartbeats = 0
        self.holds_device = holds_device
        self.layout = layout
        self._on_exit, self._events, self._error = on_exit, events, error
        self._may_be_ready = may_be_ready
        events.append(f"start {self.name}")

    def wait_ready(self, timeout_s: float) -> None:
        self._may_be_ready.wait(60)
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
        self.may_be_ready = threading.Event()
        self.may_be_ready.set()
        self.launch_error: PeltonError | None = None
        self.shares: list[int] = []
        """Among how many workers each one that was launched shares the machine."""
        self.unreachable: set[tuple[int, int]] = set()
        self.layouts: dict[Role, KVLayout | None] = {}
        """Of the workers to come, where it is not `LAYOUT`."""
        self._holds_device = holds_device

    def launch(
        self,
        start: messages.StartWorker,
        generation: int,
        *,
        on_progress: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> FakeWorker:
        if self.launch_error is not None:
            raise self.launch_error
        self.shares.append(start.place.num_workers)
        return FakeWorker(
            *(start.place.index, generation, on_exit, self.events),
            *(self._holds_device, self.error, self.may_be_ready),
            self.layouts.get(start.place.role, LAYOUT),
        )

    def close(self) -> None: ...

    def use(self, worker: int, generation: int, address: str) -> None:
        self.events.append(f"use {address}")

    def forget(self, worker: int) -> None:
        self.events.append(f"forget {worker}")

    def is_used(self, worker: int, generation: int) -> bool:
        return (worker, generation) not in self.unreachable

    async def drain(self, worker: int, generation: int, timeout_s: float) -> None:
        self.events.append(f"drain {worker}.{generation}")
        await self.drained.wait()


@asynccontextmanager
async def running(
    fakes: Fakes, *, num_ready: int | None = None, **options: int
) -> AsyncIterator[tuple[WorkerFleet, FleetOperations]]:
    """A fleet once `num_ready` of its workers are; None: all."""
    config = ServerConfig(worker_heartbeat_s=1000.0, **options)  # type: ignore[arg-type]
    fleet = WorkerFleet(ENGINE, config, fakes, fakes, on_progress=print)
    task = asyncio.create_task(fleet.run())
    async with asyncio.timeout(60):
        while len(fleet.ready()) < (len(config.roles) if num_ready is None else num_ready):
            await asyncio.sleep(0.005)
    fakes.events.clear()
    fakes.shares.clear()
    try:
        yield fleet, FleetOperations(config, fleet, fakes)
    finally:
        fleet.is_stopping = True
        for handle in fleet.handles():
            handle.stop()
        task.cancel()
        with suppress(asyncio.CancelledError, PeltonError):
            await task


async def finish(change: FleetOperations) -> str | None:
    """The error of the operation that was begun last, once it is done."""
    operation = change.newest
    assert operation is not None
    async with asyncio.timeout(60):
        while not operation.is_done:
            await asyncio.sleep(0.005)
    return operation.error


async def test_an_added_worker_takes_the_lowest_free_number() -> None:
    fakes = Fakes()
    async with running(fakes, workers=3) as (fleet, change):
        change.drain(1, 1.0)
        assert await finish(change) is None
        assert fakes.events == ["drain 1.1", "end 1.1", "forget 1"]
        change.add(Role.MIXED, 2)
        assert await finish(change) is None
        assert {worker.entry().process for worker in fleet.workers.values()} == {
            *("0.1", "1.2", "2.1", "3.1")
        }


async def test_a_worker_that_cannot_start_is_no_worker_and_the_server_goes_on() -> None:
    fakes = Fakes()
    async with running(fakes, workers=1) as (fleet, change):
        fakes.error = ConfigError("There is no such GPU.")
        change.add(Role.MIXED, 1)
        assert await finish(change) == "There is no such GPU."
        async with asyncio.timeout(60):
            while len(fleet.workers) > 1:
                await asyncio.sleep(0.005)
        assert fakes.events == ["start 1.1", "end 1.1", "forget 1"]


async def test_a_roll_starts_each_replacement_before_it_drains() -> None:
    fakes = Fakes()
    async with running(fakes, workers=1) as (_, change):
        change.roll(1.0)
        assert await finish(change) is None
    assert fakes.events[:4] == ["start 1.1", "use 1.1", "drain 0.1", "end 0.1"]


async def test_a_roll_on_gpus_gives_each_back_before_its_replacement_takes_it() -> None:
    fakes = Fakes(holds_device=True)
    async with running(fakes, workers=2) as (fleet, change):
        change.roll(1.0)
        assert await finish(change) is None
        assert sorted(fleet.workers) == [0, 1]
        expected = [
            *("drain 0.1", "end 0.1", "start 0.2", "use 0.2"),
            *("drain 1.1", "end 1.1", "start 1.2", "use 1.2"),
        ]
        assert fakes.events == expected


async def test_a_roll_that_cannot_start_a_replacement_leaves_the_others() -> None:
    fakes = Fakes()
    async with running(fakes, workers=2) as (fleet, change):
        fakes.error = ConfigError("The disk is full.")
        change.roll(1.0)
        assert await finish(change) == "The disk is full."
        assert [worker.phase for worker in fleet.workers.values()][:2] == ["ready", "ready"]


async def test_a_worker_that_dies_while_it_drains_is_gone_and_one_that_dies_is_replaced() -> None:
    fakes = Fakes()
    async with running(fakes, workers=2) as (fleet, change):
        fakes.drained.clear()
        change.drain(0, 1.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        fleet.handles()[0].kill()
        fakes.drained.set()
        assert await finish(change) is None
        assert sorted(fleet.workers) == [1]
        fleet.kill(1, 1)
        async with asyncio.timeout(60):
            while fleet.ready() != [(1, 2, "1.2")]:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("options", "number"), [({"workers": 1}, 0), ({"prefill": 2, "decode": 1}, 2)]
)
async def test_the_last_worker_that_decodes_is_not_drained(
    options: dict[str, int], number: int
) -> None:
    async with running(Fakes(), **options) as (fleet, change):
        with pytest.raises(ConflictError, match="only one that can decode"):
            change.drain(number, 1.0)
        assert [worker.phase for worker in fleet.workers.values()] == ["ready"] * len(fleet.workers)


async def test_every_prefill_worker_may_be_drained() -> None:
    async with running(Fakes(), prefill=1, decode=1) as (fleet, change):
        change.drain(0, 1.0)
        assert await finish(change) is None
        assert sorted(fleet.workers) == [1]


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (
            replace(LAYOUT, block_size=32),
            r"block size differs \(.* in \w+ worker \d, .*--block-size",
        ),
        (replace(LAYOUT, device="cuda"), r"device differs \(.*cuda in decode worker 1"),
        (None, "does not say what its KV is"),
    ],
    ids=["block-size", "device", "none"],
)
async def test_a_server_does_not_start_with_workers_that_cannot_exchange_kv(
    layout: KVLayout | None, text: str
) -> None:
    fakes = Fakes()
    fakes.layouts[Role.DECODE] = layout
    config = ServerConfig(prefill=1, decode=1)
    fleet = WorkerFleet(ENGINE, config, fakes, fakes, on_progress=print)
    async with asyncio.timeout(60):
        with pytest.raises(ConfigError, match=text):
            await fleet.run()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_an_added_worker_that_cannot_exchange_kv_is_refused(role: Role) -> None:
    fakes = Fakes()
    async with running(fakes, prefill=1, decode=1) as (fleet, change):
        fakes.layouts[role] = replace(LAYOUT, fingerprint="g")
        change.add(role, 1)
        error = await finish(change)
        assert error is not None
        assert f"(g in {role} worker 2, f in" in error
        async with asyncio.timeout(60):
            while len(fleet.workers) > 2:
                await asyncio.sleep(0.005)
        assert fakes.events == ["start 2.1", "end 2.1", "forget 2"]


@pytest.mark.parametrize(
    ("options", "role"),
    [({"workers": 1}, Role.MIXED), ({"prefill": 1, "decode": 1}, Role.DECODE)],
)
async def test_an_added_worker_that_differs_from_those_of_its_role_is_refused(
    options: dict[str, int], role: Role
) -> None:
    fakes = Fakes()
    async with running(fakes, **options) as (_, change):
        if role is Role.DECODE:
            change.drain(0, 1.0)  # nobody else to be compared with
            assert await finish(change) is None
        fakes.layouts[role] = replace(LAYOUT, model="n")
        change.add(role, 1)
        error = await finish(change)
        assert error is not None
        assert "take over KV or requests from each other, as their model differs (n in" in error
        fakes.layouts.clear()
        change.add(role, 1)
        assert await finish(change) is None


async def test_stand_ins_have_nothing_to_be_compared() -> None:
    fakes = Fakes()
    fakes.layouts[Role.MIXED] = None
    async with running(fakes, workers=2):
        pass


async def test_a_roll_brings_in_other_kv_and_what_died_is_replaced_by_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fakes = Fakes()
    async with running(fakes, prefill=1, decode=1) as (fleet, change):
        fakes.layouts = dict.fromkeys(Role, replace(LAYOUT, format_version=0))
        fleet.kill(1, 1)
        async with asyncio.timeout(60):
            while (1, 2, "1.2") not in fleet.ready():
                await asyncio.sleep(0.005)
        assert "event=worker_differs worker=1" in caplog.text
        change.roll(1.0)
        assert await finish(change) is None
        change.add(Role.PREFILL, 1)  # which is compared with those that were rolled
        assert await finish(change) is None


async def test_what_cannot_be_is_refused_with_a_sentence() -> None:
    fakes = Fakes(holds_device=True)
    async with running(fakes, prefill=1, decode=1) as (_, change):
        with pytest.raises(InvalidRequestError, match="give role prefill or decode"):
            change.add(Role.MIXED, 1)
        with pytest.raises(InvalidRequestError, match="at most 64"):
            change.add(Role.DECODE, 63)
        with pytest.raises(InvalidRequestError, match="no worker 7; there are 0, 1"):
            change.drain(7, 1.0)
        with pytest.raises(ConflictError, match="no room for a second"):
            change.roll(1.0)
        assert fakes.events == []
        change.add(Role.DECODE, 1)
        with pytest.raises(ConflictError, match="wait until that is done"):
            change.roll(1.0)
        await finish(change)


async def test_a_server_ends_with_its_last_worker_that_decodes() -> None:
    async with running(Fakes(), prefill=1, decode=2) as (fleet, change):
        error = RestartLimitError("It died.")
        prefill, first, last = fleet.workers.values()
        fleet._give_up(first, error)
        with pytest.raises(RestartLimitError):
            fleet._give_up(last, error)
        assert prefill.phase == "ready"
        last.phase = "ready"
        change.drain(first.number, 1.0)
        assert await finish(change) is None
        assert sorted(fleet.workers) == [0, 2]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_workers_that_are_added_together_share_the_machine_with_all() -> None:
    """On GPUs more sharers than there are would be refused."""
    fakes = Fakes()
    async with running(fakes, workers=2) as (_, change):
        change.add(Role.MIXED, 3)
        assert await finish(change) is None
        assert fakes.shares == [5, 5, 5]


async def test_nothing_is_changed_before_the_first_workers_are_ready() -> None:
    """A drain would look like a worker that could not start, and end the server."""
    fakes = Fakes()
    fakes.may_be_ready.clear()
    async with running(fakes, workers=2, num_ready=0) as (fleet, change):
        for begin in (
            lambda: change.drain(1, 1.0),
            lambda: change.add(Role.MIXED, 1),
            lambda: change.roll(1.0),
        ):
            with pytest.raises(ConflictError, match="is starting"):
                begin()
        assert fakes.events == []
        fakes.may_be_ready.set()
        await until(lambda: len(fleet.ready()) == 2)
        change.drain(1, 1.0)
        assert await finish(change) is None


async def test_a_system_that_starts_no_process_ends_the_addition_and_not_the_server() -> None:
    fakes = Fakes()
    async with running(fakes, workers=1) as (fleet, change):
        fakes.launch_error = UnavailableError("The system starts no further process.")
        change.add(Role.MIXED, 1)
        assert await finish(change) == "The system starts no further process."
        await until(lambda: sorted(fleet.workers) == [0])
        assert fleet.ready() == [(0, 1, "0.1")]
        fleet.kill(0, 1)  # neither can this one be started now, and it is tried again
        await until(lambda: fleet.workers[0].generation > 2)
        fakes.launch_error = None
        await until(fleet.ready)


async def test_an_addition_goes_on_with_the_process_after_one_that_died_at_once() -> None:
    fakes = Fakes()
    async with running(fakes, workers=1) as (fleet, change):
        fakes.unreachable.add((1, 1))
        change.add(Role.MIXED, 1)
        await until(lambda: len(fleet.ready()) == 2)
        fleet.kill(1, 1)
        assert await finish(change) is None
        assert fleet.ready()[1] == (1, 2, "1.2")


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_a_roll_on_gpus_waits_for_what_died_meanwhile_and_not_for_what_never_comes(
    is_given_up: bool,
) -> None:
    fakes = Fakes(holds_device=True)
    async with running(fakes, workers=3) as (fleet, change):
        fakes.drained.clear()
        change.roll(1.0)
        await until(lambda: fakes.events)
        if is_given_up:
            fleet._give_up(fleet.workers[1], RestartLimitError("It died."))
        else:
            fleet.kill(1, 1)
            await until(lambda: fleet.workers[1].phase == "starting")
        fakes.drained.set()
        assert await finish(change) == ("It died." if is_given_up else None)
        if not is_given_up:
            assert "drain 1.1" not in fakes.events
            assert "drain 1.2" not in fakes.events
            assert sorted(fleet.ready()) == [(n, 2, f"{n}.2") for n in range(3)]


async def test_a_server_ends_when_its_last_worker_that_is_not_given_up_was_drained() -> None:
    fakes = Fakes()
    async with running(fakes, workers=2) as (fleet, change):
        fakes.drained.clear()
        change.drain(0, 1.0)
        await until(lambda: fakes.events)
        fleet._give_up(fleet.workers[1], RestartLimitError("It died."))
        fakes.drained.set()
        assert await finish(change) is None
        await until(fleet._fatal.done)
        assert isinstance(fleet._fatal.exception(), RestartLimitError)


async def test_a_worker_that_shows_no_life_is_killed_and_replaced(monkeypatch) -> None:
    """By the limits of the server's own configuration; `test_liveness` has the rule."""
    is_frozen, limits = asyncio.Event(), []

    async def falls_silent(
        exited: asyncio.Event, num_heard: Callable[[], int], *limits_s: float
    ) -> bool:
        assert num_heard() == 1
        limits.append(limits_s)
        is_first = len(limits) <= 2
        await (is_frozen if is_first else exited).wait()
        return is_first

    monkeypatch.setattr(worker_fleet, "falls_silent", falls_silent)
    fakes = Fakes()
    async with running(fakes, workers=2, start_timeout_s=77) as (fleet, _):
        is_frozen.set()
        async with asyncio.timeout(60):
            while not {"use 0.2", "use 1.2"} <= set(fakes.events):
                await asyncio.sleep(0.005)
        assert {"end 0.1", "end 1.1"} <= set(fakes.events)
        assert len(fleet.ready()) == 2
    assert set(limits) == {(1000.0, 77)}
