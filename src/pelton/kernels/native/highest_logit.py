# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`highest_logit` on a CPU: the largest value of a row by vector instructions, then its place."""

import numpy as np
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
    num_threads,
    ordered,
    store_int32,
    thread_num,
    unordered,
)


@compiled
def _highest_logit(tag, size, a):
    num_rows, vocab_size, stride_l = argument(a, 0), argument(a, 1), argument(a, 2)
    logits, token_ids, is_finite = argument(a, 3), argument(a, 4), argument(a, 5)
    for row in range(thread_num(), num_rows, num_threads()):
        start = logits + row * stride_l * size
        largest = ordered(np.float32(-np.inf))
        num_nans = 0
        for v in range(vocab_size):
            value = load(tag, start, v)
            largest = max(largest, ordered(value))
            num_nans += value != value
        highest = unordered(largest)
        best = vocab_size - 1
        for v in range(vocab_size):
            if load(tag, start, v) == highest:
                best = v
                break
        store_int32(token_ids, row, best)
        store_int32(is_finite, row, int(num_nans == 0 and abs(highest) < np.float32(np.inf)))


@kernel
def _highest_logit_bf16(a):
    _highest_logit(BF16, 2, a)


@kernel
def _highest_logit_f32(a):
    _highest_logit(F32, 4, a)


def highest_logit(
    logits: Float[Tensor, "N V"],
) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    num_rows, vocab_size = logits.shape
    token_ids, is_finite = torch.empty((2, num_rows), dtype=torch.int32).unbind()
    run = _highest_logit_bf16 if is_bfloat16(logits) else _highest_logit_f32
    run(
        logits.numel(), num_rows, vocab_size, logits.stride(0), logits.data_ptr(),
        token_ids.data_ptr(), is_finite.data_ptr(),
    )  # fmt: skip
    return token_ids, is_finite
