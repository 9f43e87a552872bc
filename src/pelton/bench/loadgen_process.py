# SPDX-License-Identifier: Apache-2.0
"""The load process: sends requests and runs LoadGen, apart from everything that could delay it.

    python -m pelton.bench.loadgen_process

Commands come on stdin and replies go to stdout (`load_messages`). The main thread runs the event
loop of the client, a second one LoadGen; no engine and no harness work shares their interpreter
lock. The process ends when stdin does, so it never outlives the harness.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import NoReturn

import msgspec
import uvloop

from pelton.bench.http_sut import HttpSut
from pelton.bench.load_messages import (
    MAX_LINE_BYTES,
    Abort,
    ClosedLoopDone,
    Command,
    HttpTarget,
    LoadFailed,
    LoadGenDone,
    Progress,
    Ready,
    Reply,
    RunClosedLoop,
    RunLoadGen,
    Setup,
    decode_command,
    encode,
)
from pelton.bench.loadgen_run import LoadGenRun
from pelton.bench.measurements import RequestRecord
from pelton.bench.request_runner import RequestRunner
from pelton.bench.traffic import Sample
from pelton.core.errors import PeltonError
from pelton.core.ports import SystemUnderTest

_PROGRESS_PERIOD_S = 0.25


class LoadProcess:
    def __init__(self, sut: SystemUnderTest[Sample], setup: Setup, samples: list[Sample]) -> None:
        self._sut = sut
        self._samples = samples
        self._runner = RequestRunner(sut, samples, timeout_s=setup.request_timeout_s)
        self._run: LoadGenRun | None = None

    def abort(self, reason: str) -> None:
        """Ends a LoadGen test that runs, or else the process."""
        if self._run is None:
            _exit_now()
        self._run.abort(reason)

    async def run_closed_loop(self, command: RunClosedLoop) -> None:
        """Sample i of the data set is request i: every level of a calibration sees the same."""
        records: list[RequestRecord] = []
        indices = iter(range(command.num_requests))
        start_s = time.monotonic()

        async def run_client() -> None:
            for index in indices:
                if time.monotonic() - start_s > command.time_limit_s:
                    return
                record = self._runner.make_record(index % len(self._samples), time.time_ns())
                records.append(record)
                await self._runner.run(record)

        async with asyncio.TaskGroup() as clients:
            for _ in range(min(command.concurrency, command.num_requests)):
                clients.create_task(run_client())
        _send(ClosedLoopDone(records=records))

    async def run_loadgen(self, command: RunLoadGen) -> None:
        loop = asyncio.get_running_loop()
        self._runner.reset_counts()
        run = LoadGenRun(
            self._runner,
            command.settings,
            num_samples=len(self._samples),
            log_dir=command.log_dir,
            max_in_flight=command.max_in_flight,
            loop=loop,
        )
        self._run = run
        ended = loop.create_future()

        def run_blocking() -> None:
            run.run()
            loop.call_soon_threadsafe(ended.set_result, None)

        threading.Thread(target=run_blocking, name="loadgen", daemon=True).start()
        while True:
            waited, _ = await asyncio.wait(
                (ended, run.aborted),
                timeout=_PROGRESS_PERIOD_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            self._send_progress(run)
            if waited:
                break
        aborted = run.aborted.result() if run.aborted.done() else None
        _send(
            LoadGenDone(
                records=run.records,
                tokens_by_bucket=self._runner.tokens_by_bucket,
                aborted=aborted,
            )
        )
        if aborted is not None:
            _exit_now()
        self._run = None

    def _send_progress(self, run: LoadGenRun) -> None:
        _send(
            Progress(
                num_issued=run.num_issued,
                num_completed=self._runner.num_completed,
                num_failed=self._runner.num_failed,
                num_output_tokens=self._runner.num_output_tokens,
            )
        )


def _send(reply: Reply) -> None:
    sys.stdout.buffer.write(encode(reply) + b"\n")
    sys.stdout.buffer.flush()


def _exit_now() -> NoReturn:
    """Without the interpreter's own shutdown: LoadGen's thread may still be inside its test."""
    sys.stdout.buffer.flush()
    os._exit(0)


async def _make_sut(setup: Setup) -> SystemUnderTest[Sample]:
    if isinstance(setup.target, HttpTarget):
        return HttpSut(setup.target, may_reuse_prefixes=setup.may_reuse_prefixes)
    from pelton.bench.worker_sut import WorkerSut

    return await WorkerSut.connect(setup.target, may_reuse_prefixes=setup.may_reuse_prefixes)


async def _read_commands() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


async def _run_commands() -> None:
    reader = await _read_commands()
    setup = decode_command(await reader.readline())
    assert isinstance(setup, Setup), setup
    samples = msgspec.json.decode(Path(setup.samples_path).read_bytes(), type=list[Sample])
    sut = await _make_sut(setup)
    process = LoadProcess(sut, setup, samples)
    _send(Ready())
    work: asyncio.Task[None] | None = None
    while line := await reader.readline():
        command: Command = decode_command(line)
        if isinstance(command, Abort):
            process.abort(command.reason)
        elif isinstance(command, RunClosedLoop):
            work = asyncio.create_task(_report_failure(process.run_closed_loop(command)))
        elif isinstance(command, RunLoadGen):
            work = asyncio.create_task(_report_failure(process.run_loadgen(command)))
    if work is not None and not work.done():
        _exit_now()
    await sut.close()


async def _report_failure(work: Coroutine[None, None, None]) -> None:
    """An error in this process reaches the harness as a message, not as silence."""
    try:
        await work
    except Exception as error:
        _send(LoadFailed(reason=f"{type(error).__name__}: {error}"))
        raise


def main() -> None:
    # Ctrl-C is the harness's to handle: it tells this process to end and collects what is known.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        uvloop.run(_run_commands())
    except PeltonError as error:
        _send(LoadFailed(reason=error.message))


if __name__ == "__main__":
    main()
