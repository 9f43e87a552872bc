# SPDX-License-Identifier: Apache-2.0
"""The memory of the KV cache: one tensor for each group of layers."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.core.geometry import KVGroup, ModelGeometry


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


def _cache_shape(group: KVGroup, num_blocks: int, block_size: int) -> tuple[int, ...]:
    planes = group.num_planes
    return (num_blocks, len(group.layers), planes, block_size, group.num_kv_heads, group.head_dim)
