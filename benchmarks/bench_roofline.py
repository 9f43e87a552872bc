# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step goes on this machine's GPU: each op beside its floor.

python benchmarks/bench_roofline.py [--steps gpt-oss-120b:256:1:1500:fp8,...] [--out FILE]

A step is MODEL:ROWS:NEW:CONTEXT[:fp8][:deterministic][:LAYERS]: so many rows of NEW tokens each
with CONTEXT tokens in all, random weights, `fp8` for keys and values in that format,
`deterministic` for that mode's kernels, the model's first LAYERS only. It is what `pelton roofline
--measure` prints; from the record `scripts/make_results.py` draws the pictures of
docs/performance.md.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pelton.bench.ceilings import measure_ceilings
from pelton.bench.figures import write_figures
from pelton.bench.roofline import make_rows, table_lines
from pelton.bench.roofline_step import Step, cost_step, measure_step
from pelton.core.config import Device, KVCacheDType
from pelton.engine.factory import select_device
from pelton.perf.hardware import Hardware

STEPS = (
    "llama-3.1-8b:256:1:1500,llama-3.1-8b:1:1:256,llama-3.1-8b-fp8:512:1:1500:fp8,"
    "gpt-oss-120b:256:1:1500:fp8,gpt-oss-120b:1:1:256:fp8,gpt-oss-120b:8:1000:1000:fp8,"
    "deepseek-v3:128:1:1250:7,deepseek-v3:1:1:192:7,deepseek-v3:8:1000:1000:7,"
    "llama-3.1-8b-fp8:8:1000:1000:fp8"
)


def parse_step(text: str) -> Step:
    name, num_rows, new_tokens, context, *rest = text.split(":")
    layers = [int(word) for word in rest if word not in ("fp8", "deterministic")]
    return Step(
        name=name,
        num_rows=int(num_rows),
        new_tokens=int(new_tokens),
        context_len=int(context),
        speculative="off",
        num_layers=layers[0] if layers else 0,
        kv_cache_dtype=KVCacheDType.FP8 if "fp8" in rest else KVCacheDType.AUTO,
        is_deterministic="deterministic" in rest,
    )


def measure(text: str, repeats: int, hardware: Hardware) -> dict[str, Any]:
    step = parse_step(text)
    log = cost_step(step)
    _, times = measure_step(step, repeats)
    rows = make_rows(log, hardware, times)
    print(text)
    for line in table_lines(rows, step.num_rows * step.new_tokens, times):
        print(line, flush=True)
    torch.cuda.empty_cache()
    return {
        "step": text,
        "total_s": times.total_s,
        "rest_s": times.rest_s,
        "floor_s": sum(row.floor_s for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", default=STEPS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default="", help="of the source, where there is no git")
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    arguments = parser.parse_args()
    # Once, and first: with a model's memory taken and given back a copy is 10% slower.
    hardware = measure_ceilings(select_device(Device.AUTO))
    print(f"{hardware.name}: copy {hardware.memory_bytes_per_s / 1e12:.2f} TB/s")
    steps = [measure(text, arguments.repeats, hardware) for text in arguments.steps.split(",")]
    if arguments.out is not None:
        figures = {
            "hardware": asdict(hardware),
            "repeats": arguments.repeats,
            "steps": steps,
        }
        write_figures(arguments.out, "roofline", figures, commit=arguments.commit or None)


if __name__ == "__main__":
    main()
