# SPDX-License-Identifier: Apache-2.0
"""Whether a server's memory grows under load: requests of every kind, many of which leave.

python benchmarks/bench_memory_growth.py [--model smollm2] [--minutes 10] [--out record.json]

Clients send requests with all sampling controls on, streamed or not, and leave some at a random
moment. Resident and proportional memory of each process are sampled once a second; printed is the
slope of the least-squares line through the samples of the last two thirds, when the pool, caches
and allocators have their size. Growth that goes on is a leak.
"""

import argparse
import asyncio
import contextlib
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench_startup import name_of, start_server
from pelton.bench.figures import write_figures

_WORDS = ("the", "sea", "and", "a", "small", "boat", "under", "grey", "clouds", "near", "an", "old")


@dataclass(slots=True)
class Growth:
    """Of one process. Bytes, and seconds since the load began."""

    seconds: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    pss_bytes: list[int] = field(default_factory=list)

    def add(self, second: float, process: psutil.Process) -> None:
        memory = process.memory_full_info()
        self.seconds.append(second)
        self.rss_bytes.append(memory.rss)
        self.pss_bytes.append(memory.pss)

    def bytes_per_minute(self) -> float:
        """Slope of the proportional set size over the last two thirds of the samples."""
        skipped = len(self.seconds) // 3
        return 60 * slope(self.seconds[skipped:], self.pss_bytes[skipped:])


def slope(x: list[float], y: list[int]) -> float:
    """Of the least-squares line through the points."""
    if len(x) < 2:
        return 0.0
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


async def load(url: str, num_clients: int, end_s: float, seed: int) -> dict[str, int]:
    """Keeps `num_clients` requests in flight until `end_s`; counts them by how they ended."""
    counts = {"done": 0, "left": 0, "refused": 0}

    async def run_client(client: httpx.AsyncClient, generator: random.Random) -> None:
        while time.monotonic() < end_s:
            counts[await _send(client, generator)] += 1

    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        clients = (run_client(client, random.Random(seed + i)) for i in range(num_clients))
        await asyncio.gather(*clients)
    return counts


async def _send(client: httpx.AsyncClient, generator: random.Random) -> str:
    body: dict[str, Any] = {
        "prompt": " ".join(generator.choices(_WORDS, k=generator.randrange(1, 200))),
        "max_tokens": generator.randrange(1, 100),
        "temperature": generator.choice([0.0, 0.8]),
        "top_p": 0.9,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "logprobs": generator.choice([None, 20]),
        "stream": generator.random() < 0.6,
    }
    leaves_after_s = generator.random() * 2 if generator.random() < 0.4 else None
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(leaves_after_s),
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            async for _ in reply.aiter_bytes():
                pass
            return "done" if reply.status_code == 200 else "refused"
    return "left"


async def measure(url: str, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    server = psutil.Process(pid)
    processes = {name_of(process): process for process in [server, *server.children()]}
    growth = {name: Growth() for name in processes}
    start_s = time.monotonic()
    work = asyncio.create_task(
        load(url, args.clients, start_s + 60 * args.minutes, args.seed), name="load"
    )
    while not work.done():
        second = time.monotonic() - start_s
        for name, process in processes.items():
            growth[name].add(round(second, 2), process)
        print(f"\r{second:6.0f} s of {60 * args.minutes:.0f}", end="", flush=True)
        await asyncio.wait({work}, timeout=1.0)
    counts = work.result()
    print(f"\n{counts['done']} requests done, {counts['left']} left, {counts['refused']} refused")
    for name, each in growth.items():
        print(
            f"{name:12} {each.pss_bytes[0] / 2**20:8.1f} -> {each.pss_bytes[-1] / 2**20:8.1f} MiB,"
            f" {each.bytes_per_minute() / 2**10:+9.1f} KiB a minute"
        )
    return {
        "requests": counts,
        "growth_bytes_per_minute": {
            n: round(each.bytes_per_minute()) for n, each in growth.items()
        },
        "samples": {name: asdict(each) for name, each in growth.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    # Pages of the pool become resident as they are first written: a small one is soon full, and
    # what grows after that is no KV.
    parser.add_argument("--kv-memory-bytes", default="256MiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args, options = parser.parse_known_args()
    options += ["--kv-memory-bytes", args.kv_memory_bytes]
    with start_server(args.model, options) as (url, pid):
        figures = asyncio.run(measure(url, pid, args))
    if args.out:
        settings = {"model": args.model, "minutes": args.minutes, "clients": args.clients}
        write_figures(args.out, "memory_growth", {**settings, **figures})


if __name__ == "__main__":
    main()
