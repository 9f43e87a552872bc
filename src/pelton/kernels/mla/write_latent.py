# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Rotary positions for multi-head latent attention, and the write of a token's latent.

What is cached of a token is its latent, [L] after its norm, followed by one rotated key of R
numbers that all heads share (DeepSeek-V2, 2024, equations 9 to 19). A vector is rotated in
neighbouring pairs, (x_0, x_1), (x_2, x_3), ...: the form of Su et al., "RoFormer", 2021, equation
34, in which these checkpoints are trained.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta
from pelton.kernels.triton_runtime import next_power_of_2, overlap_options, runs_triton, tl, triton
from pelton.perf.cost import OpCost, log_cost

WriteLatent = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def rotate_pairs(
    x: Float[Tensor, "T H R"], cos: Float[Tensor, "T R/2"], sin: Float[Tensor, "T R/2"]
) -> Float[Tensor, "T H R"]:
    even, odd = x[:, :, 0::2].float(), x[:, :, 1::2].float()
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=3)
    return rotated.flatten(2).to(x.dtype)


def write_latent_reference(
    q_rope: Float[Tensor, "T H R"],
    latent: Float[Tensor, "T L"],
    k_rope: Float[Tensor, "T R"],
    positions: Int[Tensor, " T"],
    cos_sin: Float[Tensor, "max R"],
    cache_layer: Float[Tensor, "P S L+R"],
    slot_mapping: Int[Tensor, " T"],
) -> Float[Tensor, "T H R"]:
    cos, sin = cos_sin[positions.long()].float().chunk(2, dim=-1)
    rotated_key = rotate_pairs(k_rope[:, None, :], cos, sin)[:, 0]
    entries = torch.cat((latent, rotated_key), dim=1).to(cache_layer.dtype)
    block_size = cache_layer.shape[1]
    slots = slot_mapping.long()
    cache_layer[slots // block_size, slots % block_size] = entries
    return rotate_pairs(q_rope, cos, sin)


@triton.jit
def _rotate(x, cos, sin):
    """[h, R] by [1, R/2] angles, in float32. Pairs are split here and not by their addresses, so
    that a thread reads and writes runs of memory."""
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [x.shape[0], x.shape[1] // 2, 2]))
    rotated = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    return tl.reshape(rotated, x.shape)


@triton.jit
def _write_latent_kernel(
    q_ptr,
    latent_ptr,
    k_ptr,
    positions_ptr,
    cos_sin_ptr,
    cache_ptr,
    slot_mapping_ptr,
    out_ptr,
    stride_qt,
    stride_qh,
    stride_lt,
    stride_kt,
    stride_ct,
    stride_cachep,
    stride_caches,
    stride_ot,
    stride_oh,
    num_heads,
    block_size,
    latent_rank,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    numbers = tl.arange(0, 2 * BLOCK_R)  # [2 * BLOCK_R], pairs side by side
    is_number = numbers < 2 * HALF
    pairs = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    is_pair = pairs < HALF
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * stride_ct + pairs
    cos = tl.load(angle_ptr, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(angle_ptr + HALF, mask=is_pair, other=0.0).to(tl.float32)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()

    mask = (heads < num_heads)[:, None] & is_number[None, :]
    q_tile_ptr = q_ptr + token * stride_qt + heads[:, None] * stride_qh + numbers[None, :]
    q = tl.load(q_tile_ptr, mask=mask, other=0.0)  # [BLOCK_H, 2 * BLOCK_R]
    out_tile_ptr = out_ptr + token * stride_ot + heads[:, None] * stride_oh + numbers[None, :]
    tl.store(out_tile_ptr, _rotate(q, cos[None, :], sin[None, :]), mask=mask)

    if tl.program_id(1) == 0:
        entry_ptr = (
            cache_ptr + (slot // block_size) * stride_cachep + (slot % block_size) * stride_caches
        )
        dims = tl.arange(0, BLOCK_L)  # [BLOCK_L]
        is_latent = dims < latent_rank
        latent = tl.load(latent_ptr + token * stride_lt + dims, mask=is_latent, other=0.0)
        tl.store(entry_ptr + dims, latent, mask=is_latent)
        key_ptr = k_ptr + token * stride_kt + numbers[None, :]
        key = tl.load(key_ptr, mask=is_number[None, :], other=0.0)  # [1, 2 * BLOCK_R]
        rotated = _rotate(key, cos[None, :], sin[None, :])
        tl.store(entry_ptr + latent_rank + numbers[None, :], rotated, mask=is_number[None, :])


def tune(num_tokens: int) -> dict[str, int]:
    """Few tokens: a program for every sixteen heads, so that one token already spreads out."""
    return {"BLOCK_H": 16 if num_tokens <= 64 else 64, "num_warps": 4}


def _write_latent_triton(
    q_rope: Float[Tensor, "T H R"],
    latent: Float[Tensor, "T L"],
    k_rope: Float[Tensor, "T R"],
    positions: Int[Tensor, " T"],
    cos_sin: Float[Tensor, "max R"],
    cache_layer: Float[Tensor, "P S L+R"],
    slot_mapping: Int[Tensor, " T"],
) -> Float[Tensor, "T H R"]:
    num_tokens, num_heads, rope_dim = q_rope.shape
    out = torch.empty(q_rope.shape, dtype=q_rope.dtype, device=q_rope.device)
    if num_tokens == 0:
        return out
    blocks = tune(num_tokens)
    _write_latent_kernel[(num_tokens, -(-num_heads // blocks["BLOCK_H"]))](
        q_ptr=q_rope,
        latent_ptr=latent,
        k_ptr=k_rope,
        positions_ptr=positions,
        cos_sin_ptr=cos_sin,
        cache_ptr=cache_layer,
        slot_mapping_ptr=slot_mapping,
        out_ptr=out,
        stride_qt=q_rope.stride(0),
        stride_qh=q_rope.stride(1),
        stride_lt=latent.stride(0),
        stride_kt=k_rope.stride(0),
        stride_ct=cos_sin.stride(0),
        stride_cachep=cache_layer.stride(0),
        stride_caches=cache_layer.stride(1),
        stride_ot=out.stride(0),
        stride_oh=out.stride(1),
        num_heads=num_heads,
        block_size=cache_layer.shape[1],
        latent_rank=latent.shape[1],
        HALF=rope_dim // 2,
        BLOCK_R=next_power_of_2(rope_dim // 2),
        BLOCK_L=next_power_of_2(latent.shape[1]),
        **blocks,
        **overlap_options(q_rope.device, num_tokens),
    )
    return out


def write_latent_cost(
    num_tokens: int, num_heads: int, latent_rank: int, rope_dim: int, element_bytes: int
) -> OpCost:
    rotated = num_tokens * (num_heads + 1) * rope_dim
    return OpCost(3 * rotated, 2 * (rotated + num_tokens * latent_rank) * element_bytes)


def _write_latent_meta(
    q_rope: Float[Tensor, "T H R"],
    latent: Float[Tensor, "T L"],
    k_rope: Float[Tensor, "T R"],
    positions: Int[Tensor, " T"],
    cos_sin: Float[Tensor, "max R"],
    cache_layer: Float[Tensor, "P S L+R"],
    slot_mapping: Int[Tensor, " T"],
) -> Float[Tensor, "T H R"]:
    num_tokens, num_heads, rope_dim = q_rope.shape
    cost = write_latent_cost(
        num_tokens, num_heads, latent.shape[1], rope_dim, q_rope.element_size()
    )
    log_cost("write_latent", cost)
    return q_rope.new_empty(q_rope.shape)


WRITE_LATENT: Dispatch[WriteLatent] = Dispatch(
    "write_latent",
    Implementation("meta", on_meta, _write_latent_meta),
    Implementation("triton", runs_triton, _write_latent_triton),
    Implementation("reference", anywhere, write_latent_reference),
)


def write_latent(
    q_rope: Float[Tensor, "T H R"],
    latent: Float[Tensor, "T L"],
    k_rope: Float[Tensor, "T R"],
    positions: Int[Tensor, " T"],
    cos_sin: Float[Tensor, "max R"],
    cache_layer: Float[Tensor, "P S L+R"],
    slot_mapping: Int[Tensor, " T"],
) -> Float[Tensor, "T H R"]:
    """Returns the rotated queries in new memory; writes latents and rotated keys to the cache.

    `cos_sin[p]` holds the cosines of position p's R/2 angles, then their sines. The inputs may be
    slices of wider buffers, `cache_layer` a layer's strided view of the pool.
    """
    assert q_rope.shape[2] == k_rope.shape[1] == cos_sin.shape[1], (q_rope.shape, k_rope.shape)
    assert latent.shape[1] + k_rope.shape[1] == cache_layer.shape[2], (latent.shape, k_rope.shape)
    assert q_rope.stride(2) == latent.stride(1) == k_rope.stride(1) == cache_layer.stride(2) == 1
    run = WRITE_LATENT.select(q_rope.device, q_rope.dtype)
    return run(q_rope, latent, k_rope, positions, cos_sin, cache_layer, slot_mapping)
