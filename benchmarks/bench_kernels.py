# SPDX-License-Identifier: Apache-2.0
"""Times kernels on a GPU against the card's own ceilings, measured in the same run.

    python benchmarks/bench_kernels.py [--out FILE.json]
    python benchmarks/bench_kernels.py --groups experts --cases T256 --seconds 1

One line a case: microseconds (median of repeats, and their spread), GB/s, TFLOP/s and the share
of the roofline. Each case is a CUDA graph over several input sets that together exceed the L2
cache, so launches cost little and no input is found in the cache.

`--seconds` then repeats each case for so long to warm up and as long again, as a server under load
does: a card at its power limit lowers its clock. The line goes on with the microseconds of a call,
watts, MHz and the millijoules of a call. Needs `pip install -e '.[energy]'`.
"""

import argparse
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from pelton.bench.ceilings import measure_ceilings
from pelton.bench.figures import write_figures
from pelton.core.batch import AttentionRows
from pelton.kernels.dispatch import batch_invariant
from pelton.kernels.draw_tokens.cost import draw_tokens_cost
from pelton.kernels.draw_tokens.op import draw_tokens
from pelton.kernels.draw_tokens.reference import RandomRows
from pelton.kernels.fp8.linear import fp8_linear_cost
from pelton.kernels.fp8.norm import NormQuantization, add_rms_norm_fp8, norm_fp8_cost
from pelton.kernels.fp8.quantize import quantize_fp8, quantize_fp8_cost
from pelton.kernels.fp8.silu_mul import silu_mul_fp8, silu_mul_fp8_cost
from pelton.kernels.highest_logit import highest_logit
from pelton.kernels.linear import linear
from pelton.kernels.mla.cost import latent_attention_cost, latent_prefill_cost
from pelton.kernels.mla.op import latent_attention
from pelton.kernels.mla.prefill import PrefillInputs, Spans, latent_prefill
from pelton.kernels.moe.expert_product.cost import expert_product_cost
from pelton.kernels.moe.fp8_product import (
    fp8_down_product,
    fp8_gate_up_product,
    fp8_product_cost,
)
from pelton.kernels.moe.gate import SWIGLU, Gate
from pelton.kernels.moe.grouped_routing import (
    GroupedRouting,
    sigmoid_top_k,
    sigmoid_top_k_cost,
)
from pelton.kernels.moe.mxfp4_product.hopper_tiles import tile_weights
from pelton.kernels.moe.mxfp4_product.op import (
    Routed,
    mxfp4_down_product,
    mxfp4_gate_up_product,
    route_rows,
    takes_tiles,
)
from pelton.kernels.moe.routing import SoftmaxTopK, softmax_top_k_cost
from pelton.kernels.moe.sort_by_expert import RoutedRows, sort_by_expert, sort_by_expert_cost
from pelton.kernels.paged_attention.cost import paged_attention_cost
from pelton.kernels.paged_attention.op import paged_attention
from pelton.kernels.rms_norm import add_rms_norm, add_rms_norm_cost, rms_norm, rms_norm_cost
from pelton.kernels.rope_write_kv import rope_write_kv, rope_write_kv_cost
from pelton.kernels.silu_mul import silu_mul, silu_mul_cost
from pelton.perf.cost import OpCost, matmul_cost
from pelton.perf.hardware import Hardware
from pelton.perf.roofline import NumberFormat, floor_s
from pelton.quantization.fp8 import FP8Rows, FP8Weight

CACHE_BYTES = 256 * 2**20
"""Input sets add up to this much: several times any L2 cache."""
REPEATS = 7
_BETWEEN_LOOKS_US = 20_000
"""How long replays run between two looks at the energy that the card took."""
DTYPE = torch.bfloat16
HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
LLAMA_SHAPES = (6144, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)
"""Outputs and inputs of the products of Llama-3.1-8B."""
FP8_BLOCK_SHAPES = (
    (2112, 7168), (24576, 1536), (7168, 16384), (36864, 7168), (7168, 18432), (4096, 7168),
    (7168, 2048),
)  # fmt: skip
"""The same of DeepSeek-V3."""


@dataclass(frozen=True)
class Sustained:
    """A case repeated without a pause."""

    us: float
    power_w: float
    sm_clock_mhz: float

    def text(self) -> str:
        millijoules = self.power_w * self.us / 1e3
        return (
            f"  going on {self.us:9.1f} us {self.power_w:4.0f} W {self.sm_clock_mhz:5.0f} MHz"
            f" {millijoules:8.2f} mJ"
        )


@dataclass(frozen=True)
class Timing:
    case: str
    median_us: float
    spread_us: float
    gigabytes_per_s: float
    teraflops_per_s: float
    share_of_roofline: float
    sustained: Sustained | None

    def text(self) -> str:
        return (
            f"{self.case:<34} {self.median_us:9.1f} us +-{self.spread_us:6.1f} "
            f"{self.gigabytes_per_s:7.0f} GB/s {self.teraflops_per_s:7.1f} TFLOP/s "
            f"{self.share_of_roofline:6.1%}"
        ) + (self.sustained.text() if self.sustained else "")


@dataclass(frozen=True)
class Look:
    at_s: float
    energy_mj: int
    """Since the driver was loaded."""
    sm_clock_mhz: int


class EnergyMeter:
    """Replays graphs for some seconds and asks the driver what energy the card took."""

    def __init__(self, seconds: float) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        uuid = torch.cuda.get_device_properties().uuid
        self._card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self._seconds = seconds

    def measure(self, graph: torch.cuda.CUDAGraph, num_calls: int, graph_us: float) -> Sustained:
        """`num_calls`: of a replay, which takes about `graph_us`."""
        num_replays = max(int(_BETWEEN_LOOKS_US / graph_us), 1)
        self._look(graph, num_replays)  # to warm up
        looks, replay_us = self._look(graph, num_replays)
        # The driver counts in steps of a tenth of a second or so: what is between two of them.
        steps = [now for before, now in pairwise(looks) if now.energy_mj != before.energy_mj]
        assert len(steps) > 1, "the energy counter did not move twice: repeat for longer"
        millijoules = steps[-1].energy_mj - steps[0].energy_mj
        return Sustained(
            us=replay_us / num_calls,
            power_w=millijoules / 1e3 / (steps[-1].at_s - steps[0].at_s),
            sm_clock_mhz=statistics.mean(look.sm_clock_mhz for look in looks),
        )

    def _look(self, graph: torch.cuda.CUDAGraph, num_replays: int) -> tuple[list[Look], float]:
        """What the driver says after each so many replays, while as many run; and the microseconds
        of a replay."""
        nvml, card = self._nvml, self._card
        looks: list[Look] = []
        ends: list[torch.cuda.Event] = []
        start_s = time.perf_counter()
        while not looks or looks[-1].at_s - start_s < self._seconds:
            for _ in range(num_replays):
                graph.replay()
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
            if len(ends) == 1:
                continue
            ends[-2].synchronize()
            looks.append(
                Look(
                    at_s=time.perf_counter(),
                    energy_mj=nvml.nvmlDeviceGetTotalEnergyConsumption(card),
                    sm_clock_mhz=nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM),
                )
            )
        ends[-1].synchronize()
        total_us = ends[0].elapsed_time(ends[-1]) * 1e3
        return looks, total_us / ((len(ends) - 1) * num_replays)


@dataclass
class Bench:
    """Times cases and keeps what it found."""

    hardware: Hardware
    pattern: re.Pattern[str]
    """A part of the names of the cases that are wanted."""
    meter: EnergyMeter | None
    timings: list[Timing] = field(default_factory=list)

    def time(self, case: str, cost: OpCost, make_call: Callable[[], Callable[[], object]]) -> None:
        """`make_call` allocates one fresh set of inputs. Products in FP8 are the cases whose names
        begin so."""
        if not self.pattern.search(case):
            return
        num_sets = min(max(CACHE_BYTES // max(cost.bytes, 1), 2), 64)
        calls = [make_call() for _ in range(num_sets)]
        graph = capture(calls)
        times_us = [time_us / num_sets for time_us in time_replays_us(graph)]
        median_us = statistics.median(times_us)
        number_format: NumberFormat = "fp8" if case.startswith("fp8 ") else "bfloat16"
        timing = Timing(
            case=case,
            median_us=median_us,
            spread_us=max(times_us) - min(times_us),
            gigabytes_per_s=cost.bytes / median_us / 1e3,
            teraflops_per_s=cost.flops / median_us / 1e6,
            share_of_roofline=floor_s(cost, self.hardware, number_format) * 1e6 / median_us,
            sustained=self.meter and self.meter.measure(graph, num_sets, median_us * num_sets),
        )
        print(timing.text(), flush=True)
        self.timings.append(timing)


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of all, which ran once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_replays_us(graph: torch.cuda.CUDAGraph) -> list[float]:
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return times


def measure_hardware() -> Hardware:
    return measure_ceilings(torch.device("cuda"))


def make_rows(tables: Tensor, new: int, context: int) -> AttentionRows:
    """Rows alike, of `new` tokens each; 1: decodes."""
    num_rows = tables.shape[0]
    return AttentionRows(
        block_tables=tables,
        query_starts=torch.arange(num_rows + 1, device="cuda", dtype=torch.int32) * new,
        context_lens=torch.full((num_rows,), context, device="cuda", dtype=torch.int32),
        num_decodes=num_rows if new == 1 else 0,
        max_query_len=new,
        max_context_len=context,
        chunk_lens=() if new == 1 else ((new, context),) * num_rows,
    )


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def vector_cases(num_tokens: int, bench: Bench) -> None:
    """Those that read products' results take them in either format."""
    weight = randn(HIDDEN)
    angles = torch.randn(4096, HEAD_DIM, device="cuda")
    cache = randn(num_tokens // 16 + 3, 2, 16, KV_HEADS, HEAD_DIM)
    slots = torch.arange(num_tokens, device="cuda", dtype=torch.int32) + 16
    positions = slots % 4096

    def make_norm() -> Callable[[], object]:
        x = randn(num_tokens, HIDDEN)
        return lambda: rms_norm(x, weight, 1e-5)

    def make_add_norm(dtype: torch.dtype) -> Callable[[], object]:
        x, residual = randn(num_tokens, HIDDEN, dtype=dtype), randn(num_tokens, HIDDEN).float()
        return lambda: add_rms_norm(x, residual, weight, 1e-5)

    def make_add_norm_fp8(then: NormQuantization) -> Callable[[], object]:
        x, residual = randn(num_tokens, HIDDEN), randn(num_tokens, HIDDEN).float()
        return lambda: add_rms_norm_fp8(x, residual, weight, 1e-5, then)

    def make_silu(dtype: torch.dtype) -> Callable[[], object]:
        x = randn(num_tokens, 2 * FFN, dtype=dtype)
        return lambda: silu_mul(x, DTYPE)

    def make_silu_fp8(group_size: int) -> Callable[[], object]:
        x = randn(num_tokens, 2 * FFN)
        return lambda: silu_mul_fp8(x, group_size, math.inf)

    def make_rope(dtype: torch.dtype) -> Callable[[], object]:
        qkv = randn(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=dtype)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        return lambda: rope_write_kv(q, k, v, positions, angles, cache, slots, dtype=DTYPE)

    def time_those_that_read(dtype: torch.dtype) -> None:
        size = dtype.itemsize
        label = f"{'of float32 ' * (size == 4)}T{num_tokens}"
        norm_cost = add_rms_norm_cost(num_tokens, HIDDEN, size, 2)
        silu_cost = silu_mul_cost(num_tokens, FFN, size, 2)
        rope_cost = rope_write_kv_cost(num_tokens, HEADS, KV_HEADS, HEAD_DIM, size, 2, 2)
        bench.time(f"add_rms_norm {label}", norm_cost, partial(make_add_norm, dtype))
        bench.time(f"silu_mul {label}", silu_cost, partial(make_silu, dtype))
        bench.time(f"rope_write_kv {label}", rope_cost, partial(make_rope, dtype))

    bench.time(f"rms_norm T{num_tokens}", rms_norm_cost(num_tokens, HIDDEN, 2, 2), make_norm)
    time_those_that_read(DTYPE)
    time_those_that_read(torch.float32)
    for then in (NormQuantization(size, math.inf, False) for size in (128, HIDDEN)):
        bench.time(
            f"add_rms_norm fp8/{then.group_size} T{num_tokens}",
            norm_fp8_cost(num_tokens, HIDDEN, 2, then, has_residual=True),
            partial(make_add_norm_fp8, then),
        )
    for group_size in (128, FFN):
        bench.time(
            f"silu_mul fp8/{group_size} T{num_tokens}",
            silu_mul_fp8_cost(num_tokens, FFN, group_size, 2),
            partial(make_silu_fp8, group_size),
        )


def attention_case(
    num_rows: int,
    new: int,
    context: int,
    bench: Bench,
    label: str = "",
    kv_dtype: torch.dtype = DTYPE,
) -> None:
    per_row = -(-context // 16)

    def make_attention() -> Callable[[], object]:
        cache = randn(num_rows * per_row + 1, 2, 16, KV_HEADS, HEAD_DIM).to(kv_dtype)
        tables = torch.randperm(num_rows * per_row, device="cuda").int().view(num_rows, -1) + 1
        q = randn(num_rows * new, HEADS, HEAD_DIM)
        rows = make_rows(tables, new, context)
        return lambda: paged_attention(q, cache, rows, HEAD_DIM**-0.5, 0)

    cost = paged_attention_cost(
        [(new, context)] * num_rows, HEADS, KV_HEADS, HEAD_DIM, 2, kv_dtype.itemsize
    )
    kind = "decode" if new == 1 else f"prefill {new}"
    bench.time(f"{kind} R{num_rows} C{context} {label}", cost, make_attention)


def product_case(num_tokens: int, outer: int, inner: int, dtype: torch.dtype, bench: Bench) -> None:
    """`dtype`: of the result."""

    def make_product() -> Callable[[], object]:
        x, weight = randn(num_tokens, inner), randn(outer, inner)
        return lambda: linear(x, weight, dtype=dtype)

    cost = matmul_cost(num_tokens, inner, outer, 2, dtype.itemsize)
    label = f"linear T{num_tokens} {inner}->{outer}{' in float32' * (dtype.itemsize == 4)}"
    bench.time(label, cost, make_product)


def gpt_oss_case(
    num_rows: int, context: int, window: int, bench: Bench, kv_dtype: torch.dtype = DTYPE
) -> None:
    """GPT-OSS's layers: 64 heads of 64 on 8 KV heads, with sinks."""
    heads, head_dim = 64, 64
    per_row = -(-context // 16)

    def make_attention() -> Callable[[], object]:
        cache = randn(num_rows * per_row + 1, 2, 16, KV_HEADS, head_dim).to(kv_dtype)
        tables = torch.randperm(num_rows * per_row, device="cuda").int().view(num_rows, -1) + 1
        q, sinks = randn(num_rows, heads, head_dim), randn(heads)
        rows = make_rows(tables, 1, context)
        return lambda: paged_attention(q, cache, rows, head_dim**-0.5, window, sinks)

    cost = paged_attention_cost(
        [(1, context)] * num_rows, heads, KV_HEADS, head_dim, 2, kv_dtype.itemsize, window
    )
    kind = f"window {window}" if window else "full"
    name = f"gpt-oss {kind} R{num_rows} C{context} {str(kv_dtype).removeprefix('torch.')}"
    bench.time(name, cost, make_attention)


def expert_cases(num_tokens: int, bench: Bench) -> None:
    """GPT-OSS-120B's experts in MXFP4, a layer's routing and its two products."""
    num_experts, top_k, size = 128, 4, 2880
    gate = Gate(alpha=1.702, limit=7.0, offset=1.0)

    def packed(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = num_experts, rows, size // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cuda")
        scales = torch.randint(119, 121, shape, dtype=torch.uint8, device="cuda")
        if takes_tiles(blocks, DTYPE):
            blocks, scales = tile_weights(blocks, scales)
        return blocks, scales, randn(num_experts, rows)

    gate_up, down = packed(2 * size), packed(size)

    def sort(logits: Tensor) -> Routed:
        return route_rows(SoftmaxTopK(logits, top_k), gate_up[0], down[0])[0]

    def route() -> Routed:
        return sort(randn(num_tokens, num_experts))

    def make_routing() -> Callable[[], object]:
        logits = randn(num_tokens, num_experts)
        return lambda: sort(logits)

    # Other experts in each set of inputs: few tokens' experts would be found in the card's cache.
    def make_gate_up() -> Callable[[], object]:
        x, routed = randn(num_tokens, size), route()
        return lambda: mxfp4_gate_up_product(x, routed, *gate_up, gate)

    def make_down() -> Callable[[], object]:
        hidden, routed = randn(num_tokens * top_k, size), route()
        return lambda: mxfp4_down_product(hidden, routed, *down)

    arguments = num_tokens, top_k, num_experts, size
    gate_up_cost = expert_product_cost(*arguments, 2 * size, 2, 4.25, is_gated=True)
    down_cost = expert_product_cost(*arguments, size, 2, 4.25, is_gated=False)
    if isinstance(routed := route(), RoutedRows):  # of one token the products choose
        routing_cost = softmax_top_k_cost(num_tokens, num_experts, top_k, 2)
        routing_cost += sort_by_expert_cost(num_tokens * top_k, routed.tiles.shape[0])
        bench.time(f"routing T{num_tokens} E128", routing_cost, make_routing)
    bench.time(f"mxfp4 gate_up T{num_tokens} E128", gate_up_cost, make_gate_up)
    bench.time(f"mxfp4 down T{num_tokens} E128", down_cost, make_down)


def fp8_case(num_tokens: int, outer: int, inner: int, bench: Bench, group_size: int = 128) -> None:
    """A product in blocks of 128 x 128, or with a scale for each row (`group_size` is `inner`);
    its activations quantised before."""
    weight = randn(outer, inner).to(torch.float8_e4m3fn)
    is_block = group_size != inner
    shape = (-(-outer // 128), -(-inner // 128)) if is_block else (outer, 1)
    scales = torch.rand(shape, device="cuda")

    def make_product() -> Callable[[], object]:
        x, x_scales = quantize_fp8(randn(num_tokens, inner), group_size)
        packed = FP8Weight(weight.clone(), scales, None, has_blocks=is_block)
        rows = FP8Rows(x, x_scales, DTYPE, None)
        return lambda: packed.multiply(rows)

    num_scales = num_tokens * inner // group_size + scales.numel()
    cost = fp8_linear_cost(num_tokens, inner, outer, num_scales, 2)
    name = f"fp8 {'block' if is_block else 'channel'} T{num_tokens} {inner}->{outer}"
    bench.time(name, cost, make_product)


def quantize_case(num_tokens: int, size: int, bench: Bench) -> None:
    def make_quantize() -> Callable[[], object]:
        x = randn(num_tokens, size)
        return lambda: quantize_fp8(x, 128)

    cost = quantize_fp8_cost(num_tokens, size, 128, 2)
    bench.time(f"quantize fp8 T{num_tokens} D{size}", cost, make_quantize)


def latent_case(num_rows: int, new: int, context: int, bench: Bench) -> None:
    """DeepSeek-V3's absorbed attention: 128 heads over latents of 512 + 64."""
    heads, latent, rope, block_size = 128, 512, 64, 16
    num_blocks = num_rows * -(-context // block_size)
    tables = torch.arange(num_blocks, device="cuda", dtype=torch.int32).view(num_rows, -1) + 1
    rows = make_rows(tables, new, context)

    def make_attention() -> Callable[[], object]:
        cache = randn(num_blocks + 1, block_size, latent + rope)
        q, q_rope = randn(num_rows * new, heads, latent), randn(num_rows * new, heads, rope)
        return lambda: latent_attention(q, q_rope, cache, rows, 0.1)

    cost = latent_attention_cost([(new, context)] * num_rows, heads, latent, rope, 2)
    name = f"latent attention R{num_rows} N{new} C{context}"
    bench.time(name, cost, make_attention)


def latent_prefill_case(num_rows: int, new: int, prefix: int, bench: Bench) -> None:
    """DeepSeek-V3's un-absorbed attention: of new tokens among themselves (`prefix` 0), or over a
    part of their prefixes."""
    heads, nope, rope, value = 128, 128, 64, 128
    keys = prefix or new
    host = tuple((row * new, new, row * keys, keys) for row in range(num_rows))
    spans = Spans(host, torch.tensor(host, dtype=torch.int32, device="cuda"))
    is_own = not prefix
    out_dtype = DTYPE if is_own else torch.float32

    def make_attention() -> Callable[[], object]:
        q, q_rope = randn(num_rows * new, heads, nope + rope), randn(num_rows * new, heads, rope)
        made, rope_keys = randn(num_rows * keys, heads, nope + value), randn(num_rows * keys, rope)
        out = torch.zeros(num_rows * new, heads, value, dtype=out_dtype, device="cuda")
        lse = torch.zeros(num_rows * new, heads, device="cuda")
        inputs = PrefillInputs(
            q[:, :, :nope], q_rope, made[:, :, :nope], rope_keys, made[:, :, nope:], spans, 0.1,
            is_own,
        )  # fmt: skip
        return lambda: latent_prefill(inputs, out, lse, not is_own)

    cost = latent_prefill_cost(
        [(new, keys)] * num_rows, heads, nope, rope, value, 2, out_dtype.itemsize,
        is_causal=is_own, continues=not is_own,
    )  # fmt: skip
    name = f"latent prefill R{num_rows} N{new} P{prefix}"
    bench.time(name, cost, make_attention)


def fp8_expert_cases(num_tokens: int, bench: Bench) -> None:
    """DeepSeek-V3's experts in FP8 blocks: a layer's routing and its two products."""
    num_experts, top_k, hidden_size, ffn_size = 256, 8, 7168, 2048
    rule = GroupedRouting(top_k=top_k, num_groups=8, top_groups=4, scale=2.5)

    def packed(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        weight = torch.empty(num_experts, rows, columns, dtype=torch.float8_e4m3fn, device="cuda")
        for expert in weight:
            expert.copy_(randn(rows, columns))
        return weight, torch.rand(num_experts, rows // 128, columns // 128, device="cuda")

    gate_up, down = packed(2 * ffn_size, hidden_size), packed(hidden_size, ffn_size)
    bias = torch.zeros(num_experts, device="cuda")
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    routed = sort_by_expert(sigmoid_top_k(logits, bias, rule)[0], num_experts)
    num_rows = num_tokens * top_k

    def make_routing() -> Callable[[], object]:
        logits = torch.randn(num_tokens, num_experts, device="cuda")
        return lambda: sort_by_expert(sigmoid_top_k(logits, bias, rule)[0], num_experts)

    def make_gate_up() -> Callable[[], object]:
        x, scales = quantize_fp8(randn(num_tokens, hidden_size), 128)
        return lambda: fp8_gate_up_product(x, scales, routed, *gate_up, SWIGLU, DTYPE)

    def make_down() -> Callable[[], object]:
        hidden, scales = quantize_fp8(randn(num_rows, ffn_size), 128)
        return lambda: fp8_down_product(hidden, scales, routed, *down, DTYPE)

    routing_cost = sigmoid_top_k_cost(num_tokens, num_experts, top_k, 4)
    routing_cost += sort_by_expert_cost(num_rows, routed.tiles.shape[0])
    routes = num_tokens, top_k, num_experts
    gate_up_cost = fp8_product_cost(
        num_tokens, *routes, hidden_size, 2 * ffn_size, 2 * num_rows * ffn_size
    )
    down_cost = fp8_product_cost(
        num_rows, *routes, ffn_size, hidden_size, 2 * num_rows * hidden_size
    )
    bench.time(f"routing T{num_tokens} E256", routing_cost, make_routing)
    bench.time(f"fp8 gate_up T{num_tokens} E256", gate_up_cost, make_gate_up)
    bench.time(f"fp8 down T{num_tokens} E256", down_cost, make_down)


def highest_case(num_rows: int, bench: Bench) -> None:
    def make_max() -> Callable[[], object]:
        logits = randn(num_rows, VOCAB)
        return lambda: highest_logit(logits)

    cost = OpCost(num_rows * VOCAB, 2 * num_rows * VOCAB)
    bench.time(f"highest_logit R{num_rows} V{VOCAB}", cost, make_max)


def draw_case(num_rows: int, top_k: int, top_p: float, bench: Bench) -> None:
    """Logits as a trained head gives them: a few tokens stand out of a wide field."""

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device="cuda")

    def make_draw() -> Callable[[], object]:
        logits = randn(num_rows, VOCAB) * 2
        logits[:, ::1000] += 6
        highest_ids, _ = highest_logit(logits)
        rows = RandomRows(
            rows=torch.arange(num_rows, device="cuda"),
            temperature=column(1.0),
            uniforms=torch.rand(num_rows, device="cuda"),
            top_k=column(top_k, torch.int32),
            top_p=column(top_p),
            min_p=column(0.0),
            has_top_k=top_k > 0,
            has_top_p=top_p < 1,
        )
        return lambda: draw_tokens(logits, highest_ids, rows)

    cost = draw_tokens_cost(num_rows, VOCAB, 2)
    name = f"draw_tokens R{num_rows} V{VOCAB} k{top_k} p{top_p:g}"
    bench.time(name, cost, make_draw)


def time_vectors(bench: Bench) -> None:
    for num_tokens in (1, 256, 8192):
        vector_cases(num_tokens, bench)


def time_attention(bench: Bench) -> None:
    decodes = [(1, 1, 384), (1, 1, 8192), (16, 1, 1024), (64, 1, 1024), (256, 1, 1500)]
    prefills = [(8, 1000, 1000), (1, 8192, 8192), (1, 2048, 16384)]
    for num_rows, new, context in decodes + prefills:
        attention_case(num_rows, new, context, bench)
        attention_case(num_rows, new, context, bench, "fp8 KV", torch.float8_e4m3fn)
    for num_rows, context in ((1, 384), (64, 1024), (256, 1500)):
        for window in (0, 128):
            for dtype in (DTYPE, torch.float8_e4m3fn):
                gpt_oss_case(num_rows, context, window, bench, dtype)


def time_products(bench: Bench) -> None:
    for num_tokens in (1, 16, 64, 256, 8192):
        for outer, inner in LLAMA_SHAPES:
            for dtype in (DTYPE, torch.float32):
                product_case(num_tokens, outer, inner, dtype, bench)


def time_fp8(bench: Bench) -> None:
    for num_tokens in (1, 2, 4, 16, 64, 256, 8192):
        quantize_case(num_tokens, 7168, bench)
        for outer, inner in FP8_BLOCK_SHAPES:
            fp8_case(num_tokens, outer, inner, bench)
    for num_tokens in (1, 512):
        for outer, inner in LLAMA_SHAPES:
            fp8_case(num_tokens, outer, inner, bench, group_size=inner)


def time_latent(bench: Bench) -> None:
    for num_rows, new, context in ((1, 1, 8192), (64, 1, 1024), (128, 1, 1500), (16, 4, 4096)):
        latent_case(num_rows, new, context, bench)
    for num_rows, new, context in ((8, 1000, 1000), (1, 2048, 8192)):
        latent_case(num_rows, new, context, bench)
    for num_rows, new, prefix in ((8, 1000, 0), (1, 8192, 0), (8, 128, 0), (1, 2048, 8192)):
        latent_prefill_case(num_rows, new, prefix, bench)


def time_experts(bench: Bench) -> None:
    for num_tokens in (1, 8, 64, 256, 8192):
        expert_cases(num_tokens, bench)


def time_fp8_experts(bench: Bench) -> None:
    for num_tokens in (1, 8, 64, 256, 8192):
        fp8_expert_cases(num_tokens, bench)


def time_heads(bench: Bench) -> None:
    for num_rows in (1, 256):
        product_case(num_rows, VOCAB, HIDDEN, torch.float32, bench)
        highest_case(num_rows, bench)
    for num_rows in (1, 64, 256):
        for top_k, top_p in ((0, 1.0), (0, 0.9), (50, 0.9)):
            draw_case(num_rows, top_k, top_p, bench)


GROUPS = {
    "vectors": time_vectors,
    "attention": time_attention,
    "products": time_products,
    "experts": time_experts,
    "fp8": time_fp8,
    "latent": time_latent,
    "fp8-experts": time_fp8_experts,
    "heads": time_heads,
}


def pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    parser.add_argument("--commit", default="", help="of the source, where there is no git")
    parser.add_argument("--deterministic", action="store_true", help="what that mode runs")
    parser.add_argument("--groups", default=",".join(GROUPS), help="of cases; all if not given")
    parser.add_argument(
        "--cases", type=pattern, default="", help="a regular expression in the names of some"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help="repeat each case for so long, at least 0.5: power and clock",
    )
    arguments = parser.parse_args()
    groups = arguments.groups.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--groups: no {', '.join(sorted(unknown))}, only {', '.join(GROUPS)}")
    if arguments.seconds and find_spec("pynvml") is None:
        parser.error("--seconds needs nvidia-ml-py: pip install -e '.[energy]'")
    if 0 < arguments.seconds < 0.5:
        parser.error("--seconds: the driver counts energy too coarsely for less than 0.5")
    torch.manual_seed(0)
    meter = EnergyMeter(arguments.seconds) if arguments.seconds else None
    with torch.inference_mode(), batch_invariant(wanted=arguments.deterministic):
        hardware = measure_hardware()
        print(
            f"{hardware.name}: copy {hardware.memory_bytes_per_s / 1e12:.2f} TB/s, "
            f"bf16 {hardware.bf16_flops_per_s / 1e12:.0f} TFLOP/s"
        )
        bench = Bench(hardware, arguments.cases, meter)
        for group in groups:
            GROUPS[group](bench)
    if arguments.out:
        figures = {
            "hardware": asdict(hardware),
            "seconds": arguments.seconds,
            "timings": [asdict(timing) for timing in bench.timings],
        }
        write_figures(arguments.out, "kernels", figures, commit=arguments.commit or None)


if __name__ == "__main__":
    main()
