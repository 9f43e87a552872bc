# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 on a CPU: Pelton beside transformers and llama.cpp, all in one run.

    python benchmarks/bench_cpu_peers.py [--threads 2] [--repeats 5] [--peers NAME,NAME]
        [--out benchmarks/records/NAME.json]

Prompts of 128 tokens of English from the standard library's documentation, 64 greedy tokens each,
1 and 16 requests at once. Repeats are interleaved: every peer runs once before any runs again, so
that a disturbance meets all of them. Prints medians with the lowest and highest repeat.
"""

import argparse
import multiprocessing
import os
import pydoc_data.topics
import statistics
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cpu_peers import MAX_PROMPT, MAX_REQUESTS, MODEL, PEERS, PeerMissingError, Timing
from pelton.bench.figures import write_figures
from pelton.models.checkpoint import open_checkpoint
from pelton.serving.tokenizer import Tokenizer

NUM_TOKENS = 64
CONCURRENCIES = (1, MAX_REQUESTS)
START_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 600.0


@dataclass
class Figures:
    """Of one peer at one concurrency; one entry a repeat."""

    peer: str
    num_requests: int
    prefill_tokens_per_s: list[float] = field(default_factory=list)
    decode_tokens_per_s: list[float] = field(default_factory=list)
    load_average: list[float] = field(default_factory=list)
    first_output: list[int] = field(default_factory=list)
    """The tokens of the first request, for comparing peers."""

    def add(self, timing: Timing) -> None:
        self.prefill_tokens_per_s.append(self.num_requests * MAX_PROMPT / timing.prefill_s)
        num_decoded = self.num_requests * (NUM_TOKENS - 1)
        self.decode_tokens_per_s.append(num_decoded / timing.decode_s)
        self.load_average.append(os.getloadavg()[0])
        self.first_output = timing.token_ids[0]


class PeerProcess:
    """A peer in a process of its own; idle while others run."""

    def __init__(self, name: str, num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_serve_peer, args=(name, num_threads, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self.description: dict[str, Any] = self._receive(START_TIMEOUT_S)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Timing:
        self._connection.send((prompts, num_tokens))
        timing: Timing = self._receive(RUN_TIMEOUT_S)
        return timing

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            self._process.kill()
            raise TimeoutError(f"a peer did not answer within {timeout_s:.0f} s")
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join(10)
            raise RuntimeError(f"a peer ended with code {self._process.exitcode}") from None
        if isinstance(answer, PeerMissingError):
            raise answer
        return answer


def _serve_peer(name: str, num_threads: int, connection: Connection) -> None:
    try:
        peer = PEERS[name](num_threads)
    except PeerMissingError as error:
        connection.send(error)
        return
    connection.send(peer.description)
    while True:
        try:
            prompts, num_tokens = connection.recv()
        except EOFError:
            return
        connection.send(peer.generate(prompts, num_tokens))


def make_prompts() -> list[list[int]]:
    text = "\n".join(pydoc_data.topics.topics.values())
    ids = Tokenizer.load(open_checkpoint(MODEL)).encode(text, False)
    return [ids[4000 * index :][:MAX_PROMPT] for index in range(MAX_REQUESTS)]


def run(
    names: list[str], num_threads: int, num_repeats: int
) -> tuple[list[Figures], dict[str, Any]]:
    """Figures of every peer that is installed, and what each says of itself."""
    peers: dict[str, PeerProcess] = {}
    for name in names:
        try:
            peers[name] = PeerProcess(name, num_threads)
        except PeerMissingError as error:
            print(f"{name} left out: {error}", flush=True)
    prompts = make_prompts()
    figures = {(name, n): Figures(name, n) for n in CONCURRENCIES for name in peers}
    try:
        for repeat in range(-1, num_repeats):
            for (name, num_requests), found in figures.items():
                # The first round warms up and is not counted.
                num_tokens = NUM_TOKENS if repeat >= 0 else 4
                timing = peers[name].generate(prompts[:num_requests], num_tokens)
                if repeat >= 0:
                    found.add(timing)
            print(f"repeat {repeat + 1} of {num_repeats}", flush=True)
        return list(figures.values()), {name: peer.description for name, peer in peers.items()}
    finally:
        for peer in peers.values():
            peer.close()


def print_table(figures: list[Figures]) -> None:
    print(f"{'peer':<20}{'requests':>9}{'prefill tok/s':>26}{'decode tok/s':>26}")
    for item in figures:
        cells = (_spread(item.prefill_tokens_per_s), _spread(item.decode_tokens_per_s))
        print(f"{item.peer:<20}{item.num_requests:>9}{cells[0]:>26}{cells[1]:>26}")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def ratios(figures: list[Figures]) -> dict[str, float]:
    """The acceptance lines, as Pelton's median over the peer's, for each of Pelton's formats."""
    median = {
        (item.peer, item.num_requests, what): statistics.median(getattr(item, what))
        for item in figures
        for what in ("prefill_tokens_per_s", "decode_tokens_per_s")
    }
    lines = (
        ("transformers bf16", MAX_REQUESTS, "decode_tokens_per_s"),
        ("llama.cpp Q4_1", MAX_REQUESTS, "decode_tokens_per_s"),
        ("transformers bf16", 1, "decode_tokens_per_s"),
        ("transformers bf16", 1, "prefill_tokens_per_s"),
        ("transformers bf16", MAX_REQUESTS, "prefill_tokens_per_s"),
    )
    found = {}
    for peer, num_requests, what in lines:
        for name in PEERS:
            ours = median.get((name, num_requests, what))
            theirs = median.get((peer, num_requests, what))
            if name.startswith("pelton") and ours and theirs:
                phase = what.partition("_")[0]
                found[f"{name} / {peer}, {phase} at {num_requests}"] = ours / theirs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = arguments.peers.split(",")
    for name in names:
        if name not in PEERS:
            parser.error(f"no peer {name!r}; there are {', '.join(PEERS)}")
    figures, descriptions = run(names, arguments.threads, arguments.repeats)
    print_table(figures)
    found = ratios(figures)
    for line, ratio in found.items():
        print(f"{line}: {ratio:.2f}x")
    if arguments.out is not None:
        record = {
            "model": MODEL,
            "threads": arguments.threads,
            "prompt_tokens": MAX_PROMPT,
            "output_tokens": NUM_TOKENS,
            "peers": descriptions,
            "figures": [asdict(item) for item in figures],
            "ratios": found,
            "status": "complete",
        }
        write_figures(arguments.out, "cpu_peers", record)
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
