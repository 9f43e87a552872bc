# SPDX-License-Identifier: Apache-2.0
"""The main process of `pelton serve`: owns the listening socket, starts workers and frontends, and
keeps them running.

    supervisor ── listening socket, orders ──> frontends ── requests ──> workers
         └──────────────── configuration ─────────────────────────────────^

The socket stays open while any child is replaced, so clients wait in its backlog or get a 503,
never a refused connection. What operators ask of the workers comes here from a frontend, by a call.
SIGTERM or SIGINT drains: the frontends take nothing new and finish what runs; a second signal ends
everything at once.
"""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from pelton.core.config import EngineConfig, ServerConfig
from pelton.core.errors import ConfigError, ConflictError, PeltonError
from pelton.models.geometries import random_vocab_size
from pelton.serving import fleet_messages, messages
from pelton.serving.child_process import STOP_GRACE_S, ChildProcess
from pelton.serving.fleet_operations import FleetOperations
from pelton.serving.frontend_group import FrontendGroup
from pelton.serving.launcher import Launcher, LocalLauncher, WorkerHandle
from pelton.serving.local_calls import answer_calls, control_path
from pelton.serving.runtime_directory import RuntimeDirectory
from pelton.serving.worker_fleet import MAX_WORKERS, WorkerFleet

LISTEN_BACKLOG = 4096
_POLL_S = 0.02
_log = logging.getLogger("pelton.serving")


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


class Supervisor:
    """One server. `run` returns when it was told to stop; nothing is left running then."""

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        on_ready: Callable[[str], None],
        on_progress: Callable[[str], None],
        make_launcher: Callable[[RuntimeDirectory], Launcher] = LocalLauncher,
    ) -> None:
        """`on_ready` gets the URL once, when every worker takes requests."""
        self._engine_config, self._config = engine, server
        self._on_ready, self._on_progress = on_ready, on_progress
        self._make_launcher = make_launcher
        self._num_signals = 0

    async def run(self) -> None:
        """Raises the `ConfigError` that kept the server from starting, or `RestartLimitError`."""
        loop = asyncio.get_running_loop()
        # A thread waits for each worker that starts, and one for each that is stopped.
        loop.set_default_executor(ThreadPoolExecutor(2 * MAX_WORKERS))
        self._stop, self._stop_at_once = asyncio.Event(), asyncio.Event()
        with (
            bind_socket(self._config.host, self._config.port) as listener,
            closing(RuntimeDirectory()) as directory,
            closing(self._make_launcher(directory)) as launcher,
        ):
            await self._run(listener, directory, launcher)

    async def _run(
        self, listener: socket.socket, directory: RuntimeDirectory, launcher: Launcher
    ) -> None:
        self._frontends, self._fleet = self._make_parts(listener, directory, launcher)
        self._operations = FleetOperations(self._config, self._fleet, self._frontends)
        calls = await answer_calls(control_path(str(directory.path)), self._answer)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        parts = (self._fleet.run(), self._frontends.run(), self._wait_for_signal())
        tasks = [asyncio.create_task(part) for part in parts]
        announcing = asyncio.create_task(self._announce(make_url(listener)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._note_stopping()
            for task in done:
                task.result()
            if announcing.done():
                timeout_s = self._config.drain_timeout_s
                _log.info("event=drain timeout_s=%g", timeout_s)
                await self._frontends.drain_all(timeout_s, self._stop_at_once)
        finally:
            self._note_stopping()
            calls.close()
            await asyncio.to_thread(self._stop_children)
            for task in (*tasks, announcing):
                task.cancel()
            await asyncio.gather(*tasks, announcing, return_exceptions=True)

    def _make_parts(
        self, listener: socket.socket, directory: RuntimeDirectory, launcher: Launcher
    ) -> tuple[FrontendGroup, WorkerFleet]:
        model = self._engine_config.model
        start = messages.StartFrontend(
            config=self._config,
            model=model.model,
            listen_fd=listener.fileno(),
            directory=str(directory.path),
            vocab_size=random_vocab_size(model),
        )
        frontends = FrontendGroup(
            self._config,
            start,
            (listener.fileno(), directory.lock_fd),
            ready_workers=lambda: fleet.ready(),
            on_stalled=lambda worker, generation: fleet.kill(worker, generation),
        )
        fleet = WorkerFleet(
            self._engine_config, self._config, launcher, frontends, self._on_progress
        )
        return frontends, fleet

    def _note_stopping(self) -> None:
        self._fleet.is_stopping = self._frontends.is_stopping = True

    async def _wait_for_signal(self) -> None:
        await self._stop.wait()

    async def _announce(self, url: str) -> None:
        """Says that the server is ready, once it is."""
        while not self._is_ready():
            await asyncio.sleep(_POLL_S)
        self._on_ready(url)

    def _is_ready(self) -> bool:
        workers = [(number, generation) for number, generation, _ in self._fleet.ready()]
        is_whole = self._fleet.has_started and len(workers) == len(self._fleet.workers)
        return is_whole and self._frontends.has_all(workers)

    async def _answer(self, question: bytes) -> bytes:
        """What an operator asks through a frontend."""
        try:
            self._carry_out(fleet_messages.decode_request(question))
        except PeltonError as error:
            return fleet_messages.encode(fleet_messages.NotDone(messages.ErrorInfo.of(error)))
        entries = [worker.entry() for _, worker in sorted(self._fleet.workers.items())]
        return fleet_messages.encode(fleet_messages.Workers(entries, self._operations.newest))

    def _carry_out(self, request: fleet_messages.FleetRequest) -> None:
        if self._stop.is_set():
            raise ConflictError("The server is shutting down.")
        match request:
            case fleet_messages.AddWorkers(role, count):
                self._operations.add(role, count)
            case fleet_messages.DrainOne(worker, timeout_s):
                self._operations.drain(worker, timeout_s)
            case fleet_messages.RollWorkers(timeout_s):
                self._operations.roll(timeout_s)
            case fleet_messages.ListWorkers():
                pass

    def _on_signal(self) -> None:
        self._num_signals += 1
        (self._stop if self._num_signals == 1 else self._stop_at_once).set()

    def _stop_children(self) -> None:
        children: list[ChildProcess | WorkerHandle] = [
            *self._frontends.children(),
            *self._fleet.handles(),
        ]
        for child in children:
            child.ask_to_end()
        deadline_s = time.monotonic() + STOP_GRACE_S
        for child in children:
            child.stop(max(0.0, deadline_s - time.monotonic()))
