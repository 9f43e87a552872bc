# SPDX-License-Identifier: Apache-2.0
"""Times the settings of tiled kernels on this machine's GPU and writes what beats their rules.

    python scripts/tune_kernels.py [--only paged_decode,fp8_linear] [--out tuned.json]

One setting after the other is varied, from the rule's own on, and the best is kept: a search of
sums, not products. A setting counts when its results agree with the rule's and it is faster by
MIN_GAIN. What is written takes the place of src/pelton/kernels/tuned.json; kernels that were not
searched keep what that has. Cases are CUDA graphs over inputs larger than the L2 cache.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from pelton.core.batch import AttentionRows
from pelton.kernels.fp8.linear import tune as tune_fp8_linear
from pelton.kernels.fp8.quantize import quantize_fp8
from pelton.kernels.hopper_vector import tune_hopper_vector
from pelton.kernels.linear import linear, tune_vector
from pelton.kernels.mla.op import LATENT_ATTENTION
from pelton.kernels.mla.triton import tune as tune_latent
from pelton.kernels.moe.fp8_product import FP8_GATE_UP_PRODUCT
from pelton.kernels.moe.fp8_product import tune as tune_fp8_experts
from pelton.kernels.moe.gate import SWIGLU
from pelton.kernels.moe.sort_by_expert import sort_by_expert
from pelton.kernels.paged_attention.op import PAGED_ATTENTION
from pelton.kernels.paged_attention.triton_decode import tune_decode
from pelton.kernels.rms_norm import rms_norm
from pelton.kernels.tuning import TABLE, Settings, Tunable, capability
from pelton.quantization.fp8 import FP8Rows, FP8Weight

MIN_GAIN = 0.03
MAX_ERROR = 1e-2
"""RMS of the difference over that of the rule's result, in bfloat16."""
SHORT, LONG = 256, 1536
"""Tokens of context that decode is timed with."""
SET_BYTES = 256 * 2**20
"""Input sets of a case together: several times any L2 cache."""
REPEATS = 7
DTYPE, E4M3 = torch.bfloat16, torch.float8_e4m3fn
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    num_bytes: int
    """Of one input set."""
    make_call: Callable[[], Call]
    """With a fresh input set, the same in every search."""


@dataclass(frozen=True)
class Search:
    tune: Tunable[Any]
    candidates: Mapping[str, Sequence[int]]
    cases: Sequence[Case]


def rand(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE).to(dtype)


def paged_decode(num_rows: int, heads: int, kv_dtype: torch.dtype) -> Case:
    """8 KV heads; 32 heads are Llama 3.1 8B's, of 128, and 64 GPT-OSS's, of 64."""
    head_dim = 4096 // heads
    num_blocks = num_rows * LONG // 16

    def make_call() -> Call:
        cache = rand(num_blocks + 1, 2, 16, 8, head_dim, dtype=kv_dtype)
        q, (short, long) = rand(num_rows, heads, head_dim), decode_rows(num_rows)
        run = PAGED_ATTENTION.named("triton")
        arguments = head_dim**-0.5, 0, None
        return lambda: torch.cat(
            (run(q, cache, short, *arguments), run(q, cache, long, *arguments))
        )

    name = f"R{num_rows} H{heads} {kv_dtype.itemsize} bytes"
    return Case(name, num_blocks * 256 * head_dim * kv_dtype.itemsize, make_call)


def latent_decode(num_rows: int) -> Case:
    num_blocks = num_rows * LONG // 16

    def make_call() -> Call:
        cache = rand(num_blocks + 1, 16, 576)
        q, q_rope, (short, long) = (
            rand(num_rows, 128, 512),
            rand(num_rows, 128, 64),
            decode_rows(num_rows),
        )
        run = LATENT_ATTENTION.named("triton")
        return lambda: torch.cat([run(q, q_rope, cache, rows, 0.1) for rows in (short, long)])

    return Case(f"R{num_rows}", num_blocks * 16 * 1152, make_call)


def decode_rows(num_rows: int) -> tuple[AttentionRows, AttentionRows]:
    """All of SHORT contexts, and all of LONG ones: a rule does not know them."""
    tables = torch.randperm(num_rows * LONG // 16, device="cuda").int().view(num_rows, -1) + 1
    short, long = (
        AttentionRows(
            block_tables=tables,
            query_starts=torch.arange(num_rows + 1, device="cuda", dtype=torch.int32),
            context_lens=torch.full((num_rows,), context, device="cuda", dtype=torch.int32),
            num_decodes=num_rows,
            max_query_len=1,
            max_context_len=context,
        )
        for context in (SHORT, LONG)
    )
    return short, long


def fp8_linear(num_tokens: int, out_features: int, in_features: int) -> Case:
    """In blocks of 128 x 128, by the kernel that a model would use."""

    def make_call() -> Call:
        weight = rand(out_features, in_features, dtype=E4M3)
        blocks = -(-out_features // 128), -(-in_features // 128)
        packed = FP8Weight(weight, torch.rand(blocks, device="cuda"), None, has_blocks=True)
        rows = FP8Rows(*quantize_fp8(rand(num_tokens, in_features), 128), DTYPE, None)
        return lambda: packed.multiply(rows)

    name = f"T{num_tokens} {in_features}->{out_features}"
    return Case(name, out_features * in_features, make_call)


def vector_linear(out_features: int, in_features: int) -> Case:
    """Behind a small kernel, as in a step: meanwhile a part of the weights can come."""

    def make_call() -> Call:
        x, weight = rand(1, in_features), rand(out_features, in_features)
        scale = rand(in_features)
        return lambda: linear(rms_norm(x, scale, 1e-6), weight)

    return Case(f"{in_features}->{out_features}", 2 * out_features * in_features, make_call)


def fp8_experts(num_tokens: int) -> Case:
    """A quarter of DeepSeek-V3's experts, each with its share of the rows."""
    num_experts, hidden, ffn = 64, 7168, 2048

    def make_call() -> Call:
        weight = torch.empty(num_experts, 2 * ffn, hidden, dtype=E4M3, device="cuda")
        for expert in weight:
            expert.copy_(rand(2 * ffn, hidden))
        scales = torch.rand(num_experts, 2 * ffn // 128, hidden // 128, device="cuda")
        ids = torch.rand(num_tokens, num_experts, device="cuda").topk(2).indices.int().contiguous()
        routed = sort_by_expert(ids, num_experts)
        x, x_scales = quantize_fp8(rand(num_tokens, hidden), 128)
        run = FP8_GATE_UP_PRODUCT.named("triton")
        return lambda: run(x, x_scales, routed, weight, scales, DTYPE, SWIGLU)

    return Case(f"T{num_tokens}", num_experts * 2 * ffn * hidden, make_call)


BLOCK_SHAPES = ((2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048))
"""Outputs and inputs of DeepSeek-V3's products."""
SEARCHES = (
    Search(
        tune_decode,
        {"num_splits": (1, 2, 4, 8, 16, 32), "block_n": (32, 64, 128), "num_stages": (2, 3, 4),
         "num_warps": (4, 8)},
        [
            paged_decode(rows, heads, dtype)
            for heads, dtype in ((32, DTYPE), (32, E4M3), (64, DTYPE), (64, E4M3))
            for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
        ],
    ),
    Search(
        tune_latent,
        {"num_splits": (1, 2, 4, 8, 16, 32), "block_n": (32, 64), "num_stages": (1, 2, 3)},
        [latent_decode(rows) for rows in (1, 2, 4, 8, 16, 32, 64, 128)],
    ),
    Search(
        tune_fp8_linear,
        {"BLOCK_F": (16, 32, 64, 128), "num_stages": (3, 4, 5, 6), "num_warps": (2, 4, 8)},
        [fp8_linear(count, *shape) for count in (2, 8, 16, 32, 64, 128) for shape in BLOCK_SHAPES],
    ),
    Search(
        tune_fp8_experts,
        # Not 32: another matrix instruction, whose sums differ, for some numbers of rows alone.
        {"BLOCK_F": (64, 128), "num_stages": (2, 3, 4, 5), "num_warps": (4, 8)},
        [fp8_experts(tokens) for tokens in (8, 512, 1024, 4096)],
    ),
    Search(
        tune_vector,
        {"block_f": (1, 2, 4, 8, 16), "block_d": (512, 1024, 2048, 4096),
         "num_warps": (1, 2, 4, 8)},
        [
            vector_linear(*shape)
            for shape in ((4096, 14336), (128, 2880))
        ],
    ),
    Search(
        tune_hopper_vector,
        {"held": (0, 2, 4, 6, 8), "num_warps": (2, 4, 8)},
        [
            vector_linear(*shape)
            for shape in ((6144, 4096), (4096, 4096), (28672, 4096), (128256, 4096),
                          (5120, 2880), (2880, 4096), (201088, 2880))
        ],
    ),
)  # fmt: skip


def measure_us(calls: Sequence[Call]) -> float:
    """One call, the median of the repeats of a graph of all of them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def try_settings(
    tune: Tunable[Any], settings: Settings, calls: Sequence[Call], expected: Tensor | None
) -> tuple[float, set[str], Tensor | None]:
    """Microseconds, infinite for what cannot run or gives another result; the shapes that the
    rule was asked for; the result."""
    with tune.trying(settings) as shapes:
        try:
            actual = calls[0]()
        except TritonError:
            return math.inf, shapes, None
        if expected is not None:
            error = (actual.float() - expected.float()).square().mean()
            if not error.sqrt() <= MAX_ERROR * expected.float().square().mean().sqrt():
                print(f"  {dict(settings)} gives another result", flush=True)
                return math.inf, shapes, None
        duration_us = measure_us(calls)
    return duration_us, shapes, actual


def search(
    tune: Tunable[Any], candidates: Mapping[str, Sequence[int]], case: Case
) -> dict[str, Settings]:
    """Shape to settings, where some are better than the rule's."""
    torch.manual_seed(0)
    num_sets = min(max(SET_BYTES // case.num_bytes, 2), 64)
    calls = [case.make_call() for _ in range(num_sets)]
    for call in calls:
        call()
    run = partial(try_settings, tune, calls=calls)
    rule_us, shapes, expected = run({}, expected=None)
    if not shapes:
        print(f"{tune.name:14} {case.name:28} runs on another kernel", flush=True)
        return {}
    best, best_us = {}, rule_us
    for name, values in candidates.items():
        tried = {value: run({**best, name: value}, expected=expected)[0] for value in values}
        value = min(tried, key=tried.__getitem__)
        if tried[value] < best_us * (1 - MIN_GAIN):
            best, best_us = {**best, name: value}, tried[value]
    print(
        f"{tune.name:14} {case.name:28} {rule_us:9.2f} us -> {best_us:9.2f} us  {best}", flush=True
    )
    return dict.fromkeys(shapes, best) if best else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="comma-separated names of kernels")
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args()
    tables = json.loads(TABLE.read_text())
    table = tables.setdefault(capability(), {})
    wanted = arguments.only.split(",") if arguments.only else [s.tune.name for s in SEARCHES]
    for searched in SEARCHES:
        if searched.tune.name not in wanted:
            continue
        found: dict[str, Settings] = {}
        for case in searched.cases:
            found.update(search(searched.tune, searched.candidates, case))
            torch.cuda.empty_cache()
        table[searched.tune.name] = dict(sorted(found.items()))
        arguments.out.write_text(json.dumps(tables, indent=1) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
