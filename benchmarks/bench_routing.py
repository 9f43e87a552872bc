# SPDX-License-Identifier: Apache-2.0
"""Hit rate and TTFT of a routing policy on conversations, and its balance on prompts apart.

python benchmarks/bench_routing.py [--model smollm2] [--conversations 60] [--rate 0.5]
                                   [--policies kv-aware round-robin] [--out FILE]

`pelton serve MODEL --workers 4 --router POLICY` runs as anybody would run it, a fresh server for
each policy, and this script replays one trace (`routing_trace`) through its HTTP interface: each
conversation starts at its time, and each next message comes a while after the answer. Hit rate is
the prompt tokens that servers say were cached over all prompt tokens, beside what one endless cache
would give. TTFT is the client's, from sending to the first token. At a load that one of the
policies cannot carry the ratio would measure its queue: "late" says how much longer the trace took
than its own schedule with answers at once. Then prompts that have nothing in common arrive at the
same rate of tokens, and the prompt tokens that each worker got are compared.

Threads are each worker's; `--engine-options '--num-threads 6'` leaves some of 32 cores to the
frontend and to this script. For machines with fewer cores than workers there are engines whose
scheduler and prefix cache are real and whose steps take their time without computing:

    --model 'stand-in:smollm2?scheduled=1&step_ms=10' --rate 2.5 --think-s 1
    --engine-options '--max-num-batched-tokens 32 --max-num-requests 16'
"""

import argparse
import asyncio
import shlex
import signal
import time
from collections import Counter
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import httpx

from pelton.bench.figures import write_figures
from routing_trace import (
    Conversation,
    TraceConfig,
    describe,
    ideal_hit_rate,
    make_independent,
    make_trace,
    shapes_of,
)
from served import Answer, ask, make_client, running_server

BLOCK_SIZE = 16


async def converse(
    client: httpx.AsyncClient, conversation: Conversation, start_s: float
) -> list[Answer]:
    await asyncio.sleep(max(0.0, start_s + conversation.start_s - time.perf_counter()))
    prompt, answers = list(conversation.system_tokens), []
    for turn in conversation.turns:
        await asyncio.sleep(turn.think_s)
        prompt += turn.user_tokens
        answers.append(await ask(client, prompt, turn.num_answer_tokens))
        prompt += answers[-1].token_ids
    return answers


async def replay(url: str, trace: list[Conversation]) -> tuple[list[Answer], float]:
    """All answers, and how long the trace took."""
    async with make_client(url) as client:
        start_s = time.perf_counter()
        answers = await asyncio.gather(*(converse(client, c, start_s) for c in trace))
    return [a for each in answers for a in each], time.perf_counter() - start_s


async def warm_up(url: str, num_workers: int) -> None:
    """Each worker's first steps, alone and side by side."""
    prompts = make_independent(4 * num_workers, (64, 1024), seed=-1)
    async with make_client(url) as client:
        await asyncio.gather(*(ask(client, prompt, 16) for prompt in prompts))


async def send_independent(url: str, prompts: list[list[int]], rate_per_s: float) -> list[Answer]:
    async def send(client: httpx.AsyncClient, number: int) -> Answer:
        await asyncio.sleep(number / rate_per_s)
        return await ask(client, prompts[number], 4)

    async with make_client(url) as client:
        return list(await asyncio.gather(*(send(client, n) for n in range(len(prompts)))))


def summarise(answers: list[Answer], took_s: float, trace: list[Conversation]) -> dict[str, Any]:
    ttfts_ms = sorted(1000 * answer.ttft_s for answer in answers)
    num_prompt = sum(answer.num_prompt_tokens for answer in answers)
    hit_rate = sum(answer.num_cached_tokens for answer in answers) / num_prompt
    scheduled_s = max(c.start_s + sum(turn.think_s for turn in c.turns) for c in trace)
    return {
        "hit_rate": hit_rate,
        "of_ideal": hit_rate / ideal_hit_rate(shapes_of(trace, BLOCK_SIZE)),
        "ttft_p50_ms": median(ttfts_ms),
        "ttft_p90_ms": quantiles(ttfts_ms, n=10)[8] if len(ttfts_ms) > 1 else ttfts_ms[0],
        "took_s": took_s,
        "late_s": took_s - scheduled_s,
        "requests_by_worker": dict(sorted(Counter(a.worker for a in answers).items())),
        "ttfts_ms": ttfts_ms,
    }


def max_over_mean(answers: list[Answer], num_workers: int) -> float:
    """Of the prompt tokens that each worker got."""
    tokens = Counter[str]()
    for answer in answers:
        tokens[answer.worker] += answer.num_prompt_tokens
    return max(tokens.values()) / mean([*tokens.values(), *[0] * (num_workers - len(tokens))])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--policies", nargs="+", default=["kv-aware", "round-robin"])
    parser.add_argument("--conversations", type=int, default=TraceConfig().num_conversations)
    parser.add_argument("--rate", type=float, default=TraceConfig().rate_per_s)
    parser.add_argument("--think-s", type=float, default=TraceConfig().mean_think_s)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--independent", type=int, default=200, help="prompts apart; 0: none")
    parser.add_argument("--engine-options", default="", help="for pelton serve, quoted")
    parser.add_argument("--commit", default="", help="of the source, where there is no git")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = TraceConfig(
        num_conversations=args.conversations,
        rate_per_s=args.rate,
        mean_think_s=args.think_s,
        seed=args.seed,
    )
    trace = make_trace(config)
    facts = describe(config, trace, BLOCK_SIZE)
    print(
        f"{facts['num_conversations']} conversations, {facts['num_requests']} requests, prompts of"
        f" {facts['mean_prompt_tokens']:.0f} tokens in the mean, {facts['max_prompt_tokens']} at"
        f" most; ideal hit rate {facts['ideal_hit_rate']:.1%}"
    )
    results: dict[str, dict[str, Any]] = {}
    signal.signal(signal.SIGTERM, end)
    try:
        for policy in args.policies:
            results[policy] = measure(policy, trace, facts["mean_turns"], args)
    finally:
        if args.out and results:
            figures = {
                "model": Path(args.model).name,
                "workers": args.workers,
                "engine_options": args.engine_options,
                "trace": facts,
                "policies": results,
            }
            write_figures(args.out, "routing", figures, commit=args.commit or None)
    if {"kv-aware", "round-robin"} <= results.keys():
        ratio = results["round-robin"]["ttft_p50_ms"] / results["kv-aware"]["ttft_p50_ms"]
        print(f"TTFT p50 of round-robin over kv-aware: {ratio:.2f}")


def measure(
    policy: str, trace: list[Conversation], mean_turns: float, args: argparse.Namespace
) -> dict[str, Any]:
    options = [*shlex.split(args.engine_options), "--workers", str(args.workers)]
    options += ["--router", policy, "--block-size", str(BLOCK_SIZE)]
    with running_server(args.model, options) as url:
        asyncio.run(warm_up(url, args.workers))
        answers, took_s = asyncio.run(replay(url, trace))
        found = summarise(answers, took_s, trace)
        print(
            f"{policy:12} hit rate {found['hit_rate']:.1%} ({found['of_ideal']:.1%} of the ideal),"
            f" TTFT p50 {found['ttft_p50_ms']:.0f} ms, p90 {found['ttft_p90_ms']:.0f} ms; took"
            f" {took_s:.1f} s, late {found['late_s']:.1f} s",
            flush=True,
        )
        if args.independent and policy == "kv-aware":
            prompts = make_independent(args.independent, (64, 256), args.seed + 1)
            apart = asyncio.run(send_independent(url, prompts, args.rate * mean_turns))
            found["independent_max_over_mean"] = max_over_mean(apart, args.workers)
            print(
                f"max/mean load of prompts apart {found['independent_max_over_mean']:.3f}",
                flush=True,
            )
    return found


def end(number: int, frame: object) -> None:
    raise SystemExit(f"ended by signal {number}")


if __name__ == "__main__":
    main()
