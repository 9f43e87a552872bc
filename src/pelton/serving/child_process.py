# SPDX-License-Identifier: Apache-2.0
"""A child process of a server on this machine.

It gets its orders as lines on stdin and reports as lines on stdout; stderr is shared. Its stdin
ends when the parent does, however the parent ends, and then so does the child.
"""

import logging
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from pelton.core.errors import UnavailableError

STOP_GRACE_S = 2.0
"""How long a child may take to end once it was asked to."""
_log = logging.getLogger("pelton.serving")


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
        """`environment` None: this process's own. Raises `UnavailableError` where the system lets
        none be started."""
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=pass_fds,
                env=environment,
                start_new_session=True,  # a Ctrl-C at the terminal is the parent's to handle
            )
        except OSError as error:
            raise UnavailableError(
                f"The system starts no further process: {error.strerror}; see 'ulimit -a'."
            ) from error
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

    @property
    def has_room(self) -> bool:
        """Whether `send` would not wait for the child to read; one that is stopped never does."""
        poll = select.poll()
        assert self._popen.stdin is not None
        try:
            poll.register(self._popen.stdin, select.POLLOUT)
        except ValueError:  # it was asked to end
            return True
        return bool(poll.poll(0))

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
