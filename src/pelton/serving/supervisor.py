# SPDX-License-Identifier: Apache-2.0
"""The main process of `pelton serve`: owns the listening socket, starts the workers and a frontend,
and keeps them running.

    supervisor ── listening socket, orders ──> frontend ── requests ──> workers
         └──────────────── configuration ─────────────────────────────────^

The socket stays open while any child is replaced, so clients wait in its backlog or get a 503,
never a refused connection. A worker's address carries its generation; a frontend is told each new
one. A worker that dies is replaced alone; one that dies too often is given up, and with the last
one that decodes the server ends. SIGTERM or SIGINT drains: the frontend takes nothing new and
finishes what runs; a second signal ends everything at once.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from pelton.core.config import EngineConfig, Role, ServerConfig, WorkerPlace
from pelton.core.errors import ConfigError, PeltonError
from pelton.models.geometries import random_vocab_size
from pelton.serving import messages
from pelton.serving.child_process import STOP_GRACE_S, ChildProcess
from pelton.serving.launcher import Launcher, LocalLauncher, WorkerHandle
from pelton.serving.runtime_directory import RuntimeDirectory

LISTEN_BACKLOG = 4096
_LOOKS_PER_HEARTBEAT = 4
_DRAIN_MARGIN_S = 5.0
"""How much longer than `drain_timeout_s` a frontend may take to exit."""
_log = logging.getLogger("pelton.serving")


class RestartLimitError(PeltonError):
    """A child process died too often in a short time."""


@dataclass(slots=True)
class RestartPolicy:
    """When a child that died is started again: later each time, and not for ever."""

    max_restarts: int = 5
    window_s: float = 300.0
    first_delay_s: float = 0.25
    max_delay_s: float = 10.0
    _deaths_s: deque[float] = field(default_factory=deque)

    def next_delay_s(self, now_s: float) -> float | None:
        """Notes a death at `now_s`; None: it has died too often within the window."""
        while self._deaths_s and now_s - self._deaths_s[0] > self.window_s:
            self._deaths_s.popleft()
        self._deaths_s.append(now_s)
        if len(self._deaths_s) > self.max_restarts:
            return None
        doublings: float = 2.0 ** (len(self._deaths_s) - 1)
        return min(self.first_delay_s * doublings, self.max_delay_s)


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening TCP socket; `ConfigError` when the address cannot be had."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except (OSError, UnicodeError) as error:  # the latter for what cannot be a host's name
        if listener is not None:
            listener.close()
        reason = error.strerror or error if isinstance(error, OSError) else "no name of a host"
        raise ConfigError(
            f"Cannot listen on {host[:256]} port {port}: {reason}; choose another with --host and"
            " --port.",
            param="port",
        ) from error
    return listener


def make_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(slots=True)
class _Worker:
    """What the supervisor knows of a place and of the process in it."""

    place: WorkerPlace
    process: WorkerHandle | None = None
    ready_generation: int = 0
    """Of the process that takes requests; 0: none does."""
    has_served: bool = False
    is_given_up: bool = False

    @property
    def name(self) -> str:
        role = "" if self.place.role is Role.MIXED else f"{self.place.role} "
        return "worker" if self.place.num_workers == 1 else f"{role}worker {self.place.index}"


class Supervisor:
    """One server. `run` returns when it was told to stop; nothing is left running then."""

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        on_ready: Callable[[str], None],
        on_progress: Callable[[str], None],
    ) -> None:
        """`on_ready` gets the URL once, when every worker takes requests."""
        self._engine_config, self._config = engine, server
        self._on_ready, self._on_progress = on_ready, on_progress
        roles = server.roles
        self._workers = [
            _Worker(
                WorkerPlace(
                    index=index,
                    num_workers=len(roles),
                    role=role,
                    kv_transport=server.kv_transport,
                )
            )
            for index, role in enumerate(roles)
        ]
        self._frontend: ChildProcess | None = None
        self._is_frontend_listening = False
        self._is_stopping = False
        self._num_signals = 0

    async def run(self) -> None:
        """Raises the `ConfigError` that kept the server from starting, or `RestartLimitError`."""
        self._loop = asyncio.get_running_loop()
        # A thread waits for each worker that starts, and one more stops them.
        self._loop.set_default_executor(ThreadPoolExecutor(len(self._workers) + 2))
        self._stop, self._stop_at_once = asyncio.Event(), asyncio.Event()
        self._is_announced = False
        self._listener = bind_socket(self._config.host, self._config.port)
        self._directory = RuntimeDirectory()
        self._launcher: Launcher = LocalLauncher(self._directory)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        tasks = [asyncio.create_task(self._keep_worker(worker)) for worker in self._workers]
        tasks.append(asyncio.create_task(self._keep_frontend()))
        tasks.append(asyncio.create_task(self._wait_for_signal()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._is_stopping = True
            for task in tasks:
                if task.done():
                    task.result()
            await self._drain()
        finally:
            self._is_stopping = True
            await asyncio.to_thread(self._stop_children)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._listener.close()
            self._launcher.close()
            self._directory.close()

    async def _wait_for_signal(self) -> None:
        await self._stop.wait()

    async def _keep_worker(self, worker: _Worker) -> None:
        policy, generation, index = RestartPolicy(), 0, worker.place.index
        while not self._is_stopping:
            generation += 1
            exited = asyncio.Event()
            start_s = time.monotonic()
            heartbeat_s = self._config.worker_heartbeat_s
            worker.process = process = self._launcher.launch(
                messages.StartWorker(self._engine_config, worker.place, heartbeat_s),
                generation,
                on_progress=lambda phase: self._report_progress(worker, phase),
                on_exit=lambda code, event=exited: self._from_thread(event.set),  # type: ignore[misc]
            )
            try:
                await asyncio.to_thread(process.wait_ready, self._config.start_timeout_s)
            except PeltonError as error:
                if self._is_stopping:
                    return
                if generation == 1:
                    raise
                _log.error("event=worker_start_failed worker=%d error=%r", index, error.message)
            else:
                load_s = time.monotonic() - start_s
                _log.info(
                    "event=worker_ready worker=%d generation=%d load_s=%.1f",
                    *(index, generation, load_s),
                )
                worker.ready_generation = generation
                self._tell_frontend_of(worker)
                await self._watch(process, exited)
                worker.ready_generation = 0
            await asyncio.to_thread(process.stop)
            if not self._is_stopping:
                _log.error(
                    "event=worker_exit worker=%d generation=%d code=%s",
                    *(index, generation, process.returncode),
                )
                try:
                    await self._back_off(policy, worker.name)
                except RestartLimitError as error:
                    await self._give_up(worker, error)

    async def _watch(self, process: WorkerHandle, exited: asyncio.Event) -> None:
        """Returns when the worker has ended; ends one that shows no life for two heartbeats. Its
        clients then see their connections close, and go on elsewhere."""
        silence_s, num_heard = 0.0, -1
        interval_s = self._config.worker_heartbeat_s / _LOOKS_PER_HEARTBEAT
        while not exited.is_set():
            # Looks are counted, not the clock: while this process stood still, so did its ears.
            silence_s = silence_s + interval_s if process.num_heartbeats == num_heard else 0.0
            num_heard = process.num_heartbeats
            if silence_s >= 2 * self._config.worker_heartbeat_s:
                _log.error("event=worker_frozen process=%r silence_s=%g", process.name, silence_s)
                process.kill()
                await exited.wait()
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(exited.wait(), interval_s)

    async def _give_up(self, worker: _Worker, error: RestartLimitError) -> None:
        """Leaves the serving to the others; raises `error` if none of them decodes."""
        worker.is_given_up = True
        decoding = [w for w in self._workers if w.place.role is not Role.PREFILL]
        if all(other.is_given_up for other in decoding):
            raise error
        _log.error("event=worker_given_up worker=%d error=%r", worker.place.index, error.message)
        await self._stop.wait()

    def _report_progress(self, worker: _Worker, phase: str) -> None:
        """Called on a thread."""
        is_alone = worker.place.num_workers == 1
        self._on_progress(phase if is_alone else f"{worker.name}: {phase}")

    async def _keep_frontend(self) -> None:
        policy = RestartPolicy()
        while not self._is_stopping:
            exited = asyncio.Event()
            self._start_error: PeltonError | None = None
            model = self._engine_config.model
            start = messages.StartFrontend(
                self._config, model.model, self._listener.fileno(), random_vocab_size(model)
            )
            self._frontend = frontend = ChildProcess(
                "pelton.serving.http.main",
                [],
                messages.encode_line(start),
                on_line=lambda line: self._from_thread(self._take_line, line),
                on_exit=lambda code, event=exited: self._from_thread(event.set),  # type: ignore[misc]
                pass_fds=(self._listener.fileno(), self._directory.lock_fd),
            )
            await exited.wait()
            self._is_frontend_listening = False
            if self._start_error is not None:
                raise self._start_error
            if not self._is_stopping:
                _log.error("event=frontend_exit code=%s", frontend.returncode)
                await self._back_off(policy, "frontend")

    async def _back_off(self, policy: RestartPolicy, name: str) -> None:
        delay_s = policy.next_delay_s(time.monotonic())
        if delay_s is None:
            raise RestartLimitError(
                f"The {name} died {policy.max_restarts + 1} times within {policy.window_s:g} s;"
                " its messages are above."
            )
        await asyncio.sleep(delay_s)

    def _take_line(self, line: bytes) -> None:
        """A frontend's report; runs on the event loop."""
        try:
            message = messages.decode_from_frontend(line)
        except msgspec.MsgspecError:
            _log.warning("event=frontend_line_not_understood line=%r", line[:200])
            return
        match message:
            case messages.Listening():
                self._is_frontend_listening = True
                for worker in self._workers:
                    self._tell_frontend_of(worker)
            case messages.Serving(index, generation):
                self._workers[index].has_served = True
                _log.info("event=serving worker=%d generation=%d", index, generation)
                if not self._is_announced and all(w.has_served for w in self._workers):
                    self._is_announced = True
                    self._on_ready(make_url(self._listener))
            case messages.WorkerStalled(index, generation):
                worker = self._workers[index]
                if worker.process is not None and generation == worker.ready_generation:
                    _log.error("event=worker_stalled worker=%d generation=%d", index, generation)
                    worker.process.kill()
            case messages.StartFailed(error):
                self._start_error = error.to_error()

    def _tell_frontend_of(self, worker: _Worker) -> None:
        generation = worker.ready_generation
        if not self._is_frontend_listening or not generation:
            return  # whichever of the two comes later calls this again
        assert self._frontend is not None
        assert worker.process is not None
        order = messages.UseWorker(worker.process.address, worker.place.index, generation)
        self._frontend.send(messages.encode_line(order))

    async def _drain(self) -> None:
        """Returns when the frontend is done, or at a second signal."""
        if self._frontend is None or not self._is_announced:
            return
        timeout_s = self._config.drain_timeout_s
        _log.info("event=drain timeout_s=%g", timeout_s)
        self._frontend.send(messages.encode_line(messages.Drain(timeout_s)))
        deadline_s = time.monotonic() + timeout_s + _DRAIN_MARGIN_S
        while self._frontend.returncode is None and time.monotonic() < deadline_s:
            try:
                await asyncio.wait_for(self._stop_at_once.wait(), 0.02)
            except TimeoutError:
                continue
            return

    def _on_signal(self) -> None:
        self._num_signals += 1
        (self._stop if self._num_signals == 1 else self._stop_at_once).set()

    def _from_thread(self, function: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _stop_children(self) -> None:
        children: list[ChildProcess | WorkerHandle] = [
            worker.process for worker in self._workers if worker.process is not None
        ]
        if self._frontend is not None:
            children.insert(0, self._frontend)
        for child in children:
            child.ask_to_end()
        deadline_s = time.monotonic() + STOP_GRACE_S
        for child in children:
            child.stop(max(0.0, deadline_s - time.monotonic()))
