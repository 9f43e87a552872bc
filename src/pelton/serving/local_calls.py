# SPDX-License-Identifier: Apache-2.0
"""Questions between the processes of a server, each with one answer: a Unix socket for each callee.

The supervisor answers what operators ask for through any frontend, and each frontend what the
others ask for a page that is about all of them. One question a connection; both are one JSON line.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from pelton.core.errors import UnavailableError

_MAX_LINE_BYTES = 2**24
_CALL_TIMEOUT_S = 10.0
"""For a caller to send its question, and for its connection to take the answer."""
_log = logging.getLogger("pelton.serving")

Answer = Callable[[bytes], Awaitable[bytes]]
"""Both without the end of the line."""


def control_path(directory: str) -> Path:
    """The supervisor's socket in the directory of a server."""
    return Path(directory, "control")


def frontend_path(directory: str, number: int) -> Path:
    return Path(directory, f"frontend-{number}")


async def answer_calls(path: Path, answer: Answer) -> asyncio.Server:
    """Answers calls until the result is closed. `answer` raises nothing that a caller can cause."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                question = await reader.readline()
            if question.endswith(b"\n"):
                writer.write(await answer(question[:-1]) + b"\n")
                async with asyncio.timeout(_CALL_TIMEOUT_S):
                    await writer.drain()
        except (OSError, TimeoutError, ValueError) as error:  # the caller left, or sent no line
            _log.debug("event=call_failed path=%s error=%r", path, error)
        finally:
            writer.close()

    path.unlink(missing_ok=True)  # of a process that was killed
    return await asyncio.start_unix_server(serve, path, limit=_MAX_LINE_BYTES)


async def call(path: Path, question: bytes, timeout_s: float = _CALL_TIMEOUT_S) -> bytes:
    """The answer. Raises `UnavailableError` where there is none within `timeout_s`."""
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(path, limit=_MAX_LINE_BYTES)
            writer.write(question + b"\n")
            line = await reader.readline()
    except (OSError, TimeoutError, ValueError) as error:
        raise UnavailableError(f"{path.name} does not answer: {error!r}.") from error
    finally:
        if writer is not None:
            writer.close()
    if not line.endswith(b"\n"):
        raise UnavailableError(f"{path.name} ended before it had answered.")
    return line[:-1]
