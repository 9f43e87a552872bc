# SPDX-License-Identifier: Apache-2.0
"""What every child process of a server does first: its pipes, its signals, its limits."""

import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from pelton.core.errors import ConfigError
from pelton.serving.messages import Alive, encode_line

LOCK_NAME = "lock"
"""The file in a runtime directory that its users hold a lock on."""
MIN_OPEN_FILES = 128
"""Fewest that a server can start with: its own pipes and sockets, and some for clients."""


def take_over_stdout() -> Callable[[Any], None]:
    """Keeps the real stdout for messages and points everybody else's prints at stderr.

    Returns a function that sends one message as a line; a parent that is gone is ignored, because
    end of file on stdin already ends the process.
    """
    status_fd = os.dup(1)
    os.dup2(2, 1)

    def report(message: Any) -> None:
        try:
            os.write(status_fd, encode_line(message))
        except BrokenPipeError:
            return

    return report


def start_beating(report: Callable[[Any], None], interval_s: float) -> None:
    """Has a thread say `Alive` so often, whatever the others do."""

    def beat() -> NoReturn:
        while True:
            report(Alive())
            time.sleep(interval_s)

    threading.Thread(target=beat, daemon=True).start()


def read_first_line() -> bytes:
    """The first line of stdin, read byte-exact so that the rest stays in the pipe."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("The parent closed stdin before it sent a configuration.")
        line += byte
    return bytes(line)


def raise_file_limit() -> None:
    """As many open files as the system lets this user have, for this process and its children: a
    socket is one. Raises `ConfigError` where even that is too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < MIN_OPEN_FILES:
        raise ConfigError(
            f"This process may open {hard} files at once and needs {MIN_OPEN_FILES}, and more for"
            " many clients; raise the limit, for example with 'ulimit -n 4096'."
        )
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def set_up_logging(level: str) -> None:
    """One line per event on stderr, with the time and the process."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s pid=%(process)d %(message)s",
        stream=sys.stderr,
        force=True,
    )
    # It tells of each step of each kernel that it compiles.
    logging.getLogger("numba").setLevel(logging.WARNING)
