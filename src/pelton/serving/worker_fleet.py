# SPDX-License-Identifier: Apache-2.0
"""The worker processes of a server: keeps them running.

Each worker has a number and a task that runs process after process under it; a worker's address
carries its generation, which grows with each. One that dies is started again, alone; one that dies
too often is given up, and with the last one that decodes the server ends. What operators change is
in `fleet_operations`.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from pelton.core.config import EngineConfig, Role, ServerConfig, WorkerPlace
from pelton.core.errors import ConfigError, PeltonError
from pelton.core.kv_transfer import explain_mismatch
from pelton.serving import messages
from pelton.serving.fleet_messages import WorkerEntry, WorkerPhase
from pelton.serving.launcher import Launcher, WorkerHandle
from pelton.serving.liveness import falls_silent
from pelton.serving.restart_policy import RestartLimitError, RestartPolicy

MAX_WORKERS = 64
_log = logging.getLogger("pelton.serving")


class Frontends(Protocol):
    """What a fleet needs of `FrontendGroup`."""

    def use(self, worker: int, generation: int, address: str) -> None:
        """Tells all of them of a process that takes requests."""
        ...

    def forget(self, worker: int) -> None:
        """Tells all of them that there is no such worker any more."""
        ...


@dataclass(slots=True)
class Worker:
    """A number, and the process that runs under it now."""

    place: WorkerPlace
    phase: WorkerPhase = "starting"
    generation: int = 0
    process: WorkerHandle | None = None
    was_ready: bool = False
    """A process of it has taken requests."""
    is_replacement: bool = False
    """Another worker, of the same role, ends for it."""
    is_leaving: bool = False
    """No process follows the one that runs."""
    is_restarting: bool = False
    """The process that runs ends because it is to be replaced."""
    ready: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done while the newest process takes requests, or once none can."""

    @property
    def number(self) -> int:
        return self.place.index

    @property
    def name(self) -> str:
        role = "" if self.place.role is Role.MIXED else f"{self.place.role} "
        return f"{role}worker {self.number}"

    @property
    def can_decode(self) -> bool:
        return self.place.role is not Role.PREFILL

    def expect_ready(self) -> None:
        """From now on `ready` is about the process to come."""
        if self.ready.done():
            self.ready = asyncio.get_running_loop().create_future()

    def fail(self, error: PeltonError) -> None:
        """Tells whoever waits for `ready`, if anybody does."""
        self.expect_ready()
        self.ready.set_exception(error)
        self.ready.exception()

    @property
    def holds_device(self) -> bool:
        """Its replacement must wait for its end."""
        return self.process is not None and self.process.holds_device

    def entry(self) -> WorkerEntry:
        process = "" if self.process is None else self.process.name
        return WorkerEntry(self.number, self.place.role, self.phase, self.generation, process)


class WorkerFleet:
    def __init__(
        self,
        engine: EngineConfig,
        config: ServerConfig,
        launcher: Launcher,
        frontends: Frontends,
        on_progress: Callable[[str], None],
    ) -> None:
        """`on_progress` is called on threads of the launcher's."""
        self._engine, self._config = engine, config
        self._launcher, self._frontends = launcher, frontends
        self._on_progress = on_progress
        self.workers: dict[int, Worker] = {}
        self.is_stopping = False
        """Set by the owner: ends of processes are wanted from now on."""
        self._first: list[Worker] = []
        self._generations: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._fatal: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Starts the first workers and keeps all that there are, until it is cancelled. Raises the
        error that kept one of the first from starting, or `RestartLimitError`."""
        roles = self._config.roles
        self._first = [self.open(role, len(roles)) for role in roles]
        for worker in self._first:
            self.spawn(self._start_or_fail(worker))
        try:
            await self._fatal
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start_or_fail(self, worker: Worker) -> None:
        await worker.ready

    @property
    def has_started(self) -> bool:
        """Every one of the first workers has taken requests."""
        return bool(self._first) and all(worker.was_ready for worker in self._first)

    def ready(self) -> list[tuple[int, int, str]]:
        """Number, generation and address of every process that takes requests."""
        return [
            (w.number, w.generation, w.process.address)
            for w in self.workers.values()
            if w.phase == "ready" and w.process is not None
        ]

    def handles(self) -> list[WorkerHandle]:
        """Of every process there is, ended or not."""
        return [w.process for w in self.workers.values() if w.process is not None]

    def kill(self, number: int, generation: int) -> None:
        """Ends a process that hangs; another follows."""
        worker = self.workers.get(number)
        if worker is not None and worker.process is not None and worker.generation == generation:
            _log.error("event=worker_stalled worker=%d generation=%d", number, generation)
            worker.process.kill()

    def open(self, role: Role, num_workers: int, *, is_replacement: bool = False) -> Worker:
        """A worker under the lowest free number, whose task begins. `num_workers`: that will share
        the machine."""
        number = min(set(range(len(self.workers) + 1)) - set(self.workers))
        place = WorkerPlace(
            index=number,
            num_workers=num_workers,
            role=role,
            kv_transport=self._config.kv_transport_of_workers,
        )
        worker = self.workers[number] = Worker(place, is_replacement=is_replacement)
        self.spawn(self._keep(worker))
        return worker

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs it until `run` ends. An error that it raises ends the server."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    async def _keep(self, worker: Worker) -> None:
        """Runs one process after the other until the worker leaves."""
        policy = RestartPolicy()
        while not (self.is_stopping or worker.is_leaving):
            await self._run_process(worker)
            if self.is_stopping or worker.is_leaving or not worker.was_ready:
                break  # what never came up is not tried again: who asked for it is told
            if worker.is_restarting:
                worker.is_restarting = False
                continue
            try:
                await asyncio.sleep(policy.delay_s(worker.name, time.monotonic()))
            except RestartLimitError as error:
                self._give_up(worker, error)
                return
        if not self.is_stopping:
            self.remove(worker)

    def remove(self, worker: Worker) -> None:
        """Of which no process runs."""
        del self.workers[worker.number]
        self._frontends.forget(worker.number)
        # Another may have been given up while this one was drained.
        if self.has_started and not self._can_decode() and not self._fatal.done():
            self._fatal.set_exception(RestartLimitError("No worker is left that decodes."))

    def _can_decode(self) -> bool:
        """Now, or once a process has been started again."""
        return any(w.can_decode and w.phase != "given-up" for w in self.workers.values())

    async def _run_process(self, worker: Worker) -> None:
        """Starts a process and returns when it has ended."""
        number = worker.number
        self._generations[number] += 1
        worker.generation = generation = self._generations[number]
        worker.phase = "starting"
        worker.expect_ready()
        process: WorkerHandle | None = None
        worker.process = None
        exited = asyncio.Event()
        start_s = time.monotonic()
        try:
            worker.process = process = self._launch(worker, exited)
            await asyncio.to_thread(process.wait_ready, self._config.start_timeout_s)
            self._check_layout(worker, process)
        except PeltonError as error:
            worker.fail(error)
            if not self.is_stopping:
                _log.error("event=worker_start_failed worker=%d error=%r", number, error.message)
        else:
            load_s = time.monotonic() - start_s
            _log.info(
                "event=worker_ready worker=%d generation=%d load_s=%.1f",
                *(number, generation, load_s),
            )
            is_wanted = not worker.is_leaving
            worker.phase = "ready" if is_wanted else "draining"
            if is_wanted:
                self._frontends.use(number, generation, process.address)
            worker.was_ready = True
            worker.ready.set_result(None)
            # Being ready was its first word.
            limits_s = self._config.worker_heartbeat_s, self._config.start_timeout_s
            if await falls_silent(exited, lambda: 1 + process.num_heartbeats, *limits_s):
                # Its clients see their connections close, and go on elsewhere.
                _log.error("event=worker_frozen worker=%d process=%r", number, process.name)
                process.kill()
                await exited.wait()
            worker.expect_ready()
        worker.phase = "draining" if worker.is_leaving or worker.is_restarting else "starting"
        if process is None:
            return
        await asyncio.to_thread(process.stop)
        if not self.is_stopping:
            level = logging.INFO if worker.phase == "draining" else logging.ERROR
            _log.log(
                level,
                "event=worker_exit worker=%d generation=%d code=%s",
                *(number, generation, process.returncode),
            )

    def _check_layout(self, worker: Worker, process: WorkerHandle) -> None:
        """Raises `ConfigError` for a newcomer that is not like every worker that takes requests.
        What takes the place of another is let in: its requests go on with what it has, and prompts
        are computed where they are decoded, which is better than no answers."""
        mismatches = [
            _explain_mismatch(worker, process, other, other.process)
            for other in self.workers.values()
            if other.phase == "ready" and other.process is not None
        ]
        mismatch = next(filter(None, mismatches), None)
        if mismatch is None:
            return
        if not (worker.was_ready or worker.is_replacement):
            raise ConfigError(mismatch)
        _log.error("event=worker_differs worker=%d error=%r", worker.number, mismatch)

    def _launch(self, worker: Worker, exited: asyncio.Event) -> WorkerHandle:
        start = messages.StartWorker(
            self._engine,
            worker.place,
            self._config.worker_heartbeat_s,
            log_level=self._config.log_level,
        )
        return self._launcher.launch(
            start,
            worker.generation,
            on_progress=lambda phase: self._report_progress(worker, phase),
            on_exit=lambda code: self._from_thread(exited),
        )

    def _give_up(self, worker: Worker, error: RestartLimitError) -> None:
        """Leaves the serving to the others; raises `error` if none of them decodes."""
        worker.phase = "given-up"
        worker.fail(error)
        if not self._can_decode():
            raise error
        _log.error("event=worker_given_up worker=%d error=%r", worker.number, error.message)

    def _report_progress(self, worker: Worker, phase: str) -> None:
        """Called on a thread."""
        is_alone = worker.place.num_workers == 1
        self._on_progress(phase if is_alone else f"{worker.name}: {phase}")

    def _from_thread(self, event: asyncio.Event) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(event.set)


def _explain_mismatch(
    worker: Worker, process: WorkerHandle, other: Worker, other_process: WorkerHandle
) -> str | None:
    """Why one cannot take over what the other has."""
    if process.layout == other_process.layout:
        return None
    if process.layout is None or other_process.layout is None:
        return "A worker does not say what its KV is: start all workers from one installation."
    names = f"in {worker.name}", f"in {other.name}"
    return explain_mismatch(process.layout, other_process.layout, *names)
