# SPDX-License-Identifier: Apache-2.0
"""The references against scalar loops, and the contracts that all implementations share."""

import math

import pytest
import torch

from attention_cases import (
    ATTENTION_CASES,
    AttentionCase,
    make_attention_inputs,
    with_fp8_cache,
)
from pelton.kernels.highest_logit import highest_logit
from pelton.kernels.linear import linear, linear_reference
from pelton.kernels.paged_attention.op import PAGED_ATTENTION, paged_attention
from pelton.kernels.paged_attention.reference import paged_attention_reference
from pelton.kernels.rms_norm import (
    ADD_RMS_NORM,
    RMS_NORM,
    add_rms_norm_reference,
    rms_norm_reference,
)
from pelton.kernels.rope_write_kv import ROPE_WRITE_KV, rope_write_kv, rope_write_kv_reference
from pelton.kernels.silu_mul import SILU_MUL, silu_mul_reference
from tolerance import assert_matches

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
CPU = torch.device("cpu")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def test_rms_norm_is_its_formula(generator) -> None:
    x, weight = torch.randn(3, 5, generator=generator), torch.randn(5, generator=generator)

    actual = rms_norm_reference(x, weight, 1e-3)

    for t in range(3):
        root = math.sqrt(sum(value**2 for value in x[t].tolist()) / 5 + 1e-3)
        expected = [
            value / root * w for value, w in zip(x[t].tolist(), weight.tolist(), strict=True)
        ]
        assert_matches(actual[t], torch.tensor(expected), torch.float32)


def test_add_rms_norm_is_an_addition_and_a_norm(generator) -> None:
    x, residual = torch.randn(2, 4, 6, generator=generator)
    x = x.bfloat16()
    weight = torch.randn(6, generator=generator).bfloat16()

    normed, total = add_rms_norm_reference(x, residual, weight, 1e-5)

    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm_reference(x + residual, weight, 1e-5).bfloat16())


def test_silu_mul_is_its_formula(generator) -> None:
    gate_up = torch.randn(2, 6, generator=generator) * 3

    actual = silu_mul_reference(gate_up)

    for t in range(2):
        gate, up = gate_up[t, :3].tolist(), gate_up[t, 3:].tolist()
        expected = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
        assert_matches(actual[t], torch.tensor(expected), torch.float32)


def test_rope_rotates_pairs_of_the_halves_and_writes_the_slot(generator) -> None:
    q, k, v = torch.randn(3, 1, 1, 4, generator=generator)
    angles = torch.rand(8, 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    cache_layer = torch.full((3, 2, 4, 1, 4), float("nan"))

    rotated = rope_write_kv_reference(
        q, k, v, torch.tensor([6]), cos_sin, cache_layer, torch.tensor([9])
    )

    for vector, actual in ((q, rotated[0, 0]), (k, cache_layer[2, 0, 1, 0])):
        a0, a1, b0, b1 = vector.flatten().tolist()
        t0, t1 = angles[6].tolist()
        expected = [
            a0 * math.cos(t0) - b0 * math.sin(t0),
            a1 * math.cos(t1) - b1 * math.sin(t1),
            b0 * math.cos(t0) + a0 * math.sin(t0),
            b1 * math.cos(t1) + a1 * math.sin(t1),
        ]
        assert_matches(actual, torch.tensor(expected), torch.float32)
    assert torch.equal(cache_layer[2, 1, 1, 0], v[0, 0])
    assert cache_layer.isnan().sum() == cache_layer.numel() - 8


def test_linear_is_its_formula(generator) -> None:
    x, weight = torch.randn(2, 3, generator=generator), torch.randn(4, 3, generator=generator)
    bias = torch.randn(4, generator=generator)

    actual = linear_reference(x, weight, bias)

    for t in range(2):
        expected = [
            sum(a * b for a, b in zip(x[t].tolist(), weight[f].tolist(), strict=True)) + bias[f]
            for f in range(4)
        ]
        assert_matches(actual[t], torch.tensor(expected), torch.float32)


@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 5], ids=lambda t: f"T{t}")
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_chosen_linear_matches_the_reference(num_tokens, has_bias, dtype, generator) -> None:
    x = torch.randn(num_tokens, 48, generator=generator).to(dtype)
    weight = torch.randn(33, 48, generator=generator).to(dtype)
    bias = torch.randn(33, generator=generator).to(dtype) if has_bias else None

    actual = linear(x, weight, bias)

    bias = None if bias is None else bias.float()
    assert_matches(actual, linear_reference(x.float(), weight.float(), bias), dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(0, 10), (1, 1), (6, 5000)], ids=str)
def test_highest_logit_takes_the_lowest_id_among_ties(shape, dtype, generator) -> None:
    logits = torch.randint(-3, 4, shape, generator=generator).to(dtype)

    token_ids, is_finite = highest_logit(logits)

    assert token_ids.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert is_finite.tolist() == [1] * shape[0]
    assert token_ids.dtype == is_finite.dtype == torch.int32


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_highest_logit_reports_rows_that_are_not_finite(value, generator) -> None:
    logits = torch.randn(4, 900, generator=generator)
    logits[1, 850] = value
    logits[2] = float("-inf")

    token_ids, is_finite = highest_logit(logits)

    assert is_finite.tolist() == [1, 0, 0, 1]
    assert ((token_ids >= 0) & (token_ids < 900)).all()


def attend_with_loops(inputs, case: AttentionCase) -> torch.Tensor:
    """One dot product at a time, in double precision."""
    out = torch.zeros(inputs.q.shape, dtype=torch.float64)
    group_size = case.num_heads // case.num_kv_heads
    token = 0
    for row, (new, context) in enumerate(case.rows):
        for position in range(context - new, context) if context else []:
            first = max(0, position - case.window + 1) if case.window else 0
            for head in range(case.num_heads):
                keys, values = [], []
                for seen in range(first, position + 1):
                    block = int(inputs.block_tables[row, seen // case.block_size])
                    slot = inputs.cache_layer[block, :, seen % case.block_size, head // group_size]
                    keys.append(slot[0])
                    values.append(slot[1])
                scores = torch.stack(keys).double() @ inputs.q[token, head].double() * inputs.scale
                exponentials = scores.exp()
                total = exponentials.sum()
                if inputs.sinks is not None:
                    total += inputs.sinks[head].double().exp()
                out[token, head] = exponentials / total @ torch.stack(values).double()
            token += 1
        token += new if not context else 0
    return out.float()


@pytest.mark.parametrize("case", ATTENTION_CASES[:7] + ATTENTION_CASES[12:], ids=str)
def test_paged_attention_is_its_formula(case, generator) -> None:
    inputs = make_attention_inputs(case, CPU, torch.float32, generator)

    actual = paged_attention_reference(*inputs.arguments())

    assert_matches(actual, attend_with_loops(inputs, case), torch.float32)


@DTYPES
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_chosen_paged_attention_matches_the_reference(case, dtype, generator) -> None:
    """Whatever dispatch picks on a CPU: NaN in slots that nobody sees changes nothing."""
    inputs = make_attention_inputs(case, CPU, dtype, generator)

    actual = paged_attention(*inputs.arguments())

    assert_matches(actual, paged_attention_reference(*inputs.arguments(torch.float32)), dtype)


@DTYPES
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_chosen_paged_attention_reads_a_cache_in_fp8(case, dtype, generator) -> None:
    scales = (0.037, 2.3)
    inputs = with_fp8_cache(make_attention_inputs(case, CPU, dtype, generator), *scales)

    actual = paged_attention(*inputs.arguments(), *scales)

    expected = paged_attention_reference(*inputs.arguments(torch.float32), *scales)
    assert_matches(actual, expected, dtype)


@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64], ids=lambda t: f"T{t}")
def test_chosen_vector_ops_match_their_references(num_tokens, dtype, generator) -> None:
    wide = torch.randn(2, num_tokens, 114, generator=generator)
    x, residual = wide[0].to(dtype)[:, :98], wide[1, :, :98]
    weight = torch.randn(98, generator=generator).to(dtype)

    normed = RMS_NORM.select(CPU, dtype)(x, weight, 1e-5)
    sum_normed, total = ADD_RMS_NORM.select(CPU, dtype)(x, residual, weight, 1e-5)
    gated = SILU_MUL.select(CPU, dtype)(x, dtype)

    expected_normed, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    assert_matches(normed, rms_norm_reference(x.float(), weight.float(), 1e-5), dtype)
    assert_matches(sum_normed, expected_normed.float(), dtype)
    assert torch.equal(total, expected_total)
    assert_matches(gated, silu_mul_reference(x.float()), dtype)


@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64], ids=lambda t: f"T{t}")
def test_chosen_rope_matches_the_reference(num_tokens, dtype, generator) -> None:
    qkv = torch.randn(num_tokens, 9 + 2 * 3, 64, generator=generator).to(dtype)
    q, k, v = qkv.split([9, 3, 3], dim=1)
    positions = torch.randint(0, 100, (num_tokens,), generator=generator, dtype=torch.int32)
    angles = torch.rand(100, 32, generator=generator) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    slots = torch.randperm(112, generator=generator)[:num_tokens].int() + 16
    pool = torch.full((8, 3, 2, 16, 3, 64), float("nan"), dtype=dtype)
    expected_pool = pool.float()

    run = ROPE_WRITE_KV.select(CPU, dtype)
    actual = run(q, k, v, positions, cos_sin, pool[:, 1], slots, 1.0, 1.0, dtype)

    expected = rope_write_kv_reference(
        q.float(), k.float(), v.float(), positions, cos_sin, expected_pool[:, 1], slots
    )
    assert_matches(actual, expected, dtype)
    is_written = ~expected_pool.isnan()
    assert torch.equal(~pool.isnan(), is_written)
    assert_matches(pool[is_written], expected_pool[is_written], dtype)


def test_a_cache_in_fp8_saturates_and_keeps_nan(generator) -> None:
    """By hand: x / scale to the nearest e4m3 number, ties to even, 448 the largest."""
    wanted = {1.0: 2.0, 0.53125: 1.0, 0.5625: 1.125, 0.59375: 1.25, 1e6: 448.0, -1e6: -448.0,
              float("inf"): 448.0, 224.1: 448.0, 2**-11: 0.0, 3 * 2**-11: 2**-8}  # fmt: skip
    v = torch.tensor([*wanted, float("nan"), 0.0]).view(1, 1, 12)
    cache_layer = torch.full((2, 2, 4, 1, 12), float("nan")).to(torch.float8_e4m3fn)
    angles = torch.cat((torch.ones(1, 6), torch.zeros(1, 6)), dim=1)
    place = torch.tensor([0], dtype=torch.int32)

    k = v.nan_to_num().clamp(-1e6, 1e6)  # a rotation would spread what is not finite

    rope_write_kv(k, k, v, place, angles, cache_layer, place + 5, 2.0, 0.5)

    assert cache_layer[1, 1, 1, 0, :10].tolist() == list(wanted.values())
    assert cache_layer[1, 1, 1, 0, 10].isnan()
    keys = cache_layer[1, 0, 1, 0].float()
    assert keys[:4].tolist() == [0.5, 0.25, 0.28125, 0.3125]
    assert (~cache_layer.isnan()).sum() == 12 + 11


def test_cases_reach_every_branch_of_the_tables() -> None:
    """The grid must hold the shapes that the masks exist for."""
    contexts = {context for case in ATTENTION_CASES for _, context in case.rows}

    assert {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129} <= contexts
    assert "reference" in PAGED_ATTENTION.names
