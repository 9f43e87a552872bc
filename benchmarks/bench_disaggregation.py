# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart against workers that do both, over a sweep of load at fixed limits.

python benchmarks/bench_disaggregation.py --model smollm2 --random-weights gpt-oss-20b
    [--rates 2,4,8,16] [--input 2000] [--output 200] [--ttft-ms 1000] [--tpot-ms 15] [--out FILE]

There are two layouts of two workers, which on GPUs have one each: `--workers 2`, and `--prefill 1
--decode 1`. Each is a server of its own. At each rate requests of random tokens arrive as a Poisson
process, the same one for both, and each is a stream of its own; percentiles are of the requests
that arrived in the last four fifths of the time. A layout holds a rate where the 99th percentiles
of TTFT and TPOT (a request's mean) keep the limits.
"""

import argparse
import asyncio
import random
import re
import shlex
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx

from pelton.bench.figures import write_figures
from served import Answer, ask, make_client, running_server

LAYOUTS = {"mixed": ["--workers", "2"], "apart": ["--prefill", "1", "--decode", "1"]}
COUNTERS = (
    "pelton_kv_pulls_total",
    "pelton_kv_pulled_bytes_total",
    "pelton_kv_pull_fallbacks_total",
)
WARM_UP = 0.2


async def offer(
    url: str, rate_per_s: float, args: argparse.Namespace
) -> list[tuple[float, Answer]]:
    """Of each request: when it was sent, in seconds from the first, and what came of it."""
    source = random.Random(args.seed)

    async def send(
        client: httpx.AsyncClient, at_s: float, prompt: list[int]
    ) -> tuple[float, Answer]:
        await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
        return at_s, await ask(client, prompt, args.output)

    arrivals, at_s = [], 0.0
    while at_s < args.seconds:
        arrivals.append((at_s, source.choices(range(args.vocabulary), k=args.input)))
        at_s += source.expovariate(rate_per_s)
    async with make_client(url) as client:
        start_s = time.perf_counter()
        return list(await asyncio.gather(*(send(client, *arrival) for arrival in arrivals)))


async def read_counters(url: str) -> dict[str, float]:
    """Sums over workers."""
    async with make_client(url) as client:
        text = (await client.get("/metrics")).text
    return {
        name: sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))
        for name in COUNTERS
    }


def summarise(
    rate_per_s: float, answers: list[tuple[float, Answer]], args: argparse.Namespace
) -> dict[str, Any]:
    kept = [answer for at_s, answer in answers if at_s >= WARM_UP * args.seconds]
    ttfts = quantiles([1000 * answer.ttft_s for answer in kept], n=100, method="inclusive")
    tpots = quantiles([1000 * answer.tpot_s for answer in kept], n=100, method="inclusive")
    ended_s = max(at_s + answer.took_s for at_s, answer in answers)
    return {
        "rate_per_s": rate_per_s,
        "requests": len(answers),
        "ttft_p50_ms": ttfts[49],
        "ttft_p99_ms": ttfts[98],
        "tpot_p50_ms": tpots[49],
        "tpot_p99_ms": tpots[98],
        "output_tokens_per_s": len(answers) * args.output / ended_s,
        "holds": ttfts[98] <= args.ttft_ms and tpots[98] <= args.tpot_ms,
    }


def measure(layout: str, args: argparse.Namespace) -> dict[str, Any]:
    options = [*LAYOUTS[layout], "--no-prefix-cache", *shlex.split(args.engine_options)]
    if args.random_weights:
        options += ["--random-weights", args.random_weights]
    started_s = time.perf_counter()
    with running_server(args.model, options) as url:
        ready_s = time.perf_counter() - started_s
        asyncio.run(offer(url, args.rates[0], argparse.Namespace(**{**vars(args), "seconds": 2.0})))
        points = []
        for rate_per_s in args.rates:
            before = asyncio.run(read_counters(url))
            point = summarise(rate_per_s, asyncio.run(offer(url, rate_per_s, args)), args)
            after = asyncio.run(read_counters(url))
            point |= {name: after[name] - before[name] for name in COUNTERS}
            points.append(point)
            print(
                f"{layout:6} {rate_per_s:6.1f}/s  TTFT p50 {point['ttft_p50_ms']:7.0f} p99"
                f" {point['ttft_p99_ms']:7.0f} ms  TPOT p50 {point['tpot_p50_ms']:6.2f} p99"
                f" {point['tpot_p99_ms']:6.2f} ms  {point['output_tokens_per_s']:8.0f} tok/s "
                f" {'holds' if point['holds'] else 'does not hold'}",
                flush=True,
            )
    return {"layout": layout, "ready_s": ready_s, "points": points}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="its weights, or its tokenizer alone")
    parser.add_argument("--random-weights", default="", help="of this geometry")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rates", default="2,4,8,16", help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals at each rate")
    parser.add_argument("--input", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tpot-ms", type=float, default=15.0)
    parser.add_argument("--vocabulary", type=int, default=40_000, help="prompts are of these ids")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine-options", default="", help="for pelton serve, quoted")
    parser.add_argument("--commit", default="", help="of the source, where there is no git")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.rates = [float(rate) for rate in args.rates.split(",")]
    layouts = [measure(layout, args) for layout in args.layouts.split(",")]
    if args.out:
        names = (
            "model",
            "random_weights",
            "input",
            "output",
            "seconds",
            "ttft_ms",
            "tpot_ms",
            "seed",
        )
        figures = {name: getattr(args, name) for name in (*names, "engine_options")}
        write_figures(
            args.out,
            "disaggregation",
            {**figures, "layouts": layouts},
            commit=args.commit or None,
        )


if __name__ == "__main__":
    main()
