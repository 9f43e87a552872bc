# SPDX-License-Identifier: Apache-2.0
"""What this machine's device can do at most, measured: the yardstick of measured times."""

import statistics
import time
from collections.abc import Callable

import psutil
import torch

from pelton.bench.machine import cpu_name
from pelton.perf.hardware import Hardware

_REPEATS = 7
_MAX_CPU_S = 1.0
"""After so much no product is repeated."""


def measure_ceilings(device: torch.device) -> Hardware:
    """A large copy (reads and writes counted) and large products: in bfloat16, and in FP8 where
    the card has it. A CPU may multiply what is stored in bfloat16 in float32, and without
    instructions for bfloat16 it does: its rate is the higher of the two. Takes some seconds and a
    few hundred megabytes on a CPU, some GB on a GPU."""
    is_gpu = device.type == "cuda"
    num_bytes_per_s = _copy_rate(2**30 if is_gpu else 2**26, device)
    side = 8192 if is_gpu else 1024
    wide_a, wide_b = torch.randn((2, side, side), device=device)
    a, b = wide_a.bfloat16(), wide_b.bfloat16()
    product_s = _time_s(lambda: a @ b, device)
    if not is_gpu:
        product_s = min(product_s, _time_s(lambda: wide_a @ wide_b, device))
    fp8_s = 0.0
    if is_gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        fp8_s = _time_s(
            lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16), device
        )
    flops = 2 * side**3
    properties = torch.cuda.get_device_properties(device) if is_gpu else None
    return Hardware(
        name=properties.name if properties else cpu_name(),
        bf16_flops_per_s=flops / product_s,
        fp8_flops_per_s=flops / fp8_s if fp8_s else 0.0,
        memory_bytes_per_s=num_bytes_per_s,
        memory_bytes=properties.total_memory if properties else psutil.virtual_memory().total,
        num_multiprocessors=properties.multi_processor_count if properties else 0,
    )


def _copy_rate(num_elements: int, device: torch.device) -> float:
    source = torch.ones(num_elements, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    # A kernel and not `copy_`, which may go through a card's slower copy engine.
    return 2 * source.nbytes / _time_s(lambda: torch.neg(source, out=target), device)


def _make_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _time_s(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of one call."""
    call()
    times: list[float] = []
    for _ in range(_REPEATS):
        if device.type == "cuda":
            start, end = _make_event(), _make_event()
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            start_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - start_s)
            if sum(times) > _MAX_CPU_S:
                break
    return statistics.median(times)
