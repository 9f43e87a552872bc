# SPDX-License-Identifier: Apache-2.0
"""How long `pelton serve` takes until it answers, and what memory its processes hold.

python benchmarks/bench_startup.py [--model smollm2] [--repeats 5] [--out record.json]

Resident memory is summed over all processes after one answer, pages they share counted once
(proportional set size). It is to stay below weights + KV pool + 600 MB; pages of the pool that no
request has used yet are not resident.
"""

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from pelton.bench.figures import write_figures

_URL = re.compile(r"Ready at (http://\S+) ")


@dataclass(frozen=True, slots=True)
class StartResult:
    ready_s: float
    """From the start of the process to its line that says it takes requests."""
    memory_bytes: dict[str, int]
    """Proportional set size by process, after one answer."""

    @property
    def total_bytes(self) -> int:
        return sum(self.memory_bytes.values())


@contextmanager
def start_server(model: str, options: list[str]) -> Iterator[tuple[str, int]]:
    """The URL and process id of a server that takes requests; it is stopped afterwards."""
    command = [sys.executable, "-m", "pelton.cli.main", "serve", model, "--port", "0", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        ready = _URL.search(server.stdout.readline())
        assert ready is not None, "the server did not start"
        try:
            yield ready[1], server.pid
        finally:
            server.terminate()


def measure(model: str, options: list[str]) -> StartResult:
    start_s = time.perf_counter()
    with start_server(model, options) as (url, pid):
        ready_s = time.perf_counter() - start_s
        body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
        processes = [psutil.Process(pid), *psutil.Process(pid).children()]
        memory = {name_of(process): process.memory_full_info().pss for process in processes}
    return StartResult(ready_s, memory)


def name_of(process: psutil.Process) -> str:
    command = process.cmdline()
    for name in ("pelton.serving.worker", "pelton.serving.http.main"):
        if name in command:
            return name
    return "pelton serve"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    parser.add_argument("options", nargs="*", help="further options of `pelton serve`, after --")
    arguments = parser.parse_args()
    results = []
    for _ in range(arguments.repeats):
        result = measure(arguments.model, arguments.options)
        results.append(result)
        parts = ", ".join(f"{k} {v / 2**20:.0f}" for k, v in result.memory_bytes.items())
        print(f"ready after {result.ready_s:.2f} s, {result.total_bytes / 2**20:.0f} MiB: {parts}")
    print(f"median: ready after {statistics.median(r.ready_s for r in results):.2f} s")
    if arguments.out is not None:
        figures = {"model": arguments.model, "starts": [asdict(result) for result in results]}
        write_figures(arguments.out, "startup", figures)


if __name__ == "__main__":
    main()
