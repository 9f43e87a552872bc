# SPDX-License-Identifier: Apache-2.0
"""The harness's end of the load process: starts it, gives commands, waits for replies."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from pelton.bench.load_messages import (
    MAX_LINE_BYTES,
    Abort,
    ClosedLoopDone,
    Command,
    LoadFailed,
    LoadGenDone,
    Progress,
    Ready,
    Reply,
    RunClosedLoop,
    RunLoadGen,
    Setup,
    decode_reply,
    encode,
)
from pelton.bench.measurements import RequestRecord
from pelton.core.errors import PeltonError

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0


class LoadProcessError(PeltonError):
    """The load process ended or said that it cannot go on."""


class LoadClient:
    """One load process. Commands are given one after the other."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run_closed_loop(self, command: RunClosedLoop) -> list[RequestRecord]:
        self._send(command)
        reply = await self._receive()
        assert isinstance(reply, ClosedLoopDone), reply
        return reply.records

    async def run_loadgen(
        self, command: RunLoadGen, on_progress: Callable[[Progress], None]
    ) -> LoadGenDone:
        self._send(command)
        while True:
            reply = await self._receive()
            if isinstance(reply, LoadGenDone):
                return reply
            assert isinstance(reply, Progress), reply
            on_progress(reply)

    def abort(self, reason: str) -> None:
        """The command under way comes back at once with what is known."""
        self._send(Abort(reason=reason))

    async def start(self, setup: Setup) -> None:
        self._send(setup)
        async with asyncio.timeout(_START_TIMEOUT_S):
            reply = await self._receive()
        assert isinstance(reply, Ready), reply

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _send(self, command: Command) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(encode(command) + b"\n")

    async def _receive(self) -> Reply:
        assert self._process.stdout is not None
        while True:
            line = await self._process.stdout.readline()
            if not line:
                code = await self._process.wait()
                raise LoadProcessError(f"The load process ended unasked, exit code {code}.")
            if not line.startswith(b"{"):
                # LoadGen itself prints a line or two to stdout when it meets an error.
                sys.stderr.write(line.decode(errors="replace"))
                continue
            reply: Reply = decode_reply(line)
            if isinstance(reply, LoadFailed):
                raise LoadProcessError(f"The load process failed: {reply.reason}")
            return reply


@asynccontextmanager
async def launch_load_process(setup: Setup) -> AsyncGenerator[LoadClient, None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "pelton.bench.loadgen_process",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES, start_new_session=True,
    )  # fmt: skip
    client = LoadClient(process)
    try:
        await client.start(setup)
        yield client
    finally:
        await client.stop()
