# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`silu_mul` on a CPU: one pass over gate and up."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.native.runtime import (
    BF16,
    F32,
    argument,
    compiled,
    exp,
    is_bfloat16,
    kernel,
    load,
    num_threads,
    store,
    thread_num,
)
from pelton.kernels.silu_mul import silu_mul_reference


@compiled
def _silu_mul(tag, element_bytes, a):
    num_tokens, ffn_size, stride_g = argument(a, 0), argument(a, 1), argument(a, 2)
    gate_up, out = argument(a, 3), argument(a, 4)
    for token in range(thread_num(), num_tokens, num_threads()):
        gate = gate_up + token * stride_g * element_bytes
        up = gate + ffn_size * element_bytes
        row = out + token * ffn_size * element_bytes
        for f in range(ffn_size):
            value = load(tag, gate, f)
            silu = value / (np.float32(1.0) + exp(-value))
            store(tag, row, f, silu * load(tag, up, f))


@kernel
def _silu_mul_bf16(a):
    _silu_mul(BF16, 2, a)


@kernel
def _silu_mul_f32(a):
    _silu_mul(F32, 4, a)


def silu_mul(gate_up: Float[Tensor, "T 2F"], dtype: torch.dtype) -> Float[Tensor, "T F"]:
    if dtype is not gate_up.dtype:
        return silu_mul_reference(gate_up, dtype)
    num_tokens, ffn_size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, ffn_size), dtype=gate_up.dtype)
    run = _silu_mul_bf16 if is_bfloat16(gate_up) else _silu_mul_f32
    run(
        2 * gate_up.numel(), num_tokens, ffn_size, gate_up.stride(0), gate_up.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    return out
