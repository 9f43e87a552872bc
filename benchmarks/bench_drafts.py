# SPDX-License-Identifier: Apache-2.0
"""What drafts cost on a GPU when none is accepted: time of a decode step with and without them.

    python benchmarks/bench_drafts.py [--model deepseek-v3] [--layers 7] [--drafts 1,2,3]
        [--batches 1,8,64] [--out DIR]

With random weights the MTP layer guesses at random, so a step with drafts gains one token a row
like one without. What a step takes more is compared with what its extra bytes and products explain:
the ratio of the steps' floors (`pelton roofline`), at the ceilings measured in the same run.
Writes one record.
"""

import argparse
import gc
import logging
import random
import statistics
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench_gpu import ROOT, add_gate_options, model_of, outline, test_gate
from bench_kernels import measure_hardware
from pelton.bench.figures import write_figures
from pelton.bench.roofline import make_rows
from pelton.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    config_hash,
    to_dict,
)
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.factory import make_engine
from pelton.engine.step_cost import step_costs
from pelton.perf.hardware import Hardware
from pelton.quantization.plain import PlainWeight

INPUT_LEN, OUTPUT_LEN = 128, 160


@dataclass(frozen=True)
class Steps:
    """Decode steps of a full batch: after every request's first token, before any one's end."""

    median_ms: float
    repeats_ms: list[float]
    tokens_per_row: float


@dataclass(frozen=True)
class DraftCost:
    num_drafts: int
    batch: int
    step: Steps
    floor_ms: float
    ratio: float
    """Of the step's time to that of one without drafts."""
    explained_ratio: float
    """Of their floors."""

    @property
    def excess(self) -> float:
        return self.ratio / self.explained_ratio


def time_steps(engine: Engine, batch: int, repeats: int) -> Steps:
    times_ms, gained = [], []
    for seed in range(repeats):
        source = random.Random(seed)
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        for index in range(batch):
            prompt = source.choices(range(engine.geometry.vocab_size), k=INPUT_LEN)
            engine.add(
                GenerateRequest(
                    request_id=f"{seed}-{index}", prompt_token_ids=prompt, sampling=sampling, seed=0
                )
            )
        started: set[str] = set()
        ends, tokens, num_steps, is_over = [0.0, 0.0], 0, 0, False
        while engine.has_work:
            was_full = len(started) == batch and not is_over
            outputs = engine.step()
            if not outputs:
                continue
            for output in outputs:
                assert output.error is None, output.error
                started.add(output.request_id)
                is_over = is_over or output.finish_reason is not None
                tokens += len(output.token_ids) if was_full else 0
            if len(started) == batch and not is_over:
                num_steps += was_full
                ends[was_full] = time.perf_counter()
        times_ms.append((ends[1] - ends[0]) / num_steps * 1e3)
        gained.append(tokens / num_steps / batch)
    return Steps(statistics.median_low(times_ms), times_ms, statistics.mean(gained))


def floor_ms(name: str, layers: int, num_drafts: int, batch: int, hardware: Hardware) -> float:
    model, geometry = outline(name, layers, has_mtp=num_drafts > 0)
    model.pack(PlainWeight)
    log = step_costs(
        model,
        geometry,
        num_rows=batch,
        new_tokens=1,
        context_len=INPUT_LEN + OUTPUT_LEN // 2,
        block_size=CacheConfig().block_size,
        kv_dtype=torch.bfloat16,
        num_drafts=num_drafts,
    )
    return sum(row.floor_s for row in make_rows(log, hardware)) * 1e3


def make_config(name: str, layers: int, num_drafts: int, max_batch: int) -> EngineConfig:
    model = ModelConfig(model=name, dtype=DType.BFLOAT16, random_weights=name, max_model_len=1024)
    return EngineConfig(
        model=replace(model, layers=layers) if layers else model,
        cache=CacheConfig(prefix_cache=False),
        scheduler=SchedulerConfig(max_num_requests=max_batch, max_num_batched_tokens=8192),
        speculative=SpeculativeConfig(speculative=f"mtp:{num_drafts}" if num_drafts else "off"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--layers", type=int, default=7, help="only the first so many; 0: all")
    parser.add_argument("--drafts", default="1,2,3")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "records")
    add_gate_options(parser)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # routers' spread
    gate = test_gate(arguments)
    hardware = measure_hardware()
    batches = [int(text) for text in arguments.batches.split(",")]
    found: list[DraftCost] = []
    configs = []
    for num_drafts in (0, *map(int, arguments.drafts.split(","))):
        config = make_config(arguments.model, arguments.layers, num_drafts, max(batches))
        engine = make_engine(config)
        configs.append({"config": to_dict(engine.config), "hash": config_hash(engine.config)})
        assert (model_of(engine).mtp_layer() is not None) == (num_drafts > 0)
        for batch in batches:
            time_steps(engine, batch, 1)
            step = time_steps(engine, batch, arguments.repeats)
            floor = floor_ms(arguments.model, arguments.layers, num_drafts, batch, hardware)
            plain = next((cost for cost in found if cost.batch == batch), None)
            cost = DraftCost(
                num_drafts,
                batch,
                step,
                floor,
                ratio=step.median_ms / plain.step.median_ms if plain else 1.0,
                explained_ratio=floor / plain.floor_ms if plain else 1.0,
            )
            found.append(cost)
            print(
                f"drafts {num_drafts}  batch {batch:>3}  step {step.median_ms:7.3f} ms  floor"
                f" {floor:7.3f} ms  ratio {cost.ratio:.2f}  explained {cost.explained_ratio:.2f}"
                f"  excess {cost.excess:.2f}  tokens a row and step {step.tokens_per_row:.3f}",
                flush=True,
            )
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    card = next((short for short in ("h200", "h100") if short.upper() in hardware.name), "gpu")
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    path = arguments.out / f"{arguments.model}_1x{card}_draft-cost_{date}.json"
    figures = {
        "model": arguments.model,
        "layers": arguments.layers,
        "weights": "random, RMS 0.02, in the format of the checkpoint",
        "hardware": asdict(hardware),
        "test_gate": gate,
        "status": "complete",
        "input_len": INPUT_LEN,
        "output_len": OUTPUT_LEN,
        "configs": configs,
        "points": [{**asdict(cost), "excess": cost.excess} for cost in found],
    }
    write_figures(path, "drafts", figures, commit=arguments.commit or None)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
