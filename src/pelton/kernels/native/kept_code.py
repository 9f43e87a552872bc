# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-calls
"""Compiled code on disk: used where it is whole and of these sources, kept where there is room.

Numba's own files end the process that reads a damaged one, or that finds no room or no directory to
write in; and it looks at the file that a function stands in alone, where code of others is compiled
in. So only the choice of the directory is Numba's: beside the source, or the user's cache. Imports
no torch.
"""

import functools
import hashlib
import logging
import pickle
import uuid
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import FunctionCache, NullCache
from numba.core.serialize import dumps

_DIGEST_BYTES = 32
_log = logging.getLogger("pelton.kernels")


def keep_code(compiled: Any, function: Any) -> Any:
    """Has Numba's `compiled` form of `function` look for its code on disk before it compiles, and
    leave it there. Returns it."""
    try:
        compiled._cache = _KeptCode(function)
    except RuntimeError as error:  # Numba finds no directory
        _warn_once(f"{error}; give one in NUMBA_CACHE_DIR")
        compiled._cache = NullCache()
    return compiled


class _KeptCode(FunctionCache):
    """Replaces only what reads and writes files."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        files: Any = _CodeFiles(Path(self.cache_path), self._impl.filename_base)
        self._cache_file = files

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(f"{self.cache_path}: {error.strerror}")


class _CodeFiles:
    """A file for each function, its signature, the processor and the sources: a digest, and what it
    is of. None is ever changed."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name

    def load(self, key: object) -> Any:
        """None: there is nothing that can be used."""
        path = self._find_path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn_once(f"{path}: {error.strerror}")
            return None
        data = content[_DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != content[:_DIGEST_BYTES]:
            _log.warning("event=kept_code_damaged path=%r", str(path))
            return None
        return pickle.loads(data)

    def save(self, key: object, code: object) -> None:
        """Raises `OSError`."""
        data, path = dumps(code), self._find_path(key)
        unfinished = path.with_suffix(f".{uuid.uuid4().hex[:16]}")
        try:
            unfinished.write_bytes(hashlib.sha256(data).digest() + data)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _find_path(self, key: object) -> Path:
        digest = hashlib.sha256(_find_sources() + repr(key).encode()).hexdigest()
        return self._directory / f"{self._name}.{digest[:32]}.code"


@functools.cache
def _find_sources() -> bytes:
    """A digest of all that code is compiled from and by."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning("event=code_not_kept effect='compiled at each start' reason=%r", reason)
