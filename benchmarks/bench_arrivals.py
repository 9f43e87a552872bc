# SPDX-License-Identifier: Apache-2.0
"""A prompt that arrives while others decode, on a GPU: its time to first token, and their pause.

    python benchmarks/bench_arrivals.py [--models llama-3.1-8b,gpt-oss-120b] [--layers 0]
        [--points 0:128,8:128,32:4x200] [--arrivals 20] [--out DIR]

A point D:N is a prompt of N tokens beside D requests that decode; D:KxN are K of them at once. One
engine in this process, in which steps with prompts replay graphs, and then launch kernel by kernel:
the same requests, one after the other, random weights, greedy, no prefix cache. Writes one record.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench_gpu import ROOT, add_gate_options, test_gate
from bench_kernels import measure_hardware
from pelton.bench.figures import write_figures
from pelton.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    SchedulerConfig,
    config_hash,
    to_dict,
)
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.factory import make_engine

_WARM_UP = 3


@dataclass(frozen=True)
class Times:
    """Medians over the arrivals."""

    ttft_ms: float
    """From the engine's call that takes the first request to the last one's first token."""
    pause_ms: float | None
    """The longest time between two tokens of a request that decodes meanwhile; None: none does."""


@dataclass(frozen=True)
class Arrival:
    model: str
    num_decoding: int
    num_prompts: int
    """That arrive at once."""
    prompt_len: int
    graphs: Times
    launched: Times


def make_request(name: str, source: random.Random, length: int, max_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    tokens = source.choices(range(1000), k=length)
    return GenerateRequest(request_id=name, prompt_token_ids=tokens, sampling=sampling, seed=0)


def measure(
    engine: Engine, num_decoding: int, num_prompts: int, prompt_len: int, arrivals: int
) -> Times:
    source = random.Random(prompt_len)
    decoding = [f"decoding-{index}" for index in range(num_decoding)]
    for name in decoding:
        engine.add(make_request(name, source, 100, 4000))
    last: dict[str, float] = {}
    ttfts, pauses = [], []

    def step() -> set[str]:
        """Which requests got a token; notes the longest wait of those that decode."""
        outputs = engine.step()
        now, seen = time.perf_counter(), set()
        for output in outputs:
            assert output.error is None, output.error
            if output.token_ids:
                seen.add(output.request_id)
        for name in seen & last.keys():
            pauses[-1] = max(pauses[-1], now - last[name])
        last.update(dict.fromkeys(seen.intersection(decoding), now))
        return seen

    pauses.append(0.0)
    while len(last) < num_decoding:
        step()
    for index in range(_WARM_UP + arrivals):
        for _ in range(5 if num_decoding else 0):
            step()
        pauses.append(0.0)
        names = [f"arriving-{index}-{place}" for place in range(num_prompts)]
        requests = [make_request(name, source, prompt_len, 2) for name in names]
        start = time.perf_counter()
        for request in requests:
            engine.add(request)
        waiting = set(names)
        while waiting:
            waiting -= step()
        ttfts.append(time.perf_counter() - start)
        for _ in range(3):
            step()
    for name in decoding:
        engine.cancel(name)
    while engine.has_work:
        engine.step()
    kept = slice(-arrivals, None)
    pause_ms = statistics.median(pauses[kept]) * 1e3 if num_decoding else None
    return Times(statistics.median(ttfts[kept]) * 1e3, pause_ms)


@contextmanager
def launched_one_by_one(engine: Engine) -> Iterator[None]:
    """Steps with prompts find no graph."""
    builder: Any = engine._executor.input_builder  # type: ignore[attr-defined]
    padding = builder._padding
    builder._padding = replace(padding, mixed_sizes=())
    try:
        yield
    finally:
        builder._padding = padding


def make_config(name: str, layers: int) -> EngineConfig:
    model = ModelConfig(model=name, dtype=DType.BFLOAT16, random_weights=name, max_model_len=8192)
    kv = KVCacheDType.FP8 if "fp8" in name or "gpt-oss" in name else KVCacheDType.AUTO
    return EngineConfig(
        model=replace(model, layers=layers) if layers else model,
        cache=CacheConfig(prefix_cache=False, kv_cache_dtype=kv),
        scheduler=SchedulerConfig(max_num_requests=64, max_num_batched_tokens=8192),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-3.1-8b,gpt-oss-120b")
    parser.add_argument("--layers", type=int, default=0, help="only the first so many; 0: all")
    parser.add_argument("--points", default="0:128,8:128,32:128,32:512,32:4x200,32:1000")
    parser.add_argument("--arrivals", type=int, default=20)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "records")
    add_gate_options(parser)
    arguments = parser.parse_args()
    gate = test_gate(arguments)
    hardware = measure_hardware()
    found: list[Arrival] = []
    configs = []
    for name in arguments.models.split(","):
        engine = make_engine(make_config(name, arguments.layers))
        configs.append({"config": to_dict(engine.config), "hash": config_hash(engine.config)})
        for point in arguments.points.split(","):
            decoding, prompts = point.split(":")
            count, _, length = prompts.rpartition("x")
            sizes = int(decoding), int(count or 1), int(length)
            graphs = measure(engine, *sizes, arguments.arrivals)
            with launched_one_by_one(engine):
                launched = measure(engine, *sizes, arguments.arrivals)
            found.append(Arrival(name, *sizes, graphs, launched))
            print(f"{name} {point}: graphs {graphs}, launched {launched}", flush=True)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    card = next((short for short in ("h200", "h100") if short.upper() in hardware.name), "gpu")
    path = arguments.out / f"arrivals_1x{card}_{datetime.now(UTC):%Y-%m-%d}.json"
    figures = {
        "layers": arguments.layers,
        "weights": "random, RMS 0.02, in the format of the checkpoint",
        "hardware": asdict(hardware),
        "test_gate": gate,
        "status": "complete",
        "arrivals": arguments.arrivals,
        "configs": configs,
        "points": [asdict(arrival) for arrival in found],
    }
    write_figures(path, "arrivals", figures, commit=arguments.commit or None)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
