# SPDX-License-Identifier: Apache-2.0
"""Starts the child processes of a server on this machine, watches them, and stops them.

A child gets its orders as lines on stdin and reports as lines on stdout; stderr is shared. Its
stdin ends when the parent does, however the parent ends, and then so does the child. Sockets
between processes lie in a directory that only this user can enter; a lock on a file in it is held
by everybody who uses it, so a later start can tell what a killed server left behind and remove it.
"""

import fcntl
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from pelton.core.config import EngineConfig, WorkerPlace
from pelton.core.env import WAITING_THREADS_SLEEP
from pelton.core.errors import ConfigError, UnavailableError, WorkerLostError
from pelton.serving import messages
from pelton.serving.process import LOCK_NAME

STOP_GRACE_S = 2.0
"""How long a child may take to end once it was asked to."""
_DIRECTORY_PREFIX = "pelton-"
_MAX_SOCKET_PATH_BYTES = 107
"""What Linux has room for in the address of a Unix socket."""
_MAX_NAME_BYTES = len("/worker-63-999999")
_ALONE = WorkerPlace()
_log = logging.getLogger("pelton.serving")


class RuntimeDirectory:
    """A directory of mode 0700 for sockets, removed on close or by a later start."""

    def __init__(self) -> None:
        try:
            _remove_abandoned()
            self.path, self.lock_fd = _make_locked_directory()
        except OSError as error:
            raise ConfigError(
                f"No directory for temporary files can be used: {error.strerror}; set TMPDIR to"
                " one that can be written."
            ) from error
        if len(os.fsencode(self.path)) + _MAX_NAME_BYTES > _MAX_SOCKET_PATH_BYTES:
            self.close()
            raise ConfigError(
                f"The path {self.path} is too long for a socket; set TMPDIR to a directory with a"
                " shorter one."
            )

    def make_address(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def _make_locked_directory() -> tuple[Path, int]:
    """A new directory and the descriptor that holds its lock. Until the lock is held, another
    start may take the directory for an abandoned one and remove it: then the next try is made."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX))
        lock_fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock_fd), os.stat(path / LOCK_NAME)):
                return path, lock_fd
        except (BlockingIOError, FileNotFoundError):
            _log.debug("event=directory_taken path=%s", path)
        os.close(lock_fd)


def _remove_abandoned() -> None:
    """Removes directories of this user whose lock nobody holds any more."""
    for path in Path(tempfile.gettempdir()).glob(_DIRECTORY_PREFIX + "*"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            lock_fd = os.open(path / LOCK_NAME, os.O_RDWR)
        except OSError:
            continue  # gone already, or not one of ours
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock_fd)


class ChildProcess:
    """A Python module run as a child. The callbacks run on a thread of the parent."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        first_line: bytes,
        *,
        on_line: Callable[[bytes], None],
        on_exit: Callable[[int], None],
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` None: this process's own."""
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=pass_fds,
            env=environment,
            start_new_session=True,  # a Ctrl-C at the terminal is the parent's to handle
        )
        self._on_line, self._on_exit = on_line, on_exit
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.send(first_line)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def send(self, line: bytes) -> None:
        """Writes one line; a child that is gone reports it through `on_exit`."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(line)
            self._popen.stdin.flush()
        except (BrokenPipeError, ValueError):
            _log.debug("event=child_gone pid=%d", self.pid)

    def kill(self) -> None:
        self._popen.kill()

    def ask_to_end(self) -> None:
        """Closes the child's stdin, which ends it soon. Idempotent."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.close()
        except BrokenPipeError:
            _log.debug("event=child_gone pid=%d", self.pid)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the child: by its stdin, then by SIGKILL after `grace_s`. Idempotent."""
        self.ask_to_end()
        try:
            self._popen.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as lines:
            for line in lines:
                self._on_line(line)
        self._on_exit(self._popen.wait())


class WorkerProcess:
    """A worker on this machine. Leaving the context, or the death of this process, ends it."""

    def __init__(
        self,
        config: EngineConfig,
        directory: RuntimeDirectory,
        *,
        place: WorkerPlace = _ALONE,
        generation: int = 1,
        heartbeat_s: float = 0.0,
        on_progress: Callable[[str], None] | None = None,
        on_exit: Callable[[int], None] | None = None,
    ) -> None:
        """`heartbeat_s`: how often the ready worker says that it lives; 0: never."""
        self.num_heartbeats = 0
        self.address = directory.make_address(f"worker-{place.index}-{generation}")
        self.generation = generation
        self._on_progress, self._on_exit = on_progress, on_exit
        self._events: queue.Queue[messages.Ready | messages.Failed | int] = queue.Queue()
        self._owned_directory: RuntimeDirectory | None = None
        self._child = ChildProcess(
            "pelton.serving.worker",
            [self.address],
            messages.encode_line(messages.StartWorker(config, place, heartbeat_s)),
            on_line=self._take_line,
            on_exit=self._exited,
            pass_fds=(directory.lock_fd,),
            environment=WAITING_THREADS_SLEEP | os.environ,
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """None while it lives; negative: ended by that signal."""
        return self._child.returncode

    def wait_ready(self, timeout_s: float) -> None:
        """Blocks until the worker takes requests. Raises the `ConfigError` that kept it from
        starting, `WorkerLostError` if it died, `UnavailableError` after `timeout_s`.
        """
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise UnavailableError(
                f"The worker was not ready within {timeout_s:g} s; see --start-timeout-s."
            ) from None
        match event:
            case messages.Failed(error):
                raise error.to_error()
            case int(returncode):
                raise WorkerLostError(_describe_early_end(returncode))

    def kill(self) -> None:
        self._child.kill()

    def ask_to_end(self) -> None:
        self._child.ask_to_end()

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        self._child.stop(grace_s)
        Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)
        if self._owned_directory is not None:
            self._owned_directory.close()

    def own(self, directory: RuntimeDirectory) -> "WorkerProcess":
        """Makes `stop` remove the directory too."""
        self._owned_directory = directory
        return self

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _take_line(self, line: bytes) -> None:
        try:
            status = messages.decode_worker_status(line)
        except msgspec.MsgspecError:
            _log.warning("event=worker_line_not_understood line=%r", line[:200])
            return
        match status:
            case messages.Loading(phase):
                if self._on_progress is not None:
                    self._on_progress(phase)
            case messages.Ready() | messages.Failed():
                self._events.put(status)
            case messages.Alive():
                self.num_heartbeats += 1

    def _exited(self, returncode: int) -> None:
        self._events.put(returncode)
        if self._on_exit is not None:
            self._on_exit(returncode)


def _describe_early_end(returncode: int) -> str:
    if returncode == -signal.SIGKILL:
        return (
            "The worker was killed while it was starting, as the system does with a process for"
            " which memory runs out; take a smaller model, or lower --kv-memory-bytes or"
            " --max-num-batched-tokens."
        )
    return (
        f"The worker ended with code {returncode} while it was starting; its own message is above."
    )


def launch_worker(
    config: EngineConfig,
    *,
    start_timeout_s: float = 600.0,
    on_progress: Callable[[str], None] | None = None,
) -> WorkerProcess:
    """Starts a worker and waits until it takes requests; use as a context manager.

    Raises what `WorkerProcess.wait_ready` raises, with nothing left running.
    """
    directory = RuntimeDirectory()
    worker = WorkerProcess(config, directory, on_progress=on_progress).own(directory)
    start_s = time.monotonic()
    try:
        worker.wait_ready(start_timeout_s)
    except BaseException:
        worker.stop()
        raise
    _log.info("event=worker_ready pid=%d start_s=%.1f", worker.pid, time.monotonic() - start_s)
    return worker
