# SPDX-License-Identifier: Apache-2.0
"""Time of one routing decision, events applied a second, and memory of the prefix index.

python benchmarks/bench_router.py [--workers 64] [--blocks 1000000] [--decisions 3000] [--out FILE]

A decision is `Router.route`: eligible workers, cached prefixes, costs, booking. The prompt's block
hashes are given, as they are made once by whoever tokenises; their time stands apart. A prompt of
the rotation is cached either on a third of the workers to a random depth ("random") or on all of
them by half ("common": all begin alike); the rest of the index is filled with blocks that no prompt
has. Garbage is collected as in a frontend, which freezes what lives at its start and then collects
at a threshold of 20,000.

Memory comes as in a frontend, which is started with `core.env.HUGE_PAGES`; a setting of your own
wins: PYTHONMALLOC=pymalloc python benchmarks/bench_router.py shows Python's own allocator.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil

from pelton.bench.figures import write_figures
from pelton.core.block_hash import BlockHash, hash_prompt, make_request_salt
from pelton.core.clock import ManualClock
from pelton.core.env import HUGE_PAGES
from pelton.serving.router.events import CacheEvent, EventKind
from pelton.serving.router.router import Router
from pelton.serving.router.types import RouterConfig, RouteRequest, WorkerView

BLOCK_SIZE = 16
CASES = (("random", 4_000), ("common", 4_000), ("random", 100_000))
NUM_PROMPTS = 24
"""Of each case: enough that their hashes do not stay in the processor's caches."""
LIMITS_US = {4_000: 200.0, 100_000: 1000.0}


def make_router(num_workers: int) -> tuple[Router, ManualClock]:
    clock = ManualClock(1000.0)
    router = Router(RouterConfig(), clock)
    router.update(
        WorkerView(
            id=f"worker-{number:02}",
            generation=0,
            num_slots=512,
            num_blocks=100_000,
            block_size=BLOCK_SIZE,
            num_used_blocks=20 * number,
            prefill_tokens_per_s=50_000.0,
            requests_per_s=20.0,
            publishes_events=True,
        )
        for number in range(num_workers)
    )
    return router, clock


def random_hashes(random: Random, count: int) -> list[BlockHash]:
    return [random.randbytes(16) for _ in range(count)]


def copies(hashes: list[BlockHash]) -> tuple[BlockHash, ...]:
    """As a message from another process brings them: equal, but objects of their own."""
    return tuple(bytes(bytearray(block_hash)) for block_hash in hashes)


def one_by_one(kind: EventKind, hashes: list[BlockHash], first: int) -> Iterator[CacheEvent]:
    for number, block_hash in enumerate(hashes):
        yield CacheEvent(first + number, kind, (block_hash,))


def measure_memory(num_workers: int, num_blocks: int, random: Random) -> dict[str, Any]:
    """Resident memory of an index whose blocks are all different, hash objects included."""
    router, _ = make_router(num_workers)
    gc.collect()
    before = psutil.Process().memory_info().rss
    for number in range(num_workers):
        hashes = tuple(random_hashes(random, num_blocks // num_workers))
        event = CacheEvent(0, EventKind.STORED, hashes)
        router.apply_events(f"worker-{number:02}", 0, [event])
        del hashes, event
    gc.collect()
    used = psutil.Process().memory_info().rss - before
    indexed = sum(router.num_indexed_blocks(f"worker-{n:02}") for n in range(num_workers))
    return {"num_blocks": indexed, "bytes": used, "bytes_per_block": used / indexed}


def fill(
    router: Router,
    num_workers: int,
    num_blocks: int,
    prompts: dict[tuple[str, int], list[list[BlockHash]]],
    random: Random,
) -> list[int]:
    """Fills the index to `num_blocks`; returns the next event number of each worker."""
    for number in range(num_workers):
        held: list[BlockHash] = []
        for (spread, _), rotation in prompts.items():
            for hashes in rotation:
                if spread == "common":
                    held += hashes[: len(hashes) // 2]
                elif random.random() < 1 / 3:
                    held += hashes[: random.randrange(1, len(hashes) + 1)]
        room = num_blocks // num_workers
        held = held[:room]
        held += random_hashes(random, room - len(held))
        event = CacheEvent(0, EventKind.STORED, copies(held))
        router.apply_events(f"worker-{number:02}", 0, [event])
    return [1] * num_workers


def measure_decisions(
    router: Router,
    clock: ManualClock,
    prompt_len: int,
    prompts: list[list[BlockHash]],
    num_decisions: int,
) -> list[int]:
    """Nanoseconds of each `Router.route`, at a thousand decisions a second with 256 under way."""
    times_ns = []
    live = []
    for number in range(num_decisions):
        clock.advance(0.001)
        request = RouteRequest(
            request_id=f"request-{number}",
            num_prompt_tokens=prompt_len,
            block_hashes=prompts[number % len(prompts)],
            deadline_s=clock.now_s() + 3600,
        )
        started = time.perf_counter_ns()
        booking = router.route(request)
        times_ns.append(time.perf_counter_ns() - started)
        booking.on_first_token()
        live.append(booking)
        if len(live) > 256:
            live.pop(0).release()
    for booking in live:
        booking.release()
    return times_ns


def measure_events(
    router: Router, num_workers: int, next_sequence: list[int], random: Random
) -> dict[str, Any]:
    """Events of one block each, stored and removed in turn, in messages of 32."""
    messages = []
    for round_number in range(60):
        for number in range(num_workers):
            hashes = random_hashes(random, 16)
            first = next_sequence[number] + 32 * round_number
            events = [*one_by_one(EventKind.STORED, hashes, first)]
            events += one_by_one(EventKind.REMOVED, list(copies(hashes)), first + 16)
            messages.append((f"worker-{number:02}", events))
    num_events = sum(len(events) for _, events in messages)
    started = time.perf_counter()
    for worker_id, events in messages:
        assert router.apply_events(worker_id, 0, events) is None, "an event was missing"
    duration_s = time.perf_counter() - started
    return {"num_events": num_events, "per_s": num_events / duration_s}


def percentile(values: list[int], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks in the index")
    parser.add_argument("--decisions", type=int, default=3000, help="decisions of each length")
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    arguments = parser.parse_args()
    if not HUGE_PAGES.keys() <= os.environ.keys():
        # An allocator is chosen when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], HUGE_PAGES | os.environ)
    num_workers = arguments.workers
    random = Random(0)

    memory = measure_memory(num_workers, arguments.blocks, random)
    print(f"index: {memory['num_blocks']:,} blocks, {memory['bytes_per_block']:.0f} bytes a block")

    prompts = {
        case: [random_hashes(random, case[1] // BLOCK_SIZE) for _ in range(NUM_PROMPTS)]
        for case in CASES
    }
    router, clock = make_router(num_workers)
    next_sequence = fill(router, num_workers, arguments.blocks, prompts, random)
    decisions = []
    for spread, length in CASES:
        clock.advance(60)
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        rotation = prompts[spread, length]
        times_ns = measure_decisions(router, clock, length, rotation, arguments.decisions)
        p50, p99 = (percentile(times_ns, share) / 1000 for share in (0.5, 0.99))
        print(f"decision, {length:,} tokens, {spread}: p50 {p50:.0f} us, p99 {p99:.0f} us")
        decisions.append(
            {
                "prompt_tokens": length,
                "spread": spread,
                "p50_us": p50,
                "p99_us": p99,
                "limit_p99_us": LIMITS_US[length],
                "times_ns": times_ns,
            }
        )
    events = measure_events(router, num_workers, next_sequence, random)
    print(f"events: {events['per_s']:,.0f}/s")

    salt = make_request_salt("model", "")
    num_hashed, hash_times_s = 100_000, []
    for _ in range(5):
        started = time.perf_counter()
        hash_prompt(range(num_hashed), BLOCK_SIZE, salt)
        hash_times_s.append(time.perf_counter() - started)
    hash_ms = 1000 * statistics.median(hash_times_s)
    print(f"hashing {num_hashed:,} tokens, once a request: {hash_ms:.1f} ms")
    if arguments.out is not None:
        figures = {
            "environment": {name: os.environ[name] for name in HUGE_PAGES},
            "num_workers": num_workers,
            "block_size": BLOCK_SIZE,
            "memory": memory,
            "decisions": decisions,
            "events": events,
            "hash_prompt_ms": hash_ms,
        }
        write_figures(arguments.out, "router", figures)


if __name__ == "__main__":
    main()
