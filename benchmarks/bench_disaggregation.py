# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart against workers that do both, over a sweep of load at fixed limits.

python benchmarks/bench_disaggregation.py --model smollm2 --random-weights gpt-oss-20b
    [--rates 2,4,8,16] [--input 2000] [--output 200] [--ttft-ms 1000] [--tpot-ms 10,15,25]
    [--clients 8] [--out FILE]

There are two layouts of two workers, which on GPUs have one each: `--workers 2`, and `--prefill 1
--decode 1`. Each is a server of its own. At each rate requests of random tokens arrive as a Poisson
process, the same one for both, and each is a stream of its own; percentiles are of the requests
that arrived in the last four fifths of the time. A layout holds a rate where the 99th percentiles
of TTFT and TPOT (a request's mean) keep the limits; of TPOT there may be several. Where the median
TTFT is twice its limit, requests arrive faster than they are served: that layout's sweep ends.

The requests come from several processes, since one would not parse the events of a fast server in
time. Stopped by SIGTERM, it writes the record of the rates that it has finished.
"""

import argparse
import asyncio
import multiprocessing
import random
import re
import shlex
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx

from pelton.bench.figures import write_figures
from pelton.core.config import ModelConfig
from pelton.models.geometries import random_vocab_size
from served import Answer, ask, make_client, running_server

LAYOUTS = {"mixed": ["--workers", "2"], "apart": ["--prefill", "1", "--decode", "1"]}
COUNTERS = (
    "pelton_kv_pulls_total",
    "pelton_kv_pulled_bytes_total",
    "pelton_kv_pull_fallbacks_total",
)
WARM_UP = 0.2
LEAD_S = 1.0
"""For the prompts to get to the clients."""
OVERLOAD = 2.0
"""Times its limit that the median TTFT may be before a sweep ends."""

Arrival = tuple[float, list[int]]
"""Seconds from the first one, and a prompt."""


def make_arrivals(rate_per_s: float, seconds: float, args: argparse.Namespace) -> list[Arrival]:
    source = random.Random(args.seed)
    arrivals, at_s = [], 0.0
    while at_s < seconds:
        arrivals.append((at_s, source.choices(range(args.vocabulary), k=args.input)))
        at_s += source.expovariate(rate_per_s)
    return arrivals


def send_share(
    url: str, start_s: float, arrivals: list[Arrival], num_tokens: int
) -> list[tuple[float, Answer]]:
    """In a client's process. `start_s` is on the machine's monotonic clock."""

    async def send(client: httpx.AsyncClient, arrival: Arrival) -> tuple[float, Answer]:
        at_s, prompt = arrival
        await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
        return at_s, await ask(client, prompt, num_tokens)

    async def send_all() -> list[tuple[float, Answer]]:
        async with make_client(url) as client:
            return list(await asyncio.gather(*(send(client, arrival) for arrival in arrivals)))

    return asyncio.run(send_all())


def offer(
    pool: ProcessPoolExecutor,
    url: str,
    rate_per_s: float,
    seconds: float,
    args: argparse.Namespace,
) -> list[tuple[float, Answer]]:
    """Of each request: when it was to be sent, and what came of it."""
    arrivals = make_arrivals(rate_per_s, seconds, args)
    start_s = time.monotonic() + LEAD_S
    shares = [arrivals[number :: args.clients] for number in range(args.clients)]
    sending = [pool.submit(send_share, url, start_s, share, args.output) for share in shares]
    return [answer for future in sending for answer in future.result()]


def read_counters(url: str) -> dict[str, float]:
    """Sums over workers."""
    text = httpx.get(f"{url}/metrics").text
    return {
        name: sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))
        for name in COUNTERS
    }


def summarise(
    rate_per_s: float, answers: list[tuple[float, Answer]], args: argparse.Namespace
) -> dict[str, Any]:
    kept = [answer for at_s, answer in answers if at_s >= WARM_UP * args.seconds]
    if len(kept) < 2:
        raise SystemExit(f"{args.seconds:g} s at {rate_per_s:g} requests/s are too few to measure")
    ttfts = quantiles([1000 * answer.ttft_s for answer in kept], n=100, method="inclusive")
    tpots = quantiles([1000 * answer.tpot_s for answer in kept], n=100, method="inclusive")
    ended_s = max(at_s + answer.took_s for at_s, answer in answers)
    return {
        "rate_per_s": rate_per_s,
        "requests": len(answers),
        "requests_measured": len(kept),
        "ttft_p50_ms": ttfts[49],
        "ttft_p99_ms": ttfts[98],
        "tpot_p50_ms": tpots[49],
        "tpot_p99_ms": tpots[98],
        "output_tokens_per_s": len(answers) * args.output / ended_s,
        "holds_at_tpot_ms": [
            limit for limit in args.tpot_ms if ttfts[98] <= args.ttft_ms and tpots[98] <= limit
        ],
    }


def measure(
    found: dict[str, Any], layout: str, pool: ProcessPoolExecutor, args: argparse.Namespace
) -> None:
    """Adds to `found` rate by rate."""
    options = [*LAYOUTS[layout], "--no-prefix-cache", *shlex.split(args.engine_options)]
    if args.random_weights:
        options += ["--random-weights", args.random_weights]
    started_s = time.perf_counter()
    with running_server(args.model, options) as url:
        found["ready_s"] = time.perf_counter() - started_s
        # Kernels are compiled for what comes first, alone and beside decodes.
        for rate_per_s in (args.rates[0], args.rates[len(args.rates) // 2]):
            offer(pool, url, rate_per_s, args.warm_up_s, args)
        warm_s = time.perf_counter() - started_s
        print(f"{layout:6} ready after {found['ready_s']:.1f} s, warm {warm_s:.1f} s", flush=True)
        for rate_per_s in args.rates:
            before = read_counters(url)
            point = summarise(rate_per_s, offer(pool, url, rate_per_s, args.seconds, args), args)
            after = read_counters(url)
            point |= {name: after[name] - before[name] for name in COUNTERS}
            found["points"].append(point)
            print_point(layout, point)
            if point["ttft_p50_ms"] > OVERLOAD * args.ttft_ms:
                found["is_overloaded"] = True
                print(f"{layout:6} is overloaded: no higher rates", flush=True)
                break


def print_point(layout: str, point: dict[str, Any]) -> None:
    limits = ", ".join(f"{limit:g}" for limit in point["holds_at_tpot_ms"])
    pulls, _, fallbacks = (int(point[name]) for name in COUNTERS)
    print(
        f"{layout:6} {point['rate_per_s']:5.1f}/s  TTFT p50 {point['ttft_p50_ms']:6.0f} p99"
        f" {point['ttft_p99_ms']:6.0f} ms  TPOT p50 {point['tpot_p50_ms']:6.2f} p99"
        f" {point['tpot_p99_ms']:6.2f} ms  {point['output_tokens_per_s']:7.0f} tok/s"
        f"  pulls {pulls}, {fallbacks} failed; "
        f" {f'holds at TPOT {limits} ms' if limits else 'does not hold'}",
        flush=True,
    )


def holds(found: dict[str, Any], rate_per_s: float, limit_ms: float) -> bool | None:
    """None: not measured, and a lower rate was no overload."""
    for point in found["points"]:
        if point["rate_per_s"] == rate_per_s:
            return limit_ms in point["holds_at_tpot_ms"]
    return False if found.get("is_overloaded") else None


def print_winners(layouts: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Of each rate and limit of TPOT, which layouts hold."""
    for rate_per_s in args.rates:
        cells = []
        for limit_ms in args.tpot_ms:
            results = {f["layout"]: holds(f, rate_per_s, limit_ms) for f in layouts}
            names = " and ".join(name for name, result in results.items() if result)
            missing = [
                f"{name}: not measured" for name, result in results.items() if result is None
            ]
            cells.append(f"TPOT {limit_ms:g} ms: {', '.join([names or 'none', *missing])}")
        print(f"{rate_per_s:5.1f}/s  " + "; ".join(cells), flush=True)


def end(number: int, frame: object) -> None:
    raise SystemExit(f"ended by signal {number}")


def read_numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="its weights, or its tokenizer alone")
    parser.add_argument("--random-weights", default="", help="of this geometry")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rates", type=read_numbers, default="2,4,8,16", help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals at each rate")
    parser.add_argument("--warm-up-s", type=float, default=2.0, help="at the first, a middle rate")
    parser.add_argument("--input", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tpot-ms", type=read_numbers, default="10,15,25")
    parser.add_argument("--vocabulary", type=int, default=40_000, help="prompts are of these ids")
    parser.add_argument("--clients", type=int, default=8, help="processes that send")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine-options", default="", help="for pelton serve, quoted")
    parser.add_argument("--commit", default="", help="of the source, where there is no git")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    vocab_size = random_vocab_size(ModelConfig(random_weights=args.random_weights))
    if vocab_size:
        args.vocabulary = min(args.vocabulary, vocab_size)
    signal.signal(signal.SIGTERM, end)
    layouts: list[dict[str, Any]] = []
    try:
        # Not forked: a client is to have nothing of the server's pipes.
        with ProcessPoolExecutor(args.clients, multiprocessing.get_context("spawn")) as pool:
            for layout in args.layouts.split(","):
                layouts.append({"layout": layout, "points": []})
                measure(layouts[-1], layout, pool, args)
    finally:
        if any(found["points"] for found in layouts):
            print_winners(layouts, args)
            if args.out:
                write_record(layouts, args)


def write_record(layouts: list[dict[str, Any]], args: argparse.Namespace) -> None:
    names = ("model", "random_weights", "input", "output", "seconds", "ttft_ms", "tpot_ms", "seed")
    figures = {name: getattr(args, name) for name in (*names, "clients", "engine_options")}
    figures["model"] = Path(args.model).name
    write_figures(
        args.out, "disaggregation", {**figures, "layouts": layouts}, commit=args.commit or None
    )


if __name__ == "__main__":
    main()
