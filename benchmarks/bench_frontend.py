# SPDX-License-Identifier: Apache-2.0
"""What one frontend process on one core streams and answers, with a stand-in for the engine.

python benchmarks/bench_frontend.py [--streams 512] [--tokens 1000] [--out record.json]

The server is `pelton serve` as anybody runs it, its frontend pinned to a core of its own; the
worker, whose engine makes tokens on a schedule and computes nothing, shares the other cores with
the clients of this script. Tokens are offered at several rates: `stand-in:...?step_ms=M` gives
every stream one token each M ms. A rate is held when at least 98% of it arrives; "events" shows
how many tokens a frontend that is near its limit puts into one. Every token is counted by the
usage the server reports at the end of each stream.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import uvloop

from pelton.bench.figures import write_figures

PROMPT = "Tell me about the sea."
_URL = re.compile(r"Ready at http://127\.0\.0\.1:(\d+)")
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_LENGTH = re.compile(rb"content-length: (\d+)")


@dataclass(frozen=True, slots=True)
class StreamResult:
    step_ms: float
    offered_tokens_per_s: float
    """What the stand-in makes when nothing holds it up; 0: as fast as it can."""
    tokens_per_s: float
    tokens_per_event: float
    frontend_cpu_share: float
    """Of its core, over the run."""
    num_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class RequestResult:
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    frontend_cpu_share: float
    num_requests: int
    num_connections: int
    duration_s: float


class Server:
    """`pelton serve` on a stand-in, with its processes on the cores they should have."""

    def __init__(self, step_ms: float, num_streams: int, core: int, other_cores: set[int]) -> None:
        model = f"stand-in:smollm2?step_ms={step_ms}&max_num_requests=4096"
        self.command = [sys.executable, "-m", "pelton.cli.main", "serve", model]
        options = ["--port", "0", "--max-queue", str(num_streams + 64), "--log-level", "warning"]
        self._process = subprocess.Popen(
            [*self.command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        ready = _URL.search(self._process.stdout.readline())
        assert ready is not None, "the server did not start"
        self.port = int(ready[1])
        root = psutil.Process(self._process.pid)
        root.cpu_affinity(sorted(other_cores))
        for child in root.children():
            is_frontend = "pelton.serving.http.main" in child.cmdline()
            if is_frontend:
                self.frontend = child
            for thread in child.threads():
                os.sched_setaffinity(thread.id, {core} if is_frontend else other_cores)

    def frontend_cpu_s(self) -> float:
        times = self.frontend.cpu_times()
        return times.user + times.system

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)


class _Stream(asyncio.Protocol):
    """Sends one streaming request; keeps only what it counts."""

    def __init__(self, request: bytes, done: "asyncio.Future[None]") -> None:
        self._request, self._done = request, done
        self._tail = b""
        self.num_events = 0
        self.num_tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: {")
        self._tail = (self._tail + data)[-400:]
        if b"data: [DONE]" in self._tail:
            found = _TOKENS.search(self._tail)
            assert found is not None, self._tail
            self.num_tokens = int(found[1])
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


class _Requester(asyncio.Protocol):
    """Sends short requests one after the other on one connection."""

    def __init__(self, request: bytes, deadline_s: float, done: "asyncio.Future[None]") -> None:
        self._request, self._deadline_s, self._done = request, deadline_s, done
        self._buffer = b""
        self.latencies_s: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not separator or length is None or len(body) < int(length[1]):
            return
        assert head.startswith(b"HTTP/1.1 200"), self._buffer
        self._buffer = b""
        now_s = time.perf_counter()
        self.latencies_s.append(now_s - self._sent_s)
        if now_s < self._deadline_s:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


def make_http_request(port: int, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def run_streams(port: int, num_streams: int, num_tokens: int) -> tuple[int, int, float]:
    """(tokens, events, seconds from the first request to the last byte)."""
    loop = asyncio.get_running_loop()
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": num_tokens,
        "ignore_eos": True,
    }
    request = make_http_request(port, body)
    started_s = time.perf_counter()
    streams: list[_Stream] = []
    done = []
    for _ in range(num_streams):
        finished = loop.create_future()
        stream = _Stream(request, finished)
        streams.append(stream)
        done.append(finished)
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)
    await asyncio.wait_for(asyncio.gather(*done), 600)
    duration_s = time.perf_counter() - started_s
    # Two events of a stream carry no token: the role at its start and the usage at its end.
    num_events = sum(stream.num_events - 2 for stream in streams)
    return sum(stream.num_tokens for stream in streams), num_events, duration_s


async def run_requests(port: int, num_connections: int, duration_s: float) -> list[float]:
    loop = asyncio.get_running_loop()
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
    request = make_http_request(port, body)
    deadline_s = time.perf_counter() + duration_s
    requesters: list[_Requester] = []
    done = []
    for _ in range(num_connections):
        finished = loop.create_future()
        requester = _Requester(request, deadline_s, finished)
        requesters.append(requester)
        done.append(finished)
        await loop.create_connection(lambda requester=requester: requester, "127.0.0.1", port)
    await asyncio.wait_for(asyncio.gather(*done), duration_s + 60)
    return [latency for requester in requesters for latency in requester.latencies_s]


def measure_streams(
    step_ms: float, num_streams: int, num_tokens: int, core: int, others: set[int]
) -> StreamResult:
    server = Server(step_ms, num_streams, core, others)
    try:
        uvloop.run(run_streams(server.port, 8, 20))  # warm-up
        cpu_s = server.frontend_cpu_s()
        tokens, events, duration_s = uvloop.run(run_streams(server.port, num_streams, num_tokens))
        cpu_s = server.frontend_cpu_s() - cpu_s
    finally:
        server.stop()
    offered = num_streams / step_ms * 1000 if step_ms else 0.0
    return StreamResult(
        step_ms,
        offered,
        tokens / duration_s,
        tokens / events,
        cpu_s / duration_s,
        tokens,
        duration_s,
    )


def measure_requests(
    num_connections: int, duration_s: float, core: int, others: set[int]
) -> RequestResult:
    server = Server(0.0, num_connections, core, others)
    try:
        uvloop.run(run_requests(server.port, 4, 0.5))  # warm-up
        cpu_s = server.frontend_cpu_s()
        started_s = time.perf_counter()
        latencies = sorted(uvloop.run(run_requests(server.port, num_connections, duration_s)))
        took_s = time.perf_counter() - started_s
        cpu_s = server.frontend_cpu_s() - cpu_s
    finally:
        server.stop()
    return RequestResult(
        len(latencies) / took_s,
        statistics.median(latencies) * 1000,
        latencies[int(len(latencies) * 0.99)] * 1000,
        cpu_s / took_s,
        len(latencies),
        num_connections,
        took_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=512, help="streams open at once")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each stream")
    parser.add_argument(
        "--step-ms",
        type=float,
        nargs="*",
        default=[20.0, 12.8, 10.0, 8.0, 6.4, 0.0],
        help="milliseconds between the tokens of a stream; 0: as fast as the stand-in can",
    )
    parser.add_argument("--connections", type=int, default=64, help="for the short requests")
    parser.add_argument("--seconds", type=float, default=10.0, help="of short requests")
    parser.add_argument("--core", type=int, default=0, help="the frontend's core")
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    arguments = parser.parse_args()
    core, others = arguments.core, set(range(multiprocessing.cpu_count())) - {arguments.core}
    os.sched_setaffinity(0, others)

    requests = measure_requests(arguments.connections, arguments.seconds, core, others)
    print(
        f"short requests: {requests.requests_per_s:,.0f}/s over {requests.num_connections}"
        f" connections, p50 {requests.p50_ms:.1f} ms, p99 {requests.p99_ms:.1f} ms, frontend at"
        f" {requests.frontend_cpu_share:.0%} of a core"
    )
    print(f"{'step ms':>8} {'offered/s':>10} {'tokens/s':>10} {'tokens/event':>13} {'core':>6}")
    streams = []
    for step_ms in arguments.step_ms:
        result = measure_streams(step_ms, arguments.streams, arguments.tokens, core, others)
        streams.append(result)
        offered = f"{result.offered_tokens_per_s:,.0f}" if step_ms else "unlimited"
        print(
            f"{step_ms:8.1f} {offered:>10} {result.tokens_per_s:10,.0f}"
            f" {result.tokens_per_event:13.2f} {result.frontend_cpu_share:6.0%}"
        )
    if arguments.out is not None:
        figures = {
            "engine": "stand-in: makes tokens on a schedule and computes nothing",
            "num_streams": arguments.streams,
            "short_requests": asdict(requests),
            "streams": [asdict(result) for result in streams],
        }
        write_figures(arguments.out, "frontend", figures)


if __name__ == "__main__":
    main()
