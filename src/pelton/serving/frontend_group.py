# SPDX-License-Identifier: Apache-2.0
"""The frontend processes of a server: keeps them running, and tells them of workers.

All accept connections from one socket that the supervisor holds, so that a connection goes to
whoever is free first, and none is refused while one of them is replaced. One that dies is started
again, alone, and learns of the workers that there are; the others notice nothing. One that stands
still is killed.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from pelton.core.config import ServerConfig
from pelton.core.env import HUGE_PAGES
from pelton.core.errors import PeltonError
from pelton.serving import messages
from pelton.serving.child_process import ChildProcess
from pelton.serving.liveness import falls_silent
from pelton.serving.restart_policy import RestartLimitError, RestartPolicy

_POLL_S = 0.02
_DRAIN_MARGIN_S = 5.0
"""How much longer than it was told a frontend may take to let requests end."""
_log = logging.getLogger("pelton.serving")

ReadyWorkers = Callable[[], Iterable[tuple[int, int, str]]]
"""Number, generation and address of each."""


@dataclass(slots=True)
class _Frontend:
    number: int
    child: ChildProcess | None = None
    is_listening: bool = False
    has_listened: bool = False
    """A process of it has."""
    start_error: PeltonError | None = None
    """What kept the newest process from starting."""
    is_given_up: bool = False
    told: set[tuple[int, int]] = field(default_factory=set)
    """Workers, by number and generation, that it was told to use and has not released."""
    used: set[tuple[int, int]] = field(default_factory=set)
    """Those of them that it says it sends requests to."""
    num_heard: int = 0
    """Lines that the newest process has said."""


class FrontendGroup:
    def __init__(
        self,
        config: ServerConfig,
        start: messages.StartFrontend,
        pass_fds: tuple[int, ...],
        ready_workers: ReadyWorkers,
        on_stalled: Callable[[int, int], None],
    ) -> None:
        """`start` without a number. `on_stalled` gets the number and generation of a worker that
        a frontend has not heard of for too long."""
        self._config, self._start, self._pass_fds = config, start, pass_fds
        self._ready_workers, self._on_stalled = ready_workers, on_stalled
        self._frontends = [_Frontend(number) for number in range(config.frontends)]
        self._loop = asyncio.get_running_loop()
        self.is_stopping = False
        """Set by the owner: ends of processes are wanted from now on."""

    async def run(self) -> None:
        """Keeps all running until it is cancelled. Raises the error that kept one from ever
        starting, or `RestartLimitError` with the last of them."""
        tasks = [asyncio.create_task(self._keep(n)) for n in range(len(self._frontends))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, number: int) -> None:
        frontend, policy = self._frontends[number], RestartPolicy()
        name = "frontend" if len(self._frontends) == 1 else f"frontend {number}"
        while not self.is_stopping:
            frontend.start_error = None
            try:
                code = await self._run_process(number, frontend)
            except PeltonError as error:
                frontend.start_error, code = error, None
            if frontend.start_error is not None and not frontend.has_listened:
                raise frontend.start_error
            if self.is_stopping:
                return
            _log.error(
                "event=frontend_exit frontend=%d code=%s error=%r",
                *(number, code, frontend.start_error),
            )
            try:
                await asyncio.sleep(policy.delay_s(name, time.monotonic()))
            except RestartLimitError as error:
                frontend.is_given_up = True
                if all(other.is_given_up for other in self._frontends):
                    raise
                _log.error("event=frontend_given_up frontend=%d error=%r", number, error.message)
                await asyncio.Event().wait()

    async def _run_process(self, number: int, frontend: _Frontend) -> int | None:
        """Starts a process and returns its code when it has ended."""
        exited = asyncio.Event()
        start = msgspec.structs.replace(self._start, number=number)
        frontend.child = child = ChildProcess(
            "pelton.serving.http.main",
            [],
            messages.encode_line(start),
            on_line=lambda line: self._from_thread(self._take_line, frontend, line),
            on_exit=lambda code: self._from_thread(exited.set),
            pass_fds=self._pass_fds,
            environment=HUGE_PAGES | os.environ,
        )
        limits_s = self._config.worker_heartbeat_s, self._config.start_timeout_s
        if await falls_silent(exited, lambda: frontend.num_heard, *limits_s):
            _log.error("event=frontend_frozen frontend=%d pid=%d", number, child.pid)
            child.kill()
            await exited.wait()
        frontend.num_heard = 0
        frontend.is_listening = False
        frontend.told.clear()
        frontend.used.clear()
        return child.returncode

    def _take_line(self, frontend: _Frontend, line: bytes) -> None:
        """A frontend's report; runs on the event loop."""
        frontend.num_heard += 1
        try:
            message = messages.decode_from_frontend(line)
        except msgspec.MsgspecError:
            _log.warning("event=frontend_line_not_understood line=%r", line[:200])
            return
        match message:
            case messages.Listening():
                frontend.is_listening = frontend.has_listened = True
                for worker in self._ready_workers():
                    self._tell(frontend, *worker)
            case messages.Serving(worker, generation):
                frontend.used.add((worker, generation))
                _log.info("event=serving worker=%d generation=%d", worker, generation)
            case messages.Released(worker, generation):
                frontend.told.discard((worker, generation))
            case messages.WorkerStalled(worker, generation):
                self._on_stalled(worker, generation)
            case messages.StartFailed(error):
                frontend.start_error = error.to_error()

    # What a fleet needs

    def use(self, worker: int, generation: int, address: str) -> None:
        for frontend in self._listening():
            self._tell(frontend, worker, generation, address)

    def forget(self, worker: int) -> None:
        for frontend in self._listening():
            self._send(frontend, messages.RemoveWorker(worker))
            _drop(frontend, worker)

    def has_all(self, workers: Iterable[tuple[int, int]]) -> bool:
        """Whether every frontend listens and sends requests to these."""
        wanted = set(workers)
        return all(f.is_listening and wanted <= f.used for f in self._frontends)

    def is_used(self, worker: int, generation: int) -> bool:
        """Whether all that listen send the worker requests."""
        listening = self._listening()
        return bool(listening) and all((worker, generation) in f.used for f in listening)

    async def drain(self, worker: int, generation: int, timeout_s: float) -> None:
        """Returns when none sends the worker requests or waits for one. A request that cannot go on
        elsewhere may take until its deadline."""
        key, users = (worker, generation), self._listening()
        for frontend in users:
            if key in frontend.told:
                self._send(frontend, messages.DrainWorker(worker, generation, timeout_s))
        limit_s = timeout_s + self._config.request_timeout_s + _DRAIN_MARGIN_S
        await _until(lambda: not any(key in f.told for f in users), limit_s)
        for frontend in users:
            if key in frontend.told:
                _log.error("event=drain_timed_out worker=%d frontend=%d", worker, frontend.number)

    # The end

    async def drain_all(self, timeout_s: float, stop_at_once: asyncio.Event) -> None:
        """Has all of them finish what they answer; returns when they have ended, or at once when
        `stop_at_once` is set."""
        frontends = self._listening()
        for frontend in frontends:
            self._send(frontend, messages.Drain(timeout_s))

        def is_over() -> bool:
            runs = any(f.child and f.child.returncode is None for f in frontends)
            return stop_at_once.is_set() or not runs

        await _until(is_over, timeout_s + _DRAIN_MARGIN_S)

    def children(self) -> list[ChildProcess]:
        """Of every process there is, ended or not."""
        return [f.child for f in self._frontends if f.child is not None]

    def _listening(self) -> list[_Frontend]:
        return [frontend for frontend in self._frontends if frontend.is_listening]

    def _tell(self, frontend: _Frontend, worker: int, generation: int, address: str) -> None:
        _drop(frontend, worker)
        frontend.told.add((worker, generation))
        self._send(frontend, messages.UseWorker(address, worker, generation))

    def _send(self, frontend: _Frontend, order: messages.ToFrontend) -> None:
        assert frontend.child is not None, "it listens"
        if frontend.child.has_room:
            frontend.child.send(messages.encode_line(order))
        else:  # it has stood still for hundreds of orders; to wait for it would stop all others
            _log.error("event=frontend_reads_nothing frontend=%d", frontend.number)
            frontend.child.kill()

    def _from_thread(self, function: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


def _drop(frontend: _Frontend, worker: int) -> None:
    """A frontend that is told of another process, or of none, leaves the one before at once."""
    frontend.told = {known for known in frontend.told if known[0] != worker}
    frontend.used = {known for known in frontend.used if known[0] != worker}


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it came true within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True
