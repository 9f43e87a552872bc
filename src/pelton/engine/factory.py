# SPDX-License-Identifier: Apache-2.0
"""Builds an engine from a configuration: load the model, measure memory, size the KV pool, wire.

Every automatic setting is filled here, once; `engine.config` is the tree that runs.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import psutil
import torch

from pelton.core.clock import Clock, MonotonicClock
from pelton.core.config import (
    Auto,
    Device,
    DraftMethod,
    DType,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    Quantization,
    Role,
    SpeculativeConfig,
    WorkerPlace,
    resolved,
)
from pelton.core.errors import ConfigError
from pelton.core.geometry import ModelGeometry
from pelton.core.kv_transfer import KVLayout
from pelton.core.ports import KVConnector
from pelton.engine.allocation import allocating
from pelton.engine.cuda_graphs import DecodeGraphs
from pelton.engine.engine import Engine
from pelton.engine.gpu_memory import measure_memory
from pelton.engine.grammar import GrammarCompiler, TokenVocabulary
from pelton.engine.huge_pages import advise_huge_pages
from pelton.engine.kv.block_tables import group_blocks
from pelton.engine.kv.pool import KVPool, select_cache_dtype
from pelton.engine.model_runner import ModelRunner
from pelton.engine.resolve import (
    check_drafter,
    check_kv_cache,
    resolve,
    resolve_kv_cache_dtype,
)
from pelton.engine.step_padding import (
    StepPadding,
    make_padding,
    pad_for_graphs,
    token_ladder,
)
from pelton.kernels.dispatch import batch_invariant, has_native_kernels
from pelton.kernels.triton_runtime import IS_INTERPRETED, runs_hopper
from pelton.models.build import build_model
from pelton.models.checkpoint import open_checkpoint
from pelton.models.fingerprint import fingerprint
from pelton.models.geometries import find_geometry
from pelton.models.kv_scales import load_kv_scales
from pelton.models.language_model import LanguageModel
from pelton.models.loader import load_weights
from pelton.models.random_weights import make_random_model, measure_router_spread
from pelton.models.registry import find_architecture
from pelton.quantization.select import (
    is_compiled_by_size,
    select_float32_format,
    select_format,
    select_head_format,
)

LoadModel = Callable[[ModelConfig, torch.device, torch.dtype], tuple[LanguageModel, ModelGeometry]]
"""Gives a model that is on the device, filled and packed."""

_log = logging.getLogger("pelton.engine")
_NOT_SPECULATIVE = SpeculativeConfig()
_ALONE = WorkerPlace()
_UNLIMITED_BYTES = 2**62
_TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


LoadVocabulary = Callable[[ModelGeometry], TokenVocabulary]
Connect = Callable[[KVPool, KVLayout], KVConnector | None]
FindLandingBytes = Callable[[int], int]


def make_engine(
    config: EngineConfig,
    clock: Clock | None = None,
    *,
    load: LoadModel | None = None,
    load_vocabulary: LoadVocabulary | None = None,
    place: WorkerPlace = _ALONE,
    connect: Connect | None = None,
    find_landing_bytes: FindLandingBytes | None = None,
) -> Engine:
    """Raises `CheckpointError` for the model, `CapacityError` when the memory that is left cannot
    hold one request of maximum length, `ConfigError` for what this machine cannot do. `load`
    takes the place of `load_model` for a model that is no checkpoint. Without `load_vocabulary`,
    which is called when first needed, requests with a grammar are refused. Engines that are
    started at once take each their GPU, or their part of the CPU, by `place`. `connect` is given
    the KV pool, and says what brings KV into it from other engines; `find_landing_bytes`, given the
    bytes of a block, what of a GPU's memory that takes beside the pool."""
    device = select_device(config.executor.device, place)
    if config.executor.deterministic:
        check_deterministic(device)
    with batch_invariant(wanted=config.executor.deterministic):
        return _make_engine(
            config, clock, device, load, load_vocabulary, place, connect, find_landing_bytes
        )


def _make_engine(
    config: EngineConfig,
    clock: Clock | None,
    device: torch.device,
    load: LoadModel | None,
    load_vocabulary: LoadVocabulary | None,
    place: WorkerPlace,
    connect: Connect | None,
    find_landing_bytes: FindLandingBytes | None,
) -> Engine:
    dtype = select_dtype(config.model.dtype, device)
    # Refused before the weights are loaded, which takes minutes.
    resolve_kv_cache_dtype(config.cache.kv_cache_dtype, _NAMES[dtype])
    load = load or partial(
        load_model,
        speculative=config.speculative,
        kv_cache_dtype=config.cache.kv_cache_dtype,
    )
    with allocating(
        f"the weights of {config.model.model}",
        "free some, or take a smaller model or --dtype bfloat16",
        param="model",
    ):
        model, geometry = load(config.model, device, dtype)

    def resolve_for(kv_bytes: int) -> EngineConfig:
        return resolve(
            config,
            geometry,
            kv_bytes_available=kv_bytes,
            device=device.type,
            element_bytes=dtype.itemsize,
            num_workers=place.num_workers,
        )

    if device.type == "cuda":
        limits = resolve_for(_UNLIMITED_BYTES)
        smallest = replace(limits, cache=replace(limits.cache, num_blocks=2))
        block_size, groups = limits.cache.block_size, geometry.kv_groups
        largest_block = max(group.block_bytes(block_size, dtype.itemsize) for group in groups)
        with allocating(
            f"a step of {limits.scheduler.max_num_batched_tokens} tokens or"
            f" {limits.scheduler.max_num_requests} requests",
            "lower --max-num-batched-tokens or --max-num-requests",
            param="max_num_batched_tokens",
        ):
            use = measure_memory(
                smallest,
                geometry.vocab_size,
                device,
                lambda: make_runner(model, geometry, smallest, device, dtype),
                0 if find_landing_bytes is None else find_landing_bytes(largest_block),
            )
        final = resolve_for(use.kv_bytes)
    else:
        final = resolve_for(psutil.virtual_memory().available // (2 * place.num_workers))
    torch.set_num_threads(resolved(final.executor.num_threads))
    shares_kv = place.role is Role.PREFILL
    runner = make_runner(model, geometry, final, device, dtype, shares_kv=shares_kv)
    if device.type == "cpu":
        if not has_native_kernels():
            _log.warning("kernels=reference slow=yes reason=%r", "no numba or no libgomp.so.1 here")
        advise_huge_pages()
        runner.compile_kernels()
    if has_graphs(final):
        graphs = DecodeGraphs(
            runner.decode_eagerly, runner.draft_step, runner.input_builder.build_padding
        )
        with allocating(
            f"CUDA graphs of up to {final.scheduler.max_num_requests} requests",
            "lower --memory-fraction or --max-num-requests, or pass --no-cuda-graphs",
            param="memory_fraction",
        ):
            graphs.capture(runner.padding.graph_sizes)
        runner.decode_step = graphs.decode
        if runner.draft_step is not None:
            runner.draft_step = graphs.draft
    grammars = None
    if load_vocabulary is not None:
        grammars = GrammarCompiler(partial(load_vocabulary, geometry))
    connector = None
    if connect is not None:
        connector = connect(runner.pool, make_kv_layout(final, geometry, model, runner.pool))
    return Engine(final, geometry, runner, clock or MonotonicClock(), grammars, connector)


def make_kv_layout(
    config: EngineConfig, geometry: ModelGeometry, model: LanguageModel, pool: KVPool
) -> KVLayout:
    return KVLayout(
        model=config.model.label,
        device=pool.caches[0].device.type,
        fingerprint=fingerprint(model),
        dtype=str(pool.caches[0].dtype).removeprefix("torch."),
        block_size=config.cache.block_size,
        groups=geometry.kv_groups,
    )


def make_runner(
    model: LanguageModel,
    geometry: ModelGeometry,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    shares_kv: bool = False,
) -> ModelRunner:
    """An executor with its own KV pool, which with `shares_kv` other processes can read. `config`
    is resolved."""
    block_size = config.cache.block_size
    num_blocks = resolved(config.cache.num_blocks)
    max_num_requests = resolved(config.scheduler.max_num_requests)
    max_num_tokens = resolved(config.scheduler.max_num_batched_tokens)
    max_model_len = resolved(config.model.max_model_len)
    padding = StepPadding(num_drafts=config.speculative.num_drafts)
    if has_graphs(config):
        padding = pad_for_graphs(max_num_requests, max_num_tokens, config.speculative)
    elif device.type == "cpu" and is_compiled_by_size(config.model.quantization, dtype):
        padding = replace(
            padding,
            decode_rows=make_padding(token_ladder(max_num_requests)),
            tokens=make_padding(token_ladder(max_num_tokens)),
        )
    with allocating(
        f"{num_blocks} KV blocks", "lower --kv-memory-bytes or --num-blocks", param="num_blocks"
    ):
        pool = KVPool(
            geometry,
            num_blocks=group_blocks(
                geometry.kv_groups,
                num_blocks,
                block_size,
                config.scheduler,
                shares_prefixes=config.cache.prefix_cache,
            ),
            block_size=block_size,
            dtype=select_cache_dtype(config.cache.kv_cache_dtype, dtype, device),
            device=device,
            is_shared=shares_kv,
        )
    with allocating(
        f"the buffers of {max_num_requests} requests of {max_model_len} tokens and steps of"
        f" {max_num_tokens} tokens",
        "lower --max-num-requests, --max-model-len or --max-num-batched-tokens",
        param="max_num_requests",
    ):
        return ModelRunner(
            model,
            geometry,
            pool,
            max_num_requests=max_num_requests,
            max_num_tokens=max_num_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            device=device,
            speculative=config.speculative,
            padding=padding,
            is_deterministic=config.executor.deterministic,
        )


def has_graphs(config: EngineConfig) -> bool:
    return config.executor.cuda_graphs and config.executor.device is Device.CUDA


def check_deterministic(device: torch.device) -> None:
    """Raises `ConfigError` where `--deterministic` cannot be had."""
    if not (IS_INTERPRETED or runs_hopper(device)):
        raise ConfigError(
            "--deterministic needs a GPU of compute capability 9.0 (H100, H200), whose kernels sum"
            f" in one order for any batch, and this engine runs on {device.type}; drop it.",
            param="deterministic",
        )


def select_device(device: Device, place: WorkerPlace = _ALONE) -> torch.device:
    """Makes the GPU of `place` this process's own."""
    has_cuda = torch.cuda.is_available()
    if device is Device.CUDA and not has_cuda:
        raise ConfigError("--device cuda needs an NVIDIA GPU and there is none.", param="device")
    use_cuda = has_cuda and device is not Device.CPU
    if not use_cuda:
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if place.num_workers > num_gpus:
        option = "--workers" if place.role is Role.MIXED else "--prefill plus --decode of"
        raise ConfigError(
            f"{option} {place.num_workers} needs a GPU for each and there are {num_gpus}; start"
            " fewer, or pass --device cpu.",
            param="workers",
        )
    torch.cuda.set_device(place.index)
    return torch.device("cuda", place.index)


def select_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """Automatic: bfloat16 where the device computes in it (a GPU; a CPU with AVX512-BF16, which
    every CPU with AMX has), else float32."""
    if dtype is not DType.AUTO:
        return _TORCH_DTYPES[dtype]
    is_native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if is_native else torch.float32


def load_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    speculative: SpeculativeConfig = _NOT_SPECULATIVE,
    kv_cache_dtype: KVCacheDType = KVCacheDType.AUTO,
) -> tuple[LanguageModel, ModelGeometry]:
    """The model on `device` with its weights packed, ready to run; with its MTP layer if that is
    what drafts, and the scales of its keys and values if the cache is in FP8."""
    formats = [
        select(config.quantization, dtype, device)
        for select in (select_format, select_head_format, select_float32_format)
    ]
    if config.random_weights:
        model, geometry = _make_random_model(config, device, dtype, speculative, kv_cache_dtype)
        model.pack(*formats)
        return model, geometry
    if not isinstance(config.layers, Auto):
        raise ConfigError(
            "--layers cuts a geometry of --random-weights; a checkpoint runs with all of its"
            " layers.",
            param="layers",
        )
    checkpoint = open_checkpoint(config.model)
    architecture = find_architecture(checkpoint.config)
    model_config = architecture.config_from_hf(checkpoint.config)
    check_kv_cache(kv_cache_dtype, model_config.geometry(checkpoint.name))
    if speculative.method is DraftMethod.MTP:
        check_drafter(speculative, model_config.geometry(checkpoint.name))
        assert architecture.with_mtp is not None, architecture
        model_config = architecture.with_mtp(model_config)
    model = build_model(
        architecture, model_config, device, dtype, name=checkpoint.name, checkpoint=checkpoint
    )
    _refuse_quantized_experts(model, config, checkpoint.name)
    load_weights(model, architecture.weights(model_config), checkpoint)
    if kv_cache_dtype is KVCacheDType.FP8:
        load_kv_scales(model, checkpoint)
    model.pack(*formats)
    return model, model_config.geometry(checkpoint.name)


def _make_random_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    speculative: SpeculativeConfig,
    kv_cache_dtype: KVCacheDType,
) -> tuple[LanguageModel, ModelGeometry]:
    num_layers = None if isinstance(config.layers, Auto) else config.layers
    geometry_config = find_geometry(config.random_weights, num_layers)
    name = config.random_weights
    outline = find_architecture(geometry_config).config_from_hf(geometry_config)
    plain_geometry = outline.geometry(f"{name} (random weights)")
    check_drafter(speculative, plain_geometry)
    check_kv_cache(kv_cache_dtype, plain_geometry)
    has_mtp = speculative.method is DraftMethod.MTP
    model, geometry = make_random_model(
        name, geometry_config, device, dtype, config.seed, has_mtp=has_mtp
    )
    _refuse_quantized_experts(model, config, name)
    spread = measure_router_spread(model)
    if spread is not None:
        _log.info("routers of %s: %s", geometry.name, spread)
    return model, geometry


def _refuse_quantized_experts(model: LanguageModel, config: ModelConfig, name: str) -> None:
    if model.has_experts and config.quantization is not Quantization.NONE:
        raise ConfigError(
            f"--quantization {config.quantization} is for dense models: the experts of"
            f" {name} keep the checkpoint's format; use none.",
            param="quantization",
        )
