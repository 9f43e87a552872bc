# SPDX-License-Identifier: Apache-2.0
"""Memory that the machine refuses becomes a sentence that names the setting to lower.

Imports no torch, so that the worker's loop can tell such a failure from a bug.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pelton.core.errors import CapacityError

# How torch (CPU allocator, CUDA, sizes beyond 64 bits) and the system word it.
_SIGNS = (
    "out of memory",
    "not enough memory",
    "t allocate memory",
    "cannot allocate memory",
    "storage size calculation overflowed",
    "invalid buffer size",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory could not be had, of whichever device."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    is_torch_or_system = isinstance(error, (RuntimeError, OSError))
    return is_torch_or_system and any(sign in text for sign in _SIGNS)


@contextmanager
def allocating(what: str, remedy: str, *, param: str) -> Iterator[None]:
    """Makes a failed allocation inside a `CapacityError`: "There is no memory for `what`;
    `remedy`." Everything else passes."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(f"There is no memory for {what}; {remedy}.", param=param) from error
