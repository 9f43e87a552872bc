# SPDX-License-Identifier: Apache-2.0
"""A real worker process: it starts, serves, says why it cannot, and never outlives its parent."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pelton.core.config import EngineConfig, ModelConfig
from pelton.core.errors import ConfigError, WorkerLostError
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.serving.launcher import WorkerProcess
from pelton.serving.process import LOCK_NAME
from pelton.serving.worker_client import WorkerClient


def make_config(options: str = "") -> EngineConfig:
    return EngineConfig(model=ModelConfig(model=f"stand-in:none{options}"))


@contextmanager
def launched(config: EngineConfig) -> Iterator[WorkerProcess]:
    with WorkerProcess(config) as worker:
        worker.wait_ready(60)
        yield worker


def make_request(max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=1,
    )


async def test_request_is_served_through_a_real_process() -> None:
    with launched(make_config()) as worker:
        client = await WorkerClient.connect(worker.address)
        stream = client.submit(make_request(20))
        tokens = [i async for batch in stream for output in batch for i in output.token_ids]
        client.close()
    assert len(tokens) == 20


async def test_killed_worker_ends_its_streams() -> None:
    with launched(make_config("?step_ms=5")) as worker:
        client = await WorkerClient.connect(worker.address)
        stream = client.submit(make_request(8000))
        await anext(stream)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            async for _ in stream:
                pass
        client.close()


def test_start_error_keeps_its_type() -> None:
    with (
        pytest.raises(ConfigError, match="no_such_option"),
        launched(make_config("?no_such_option=1")),
    ):
        pass


def test_context_leaves_no_process_and_no_directory() -> None:
    with launched(make_config()) as worker:
        directory = Path(worker.address.removeprefix("ipc://")).parent
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not psutil.pid_exists(worker.pid)
    assert not directory.exists()


PARENT = """
import sys, time
from pelton.core.config import EngineConfig, ModelConfig
from pelton.serving.launcher import WorkerProcess
worker = WorkerProcess(EngineConfig(model=ModelConfig(model="stand-in:none")))
worker.wait_ready(60)
print(worker.pid, worker.address, flush=True)
time.sleep(600)
"""


def test_worker_and_directory_go_when_the_parent_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = parent.stdout.readline().split()[0]
        parent.kill()
    wait_until_gone(int(pid))
    assert list(tmp_path.iterdir()) == []


def test_next_start_removes_what_a_killed_pair_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid, address = parent.stdout.readline().split()
        os.kill(int(pid), signal.SIGKILL)
        parent.kill()
    wait_until_gone(int(pid))
    directory = Path(address.removeprefix("ipc://")).parent
    wait_until_unlocked(directory / LOCK_NAME)
    with launched(make_config()) as worker:
        assert worker.returncode is None
        assert not directory.exists()


def wait_until_unlocked(path: Path, timeout_s: float = 60.0) -> None:
    """The last thread of a killed process lets its files go some time after the first is gone."""
    deadline_s = time.monotonic() + timeout_s
    with path.open("r+b") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                assert time.monotonic() < deadline_s, f"{path} is still locked"
                time.sleep(0.02)


def wait_until_gone(pid: int, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while psutil.pid_exists(pid):
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return  # ended; its adoptive parent has not collected it yet
        assert time.monotonic() < deadline_s, f"process {pid} still runs"
        time.sleep(0.02)
