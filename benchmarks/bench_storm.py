# SPDX-License-Identifier: Apache-2.0
"""Requests while workers die and freeze and clients leave: right tokens or a typed error, no hang,
and nothing is held afterwards.

python benchmarks/bench_storm.py [--requests 2000] [--prefill 2] [--decode 2] [--seed 0]
                                 [--blow-every-s 4] [--roll-every-s 0] [--out FILE]

`pelton serve --prefill P --decode D` runs as anybody would run it, on the CPU in float32, with few
layers of random weights and few KV blocks. What each request must be answered with is computed
first, by one engine in this process. Every few seconds a random worker is killed, frozen until the
server replaces it, or stopped for a moment. A fifth of the clients leave in the middle, and some
requests have deadlines that they cannot keep. At the end, when all workers are up again and idle,
the server must hold what it held before: blocks, leases, bookings, mapped KV pools, file handles,
processes, sockets. Exits with 1 and says what is wrong otherwise.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from pelton import LLM, SamplingParams
from pelton.bench.figures import write_figures
from pelton.serving.progress import show_progress

NUM_CONCURRENT = 60
HUNG_S = 90.0
HEARTBEAT_S = 1.0
MAX_DEATHS, DEATHS_WINDOW_S = 5, 300.0
"""What the server forgives a worker (`serving.supervisor.RestartPolicy`)."""
MIN_GAP = 1e-3
"""Between the log-probabilities of two tokens: what rounding cannot turn round."""
ENGINE = {
    "random_weights": "smollm2-135m",
    "layers": 1,
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": 512,
    "num_blocks": 280,
    "max_num_requests": 16,
    "max_num_batched_tokens": 64,
}
IDLE = ("requests_live", "requests_queued", "requests_running", "requests_waiting")
IDLE += ("requests_receiving", "requests_booked", "kv_blocks_used", "kv_blocks_leased")
TYPED = {"worker_lost", "unavailable"}
LATE = {"deadline_exceeded", "deadline_unreachable"}
TOP_K = 5
_READY = re.compile(r"Ready at (http://\S+) ")


@dataclass(frozen=True, slots=True)
class Kind:
    """A request and its answer."""

    prompt: list[int]
    sampling: dict[str, Any]
    token_ids: list[int]


def make_kinds(count: int, chance: random.Random) -> list[Kind]:
    """Half of the prompts begin as another. Most answers are drawn: greedy ones repeat themselves,
    whatever the prompt."""
    stems = [[chance.randrange(300, 40_000) for _ in range(160)] for _ in range(4)]
    prompts, samplings = [], []
    for number in range(2 * count):
        length = chance.choice([1, 15, 16, 17, chance.randrange(20, 300)])
        stem = chance.choice(stems) if number % 2 else []
        prompts.append(stem + [chance.randrange(300, 40_000) for _ in range(length)])
        sampling = {"max_tokens": chance.randrange(4, 20), "ignore_eos": True, "temperature": 0.0}
        if number % 4:
            sampling |= {"temperature": 1.0, "top_k": TOP_K, "seed": number}
        samplings.append(sampling)
    with LLM("smollm2", **ENGINE) as llm:
        params = [SamplingParams(**sampling, logprobs=TOP_K + 1) for sampling in samplings]
        results = llm.generate(prompts, params, progress=False)
    kinds = []
    for prompt, sampling, result in zip(prompts, samplings, results, strict=True):
        choice = result.choices[0]
        tops = [[logprob for _, logprob in entry.top] for entry in choice.logprobs or ()]
        # The last that may be taken and the next one: what rounding may turn.
        edge = TOP_K - 1 if sampling["temperature"] else 0
        if min(top[edge] - top[edge + 1] for top in tops) > MIN_GAP:
            kinds.append(Kind(prompt, sampling, choice.token_ids))
    assert len(kinds) >= count, f"{len(kinds)} of {2 * count} answers are clear"
    return kinds[:count]


class Server:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.url = url
        self._main = psutil.Process(process.pid)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Those that live, by what they are."""
        found = defaultdict(list, {"main": [self._main]})
        for child in self._main.children():
            try:
                if child.status() == psutil.STATUS_ZOMBIE:
                    continue
                command = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            if "pelton.serving.worker" in command:
                found[f"worker {command[-1].split('-')[-2]}"].append(child)
            else:
                found["frontend"].append(child)
        return found

    def metrics(self) -> dict[str, float]:
        """Sums over workers."""
        sums: dict[str, float] = defaultdict(float)
        for line in httpx.get(f"{self.url}/metrics", timeout=20).text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                sums[name.split("{")[0].removeprefix("pelton_")] += float(value)
        return sums

    def is_whole(self) -> bool:
        return bool(httpx.get(f"{self.url}/health", timeout=20).json()["status"] == "ok")

    def num_mapped(self) -> int:
        """Pools of prefill workers in their own memory and in that of decode workers."""
        return sum(_num_pools(found[0]) for found in self.processes().values())

    def held(self) -> dict[str, int]:
        """What must be the same, or less, before and after."""
        processes = self.processes()
        listing = httpx.get(f"{self.url}/admin/workers", timeout=20).json()["data"]
        roles = {f"worker {row['worker']}": f"{row['role']} worker" for row in listing}
        counts = Counter(
            {"processes": sum(map(len, processes.values())), "segments": _num_shared()}
        )
        for name, (process, *_) in processes.items():
            kind = roles.get(name, name)
            num_pools = _num_pools(process)
            for thing, count in (("files", process.num_fds()), ("mapped pools", num_pools)):
                counts[f"{thing} of {kind}"] = max(counts[f"{thing} of {kind}"], count)
            if name.startswith("worker"):
                folder = Path(process.cmdline()[-1].removeprefix("ipc://")).parent
                counts["sockets"] = len(list(folder.iterdir()))
        metrics = self.metrics()
        return counts | {name: int(metrics[name]) for name in IDLE}


def _num_pools(process: psutil.Process) -> int:
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return len({line.split()[-2] for line in maps.splitlines() if "memfd:pelton-kv" in line})


def _num_shared() -> int:
    """Named segments of this user, whoever made them."""
    folder = Path("/dev/shm")
    return sum("pelton" in path.name for path in folder.iterdir()) if folder.exists() else 0


@contextmanager
def running_server(prefill: int, decode: int, log: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "pelton.cli.main", "serve", "smollm2", "--port", "0"]
    for name, value in ENGINE.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    if prefill:
        command += ["--prefill", str(prefill), "--decode", str(decode)]
    else:
        command += ["--workers", str(decode)]
    command += ["--worker-heartbeat-s", str(HEARTBEAT_S), "--max-queue", str(2 * NUM_CONCURRENT)]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        ready = _READY.search(process.stdout.readline())
        assert ready is not None, f"the server did not start: {log.read_text()}"
        yield Server(process, ready[1])
    finally:
        process.terminate()
        process.wait(60)


@dataclass(slots=True)
class Striker:
    """Kills and freezes workers, no more often than the server forgives. Which blow comes hangs on
    the seed and not on who is there to be struck."""

    server: Server
    seed: int
    blows: Counter[str] = field(default_factory=Counter)
    deaths_s: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    async def strike(self, number: int) -> None:
        now_s, chance = time.monotonic(), random.Random(f"{self.seed}/{number}")
        blow = chance.choice(["killed", "frozen", "stopped for a moment"])
        found = self.server.processes()
        name = chance.choice(sorted(name for name in found if name.startswith("worker")))
        (victim, *_), deaths_s = found[name], self.deaths_s[name]
        while deaths_s and now_s - deaths_s[0] > DEATHS_WINDOW_S:
            deaths_s.popleft()
        if len(deaths_s) >= MAX_DEATHS:
            blow = "stopped for a moment"
        self.blows[blow] += 1
        try:
            victim.send_signal(signal.SIGKILL if blow == "killed" else signal.SIGSTOP)
            if blow == "stopped for a moment":
                await asyncio.sleep(chance.uniform(0.1, HEARTBEAT_S))
                victim.resume()
            else:
                deaths_s.append(now_s)
        except psutil.NoSuchProcess:  # it ended before the blow fell
            pass

    async def go_on(self, every_s: float, num_blows: int | None) -> None:
        chance = random.Random(self.seed)
        for number in itertools.count() if num_blows is None else range(num_blows):
            await asyncio.sleep(every_s * chance.uniform(0.5, 1.5))
            await self.strike(number)

    async def roll(self, every_s: float) -> None:
        """Has every worker replaced, again and again."""
        while every_s:
            await asyncio.sleep(every_s)
            url, body = f"{self.server.url}/admin/workers/roll", {"timeout_s": 1.0}
            async with httpx.AsyncClient(timeout=HUNG_S) as client:
                reply = await client.post(url, json=body)
            self.blows["rolled" if reply.is_success else "too busy to roll"] += 1


class Clients:
    def __init__(self, server: Server, kinds: list[Kind], seed: int) -> None:
        self._kinds = kinds
        self._seed = seed
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_retries = 0
        """While no decode worker was up."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=NUM_CONCURRENT)
        self._client = httpx.AsyncClient(base_url=server.url, timeout=HUNG_S, limits=limits)

    async def send_all(self, count: int, advance: Callable[[int, int], None]) -> None:
        numbers = iter(range(count))

        async def work() -> None:
            for number in numbers:
                advance(1, await self._send(number))

        await asyncio.gather(*(work() for _ in range(NUM_CONCURRENT)))

    async def check_kinds(self, salt: str = "") -> None:
        """Each kind once, undisturbed."""

        async def check(kind: Kind) -> None:
            body = _body(kind) | {"cache_salt": salt}
            reply = await self._client.post("/v1/completions", json=body)
            assert reply.json()["choices"][0]["token_ids"] == kind.token_ids, reply.text

        await asyncio.gather(*map(check, self._kinds))

    async def close(self) -> None:
        await self._client.aclose()

    async def _send(self, number: int) -> int:
        """Returns the number of tokens."""
        chance = random.Random(f"{self._seed} {number}")
        kind = chance.choice(self._kinds)
        body: dict[str, Any] = _body(kind) | {
            "stream": chance.random() < 0.6,
            "priority": chance.choice([0, 0, 0, 1]),
        }
        if chance.random() < 0.5:
            body["cache_salt"] = str(number)  # so that its prompt is computed again
        has_deadline = chance.random() < 0.05
        if has_deadline:
            body["timeout_s"] = chance.uniform(0.05, 2.0)
        leaves_after_s = chance.uniform(0.0, 1.5) if number % 5 == 4 else None
        token_ids: list[int] = []
        try:
            async with asyncio.timeout(leaves_after_s or HUNG_S):
                while (error := await self._read(body, token_ids)) == "unavailable":
                    self.num_retries += 1
                    await asyncio.sleep(1.0)
        except TimeoutError:
            error = "left" if leaves_after_s is not None else "hung"
        except httpx.HTTPError as problem:
            error = repr(problem)
        self.ends[error or "right"] += 1
        expected = kind.token_ids if not error else kind.token_ids[: len(token_ids)]
        is_typed = error in TYPED or (has_deadline and error in LATE)
        if token_ids != expected or not (is_typed or error in ("", "left")):
            self.wrong.append(f"{number}: {error or 'wrong'}: {token_ids} for {expected}")
        return len(token_ids)

    async def _read(self, body: dict[str, Any], token_ids: list[int]) -> str:
        """The code of the error that ended it; empty: none did."""
        async with self._client.stream("POST", "/v1/completions", json=body) as reply:
            if not body["stream"] or reply.status_code != 200:
                content = json.loads(await reply.aread())
                if reply.status_code == 200:
                    token_ids += content["choices"][0]["token_ids"]
                return str(content["error"]["code"]) if "error" in content else ""
            is_whole = False
            async for line in reply.aiter_lines():
                is_whole = is_whole or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return str(event["error"]["code"])
                for choice in event["choices"]:
                    token_ids += choice.get("token_ids") or []
        return "" if is_whole else "cut short"


def _body(kind: Kind) -> dict[str, Any]:
    return {"prompt": kind.prompt, "return_token_ids": True, **kind.sampling}


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 90.0) -> list[str]:
    """Says what never came true; nothing otherwise."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if condition():
            return []
        time.sleep(0.1)
    return [f"after {timeout_s:g} s still not: {what}"]


async def storm(server: Server, kinds: list[Kind], args: argparse.Namespace) -> dict[str, Any]:
    warm = Clients(server, kinds, args.seed)
    for number in range(50):
        await warm.check_kinds(str(number))
        if server.num_mapped() == args.prefill * (1 + args.decode):
            break  # each decode worker knows each prefill worker
    await warm.close()
    wrong = wait_until(lambda: not any(server.held()[name] for name in IDLE), "idle")
    before = server.held()
    clients = Clients(server, kinds, args.seed)
    striker = Striker(server, args.seed)
    start_s = time.monotonic()
    blows = asyncio.create_task(striker.go_on(args.blow_every_s, args.blows))
    rolls = asyncio.create_task(striker.roll(args.roll_every_s))
    with show_progress(args.requests, is_shown=sys.stderr.isatty()) as advance:
        await clients.send_all(args.requests, advance)
    rolls.cancel()
    if args.blows is None:
        blows.cancel()
    else:
        await blows
    await asyncio.wait({rolls, blows})  # what they hold open would count
    took_s = time.monotonic() - start_s
    for processes in server.processes().values():
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)  # what was stopped for a moment
    wrong += wait_until(server.is_whole, "all workers up")
    await clients.check_kinds()
    await clients.close()

    def is_as_before() -> bool:
        return not _list_more(before, server.held())

    if wait_until(is_as_before, "as before"):
        wrong += _list_more(before, server.held())
    metrics = server.metrics()
    names = ("requests_migrated_total", "requests_aborted_total", "kv_pulls_total")
    return {
        "took_s": round(took_s, 1),
        "blows": dict(striker.blows),
        "ends": dict(clients.ends),
        "retries": clients.num_retries,
        "counts": {name: int(metrics[name]) for name in names},
        "held_before": before,
        "held_after": server.held(),
        "wrong": wrong + clients.wrong,
    }


def _list_more(before: dict[str, int], after: dict[str, int]) -> list[str]:
    return [
        f"{name}: {before.get(name, 0)} before, {count} after"
        for name, count in after.items()
        if count > before.get(name, 0)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kinds", type=int, default=50, help="different requests")
    parser.add_argument("--prefill", type=int, default=2, help="0: all do both")
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--blow-every-s", type=float, default=4.0)
    parser.add_argument("--blows", type=int, help="so many; default: until the last request")
    parser.add_argument("--roll-every-s", type=float, default=0.0, help="0: never")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("storm.log"), help="the server's")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kinds = make_kinds(args.kinds, random.Random(args.seed))
    with running_server(args.prefill, args.decode, args.log) as server:
        figures = asyncio.run(storm(server, kinds, args))
    print(json.dumps(figures, indent=1))
    if args.out:
        settings = {"requests": args.requests, "prefill": args.prefill, "decode": args.decode}
        write_figures(args.out, "storm", {**settings, "seed": args.seed, **figures})
    if figures["wrong"]:
        sys.exit(f"{len(figures['wrong'])} things are wrong: {figures['wrong'][:3]}")


if __name__ == "__main__":
    main()
