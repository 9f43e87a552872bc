# SPDX-License-Identifier: Apache-2.0
"""`rope_write_kv` on a CPU: few whole-tensor ops, and angles that a step's layers share."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.memo import Memo


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the layers of a step have in common."""

    cos: Float[Tensor, "T 1 K"]
    sin: Float[Tensor, "T 1 K"]
    """With signs, so that x cos + swap_halves(x) sin is the rotation."""
    rows: Int[Tensor, " T"] | None
    """Of `cache_rows`, where keys go; None where the cache is laid out otherwise."""


_SHARED: Memo[_Shared] = Memo()


def rope_write_kv_cpu(
    q: Float[Tensor, "T H K"],
    k: Float[Tensor, "T G K"],
    v: Float[Tensor, "T G K"],
    positions: Int[Tensor, " T"],
    cos_sin: Float[Tensor, "max K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    slot_mapping: Int[Tensor, " T"],
) -> Float[Tensor, "T H K"]:
    memory = cache_rows(cache_layer)
    block_size = cache_layer.shape[2]
    block_stride = 0 if memory is None else cache_layer.stride(0) // memory.shape[1]
    shared = _SHARED.get(
        (positions, slot_mapping),
        (block_size, block_stride),
        lambda: _share(positions, cos_sin, slot_mapping, block_size, block_stride),
        constant=cos_sin,
    )
    num_heads = q.shape[1]
    joined = _join(q, k)
    if joined is None:
        rotated_q = _rotate(q, shared.cos, shared.sin)
        rotated_k = _rotate(k, shared.cos, shared.sin)
    else:
        rotated = _rotate(joined, shared.cos, shared.sin)
        rotated_q, rotated_k = rotated[:, :num_heads], rotated[:, num_heads:]
    if memory is None or shared.rows is None:
        _write_anywhere(rotated_k, v, cache_layer, slot_mapping)
        return rotated_q
    row_shape = (k.shape[0], memory.shape[1])
    memory.index_copy_(0, shared.rows, rotated_k.reshape(row_shape))
    memory[block_size:].index_copy_(0, shared.rows, v.reshape(row_shape))
    return rotated_q


def _share(
    positions: Int[Tensor, " T"],
    cos_sin: Float[Tensor, "max K"],
    slot_mapping: Int[Tensor, " T"],
    block_size: int,
    block_stride: int,
) -> _Shared:
    cos, sin = cos_sin.index_select(0, positions).float().chunk(2, dim=1)
    rows = None
    if block_stride:
        blocks = torch.div(slot_mapping, block_size, rounding_mode="floor").long()
        rows = blocks * (block_stride - block_size) + slot_mapping
    cos, sin = torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)
    return _Shared(cos[:, None], sin[:, None], rows)


def _join(q: Float[Tensor, "T H K"], k: Float[Tensor, "T G K"]) -> Float[Tensor, "T H+G K"] | None:
    """q and k as one view where k's heads follow q's in memory, as after a fused product."""
    num_heads, head_dim = q.shape[1:]
    follows = k.data_ptr() == q.data_ptr() + num_heads * head_dim * q.element_size()
    if not follows or q.stride() != k.stride() or q.stride(1) != head_dim:
        return None
    return q.as_strided((q.shape[0], num_heads + k.shape[1], head_dim), q.stride())


def _rotate(
    x: Float[Tensor, "T H K"], cos: Float[Tensor, "T 1 K"], sin: Float[Tensor, "T 1 K"]
) -> Float[Tensor, "T H K"]:
    swapped = x.roll(x.shape[2] // 2, 2)
    if x.dtype is torch.float32:
        return (x * cos).addcmul_(swapped, sin)
    return x.float().mul_(cos).add_(swapped.float().mul_(sin)).to(x.dtype)


def _write_anywhere(
    k: Float[Tensor, "T G K"],
    v: Float[Tensor, "T G K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    slot_mapping: Int[Tensor, " T"],
) -> None:
    block_size = cache_layer.shape[2]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping % block_size
    cache_layer.index_put_((blocks, torch.zeros_like(blocks), offsets), k)
    cache_layer.index_put_((blocks, torch.ones_like(blocks), offsets), v)


def cache_rows(cache_layer: Float[Tensor, "P 2 S G K"]) -> Float[Tensor, "N G*K"] | None:
    """The layer's memory as rows of one token's keys or values, other layers' rows between them.

    Block p's keys start at row p * stride(0) / (G * K), its values S rows later. None where a
    block's rows are not contiguous.
    """
    num_blocks, _, block_size, num_kv_heads, head_dim = cache_layer.shape
    size = num_kv_heads * head_dim
    block_stride, *inner = cache_layer.stride()
    if inner != [block_size * size, size, head_dim, 1] or block_stride % size:
        return None
    num_rows = (num_blocks - 1) * (block_stride // size) + 2 * block_size
    return cache_layer.as_strided((num_rows, size), (size, 1))
