# SPDX-License-Identifier: Apache-2.0
"""The memory of the KV cache: one tensor for each group of layers."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from pelton.core.config import KVCacheDType
from pelton.core.errors import ConfigError
from pelton.core.geometry import KVGroup, ModelGeometry
from pelton.engine.kv.shared_memory import PAGE_BYTES, SharedMemory
from pelton.quantization.fp8 import computes_in_fp8


class KVPool:
    """Owns the cache tensors for as long as the engine lives; who holds which block is the block
    manager's business. On a CPU the memory is only reserved: a page costs nothing until a block
    in it is written.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        *,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        is_shared: bool = False,
    ) -> None:
        """`num_blocks` is that of each group, the null block included. `is_shared`: other processes
        can reach the memory, which on a GPU they can in any case."""
        shapes = [
            _cache_shape(group, count, block_size)
            for group, count in zip(geometry.kv_groups, num_blocks, strict=True)
        ]
        self.memory: SharedMemory | None = None
        self.caches: tuple[Float[Tensor, "P layers planes S G K"], ...]
        if is_shared and device.type == "cpu":
            self.memory, self.caches = _share(shapes, dtype)
        else:
            self.caches = tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes)

    def as_bytes(self) -> list[npt.NDArray[np.uint8]]:
        """Of each group, [blocks, bytes of a block]: the memory itself, which must be the CPU's."""
        return [cache.view(torch.uint8).flatten(1).numpy() for cache in self.caches]

    @property
    def block_bytes(self) -> list[int]:
        """Of each group."""
        return [cache[0].nbytes for cache in self.caches]

    @property
    def num_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)


def _share(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> tuple[SharedMemory, tuple[Tensor, ...]]:
    """Tensors one after the other, each at a page of its own."""
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // PAGE_BYTES) * PAGE_BYTES)
    memory = SharedMemory(starts[-1])
    caches = tuple(
        torch.frombuffer(memory.buffer, dtype=torch.uint8, count=size, offset=start)
        .view(dtype)
        .view(shape)
        for shape, size, start in zip(shapes, sizes, starts[:-1], strict=True)
    )
    return memory, caches


def select_cache_dtype(
    kv_cache_dtype: KVCacheDType, activations: torch.dtype, device: torch.device
) -> torch.dtype:
    """What keys and values are stored in. On a CPU, FP8 is converted by torch."""
    if kv_cache_dtype is not KVCacheDType.FP8:
        return activations
    if device.type != "cpu" and not computes_in_fp8(device):
        raise ConfigError(
            "--kv-cache-dtype fp8 needs an NVIDIA GPU of compute capability 8.9 or higher;"
            " use auto.",
            param="kv_cache_dtype",
        )
    return torch.float8_e4m3fn


def _cache_shape(group: KVGroup, num_blocks: int, block_size: int) -> tuple[int, ...]:
    planes = group.num_planes
    return (num_blocks, len(group.layers), planes, block_size, group.num_kv_heads, group.head_dim)
