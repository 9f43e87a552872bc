# SPDX-License-Identifier: Apache-2.0
"""Fills every automatic choice of the configuration for a model and a machine.

The order: device, limits of a step, context length, KV blocks. The KV pool must hold one request
of the maximum length in every group; a context length that was left to us is lowered to what the
pool holds, one that was asked for is refused with the figures.
"""

import dataclasses
import os

import psutil

from pelton.core.config import (
    Auto,
    CacheConfig,
    Device,
    DraftMethod,
    DType,
    EngineConfig,
    ExecutorConfig,
    KVCacheDType,
    SchedulerConfig,
    SpeculativeConfig,
    resolved,
)
from pelton.core.errors import CapacityError, ConfigError
from pelton.core.geometry import ModelGeometry
from pelton.engine.kv.block_tables import group_blocks, max_tokens_in_flight, peak_blocks

CPU_KV_BYTES = 2 * 2**30
"""Most memory taken for KV on a CPU when none is named."""

_SHORTEST_CONTEXT = 2


def resolve(
    config: EngineConfig,
    geometry: ModelGeometry,
    *,
    kv_bytes_available: int,
    device: str,
    element_bytes: int,
    num_workers: int = 1,
) -> EngineConfig:
    """The final tree. `kv_bytes_available` is what the device has left for KV, `element_bytes`
    the size of an activation; `num_workers` share the cores.
    Raises `ConfigError`, and `CapacityError` with both figures."""
    check_drafter(config.speculative, geometry)
    check_kv_cache(config.cache.kv_cache_dtype, geometry)
    is_cpu = Device(device) is Device.CPU
    dtype = config.model.dtype
    if dtype is DType.AUTO:
        dtype = DType.FLOAT32 if element_bytes == 4 else DType.BFLOAT16
    scheduler = _resolve_scheduler(config.scheduler, is_cpu)
    limit = _context_limit(config.model.max_model_len, geometry)
    kv_cache_dtype = resolve_kv_cache_dtype(config.cache.kv_cache_dtype, dtype)
    kv_element_bytes = 1 if kv_cache_dtype is KVCacheDType.FP8 else element_bytes
    pools = _Pools(geometry, config.cache, scheduler, kv_element_bytes)
    if is_cpu and isinstance(config.cache.kv_memory_bytes, Auto):
        kv_bytes_available = min(kv_bytes_available, CPU_KV_BYTES)
    useful = resolved(scheduler.max_num_requests) * -(-limit // config.cache.block_size) + 1
    num_blocks = _num_blocks(config.cache, pools, kv_bytes_available, useful)
    fitting = _longest_fitting(geometry, scheduler, config.cache.block_size, num_blocks, limit)
    if fitting < _SHORTEST_CONTEXT or (
        fitting < limit and not isinstance(config.model.max_model_len, Auto)
    ):
        raise _too_small(
            geometry, scheduler, config.cache.block_size, num_blocks, pools, limit, fitting
        )
    _check_slots(scheduler, fitting)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, dtype=dtype, max_model_len=fitting, layers=geometry.num_layers
        ),
        cache=dataclasses.replace(
            config.cache,
            num_blocks=num_blocks,
            kv_memory_bytes=pools.num_bytes(num_blocks),
            kv_cache_dtype=kv_cache_dtype,
        ),
        scheduler=scheduler,
        executor=_resolve_executor(config.executor, device, num_workers),
    )


def check_drafter(config: SpeculativeConfig, geometry: ModelGeometry) -> None:
    """Raises `ConfigError` where the model has nothing to draft with."""
    if config.method is DraftMethod.MTP and not geometry.num_mtp_layers:
        raise ConfigError(
            f"--speculative {config.speculative} needs a model with an MTP layer, which"
            f" {geometry.name} has not; use ngram:{config.num_drafts}, or off.",
            param="speculative",
        )


def check_kv_cache(kv_cache_dtype: KVCacheDType, geometry: ModelGeometry) -> None:
    """Raises `ConfigError` where the cache cannot have this format."""
    if kv_cache_dtype is KVCacheDType.FP8 and any(g.is_latent for g in geometry.kv_groups):
        raise ConfigError(
            f"--kv-cache-dtype fp8 is for grouped-query attention and {geometry.name} caches"
            " latents, which stay in the activations' format; use auto.",
            param="kv_cache_dtype",
        )


def resolve_kv_cache_dtype(kv_cache_dtype: KVCacheDType, dtype: DType) -> KVCacheDType:
    """`dtype` is that of the activations. Raises `ConfigError` where the two do not go together."""
    if kv_cache_dtype in (KVCacheDType.AUTO, KVCacheDType(dtype)):
        return KVCacheDType(dtype)
    if kv_cache_dtype is not KVCacheDType.FP8:
        raise ConfigError(
            f"--kv-cache-dtype {kv_cache_dtype} with activations in {dtype}: keys and values are in"
            " the activations' format or in fp8; use auto, or change --dtype.",
            param="kv_cache_dtype",
        )
    return kv_cache_dtype


def _resolve_scheduler(config: SchedulerConfig, is_cpu: bool) -> SchedulerConfig:
    max_tokens = config.max_num_batched_tokens
    if isinstance(max_tokens, Auto):
        max_tokens = 512 if is_cpu else 8192
    max_requests = config.max_num_requests
    if isinstance(max_requests, Auto):
        # More than the budget could not all decode in one step.
        max_requests = min(64 if is_cpu else 512, max_tokens)
    overlap = not is_cpu if isinstance(config.overlap, Auto) else config.overlap
    return dataclasses.replace(
        config,
        max_num_requests=max_requests,
        max_num_batched_tokens=max_tokens,
        overlap=overlap,
    )


def _resolve_executor(config: ExecutorConfig, device: str, num_workers: int) -> ExecutorConfig:
    num_threads = config.num_threads
    if isinstance(num_threads, Auto):
        num_allowed = len(os.sched_getaffinity(0))
        num_cores = min(num_allowed, psutil.cpu_count(logical=False) or num_allowed)
        num_threads = max(1, num_cores // num_workers)
    return dataclasses.replace(config, device=Device(device), num_threads=num_threads)


def _context_limit(max_model_len: int | Auto, geometry: ModelGeometry) -> int:
    if isinstance(max_model_len, Auto):
        return geometry.max_context
    if max_model_len > geometry.max_context:
        raise ConfigError(
            f"--max-model-len must be at most {geometry.max_context}, the context that"
            f" {geometry.name} was made for, got {max_model_len}.",
            param="max_model_len",
        )
    return max_model_len


def _check_slots(scheduler: SchedulerConfig, max_model_len: int) -> None:
    """The places of all tokens of all requests are numbered in 31 bits."""
    num_requests = resolved(scheduler.max_num_requests)
    if (num_requests + 1) * (max_model_len + 1) >= 2**31:
        raise CapacityError(
            f"--max-num-requests {num_requests} with a context of {max_model_len} tokens is more"
            f" than the {2**31 - 1:,} tokens an engine can keep track of; lower --max-num-requests"
            f" to at most {2**31 // (max_model_len + 1) - 2}, or --max-model-len.",
            param="max_num_requests",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Pools:
    """The pools of all groups as one function of `num_blocks`."""

    geometry: ModelGeometry
    cache: CacheConfig
    scheduler: SchedulerConfig
    element_bytes: int
    """Of keys and values."""

    def num_bytes(self, num_blocks: int) -> int:
        groups, block_size = self.geometry.kv_groups, self.cache.block_size
        shares_prefixes = self.cache.prefix_cache
        counts = group_blocks(
            groups, num_blocks, block_size, self.scheduler, shares_prefixes=shares_prefixes
        )
        return sum(
            count * group.block_bytes(block_size, self.element_bytes)
            for count, group in zip(counts, groups, strict=True)
        )

    def most_blocks(self, num_bytes: int) -> int:
        """The largest `num_blocks` whose pools fit in `num_bytes`."""
        low, high = (
            0,
            num_bytes
            // min(
                group.block_bytes(self.cache.block_size, self.element_bytes)
                for group in self.geometry.kv_groups
            ),
        )
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_bytes(middle) <= num_bytes:
                low = middle
            else:
                high = middle - 1
        return low


def _num_blocks(cache: CacheConfig, pools: _Pools, available: int, useful: int) -> int:
    """Blocks of a full attention group, the null block included."""
    budget = available
    if not isinstance(cache.kv_memory_bytes, Auto):
        budget = cache.kv_memory_bytes
        if budget > available:
            raise CapacityError(
                f"--kv-memory-bytes asks for {budget:,} bytes and {available:,} are left; ask for"
                " at most that, or leave it to auto.",
                param="kv_memory_bytes",
            )
    if isinstance(cache.num_blocks, Auto):
        return min(pools.most_blocks(budget), useful)
    needed = pools.num_bytes(cache.num_blocks)
    if needed > budget:
        raise CapacityError(
            f"--num-blocks asks for {cache.num_blocks} blocks, which take"
            f" {needed:,} bytes, and there are {budget:,} for KV; ask for"
            f" at most {pools.most_blocks(budget)}, or leave it to auto.",
            param="num_blocks",
        )
    return cache.num_blocks


def _blocks_needed(
    geometry: ModelGeometry, scheduler: SchedulerConfig, block_size: int, num_tokens: int
) -> int:
    """Usable blocks that the hungriest group needs for one request of `num_tokens`."""
    max_in_flight = max_tokens_in_flight(scheduler)
    return max(
        peak_blocks(group, block_size, num_tokens, max_in_flight) for group in geometry.kv_groups
    )


def _longest_fitting(
    geometry: ModelGeometry,
    scheduler: SchedulerConfig,
    block_size: int,
    num_blocks: int,
    limit: int,
) -> int:
    """The longest context of at most `limit` tokens that the pool holds."""
    num_usable = num_blocks - 1
    if _blocks_needed(geometry, scheduler, block_size, limit) <= num_usable:
        return limit
    return max(0, num_usable * block_size)


def _too_small(
    geometry: ModelGeometry,
    scheduler: SchedulerConfig,
    block_size: int,
    num_blocks: int,
    pools: _Pools,
    limit: int,
    fitting: int,
) -> CapacityError:
    needed = _blocks_needed(geometry, scheduler, block_size, limit) + 1
    held = max(0, num_blocks - 1) * block_size
    remedy = "Raise --kv-memory-bytes"
    if fitting >= _SHORTEST_CONTEXT:
        remedy += f" or lower --max-model-len to at most {fitting}"
    return CapacityError(
        f"One request of {limit} tokens needs {pools.num_bytes(needed):,} bytes of KV, and there"
        f" are {pools.num_bytes(num_blocks):,} bytes, which hold {held} tokens. {remedy}.",
        param="max_model_len",
    )
