# SPDX-License-Identifier: Apache-2.0
"""Starting workers: the port that a supervisor uses, and its implementation on this machine."""

import logging
import os
import queue
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

import pelton
from pelton.core.config import EngineConfig, WorkerPlace
from pelton.core.env import WAITING_THREADS_SLEEP
from pelton.core.errors import ConfigError, UnavailableError, WorkerLostError
from pelton.core.kv_transfer import KVLayout
from pelton.serving import messages
from pelton.serving.child_process import STOP_GRACE_S, ChildProcess
from pelton.serving.runtime_directory import RuntimeDirectory

_ALONE = WorkerPlace()
_log = logging.getLogger("pelton.serving")


class WorkerHandle(Protocol):
    """A worker that was launched, wherever it runs. Calls may come from any thread."""

    @property
    def address(self) -> str:
        """Where its clients connect, by ZMQ; no two workers ever have the same."""
        ...

    @property
    def name(self) -> str:
        """What an operator finds it by, such as "pid 4711"."""
        ...

    @property
    def num_heartbeats(self) -> int:
        """How often it has said that it lives."""
        ...

    @property
    def holds_device(self) -> bool:
        """Whether it fills a GPU, so that its replacement must wait for its end. Known once it is
        ready."""
        ...

    @property
    def layout(self) -> KVLayout | None:
        """Of its KV; None: a stand-in, which has none. Known once it is ready."""
        ...

    @property
    def returncode(self) -> int | None:
        """None while it lives; negative: ended by that signal."""
        ...

    def wait_ready(self, timeout_s: float) -> None:
        """Blocks until the worker takes requests. Raises the `ConfigError` that kept it from
        starting, `WorkerLostError` if it died, `UnavailableError` after `timeout_s`."""
        ...

    def kill(self) -> None:
        """Ends it at once, whatever it does; returns before it has ended."""
        ...

    def ask_to_end(self) -> None:
        """Lets it end soon. Idempotent."""
        ...

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Asks it to end, kills it after `grace_s`, and gives back what it owned; blocks until
        that is done. Idempotent."""
        ...


class Launcher(Protocol):
    """Where workers run. One server has one launcher, which outlives all its workers."""

    def launch(
        self,
        start: messages.StartWorker,
        generation: int,
        *,
        on_progress: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> WorkerHandle:
        """Starts the worker of `start.place`, and returns before it is ready. `generation` grows
        with each process in that place. The callbacks run on a thread of the launcher's:
        `on_progress` with what is being done until it is ready, `on_exit` once, with its code."""
        ...

    def close(self) -> None:
        """Called once no worker is left. Idempotent."""
        ...


class LocalLauncher:
    """Workers are child processes on this machine, which end with this process."""

    def __init__(self, directory: RuntimeDirectory) -> None:
        """The directory stays its owner's to close."""
        self._directory = directory

    def launch(
        self,
        start: messages.StartWorker,
        generation: int,
        *,
        on_progress: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> WorkerHandle:
        return WorkerProcess(
            start.config,
            self._directory,
            place=start.place,
            generation=generation,
            heartbeat_s=start.heartbeat_s,
            log_level=start.log_level,
            on_progress=on_progress,
            on_exit=on_exit,
        )

    def close(self) -> None:
        """The workers' sockets went with them."""


class ReportedWorker(ABC):
    """What every `WorkerHandle` learns from the worker's lines, and from its end."""

    def __init__(
        self, on_progress: Callable[[str], None] | None, on_exit: Callable[[int], None] | None
    ) -> None:
        self.address = ""
        """Where its clients connect, known once it is ready."""
        self.num_heartbeats = 0
        self.holds_device = False
        self.layout: KVLayout | None = None
        self._on_progress, self._on_exit = on_progress, on_exit
        self._events: queue.Queue[messages.Ready | messages.Failed | int] = queue.Queue()

    def wait_ready(self, timeout_s: float) -> None:
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise UnavailableError(
                f"The worker was not ready within {timeout_s:g} s; see --start-timeout-s."
            ) from None
        match event:
            case messages.Ready():
                self.holds_device, self.address = event.holds_device, event.address
                self.layout = event.layout
            case messages.Failed(error):
                raise error.to_error()
            case int(returncode):
                raise WorkerLostError(self.describe_early_end(returncode))

    @abstractmethod
    def describe_early_end(self, returncode: int) -> str:
        """What is known of an end before it was ready."""

    def take_line(self, line: bytes) -> None:
        try:
            status = messages.decode_worker_status(line)
        except msgspec.MsgspecError:
            _log.warning("event=worker_line_not_understood line=%r", line[:200])
            if line.startswith(b'["'):  # a message, and not what some library prints
                self._refuse(f"and the worker another version, which says {line[:60]!r}")
            return
        match status:
            case messages.Started(protocol, version):
                if protocol != messages.PROTOCOL_VERSION:
                    self._refuse(f"and the worker {version}, protocol {protocol}")
            case messages.Loading(phase):
                if self._on_progress is not None:
                    self._on_progress(phase)
            case messages.Ready() | messages.Failed():
                self._events.put(status)
            case messages.Alive():
                self.num_heartbeats += 1

    def _refuse(self, worker: str) -> None:
        """Before it is ready."""
        mine = f"Pelton {pelton.__version__}, protocol {messages.PROTOCOL_VERSION}"
        error = ConfigError(f"The server runs {mine}, {worker}: start both from one installation.")
        self._events.put(messages.Failed(messages.ErrorInfo.of(error)))

    def _exited(self, returncode: int) -> None:
        self._events.put(returncode)
        if self._on_exit is not None:
            self._on_exit(returncode)


class WorkerProcess(ReportedWorker):
    """A worker on this machine: a `WorkerHandle`. Leaving the context, or the death of this
    process, ends it."""

    def __init__(
        self,
        config: EngineConfig,
        directory: RuntimeDirectory | None = None,
        *,
        place: WorkerPlace = _ALONE,
        generation: int = 1,
        heartbeat_s: float = 0.0,
        log_level: str = "warning",
        on_progress: Callable[[str], None] | None = None,
        on_exit: Callable[[int], None] | None = None,
    ) -> None:
        """`directory` None: one of its own, that goes with it. `heartbeat_s`: how often the ready
        worker says that it lives; 0: never."""
        super().__init__(on_progress, on_exit)
        self._owns_directory = directory is None
        self._directory = directory or RuntimeDirectory()
        self.address = self._directory.make_address(f"worker-{place.index}-{generation}")
        self._child = ChildProcess(
            "pelton.serving.worker",
            [self.address],
            messages.encode_line(
                messages.StartWorker(config, place, heartbeat_s, log_level=log_level)
            ),
            on_line=self.take_line,
            on_exit=self._exited,
            pass_fds=(self._directory.lock_fd,),
            environment=WAITING_THREADS_SLEEP | os.environ,
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def name(self) -> str:
        return f"pid {self.pid}"

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    def kill(self) -> None:
        self._child.kill()

    def ask_to_end(self) -> None:
        self._child.send(b"end\n")
        self._child.ask_to_end()

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        self.ask_to_end()
        self._child.stop(grace_s)
        Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)
        if self._owns_directory:
            self._directory.close()

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def describe_early_end(self, returncode: int) -> str:
        if returncode == -signal.SIGKILL:
            return (
                "The worker was killed while it was starting, as the system does with a process"
                " for which memory runs out; take a smaller model, or lower --kv-memory-bytes or"
                " --max-num-batched-tokens."
            )
        return (
            f"The worker ended with code {returncode} while it was starting; its own message is"
            " above."
        )
