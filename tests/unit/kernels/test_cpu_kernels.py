# SPDX-License-Identifier: Apache-2.0
"""What only the CPU implementations do: share what a step derives, and run compiled kernels."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_cases import AttentionCase, make_attention_inputs
from pelton.kernels.highest_logit import HIGHEST_LOGIT, highest_logit_reference
from pelton.kernels.int8_rows import (
    QUANTIZE_ROWS,
    SCALE_ROWS,
    quantize_rows_reference,
    scale_rows_reference,
)
from pelton.kernels.memo import Memo
from pelton.kernels.paged_attention.native import _Planner, paged_attention_native
from pelton.kernels.paged_attention.reference import paged_attention_reference
from pelton.kernels.rms_norm import (
    ADD_RMS_NORM,
    RMS_NORM,
    add_rms_norm_reference,
    rms_norm_reference,
)
from pelton.kernels.rope_write_kv import ROPE_WRITE_KV, rope_write_kv_reference
from pelton.kernels.silu_mul import SILU_MUL, silu_mul_reference
from tolerance import assert_matches

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Of what an op reads and of what it gives.
DTYPES_IN_OUT = pytest.mark.parametrize(
    ("dtype_in", "dtype"),
    [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)],
    ids=str,
)
TOKENS = pytest.mark.parametrize("num_tokens", [0, 1, 3, 301])


def test_memo_derives_again_when_a_value_or_a_setting_changes() -> None:
    memo: Memo[int] = Memo()
    calls = []

    def derive() -> int:
        calls.append(None)
        return len(calls)

    numbers = torch.tensor([1, 2])
    assert [memo.get((numbers,), "a", derive) for _ in range(2)] == [1, 1]
    numbers[1] = 3  # in place: the memo must have kept the values, not the tensor
    assert memo.get((numbers,), "a", derive) == 2
    assert memo.get((numbers,), "b", derive) == 3
    assert memo.get((numbers[:1],), "b", derive) == 4
    assert memo.get((numbers[:1],), "b", derive, constant=numbers) == 5
    assert memo.get((numbers[:1],), "b", derive, constant=numbers.clone()) == 6


@DTYPES_IN_OUT
@TOKENS
def test_norms_of_strided_rows(num_tokens: int, dtype_in: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.randn(num_tokens, 700).to(dtype_in)[:, 13:590]
    residual = torch.randn(num_tokens, 700)[:, 13:590]
    weight = torch.randn(577).to(dtype)

    normed = RMS_NORM.named("native")(x, weight, 1e-5)
    normed_sum, new_residual = ADD_RMS_NORM.named("native")(x, residual, weight, 1e-5)

    assert_matches(normed, rms_norm_reference(x.float(), weight.float(), 1e-5), dtype)
    expected, expected_residual = add_rms_norm_reference(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, expected_residual)
    assert_matches(normed_sum, expected.float(), dtype)


@DTYPES
def test_highest_logit_of_rows_with_ties_and_values_that_are_not_finite(dtype: torch.dtype) -> None:
    logits = torch.randn(9, 1200).to(dtype)[:, 11:1110]
    logits[0, [500, 77, 1000]] = 50.0
    logits[1, 3], logits[2, 5], logits[3, 7] = float("nan"), float("inf"), -float("nan")
    logits[4] = float("-inf")
    logits[5, :1098] = float("-inf")
    logits[6], logits[6, 40] = -0.0, 0.0
    expected_ids, expected_finite = highest_logit_reference(logits)

    token_ids, is_finite = HIGHEST_LOGIT.named("native")(logits)

    assert torch.equal(is_finite, expected_finite)
    assert is_finite.tolist() == [1, 0, 0, 0, 0, 1, 1, 1, 1]
    usable = is_finite.bool()
    assert torch.equal(token_ids[usable], expected_ids[usable])
    assert (token_ids[0], token_ids[6]) == (77, 0)
    assert ((token_ids >= 0) & (token_ids < 1099)).all()


@DTYPES_IN_OUT
@TOKENS
def test_silu_mul_of_strided_rows(
    num_tokens: int, dtype_in: torch.dtype, dtype: torch.dtype
) -> None:
    gate_up = (torch.randn(num_tokens, 300) * 30).to(dtype_in)[:, 7:201]

    actual = SILU_MUL.named("native")(gate_up, dtype)

    assert_matches(actual, silu_mul_reference(gate_up.float()), dtype)


@DTYPES
@TOKENS
@pytest.mark.parametrize(("has_bias", "limit"), [(False, 127), (True, 127), (True, 64)])
def test_8_bit_rows_there_and_back(
    num_tokens: int, has_bias: bool, limit: int, dtype: torch.dtype
) -> None:
    """A value beside a half may be rounded to either side; a row of zeros stays one."""
    x = (torch.randn(num_tokens, 300) * torch.logspace(-3, 3, 300)).to(dtype)[:, 5:262]
    x[1:2] = 0.0
    product, bias = torch.randn(num_tokens, 61), torch.randn(61).to(dtype) if has_bias else None

    integers, scales = QUANTIZE_ROWS.named("native")(x, limit)
    scaled = SCALE_ROWS.named("native")(product, scales, bias, dtype)

    expected_integers, expected_scales = quantize_rows_reference(x, limit)
    assert_matches(scales, expected_scales, torch.float32)
    assert ((integers.int() - expected_integers.int()).abs() <= 1).all()
    assert (integers != expected_integers).sum() <= 0.001 * integers.numel()
    expected = scale_rows_reference(product, expected_scales, bias, torch.float32)
    assert_matches(scaled, expected, dtype)


def test_no_kernel_is_compiled_or_imported_where_none_runs() -> None:
    """A process that computes on a GPU has no use for a second compiler."""
    program = (
        "import sys, pelton.engine.factory, pelton.models.llama;"
        "print(*{'numba', 'llvmlite'} & set(sys.modules))"
    )

    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert answer.stdout.split() == []


@DTYPES
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_so_in_its_row_alone(
    value: float, dtype: torch.dtype
) -> None:
    x = torch.ones(3, 64).to(dtype)
    x[1, 5] = value
    weight = torch.ones(64).to(dtype)
    case = AttentionCase(rows=((1, 9), (1, 30), (1, 5)), num_decodes=3)
    inputs = make_attention_inputs(case, CPU, dtype, torch.Generator().manual_seed(1))
    inputs.q[1] = value

    rows = [
        RMS_NORM.named("native")(x, weight, 1e-5),
        ADD_RMS_NORM.named("native")(x, torch.zeros(x.shape), weight, 1e-5)[0],
        SILU_MUL.named("native")(x, dtype),
        paged_attention_native(*inputs.arguments()).flatten(1),
    ]

    for out in rows:
        assert out.isfinite().all(dim=1).tolist() == [True, False, True]


@DTYPES
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same_bits(num_threads: int, dtype: torch.dtype) -> None:
    """More work than a thread is woken for; rows of uneven length."""
    rows = tuple((1, 1 + 61 * row % 300) for row in range(23))
    case = AttentionCase(rows=rows, num_decodes=23, num_heads=12, num_kv_heads=3, head_dim=64)
    inputs = make_attention_inputs(case, CPU, dtype, torch.Generator().manual_seed(1))
    expected = paged_attention_reference(*inputs.arguments(torch.float32))
    before = torch.get_num_threads()
    alone = paged_attention_native(*inputs.arguments())
    try:
        torch.set_num_threads(num_threads)
        actual = paged_attention_native(*inputs.arguments())
    finally:
        torch.set_num_threads(before)

    assert_matches(actual, expected, dtype)
    assert torch.equal(actual, alone)


@DTYPES_IN_OUT
@TOKENS
def test_rope_write_kv_in_place_of_the_reference(
    num_tokens: int, dtype_in: torch.dtype, dtype: torch.dtype
) -> None:
    """Slices of one buffer, a middle layer of a pool, an odd block size; other layers stay."""
    q, k, v = torch.randn(num_tokens, 9, 24).to(dtype_in).split((5, 2, 2), dim=1)
    positions = torch.randint(0, 50, (num_tokens,), dtype=torch.int32)
    slots = torch.randperm(101 * 5)[:num_tokens].int()
    cos_sin = torch.randn(50, 24)
    pool = torch.zeros(101, 3, 2, 5, 2, 24, dtype=dtype)
    expected_pool = pool.clone()

    actual = ROPE_WRITE_KV.named("native")(
        q, k, v, positions, cos_sin, pool[:, 1], slots, 1.0, 1.0, dtype
    )

    expected = rope_write_kv_reference(
        q.float(), k.float(), v.float(), positions, cos_sin, expected_pool[:, 1], slots
    )
    assert_matches(actual, expected, dtype)
    if num_tokens:
        assert_matches(pool, expected_pool.float(), dtype)
    assert torch.equal(pool[:, 1] != 0, expected_pool[:, 1] != 0)
    assert not pool[:, ::2].any()


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.num_bytes = max(self.num_bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("window", [0, 700])
def test_nothing_is_wider_than_the_mask_of_a_chunk_behind_a_prefix(window: int) -> None:
    table = torch.zeros(64, dtype=torch.int32)
    with _Largest() as largest:
        row = _Planner(16, 32, window, torch.float32)._prefill_row(0, 256, 1024, table)
    assert row.mask is not None
    assert largest.num_bytes == row.mask.nbytes
    own, seen = torch.arange(768, 1024)[:, None], torch.arange(1024 - row.mask.shape[1], 1024)
    is_seen = (seen <= own) & (seen > own - (window or 1024))
    assert torch.equal(row.mask == 0, is_seen)
