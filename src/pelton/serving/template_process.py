# SPDX-License-Identifier: Apache-2.0
"""Renders templates that came with a request in a process of their own.

    frontend ── length, RenderOrder as JSON ──> python -m pelton.serving.template_process
             <── length, Rendered as JSON ─────

A stranger's template can hold the interpreter for as long as it likes inside one operation, such
as comparing lists that contain each other many times. Here that costs no stream anything: the
kernel ends the process once a rendering has used its computing time, and the next template gets a
new process. Its memory is bounded as well. It ends when its stdin does.
"""

import asyncio
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec

from pelton.core.errors import InvalidRequestError, OverloadedError, PeltonError
from pelton.serving.chat_template import ChatTemplate
from pelton.serving.messages import ErrorInfo

CPU_LIMIT_S = 1.0
"""Computing time of one rendering."""
_WALL_LIMIT_S = 20.0
"""On a machine so busy that the computing time is not to be had."""
_MAX_MEMORY_BYTES = 2**30
_MAX_WAITING = 32
_LENGTH = struct.Struct("<Q")


class RenderOrder(msgspec.Struct, array_like=True, frozen=True):
    special_tokens: dict[str, str]
    arguments: dict[str, Any]
    """Of `ChatTemplate.render`, the template among them."""
    variables: dict[str, Any]
    cpu_limit_s: float


class Rendered(msgspec.Struct, array_like=True, frozen=True):
    """One of the two is set."""

    text: str | None = None
    error: ErrorInfo | None = None


class TemplateProcess:
    """Started by the first rendering that needs it; renders one template at a time."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._process: asyncio.subprocess.Process | None = None
        self._is_rendering = asyncio.Lock()
        self._num_waiting = 0
        self.cpu_limit_s = CPU_LIMIT_S

    async def render(self, arguments: dict[str, Any], variables: dict[str, Any]) -> str:
        """What `ChatTemplate.render(**arguments, **variables)` returns or raises, besides an
        `InvalidRequestError` for a rendering that takes too long and `OverloadedError` when too
        many wait for theirs."""
        if self._num_waiting >= _MAX_WAITING:
            raise OverloadedError(
                f"{self._num_waiting} requests with a chat_template of their own are waiting for"
                " it to be rendered; try again later."
            )
        order = RenderOrder(self._special_tokens, arguments, variables, self.cpu_limit_s)
        self._num_waiting += 1
        try:
            async with self._is_rendering:
                rendered = await self._ask(order)
        finally:
            self._num_waiting -= 1
        if rendered.error is not None:
            raise rendered.error.to_error()
        assert rendered.text is not None
        return rendered.text

    def kill(self) -> "asyncio.subprocess.Process | None":
        """Ends the process, in the middle of a rendering too. The next rendering starts another."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            if process.returncode is None:
                process.kill()
        return process

    async def close(self) -> None:
        """`kill`, and waits until the process is gone."""
        if (process := self.kill()) is not None:
            await process.wait()

    async def _ask(self, order: RenderOrder) -> Rendered:
        if self._process is not None and self._process.returncode is not None:
            self.kill()
        if self._process is None:
            self._process = await _start()
        process = self._process
        try:
            async with asyncio.timeout(_WALL_LIMIT_S):
                answer = await _exchange(process, msgspec.json.encode(order))
            return msgspec.json.decode(answer, type=Rendered)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await process.wait()
            self.kill()
            if code == -signal.SIGPROF:
                raise _took_too_long(order.cpu_limit_s) from None
            raise InvalidRequestError(
                "The chat template ended the process that rendered it; it may take too much"
                " memory.",
                param="chat_template",
            ) from None
        except TimeoutError:
            self.kill()
            raise _took_too_long(_WALL_LIMIT_S) from None
        except BaseException:
            self.kill()  # its answer would be taken for the next one's
            raise


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "pelton.serving.template_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )


async def _exchange(process: asyncio.subprocess.Process, data: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(data)) + data)
    await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return await process.stdout.readexactly(length)


def _took_too_long(limit_s: float) -> InvalidRequestError:
    return InvalidRequestError(
        f"The chat template takes more than {limit_s:g} s to render these messages; simplify it.",
        param="chat_template",
    )


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while header := orders.read(_LENGTH.size):
        answer = _answer(orders, *_LENGTH.unpack(header))
        answers.write(_LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _answer(orders: BinaryIO, length: int) -> bytes:
    order = msgspec.json.decode(orders.read(length), type=RenderOrder)
    # The signal's default is to end the process, whatever its interpreter is in the middle of.
    signal.setitimer(signal.ITIMER_PROF, order.cpu_limit_s)
    try:
        template = ChatTemplate(None, order.special_tokens)
        return msgspec.json.encode(Rendered(template.render(**order.arguments, **order.variables)))
    except PeltonError as error:
        return msgspec.json.encode(Rendered(error=ErrorInfo.of(error)))
    except (MemoryError, UnicodeEncodeError) as error:
        reason = "is too large" if isinstance(error, MemoryError) else "has half a surrogate pair"
        text = f"What the chat template writes {reason}."
        return msgspec.json.encode(
            Rendered(error=ErrorInfo.of(InvalidRequestError(text, param="chat_template")))
        )
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
