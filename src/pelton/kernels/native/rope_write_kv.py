# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`rope_write_kv` on a CPU: one pass over a token's queries, keys and values.

A cache in FP8 is written by the reference: torch rounds to e4m3, our compiled kernels do not.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.native.runtime import (
    BF16,
    F32,
    argument,
    compiled,
    is_bfloat16,
    kernel,
    load,
    load_int32,
    num_threads,
    store,
    thread_num,
)
from pelton.kernels.rope_write_kv import rope_write_kv_reference


@compiled
def _rotate(tag, x, angles, out, half):
    """One head: (a, b) -> (a cos - b sin, b cos + a sin)."""
    for d in range(half):
        cos, sin = load(F32, angles, d), load(F32, angles, half + d)
        first, second = load(tag, x, d), load(tag, x, half + d)
        store(tag, out, d, first * cos - second * sin)
        store(tag, out, half + d, second * cos + first * sin)


@compiled
def _rope_write_kv(tag, size, a):
    num_tokens, num_heads, num_kv_heads = argument(a, 0), argument(a, 1), argument(a, 2)
    head_dim, block_size = argument(a, 3), argument(a, 4)
    q, stride_qt, stride_qh = argument(a, 5), argument(a, 6), argument(a, 7)
    k, stride_kt, stride_kg = argument(a, 8), argument(a, 9), argument(a, 10)
    v, stride_vt, stride_vg = argument(a, 11), argument(a, 12), argument(a, 13)
    cache, stride_cp, stride_ckv = argument(a, 14), argument(a, 15), argument(a, 16)
    stride_cs, stride_cg = argument(a, 17), argument(a, 18)
    positions, cos_sin, slots, out = (
        argument(a, 19),
        argument(a, 20),
        argument(a, 21),
        argument(a, 22),
    )
    half = head_dim // 2
    for token in range(thread_num(), num_tokens, num_threads()):
        angles = cos_sin + load_int32(positions, token) * head_dim * 4
        for head in range(num_heads):
            to = out + (token * num_heads + head) * head_dim * size
            _rotate(tag, q + (token * stride_qt + head * stride_qh) * size, angles, to, half)
        slot = load_int32(slots, token)
        place = cache + (slot // block_size * stride_cp + slot % block_size * stride_cs) * size
        for head in range(num_kv_heads):
            to = place + head * stride_cg * size
            _rotate(tag, k + (token * stride_kt + head * stride_kg) * size, angles, to, half)
            value = v + (token * stride_vt + head * stride_vg) * size
            for d in range(head_dim):
                store(tag, to + stride_ckv * size, d, load(tag, value, d))


@kernel
def _rope_write_kv_bf16(a):
    _rope_write_kv(BF16, 2, a)


@kernel
def _rope_write_kv_f32(a):
    _rope_write_kv(F32, 4, a)


def rope_write_kv(
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
    if not (q.dtype is cache_layer.dtype is dtype):
        return rope_write_kv_reference(
            q, k, v, positions, cos_sin, cache_layer, slot_mapping, k_scale, v_scale, dtype
        )
    num_tokens, num_heads, head_dim = q.shape
    assert positions.dtype is slot_mapping.dtype is torch.int32, (positions.dtype, slot_mapping)
    assert cos_sin.dtype is torch.float32, cos_sin.dtype
    assert cos_sin.is_contiguous(), cos_sin.stride()
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype)
    stride_cp, stride_ckv, stride_cs, stride_cg, _ = cache_layer.stride()
    run = _rope_write_kv_bf16 if is_bfloat16(q) else _rope_write_kv_f32
    run(
        out.numel(), num_tokens, num_heads, k.shape[1], head_dim, cache_layer.shape[2],
        q.data_ptr(), q.stride(0), q.stride(1), k.data_ptr(), k.stride(0), k.stride(1),
        v.data_ptr(), v.stride(0), v.stride(1), cache_layer.data_ptr(), stride_cp, stride_ckv,
        stride_cs, stride_cg, positions.data_ptr(), cos_sin.data_ptr(), slot_mapping.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    return out
