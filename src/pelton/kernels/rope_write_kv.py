# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Rotary position embedding of queries and keys, and the write of keys and values to the cache.

A vector of size K is split in halves (a, b); with angles t_i = position * frequency_i the result
is (a cos t - b sin t, b cos t + a sin t): the half-split form of Su et al., "RoFormer", 2021,
equation 34, as Hugging Face checkpoints expect it.

A cache in FP8 (e4m3) holds x / scale, rounded once and saturating at +-448; a NaN stays one.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta, runs_native
from pelton.kernels.fp8.quantize import HIGHEST, round_to_e4m3
from pelton.kernels.triton_runtime import (
    IS_INTERPRETED,
    next_power_of_2,
    overlap_options,
    runs_triton,
    tl,
    triton,
)
from pelton.perf.cost import OpCost, log_cost


def rotate_reference(
    x: Float[Tensor, "T H K"], cos: Float[Tensor, "T K/2"], sin: Float[Tensor, "T K/2"]
) -> Float[Tensor, "T H K"]:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def stored_reference(x: Float[Tensor, "T G K"], dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values as a cache of `dtype` holds them; `scale` counts in FP8 only."""
    if dtype is not torch.float8_e4m3fn:
        return x.to(dtype)
    # By a tensor: a card divides by a plain number through its reciprocal, which rounds otherwise.
    scaled = x.float() / torch.full((), scale, dtype=torch.float32, device=x.device)
    return scaled.clamp(-HIGHEST, HIGHEST).to(dtype)


def rope_write_kv_reference(
    q: Float[Tensor, "T H K"],
    k: Float[Tensor, "T G K"],
    v: Float[Tensor, "T G K"],
    positions: Int[Tensor, " T"],
    cos_sin: Float[Tensor, "max K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    slot_mapping: Int[Tensor, " T"],
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "T H K"]:
    cos, sin = cos_sin[positions.long()].float().chunk(2, dim=-1)
    block_size = cache_layer.shape[2]
    block_ids, offsets = slot_mapping.long() // block_size, slot_mapping.long() % block_size
    stored, keys = cache_layer.dtype, rotate_reference(k.float(), cos, sin)
    cache_layer[block_ids, 0, offsets] = stored_reference(keys, stored, k_scale)
    cache_layer[block_ids, 1, offsets] = stored_reference(v, stored, v_scale)
    return rotate_reference(q.float(), cos, sin).to(dtype or q.dtype)


@triton.jit
def _store(
    ptr, x, mask, scale, IS_FP8: tl.constexpr, IS_SCALED: tl.constexpr, CAST_TRUNCATES: tl.constexpr
):
    x = x.to(tl.float32)
    if IS_FP8:
        if IS_SCALED:
            x = tl.math.div_rn(x, tl.zeros_like(x) + scale)
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        if CAST_TRUNCATES:
            x = round_to_e4m3(x)
    tl.store(ptr, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_write_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    cos_sin_ptr,
    cache_ptr,
    slot_mapping_ptr,
    out_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    stride_ct,
    stride_cachep,
    stride_cachekv,
    stride_caches,
    stride_cacheg,
    stride_ot,
    stride_oh,
    num_heads,
    num_kv_heads,
    block_size,
    k_scale,
    v_scale,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_SCALED: tl.constexpr,
    CAST_TRUNCATES: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    # Tiles of heads: query heads first, then one tile row a KV head (key and value).
    first_head = tl.program_id(1) * BLOCK_H
    heads = first_head + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    dims = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    in_half = dims < HALF
    position = tl.load(positions_ptr + token).to(tl.int64)
    angle_ptr = cos_sin_ptr + position * stride_ct + dims
    cos = tl.load(angle_ptr, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle_ptr + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()

    is_query = (heads < num_heads)[:, None] & in_half[None, :]
    q_tile_ptr = q_ptr + token * stride_qt + heads[:, None] * stride_qh + dims[None, :]
    first = tl.load(q_tile_ptr, mask=is_query, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_K]
    second = tl.load(q_tile_ptr + HALF, mask=is_query, other=0.0).to(tl.float32)
    out_tile_ptr = out_ptr + token * stride_ot + heads[:, None] * stride_oh + dims[None, :]
    tl.store(out_tile_ptr, first * cos - second * sin, mask=is_query)
    tl.store(out_tile_ptr + HALF, second * cos + first * sin, mask=is_query)

    if first_head + BLOCK_H <= num_heads:
        return
    kv_heads = heads - num_heads
    is_kv = ((kv_heads >= 0) & (kv_heads < num_kv_heads))[:, None] & in_half[None, :]
    slot_ptr = (
        cache_ptr + (slot // block_size) * stride_cachep + (slot % block_size) * stride_caches
    )
    cache_tile_ptr = slot_ptr + kv_heads[:, None] * stride_cacheg + dims[None, :]
    k_tile_ptr = k_ptr + token * stride_kt + kv_heads[:, None] * stride_kg + dims[None, :]
    first = tl.load(k_tile_ptr, mask=is_kv, other=0.0).to(tl.float32)
    second = tl.load(k_tile_ptr + HALF, mask=is_kv, other=0.0).to(tl.float32)
    key = first * cos - second * sin
    _store(cache_tile_ptr, key, is_kv, k_scale, IS_FP8, IS_SCALED, CAST_TRUNCATES)
    key = second * cos + first * sin
    _store(cache_tile_ptr + HALF, key, is_kv, k_scale, IS_FP8, IS_SCALED, CAST_TRUNCATES)
    v_tile_ptr = v_ptr + token * stride_vt + kv_heads[:, None] * stride_vg + dims[None, :]
    first = tl.load(v_tile_ptr, mask=is_kv, other=0.0)
    second = tl.load(v_tile_ptr + HALF, mask=is_kv, other=0.0)
    value_ptr = cache_tile_ptr + stride_cachekv
    _store(value_ptr, first, is_kv, v_scale, IS_FP8, IS_SCALED, CAST_TRUNCATES)
    _store(value_ptr + HALF, second, is_kv, v_scale, IS_FP8, IS_SCALED, CAST_TRUNCATES)


def tune(num_tokens: int) -> dict[str, int]:
    """Few tokens: a program for every eight heads, so that one token already spreads out."""
    return {"BLOCK_H": 8 if num_tokens <= 64 else 16, "num_warps": 4}


def _rope_write_kv_triton(
    q: Float[Tensor, "T H K"],
    k: Float[Tensor, "T G K"],
    v: Float[Tensor, "T G K"],
    positions: Int[Tensor, " T"],
    cos_sin: Float[Tensor, "max K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    slot_mapping: Int[Tensor, " T"],
    k_scale: float,
    v_scale: float,
    dtype: torch.dtype,
) -> Float[Tensor, "T H K"]:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=dtype, device=q.device)
    if num_tokens == 0:
        return out
    blocks = tune(num_tokens)
    num_tiles = -(-(num_heads + num_kv_heads) // blocks["BLOCK_H"])
    _rope_write_kv_kernel[(num_tokens, num_tiles)](
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        positions_ptr=positions,
        cos_sin_ptr=cos_sin,
        cache_ptr=cache_layer,
        slot_mapping_ptr=slot_mapping,
        out_ptr=out,
        stride_qt=q.stride(0),
        stride_qh=q.stride(1),
        stride_kt=k.stride(0),
        stride_kg=k.stride(1),
        stride_vt=v.stride(0),
        stride_vg=v.stride(1),
        stride_ct=cos_sin.stride(0),
        stride_cachep=cache_layer.stride(0),
        stride_cachekv=cache_layer.stride(1),
        stride_caches=cache_layer.stride(2),
        stride_cacheg=cache_layer.stride(3),
        stride_ot=out.stride(0),
        stride_oh=out.stride(1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=cache_layer.shape[2],
        k_scale=k_scale,
        v_scale=v_scale,
        HALF=head_dim // 2,
        BLOCK_K=next_power_of_2(head_dim // 2),
        IS_FP8=cache_layer.dtype is torch.float8_e4m3fn,
        IS_SCALED=(k_scale, v_scale) != (1.0, 1.0),
        CAST_TRUNCATES=IS_INTERPRETED,
        **blocks,
        **overlap_options(q.device, num_tokens),
    )
    return out


def rope_write_kv_cost(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
    out_element_bytes: int,
    kv_element_bytes: int,
) -> OpCost:
    queries = num_tokens * num_heads * head_dim
    keys = num_tokens * num_kv_heads * head_dim
    read = (queries + 2 * keys) * element_bytes
    num_bytes = read + queries * out_element_bytes + 2 * keys * kv_element_bytes
    return OpCost(3 * (queries + keys), num_bytes)


def _rope_write_kv_meta(
    q: Float[Tensor, "T H K"],
    k: Float[Tensor, "T G K"],
    v: Float[Tensor, "T G K"],
    positions: Int[Tensor, " T"],
    cos_sin: Float[Tensor, "max K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    slot_mapping: Int[Tensor, " T"],
    k_scale: float,
    v_scale: float,
    dtype: torch.dtype,
) -> Float[Tensor, "T H K"]:
    num_tokens, num_heads, head_dim = q.shape
    sizes = q.element_size(), dtype.itemsize, cache_layer.element_size()
    cost = rope_write_kv_cost(num_tokens, num_heads, k.shape[1], head_dim, *sizes)
    log_cost("rope_write_kv", cost)
    return q.new_empty(q.shape, dtype=dtype)


RopeWriteKV = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, float, torch.dtype], Tensor
]

ROPE_WRITE_KV: Dispatch[RopeWriteKV] = Dispatch(
    "rope_write_kv",
    Implementation("meta", on_meta, _rope_write_kv_meta),
    Implementation("triton", runs_triton, _rope_write_kv_triton),
    Implementation("native", runs_native, "pelton.kernels.native.rope_write_kv:rope_write_kv"),
    Implementation("reference", anywhere, rope_write_kv_reference),
)


def rope_write_kv(
    q: Float[Tensor, "T H K"],
    k: Float[Tensor, "T G K"],
    v: Float[Tensor, "T G K"],
    positions: Int[Tensor, " T"],
    cos_sin: Float[Tensor, "max K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    slot_mapping: Int[Tensor, " T"],
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "T H K"]:
    """Returns the rotated queries in new memory, in `dtype` (None: q's); writes rotated keys, and
    values, to the cache.

    `cos_sin[p]` holds the cosines of position p's K/2 angles, then their sines. `cache_layer` is
    one layer's view of the pool and may be strided over all axes but the last; token t goes to
    block slot_mapping[t] // S, place slot_mapping[t] % S. q, k and v may be slices of one buffer.
    The scales are those of a cache in FP8, by which what is stored is divided.
    """
    assert q.shape[2] == k.shape[2] == v.shape[2] == cos_sin.shape[1], (q.shape, k.shape)
    assert q.stride(2) == k.stride(2) == v.stride(2) == cache_layer.stride(4) == 1
    run = ROPE_WRITE_KV.select(q.device, q.dtype)
    return run(
        *(q, k, v, positions, cos_sin, cache_layer, slot_mapping),
        *(k_scale, v_scale, dtype or q.dtype),
    )
