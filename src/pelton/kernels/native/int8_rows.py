# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`quantize_rows` and `scale_rows` on a CPU: a row is read from memory once."""

import numpy as np
import torch
from jaxtyping import Float, Int8
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
    ordered,
    real_argument,
    store,
    store_int8,
    thread_num,
    unordered,
)


@compiled
def _quantize_rows(tag, size, a):
    num_rows, width, stride_x = argument(a, 0), argument(a, 1), argument(a, 2)
    x, integers, scales = argument(a, 3), argument(a, 4), argument(a, 5)
    limit = real_argument(a, 6)
    for row in range(thread_num(), num_rows, num_threads()):
        start = x + row * stride_x * size
        largest = ordered(np.float32(1e-38))
        for d in range(width):
            largest = max(largest, ordered(abs(load(tag, start, d))))
        highest = unordered(largest)
        factor = limit / highest
        for d in range(width):
            value = min(max(load(tag, start, d) * factor, -limit), limit)
            store_int8(integers + row * width, d, np.floor(value + np.float32(0.5)))
        scale = highest / limit
        # Infinity is no scale that a row could be multiplied by.
        store(F32, scales, row, scale if scale < np.float32(np.inf) else np.float32(np.nan))


@compiled
def _scale_rows(tag, size, a):
    num_rows, width, product = argument(a, 0), argument(a, 1), argument(a, 2)
    scales, bias, out = argument(a, 3), argument(a, 4), argument(a, 5)
    for row in range(thread_num(), num_rows, num_threads()):
        scale = load(F32, scales, row)
        start, to = product + row * width * 4, out + row * width * size
        if bias:
            for f in range(width):
                store(tag, to, f, load(F32, start, f) * scale + load(tag, bias, f))
        else:
            for f in range(width):
                store(tag, to, f, load(F32, start, f) * scale)


@kernel
def _quantize_rows_bf16(a):
    _quantize_rows(BF16, 2, a)


@kernel
def _quantize_rows_f32(a):
    _quantize_rows(F32, 4, a)


@kernel
def _scale_rows_bf16(a):
    _scale_rows(BF16, 2, a)


@kernel
def _scale_rows_f32(a):
    _scale_rows(F32, 4, a)


def quantize_rows(
    x: Float[Tensor, "n D"], limit: int
) -> tuple[Int8[Tensor, "n D"], Float[Tensor, " n"]]:
    num_rows, width = x.shape
    integers, scales = torch.empty((num_rows, width), dtype=torch.int8), torch.empty(num_rows)
    run = _quantize_rows_bf16 if is_bfloat16(x) else _quantize_rows_f32
    run(
        x.numel(), num_rows, width, x.stride(0), x.data_ptr(), integers.data_ptr(),
        scales.data_ptr(), float(limit),
    )  # fmt: skip
    return integers, scales


def scale_rows(
    product: Float[Tensor, "n F"],
    scales: Float[Tensor, " n"],
    bias: Float[Tensor, " F"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "n F"]:
    num_rows, width = product.shape
    out = torch.empty((num_rows, width), dtype=dtype)
    run = _scale_rows_bf16 if is_bfloat16(out) else _scale_rows_f32
    run(
        out.numel(), num_rows, width, product.data_ptr(), scales.data_ptr(),
        0 if bias is None else bias.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out
