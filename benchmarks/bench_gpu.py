# SPDX-License-Identifier: Apache-2.0
"""Output tokens/s of the engine on a GPU, with random weights of real geometries.

    python benchmarks/bench_gpu.py [--models llama-3.1-8b,smollm2-135m,gpt-oss-20b]
        [--points 1:128:256,256:1000:1000] [--out DIR]

A point R:I:O is R requests of I input and O output tokens, all queued at once, greedy, ignoring
end-of-sequence, no prefix cache, engine in this process. The GPU tests run first, and nothing is
timed unless they pass. Writes one record a model.
"""

import argparse
import gc
import logging
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from bench_kernels import measure_hardware
from pelton.bench.figures import write_figures
from pelton.core.config import (
    AUTO,
    CacheConfig,
    DType,
    EngineConfig,
    ExecutorConfig,
    KVCacheDType,
    ModelConfig,
    SchedulerConfig,
    config_hash,
    to_dict,
)
from pelton.core.geometry import ModelGeometry
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.factory import make_engine
from pelton.models.build import default_dtype, weight_bytes
from pelton.models.geometries import find_geometry
from pelton.models.language_model import LanguageModel
from pelton.models.registry import find_architecture

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Point:
    num_requests: int
    input_len: int
    output_len: int

    @classmethod
    def parse(cls, text: str) -> "Point":
        return cls(*map(int, text.split(":")))

    def __str__(self) -> str:
        return f"{self.num_requests}:{self.input_len}:{self.output_len}"


@dataclass(frozen=True)
class PointResult:
    point: str
    output_tokens_per_s: float
    """Median of the repeats: all output tokens over the time from the first request queued to the
    last token."""
    repeats_tokens_per_s: list[float]
    prefill_s: float
    """Until the last request has its first token; of the median repeat, like all below."""
    decode_tokens_per_s: float
    """After that."""
    steps: int
    host_busy_s: float
    """Time the host spent outside waiting for results."""
    preemptions: int
    sm_clock_mhz: float | None
    """Mean while it ran: a card at its power limit lowers its clock. None: nvidia-smi said
    nothing meanwhile."""
    power_w: float | None


class CardWatch:
    """What nvidia-smi says of the card ten times a second, between `with` and its end."""

    sm_clock_mhz: float | None = None
    power_w: float | None = None

    def __enter__(self) -> "CardWatch":
        uuid = torch.cuda.get_device_properties().uuid
        command = ["nvidia-smi", "-i", f"GPU-{uuid}", "-lms", "100"]
        command += ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        self._lines = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(command, stdout=self._lines)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        with self._lines as lines:
            lines.seek(0)
            rows = re.findall(r"^([\d.]+), ([\d.]+)$", lines.read(), re.MULTILINE)
        if rows:
            clocks, powers = (list(map(float, column)) for column in zip(*rows, strict=True))
            self.sm_clock_mhz, self.power_w = statistics.mean(clocks), statistics.mean(powers)


def run_once(engine: Engine, point: Point, seed: int) -> dict[str, Any]:
    source = random.Random(seed)
    vocab_size = engine.geometry.vocab_size
    sampling = SamplingParams(temperature=0.0, max_tokens=point.output_len, ignore_eos=True)
    requests = [
        GenerateRequest(
            request_id=f"{seed}-{index}",
            prompt_token_ids=source.choices(range(vocab_size), k=point.input_len),
            sampling=sampling,
            seed=0,
        )
        for index in range(point.num_requests)
    ]
    before = engine.stats()
    waiting = {request.request_id for request in requests}
    num_tokens = tokens_at_prefill = 0
    prefill_s = 0.0
    torch.cuda.synchronize()
    start = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            num_tokens += len(output.token_ids)
            if output.token_ids and waiting:
                waiting.discard(output.request_id)
                if not waiting:
                    prefill_s = time.perf_counter() - start
                    tokens_at_prefill = num_tokens
    duration_s = time.perf_counter() - start
    assert num_tokens == point.num_requests * point.output_len, num_tokens
    stats = engine.stats()
    return {
        "tokens_per_s": num_tokens / duration_s,
        "prefill_s": prefill_s,
        "decode_tokens_per_s": (num_tokens - tokens_at_prefill) / (duration_s - prefill_s),
        "steps": stats.steps_total - before.steps_total,
        "preemptions": stats.preemptions_total - before.preemptions_total,
        "duration_s": duration_s,
    }


class WaitTimer:
    """Counts the seconds that an engine waits for results, by standing before its executor."""

    def __init__(self, engine: Engine) -> None:
        self.waited_s = 0.0
        executor = engine._executor
        launch = executor.launch

        def timed_launch(plan):
            pending = launch(plan)
            wait = pending.wait

            def timed_wait():
                start = time.perf_counter()
                result = wait()
                self.waited_s += time.perf_counter() - start
                return result

            pending.wait = timed_wait
            return pending

        executor.launch = timed_launch


def run_point(engine: Engine, timer: WaitTimer, point: Point, repeats: int) -> PointResult:
    runs = []
    for seed in range(repeats):
        timer.waited_s = 0.0
        with CardWatch() as watch:
            run = run_once(engine, point, seed)
        run |= {"sm_clock_mhz": watch.sm_clock_mhz, "power_w": watch.power_w}
        run["host_busy_s"] = run["duration_s"] - timer.waited_s
        runs.append(run)
    rates = [run["tokens_per_s"] for run in runs]
    median = statistics.median_low(rates)
    middle = next(run for run in runs if run["tokens_per_s"] == median)
    return PointResult(
        point=str(point),
        output_tokens_per_s=median,
        repeats_tokens_per_s=rates,
        prefill_s=middle["prefill_s"],
        decode_tokens_per_s=middle["decode_tokens_per_s"],
        steps=int(middle["steps"]),
        host_busy_s=middle["host_busy_s"],
        preemptions=int(middle["preemptions"]),
        sm_clock_mhz=middle["sm_clock_mhz"],
        power_w=middle["power_w"],
    )


def build_engine(name: str, max_num_requests: int, arguments: argparse.Namespace) -> Engine:
    config = EngineConfig(
        model=ModelConfig(
            model=name, dtype=DType.BFLOAT16, random_weights=name, layers=arguments.layers or AUTO
        ),
        cache=CacheConfig(
            prefix_cache=False,
            memory_fraction=arguments.memory_fraction,
            kv_cache_dtype=KVCacheDType(arguments.kv_cache_dtype),
        ),
        scheduler=SchedulerConfig(
            max_num_requests=max_num_requests,
            max_num_batched_tokens=arguments.max_num_batched_tokens or AUTO,
        ),
        executor=ExecutorConfig(
            cuda_graphs=arguments.graphs, deterministic=arguments.deterministic
        ),
    )
    return make_engine(config)


def add_gate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--commit", default="", help="of the source, where there is no git")
    parser.add_argument("--pytest-config", default="pyproject.toml")
    gate = parser.add_mutually_exclusive_group()
    gate.add_argument(
        "--junit", default="", help="comma-separated results of tests/gpu, run just before"
    )
    gate.add_argument("--skip-tests", action="store_true", help="and mark the record so")


def test_gate(arguments: argparse.Namespace) -> str:
    """What the record says of the GPU tests. SystemExit if one failed."""
    if arguments.skip_tests:
        return "skipped"
    if arguments.junit:
        return "; ".join(read_junit(Path(name)) for name in arguments.junit.split(","))
    return run_tests(arguments.pytest_config)


def read_junit(path: Path) -> str:
    (suite,) = ElementTree.parse(path).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")}
    num_passed = counts["tests"] - counts["skipped"] - counts["failures"] - counts["errors"]
    if counts["failures"] or counts["errors"] or not num_passed:
        raise SystemExit(f"{path} has failures, or no passed test: nothing is timed.")
    return f"{num_passed} passed, {counts['skipped']} skipped in {float(suite.get('time', 0)):.0f}s"


def run_tests(pytest_config: str) -> str:
    """Side by side, then those that need the card to themselves. SystemExit if a test fails."""
    summaries = []
    for marks, processes in (("not whole_card", "8"), ("whole_card", "0")):
        command = [sys.executable, "-m", "pytest", "-c", pytest_config, "tests/gpu"]
        command += ["-m", marks, "-n", processes, "--dist", "loadgroup"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        lines = run.stdout.splitlines()
        summaries.append(next((line for line in lines if " passed" in line), "").strip("= "))
        if run.returncode or not summaries[-1]:
            print(run.stdout[-6000:], run.stderr[-2000:])
            raise SystemExit("GPU tests fail: nothing is timed.")
        print(f"tests/gpu, {marks}: {summaries[-1]}", flush=True)
    return "; ".join(summaries)


def outline(
    name: str, layers: int, *, has_mtp: bool = False
) -> tuple[LanguageModel, ModelGeometry]:
    """The model on `meta`, where nothing is allocated. `layers`: only the first so many; 0: all."""
    raw = find_geometry(name, layers or None)
    architecture = find_architecture(raw)
    config = architecture.config_from_hf(raw)
    if has_mtp:
        assert architecture.with_mtp is not None, name
        config = architecture.with_mtp(config)
    with torch.device("meta"), default_dtype(torch.bfloat16):
        return architecture.build(config), config.geometry(name)


def take_memory(arguments: argparse.Namespace) -> int:
    """Allocates for good what the card has above --card-gib, and restates --memory-fraction as one
    of the whole card. Returns the bytes taken."""
    if not arguments.card_gib:
        return 0
    _, total = torch.cuda.mem_get_info()
    card = int(arguments.card_gib * 2**30)
    _TAKEN.append(torch.empty(total - card, dtype=torch.uint8, device="cuda"))
    arguments.memory_fraction = (total - card + arguments.memory_fraction * card) / total
    return total - card


_TAKEN: list[torch.Tensor] = []


def model_of(engine: Engine) -> torch.nn.Module:
    return engine._executor._model


def run_model(name: str, points: list[Point], arguments: argparse.Namespace) -> dict[str, object]:
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    engine = build_engine(name, max(point.num_requests for point in points), arguments)
    ready_s = time.perf_counter() - start
    print(
        f"{name}: ready in {ready_s:.1f} s, {engine.config.cache.num_blocks} KV blocks,"
        f" {sum(cache.nbytes for cache in engine._executor.caches) / 2**30:.1f} GiB"
    )
    timer = WaitTimer(engine)
    run_once(engine, Point(4, 64, 16), seed=-1)
    # As in a worker, which collects between requests.
    gc.collect()
    gc.freeze()
    gc.disable()
    results = []
    for point in points:
        result = run_point(engine, timer, point, arguments.repeats)
        results.append(result)
        print(
            f"{name:<14} {result.point:<14} {result.output_tokens_per_s:9.1f} tok/s  prefill"
            f" {result.prefill_s:6.2f} s  decode {result.decode_tokens_per_s:9.1f} tok/s "
            f" {result.steps} steps  host {result.host_busy_s:.2f} s"
            f"  preempted {result.preemptions}"
            f"  {result.sm_clock_mhz or math.nan:.0f} MHz, {result.power_w or math.nan:.0f} W",
            flush=True,
        )
    gc.unfreeze()
    gc.enable()
    return {
        "model": name,
        "weights": "random, RMS 0.02, in the format of the checkpoint",
        "ready_s": ready_s,
        "weight_bytes": weight_bytes(
            outline(name, arguments.layers)[0], torch.device("cuda"), torch.bfloat16
        ),
        "peak_bytes": torch.cuda.max_memory_allocated() - sum(taken.nbytes for taken in _TAKEN),
        "kv_bytes": sum(cache.nbytes for cache in engine._executor.caches),
        "config": to_dict(engine.config),
        "config_hash": config_hash(engine.config),
        "points": [asdict(result) for result in results],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="smollm2-135m,llama-3.1-8b")
    parser.add_argument("--points", default="1:128:256,256:1000:1000")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--layers", type=int, default=0, help="only the first so many; 0: all")
    parser.add_argument("--max-num-batched-tokens", type=int, default=0, help="0: the default")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--deterministic", action="store_true", help="bits independent of the batch: at what cost"
    )
    parser.add_argument("--memory-fraction", type=float, default=CacheConfig().memory_fraction)
    parser.add_argument(
        "--card-gib",
        type=float,
        default=0,
        help="use a larger card as one of so much memory (79.1: an H100 80GB): the rest is taken"
        " before the engine starts, and --memory-fraction is of this",
    )
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "benchmarks" / "records",
        help="folder for the records, each named after its model",
    )
    add_gate_options(parser)
    arguments = parser.parse_args()
    if arguments.out.suffix:
        parser.error(f"--out is a folder, got {arguments.out}: a record is named after its model")
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # routers' spread
    gate = test_gate(arguments)
    hardware = measure_hardware()
    print(
        f"{hardware.name}: copy {hardware.memory_bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 {hardware.bf16_flops_per_s / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    common = {"hardware": asdict(hardware), "test_gate": gate, "status": "complete"}
    points = [Point.parse(text) for text in arguments.points.split(",")]
    card = next((short for short in ("h200", "h100") if short.upper() in hardware.name), "gpu")
    taken_bytes = take_memory(arguments)
    for name in arguments.models.split(","):
        figures = {**common, "taken_bytes": taken_bytes, **run_model(name, points, arguments)}
        gc.collect()
        torch.cuda.empty_cache()
        scenario = "offline-deterministic" if arguments.deterministic else "offline"
        if arguments.layers:
            scenario += f"-{arguments.layers}layers"
        if arguments.card_gib:
            scenario += f"-{arguments.card_gib:.0f}gib"
        path = arguments.out / f"{name}_1x{card}_{scenario}_{datetime.now(UTC):%Y-%m-%d}.json"
        write_figures(path, "gpu", figures, commit=arguments.commit or None)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
