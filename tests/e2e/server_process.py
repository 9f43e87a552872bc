# SPDX-License-Identifier: Apache-2.0
"""Runs `pelton serve` as a user does, and reads what it says about itself."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

_READY = re.compile(r"Ready at (http://\S+) ")


@dataclass(frozen=True, slots=True)
class ServerProcess:
    process: subprocess.Popen[str]
    url: str
    stderr: Path

    def child(self, module: str) -> psutil.Process:
        """The newest child that runs `module`."""
        found = [c for c in self.children() if module in command_of(c)]
        return max(found, key=lambda child: child.create_time())

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    @property
    def worker(self) -> psutil.Process:
        return self.child("pelton.serving.worker")

    @property
    def frontend(self) -> psutil.Process:
        return self.child("pelton.serving.http.main")

    def workers(self) -> list[psutil.Process]:
        """Those that live, oldest first."""
        found = [c for c in self.children() if not is_gone(c.pid)]
        found = [c for c in found if "pelton.serving.worker" in command_of(c)]
        return sorted(found, key=lambda child: child.create_time())

    def metrics(self) -> dict[str, float]:
        """By name and labels, summed over workers."""
        sums: dict[str, float] = defaultdict(float)
        for name, value in self.worker_metrics().items():
            name = re.sub(r',?worker="\d+"', "", name).replace("{}", "")
            sums[name] += value
        return sums

    def worker_metrics(self) -> dict[str, float]:
        """By name and labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def wait_until_ready(self) -> None:
        wait_until(lambda: httpx.get(f"{self.url}/ready", timeout=10).status_code == 200)

    def log(self) -> str:
        return self.stderr.read_text()


def serve_command(model: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "pelton.cli.main", "serve", model, *options]


@contextmanager
def running_server(
    model: str, *options: str, prefix: tuple[str, ...] = ()
) -> Iterator[ServerProcess]:
    """A server that takes requests; on exit it is told to stop and must leave nothing behind.
    `prefix`: what the command is run by."""
    with tempfile.NamedTemporaryFile("w", suffix=".log", delete=False) as stderr:
        process = subprocess.Popen(
            [*prefix, *serve_command(model, "--port", "0", *options)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    log = Path(stderr.name)
    assert process.stdout is not None
    try:
        ready = _READY.search(process.stdout.readline())
        assert ready is not None, f"the server did not start: {log.read_text()}"
        yield ServerProcess(process, ready[1], log)
    finally:
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            log.unlink()
        for child in children:
            wait_until(lambda pid=child.pid: is_gone(pid))


def command_of(process: psutil.Process) -> list[str]:
    """Empty for a process that has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def is_gone(pid: int) -> bool:
    """Ended; a zombie that nobody has collected yet counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def suspended(*processes: psutil.Process) -> Iterator[None]:
    """They stand still, so that nothing of theirs ends before the test has looked."""
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def catch_running(
    server: ServerProcess,
    send: Callable[[], Sequence[Future[httpx.Response]]],
    are_running: Callable[[], bool],
) -> tuple[list[psutil.Process], Sequence[Future[httpx.Response]]]:
    """Sends requests, and again if they end before `are_running` was seen. All workers stand still
    then, and it is for the caller to go on with them; none of the replies is there."""

    def num_live() -> float:
        return server.metrics()["pelton_requests_live"]

    while True:
        replies = send()

        def is_time(replies: Sequence[Future[httpx.Response]] = replies) -> bool:
            is_caught = num_live() == len(replies) and are_running()
            return is_caught or any(reply.done() for reply in replies)

        wait_until(is_time)
        workers = server.workers()
        for worker in workers:
            worker.suspend()
        # The second answer comes after whatever the workers had sent before they stood still.
        if [num_live(), num_live()] == [len(replies)] * 2:
            return workers, replies
        for worker in workers:
            worker.resume()
        for reply in replies:
            reply.result(60)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(0.02)
