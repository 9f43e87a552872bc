# SPDX-License-Identifier: Apache-2.0
"""The memory of the KV cache: one tensor for each group of layers."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.core.config import KVCacheDType
from pelton.core.errors import ConfigError
from pelton.core.geometry import KVGroup, ModelGeometry
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
    ) -> None:
        """`num_blocks` is that of each group, the null block included."""
        self.caches: tuple[Float[Tensor, "P layers planes S G K"], ...] = tuple(
            torch.empty(_cache_shape(group, count, block_size), dtype=dtype, device=device)
            for group, count in zip(geometry.kv_groups, num_blocks, strict=True)
        )

    @property
    def num_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)


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
