# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`rms_norm` and `add_rms_norm` on a CPU: a token's vector is read once and stays in cache."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.native.runtime import (
    BF16,
    F32,
    argument,
    compiled,
    is_bfloat16,
    kernel,
    load,
    num_threads,
    real_argument,
    store,
    thread_num,
)
from pelton.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference


@compiled
def _norm_row(x_tag, tag, x, weight, out, hidden_size, eps):
    total = np.float32(0.0)
    for d in range(hidden_size):
        value = load(x_tag, x, d)
        total += value * value
    factor = np.float32(1.0) / np.sqrt(total / np.float32(hidden_size) + eps)
    for d in range(hidden_size):
        store(tag, out, d, load(x_tag, x, d) * factor * load(tag, weight, d))


@compiled
def _rms_norm(tag, element_bytes, a):
    num_tokens, hidden_size, eps = argument(a, 0), argument(a, 1), real_argument(a, 2)
    x, stride_x, weight, out = argument(a, 3), argument(a, 4), argument(a, 5), argument(a, 6)
    for token in range(thread_num(), num_tokens, num_threads()):
        row = x + token * stride_x * element_bytes
        out_row = out + token * hidden_size * element_bytes
        _norm_row(tag, tag, row, weight, out_row, hidden_size, eps)


@compiled
def _add_rms_norm(tag, element_bytes, a):
    num_tokens, hidden_size, eps = argument(a, 0), argument(a, 1), real_argument(a, 2)
    x, stride_x, weight, out = argument(a, 3), argument(a, 4), argument(a, 5), argument(a, 6)
    residual, stride_r, new_residual = argument(a, 7), argument(a, 8), argument(a, 9)
    for token in range(thread_num(), num_tokens, num_threads()):
        row = x + token * stride_x * element_bytes
        residual_row = residual + token * stride_r * 4
        sum_row = new_residual + token * hidden_size * 4
        for d in range(hidden_size):
            store(F32, sum_row, d, load(tag, row, d) + load(F32, residual_row, d))
        out_row = out + token * hidden_size * element_bytes
        _norm_row(F32, tag, sum_row, weight, out_row, hidden_size, eps)


@kernel
def _rms_norm_bf16(a):
    _rms_norm(BF16, 2, a)


@kernel
def _rms_norm_f32(a):
    _rms_norm(F32, 4, a)


@kernel
def _add_rms_norm_bf16(a):
    _add_rms_norm(BF16, 2, a)


@kernel
def _add_rms_norm_f32(a):
    _add_rms_norm(F32, 4, a)


def rms_norm(
    x: Float[Tensor, "T D"], weight: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "T D"]:
    if x.dtype is not weight.dtype:
        return rms_norm_reference(x, weight, eps)
    num_tokens, hidden_size = x.shape
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype)
    run = _rms_norm_bf16 if is_bfloat16(x) else _rms_norm_f32
    run(
        x.numel(), num_tokens, hidden_size, eps, x.data_ptr(), x.stride(0), weight.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Float[Tensor, "T D"],
    residual: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    if x.dtype is not weight.dtype:
        return add_rms_norm_reference(x, residual, weight, eps)
    num_tokens, hidden_size = x.shape
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype)
    new_residual = torch.empty_like(out, dtype=torch.float32)
    run = _add_rms_norm_bf16 if is_bfloat16(x) else _add_rms_norm_f32
    run(
        x.numel(), num_tokens, hidden_size, eps, x.data_ptr(), x.stride(0), weight.data_ptr(),
        out.data_ptr(), residual.data_ptr(), residual.stride(0), new_residual.data_ptr(),
    )  # fmt: skip
    return out, new_residual
