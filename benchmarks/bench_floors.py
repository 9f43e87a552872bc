# SPDX-License-Identifier: Apache-2.0
"""How near the runs of `bench_gpu.py` came to the card: tokens/s beside those of the floors.

    python benchmarks/bench_floors.py benchmarks/records/llama-3.1-8b_1xh200_offline_*.json
    python benchmarks/bench_floors.py --copy 3.02 benchmarks/records/gpt-oss-120b_*.json

A run of R requests of I input and O output tokens is taken as whole prompts in steps of as many as
the record's configuration allows, and O decode steps, whose floors are those of five steps between
the first and the last. Floors are by the ops' own costs and the ceilings that the record has. With
`--copy` also what the run would give on a card that copies so many TB/s and is otherwise the same:
the time measured and what the floors differ by. Needs no GPU.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from pelton.bench.roofline import make_rows
from pelton.bench.roofline_step import Step, cost_step
from pelton.core.config import KVCacheDType
from pelton.perf.hardware import Hardware

DECODE_PLACES = 5


def floor_of(step: Step, hardware: Hardware) -> float:
    """Seconds."""
    return sum(row.floor_s for row in make_rows(cost_step(step), hardware))


def tokens_per_s(record: dict[str, Any], point: str, hardware: Hardware) -> float:
    requests, inputs, outputs = map(int, point.split(":"))
    config = record["config"]
    prompts = min(requests, max(config["scheduler"]["max_num_batched_tokens"] // inputs, 1))
    prefill = Step(
        name=record["model"],
        num_rows=prompts,
        new_tokens=inputs,
        context_len=inputs,
        speculative="off",
        num_layers=config["model"].get("layers", 0),
        kv_cache_dtype=KVCacheDType(config["cache"].get("kv_cache_dtype", KVCacheDType.AUTO)),
    )
    decode = replace(prefill, num_rows=requests, new_tokens=1)
    contexts = [inputs + outputs * place // (DECODE_PLACES - 1) for place in range(DECODE_PLACES)]
    decode_s = statistics.mean(
        floor_of(replace(decode, context_len=context), hardware) for context in contexts
    )
    whole_s = floor_of(prefill, hardware) * requests / prompts + decode_s * outputs
    return requests * outputs / whole_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--copy", type=float, help="TB/s of a card that is otherwise the same")
    arguments = parser.parse_args()
    for path in arguments.records:
        record = json.loads(path.read_text())
        hardware = Hardware(**record["hardware"])
        for measured in record["points"]:
            floors = tokens_per_s(record, measured["point"], hardware)
            reached = measured["output_tokens_per_s"]
            line = (
                f"{path.stem:60} {measured['point']:15} {reached:9,.0f} tok/s"
                f" of {floors:9,.0f}: {reached / floors:.0%}"
            )
            if arguments.copy:
                other = replace(hardware, memory_bytes_per_s=arguments.copy * 1e12)
                other_floors = tokens_per_s(record, measured["point"], other)
                expected = 1 / (1 / reached + 1 / other_floors - 1 / floors)
                line += f"; at {arguments.copy} TB/s {expected:9,.0f} of {other_floors:9,.0f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
