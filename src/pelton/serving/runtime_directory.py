# SPDX-License-Identifier: Apache-2.0
"""Where the sockets of a server's processes lie: a directory that only this user can enter.

A lock on a file in it is held by everybody who uses it, so a later start can tell what a killed
server left behind and remove it.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

from pelton.core.errors import ConfigError
from pelton.serving.process import LOCK_NAME

_DIRECTORY_PREFIX = "pelton-"
_MAX_SOCKET_PATH_BYTES = 107
"""What Linux has room for in the address of a Unix socket."""
_MAX_NAME_BYTES = len("/worker-63-999999")
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
