# SPDX-License-Identifier: Apache-2.0
"""Builds an engine from a configuration: load the model, measure memory, size the KV pool, wire.

Every automatic setting is filled here, once; `engine.config` is the tree that runs.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from pelton.core.clock import Clock, MonotonicClock
from pelton.core.config import Device, DType, EngineConfig, ModelConfig, resolved
from pelton.core.errors import ConfigError
from pelton.core.geometry import ModelGeometry
from pelton.core.request import MAX_LOGPROBS, SamplingParams
from pelton.core.step import Admission, StepPlan
from pelton.engine.engine import Engine
from pelton.engine.kv.pool import KVPool
from pelton.engine.model_runner import ModelRunner
from pelton.engine.resolve import resolve
from pelton.models.checkpoint import open_checkpoint
from pelton.models.language_model import LanguageModel
from pelton.models.loader import load_weights
from pelton.models.registry import find_architecture
from pelton.quantization.select import select_format

_TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}


def make_engine(config: EngineConfig, clock: Clock | None = None) -> Engine:
    """Raises `CheckpointError` for the model, `CapacityError` when the memory that is left cannot
    hold one request of maximum length, `ConfigError` for what this machine cannot do."""
    device = select_device(config.executor.device)
    dtype = select_dtype(config.model.dtype, device)
    model, geometry = load_model(config.model, device, dtype)

    def resolve_for(kv_bytes: int) -> EngineConfig:
        return resolve(
            config,
            geometry,
            kv_bytes_available=kv_bytes,
            device=device.type,
            element_bytes=dtype.itemsize,
        )

    if device.type == "cuda":
        measured = measure_activations(model, geometry, resolve_for(2**62), device, dtype)
        final = resolve_for(_free_cuda_bytes(config.cache.memory_fraction, device) - measured)
    else:
        final = resolve_for(psutil.virtual_memory().available // 2)
    torch.set_num_threads(resolved(final.executor.num_threads))
    runner = make_runner(model, geometry, final, device, dtype)
    return Engine(final, geometry, runner, clock or MonotonicClock())


def make_runner(
    model: LanguageModel,
    geometry: ModelGeometry,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> ModelRunner:
    """An executor with its own KV pool. `config` is resolved."""
    block_size = config.cache.block_size
    pool = KVPool(
        geometry,
        num_blocks=resolved(config.cache.num_blocks),
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    return ModelRunner(
        model,
        geometry,
        pool,
        max_num_requests=resolved(config.scheduler.max_num_requests),
        max_num_tokens=resolved(config.scheduler.max_num_batched_tokens),
        max_model_len=resolved(config.model.max_model_len),
        block_size=block_size,
        device=device,
    )


def select_device(device: Device) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if device is Device.CUDA and not has_cuda:
        raise ConfigError("--device cuda needs an NVIDIA GPU and there is none.", param="device")
    use_cuda = has_cuda and device is not Device.CPU
    return torch.device("cuda", 0) if use_cuda else torch.device("cpu")


def select_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """Automatic: bfloat16 where the device computes in it (a GPU; a CPU with AVX512-BF16, which
    every CPU with AMX has), else float32."""
    if dtype is not DType.AUTO:
        return _TORCH_DTYPES[dtype]
    is_native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if is_native else torch.float32


def load_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> tuple[LanguageModel, ModelGeometry]:
    """The model on `device` with its weights packed, ready to run."""
    weight_format = select_format(config.quantization, dtype, device)
    checkpoint = open_checkpoint(config.model)
    architecture = find_architecture(checkpoint.config)
    model_config = architecture.config_from_hf(checkpoint.config)
    with torch.device(device), default_dtype(dtype):
        model = architecture.build(model_config)
    load_weights(model, architecture.weights(model_config), checkpoint)
    model.pack(weight_format)
    return model, model_config.geometry(checkpoint.name)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def measure_activations(
    model: LanguageModel,
    geometry: ModelGeometry,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    """Bytes of GPU memory that the largest steps take besides weights and KV: a full budget of
    prefill tokens, and the most rows with every sampling control. `config` is resolved."""
    smallest = dataclasses.replace(config.cache, num_blocks=2)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner = make_runner(
        model, geometry, dataclasses.replace(config, cache=smallest), device, dtype
    )
    for plan in _largest_plans(config):
        runner.launch(plan).wait()
    return torch.cuda.max_memory_allocated(device) - before


def _largest_plans(config: EngineConfig) -> Iterator[StepPlan]:
    """Steps on made-up tokens that use no block but the null block."""
    max_tokens = resolved(config.scheduler.max_num_batched_tokens)
    max_rows = resolved(config.scheduler.max_num_requests)
    max_len = resolved(config.model.max_model_len)
    everything = SamplingParams(
        top_p=0.9, min_p=0.01, presence_penalty=0.5, logprobs=MAX_LOGPROBS, prompt_logprobs=1
    )
    length = min(max_len - 1, max_tokens)
    counts = [length] * (max_tokens // length) + [max_tokens % length]
    counts = [count for count in counts if count][:max_rows]
    prefills = [Admission(row, [0] * n, n, everything, 0, ()) for row, n in enumerate(counts)]
    rows = list(range(len(counts)))
    yield StepPlan(0, prefills, [], rows, [0] * len(rows), counts, [True] * len(rows), 0, rows)
    rows = list(range(min(max_rows, max_tokens)))
    decodes = [Admission(row, [0], 1, everything, 0, ()) for row in rows]
    starts, ones = [max_len - 1] * len(rows), [1] * len(rows)
    yield StepPlan(1, decodes, [], rows, starts, ones, [True] * len(rows), len(rows))


def _free_cuda_bytes(memory_fraction: float, device: torch.device) -> int:
    """What weights and everything else on the card leave of its share of memory."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * memory_fraction) - (total - free)
