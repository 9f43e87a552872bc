# SPDX-License-Identifier: Apache-2.0
"""Triton kernels against their references, on shapes that touch every mask."""

import math
import os

import pytest
import torch

from attention_cases import (
    ATTENTION_CASES,
    LARGE_ATTENTION_CASES,
    AttentionCase,
    make_attention_inputs,
    with_fp8_cache,
)
from overlapped import assert_same_overlapped
from pelton.kernels import highest_logit, linear
from pelton.kernels.apply_token_mask import APPLY_TOKEN_MASK, apply_token_mask_reference
from pelton.kernels.highest_logit import HIGHEST_LOGIT
from pelton.kernels.hopper_vector import ROWS
from pelton.kernels.linear import LINEAR, linear_reference
from pelton.kernels.paged_attention.op import PAGED_ATTENTION
from pelton.kernels.paged_attention.reference import paged_attention_reference
from pelton.kernels.rms_norm import (
    ADD_RMS_NORM,
    RMS_NORM,
    SUM_ADD_RMS_NORM,
    add_rms_norm_reference,
    rms_norm_reference,
    sum_add_rms_norm_reference,
)
from pelton.kernels.rope_write_kv import ROPE_WRITE_KV, rope_write_kv_reference
from pelton.kernels.silu_mul import SILU_MUL, silu_mul_reference
from pelton.kernels.sum_words import SumWords
from pelton.kernels.triton_runtime import runs_hopper
from tolerance import assert_matches

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

# The interpreter computes products of bfloat16 tiles wrongly; float16 stands for it there.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
# Of what an op reads and of what it gives: products may bring float32 where activations are half.
DTYPES_IN_OUT = pytest.mark.parametrize(
    ("dtype_in", "dtype"),
    [(torch.float32, torch.float32), (HALF, HALF), (torch.float32, HALF)],
    ids=["fp32", "half", "fp32-to-half"],
)

VECTOR_SHAPES = [(0, 64), (1, 1), (1, 64), (3, 61), (17, 576), (5, 4096)]
SHAPES = pytest.mark.parametrize("shape", VECTOR_SHAPES, ids=lambda s: f"T{s[0]}-D{s[1]}")


def make_strided(shape, device, dtype, generator, scale=1.0):
    """Rows of a wider buffer, so that the stride differs from the width."""
    wide = torch.randn(shape[0], shape[1] + 16, generator=generator) * scale
    return wide.to(device, dtype)[:, : shape[1]]


@DTYPES_IN_OUT
@SHAPES
def test_rms_norm(shape, dtype_in, dtype, device, generator, interpretable) -> None:
    x = make_strided(shape, device, dtype_in, generator, scale=30.0)
    weight = torch.randn(shape[1], generator=generator).to(device, dtype)

    actual = RMS_NORM.named("triton")(x, weight, 1e-5)

    assert_matches(actual, rms_norm_reference(x.float(), weight.float(), 1e-5), dtype)


@DTYPES_IN_OUT
@SHAPES
def test_add_rms_norm(shape, dtype_in, dtype, device, generator, interpretable) -> None:
    x = make_strided(shape, device, dtype_in, generator)
    residual = make_strided(shape, device, torch.float32, generator, scale=100.0)
    weight = torch.randn(shape[1], generator=generator).to(device, dtype)

    normed, total = ADD_RMS_NORM.named("triton")(x, residual, weight, 1e-5)

    expected_normed, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_matches(normed, expected_normed.float(), dtype)


@DTYPES_IN_OUT
@pytest.mark.parametrize("top_k", [1, 4])
@SHAPES
def test_sum_add_rms_norm(shape, top_k, dtype_in, dtype, device, generator, interpretable) -> None:
    num_tokens, hidden_size = shape
    rows = torch.randn(num_tokens * top_k, hidden_size, generator=generator).to(device, dtype_in)
    shares = torch.rand(num_tokens, top_k, generator=generator).to(device)
    residual = make_strided(shape, device, torch.float32, generator, scale=100.0)
    weight = torch.randn(hidden_size, generator=generator).to(device, dtype)

    normed, total = SUM_ADD_RMS_NORM.named("triton")(rows, shares, residual, weight, 1e-5)

    expected = sum_add_rms_norm_reference(rows, shares, residual, weight.float(), 1e-5)
    assert_matches(total, expected[1], torch.float32)
    assert_matches(normed, expected[0], dtype)


@DTYPES_IN_OUT
@pytest.mark.parametrize("shape", [(0, 64), (1, 2), (3, 122), (7, 3072)], ids=str)
def test_silu_mul(shape, dtype_in, dtype, device, generator, interpretable) -> None:
    gate_up = make_strided(shape, device, dtype_in, generator, scale=4.0)

    actual = SILU_MUL.named("triton")(gate_up, dtype)

    assert_matches(actual, silu_mul_reference(gate_up.float()), dtype)


@DTYPES_IN_OUT
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(0, 4, 2, 32), (1, 32, 8, 128), (7, 9, 3, 64), (65, 5, 2, 16), (3, 8, 1, 24)],
)
def test_rope_write_kv(
    num_tokens, num_heads, num_kv_heads, head_dim, dtype_in, dtype, device, generator, interpretable
) -> None:
    width = num_heads + 2 * num_kv_heads
    qkv = torch.randn(num_tokens, width, head_dim, generator=generator).to(device, dtype_in)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    positions = torch.randint(0, 100, (num_tokens,), generator=generator).to(device)
    angles = torch.rand(100, head_dim // 2, generator=generator) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    pool = torch.full((8, 3, 2, 16, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    slots = torch.randperm(7 * 16, generator=generator)[:num_tokens].to(device) + 16
    expected_pool = pool.float().to(device)
    pool = pool.to(device)

    actual = ROPE_WRITE_KV.named("triton")(
        q, k, v, positions, cos_sin, pool[:, 1], slots, 1.0, 1.0, dtype
    )

    expected = rope_write_kv_reference(
        q.float(), k.float(), v.float(), positions, cos_sin, expected_pool[:, 1], slots
    )
    assert_matches(actual, expected, dtype)
    is_written = ~expected_pool.isnan()
    assert torch.equal(~pool.isnan(), is_written)
    assert_matches(pool[is_written], expected_pool[is_written], dtype)


@pytest.mark.parametrize("dtype", [torch.uint64, torch.uint32, torch.uint16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 128, 64), (3, 150, 64), (2, 129, 8), (33, 40, 32)], ids=str
)
@pytest.mark.parametrize("parts", [1, 3])
def test_sum_words(shape, parts, dtype, device, generator, interpretable) -> None:
    num_bytes = torch.empty(0, dtype=dtype).element_size() * math.prod(shape)
    words = torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)
    words = words.view(dtype).view(shape)
    ids = torch.randperm(shape[0], generator=generator)[: max(shape[0] - 1, 1)]
    expected = torch.from_numpy(words.numpy().sum(1, dtype="u8").view("i8"))[ids]
    words, sums = words.to(device), torch.full((parts + 1, len(ids), shape[2]), -7, device=device)

    SumWords(words)(ids[None].to(device), sums[:-1])

    assert torch.equal(sums[:-1].cpu().sum(0), expected)
    assert (sums[-1] == -7).all()

    pool = torch.zeros((shape[0] + 2, *shape[1:]), dtype=dtype, device=device)
    sums.fill_(-7)
    SumWords(pool)(torch.stack([ids + 2, ids]).to(device), sums[:-1], words.data_ptr())

    assert torch.equal(sums[:-1].cpu().sum(0), expected)
    copied = torch.zeros_like(pool, device="cpu").view(torch.uint8)
    copied[ids + 2] = words.cpu().view(torch.uint8)[ids]
    assert torch.equal(pool.cpu().view(torch.uint8), copied)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=["half", "fp32"])
@pytest.mark.parametrize(
    "shape",
    [(1, 64, 16), (1, 1030, 67), (1, 9000, 5), (1, 20_000, 9), (1, 2060, 601), (1, 5000, 514),
     (3, 64, 48)],
    ids=str,
)  # fmt: skip
def test_linear(shape, dtype, has_bias, device, generator, interpretable) -> None:
    """Of one token: few features and many, whose rows are held whole and are not."""
    num_tokens, in_features, out_features = shape
    x = torch.randn(num_tokens, in_features, generator=generator).to(device, HALF)
    weight = make_strided((out_features, in_features), device, HALF, generator)
    bias = torch.randn(out_features, generator=generator).to(device, HALF) if has_bias else None

    actual = LINEAR.named("triton")(x, weight, bias, dtype)

    expected = linear_reference(x, weight, bias, torch.float32)
    is_rounded = IS_INTERPRETED and num_tokens > 1  # the library's product on a CPU
    assert_matches(
        actual.to(HALF) if is_rounded else actual, expected, HALF if is_rounded else dtype
    )


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=["half", "fp32"])
@pytest.mark.parametrize(
    "shape",
    # GPT-OSS's attention, Llama-8B's output, and a head; rows and inputs that fill neither; a warp.
    [
        *[(2880, 5120), (4096, 2880), (4096, 4096), (2880, 50_000)],
        *[(2880, 5115), (3064, 4001), (200, 600)],
    ],
    ids=str,
)
def test_linear_of_one_token(shape, dtype, has_bias, device, generator, monkeypatch) -> None:
    """On Hopper by a kernel of its own, but with a bias that is not of whole programs."""
    in_features, out_features = shape
    x = torch.randn(1, in_features, generator=generator).to(device, HALF)
    weight = make_strided((out_features, in_features), device, HALF, generator)
    bias = torch.randn(out_features, generator=generator).to(device, HALF) if has_bias else None
    if runs_hopper(device) and not (has_bias and out_features % ROWS):
        monkeypatch.setattr(linear, "_vector_linear_kernel", None)

    actual = LINEAR.named("triton")(x, weight, bias, dtype)

    assert_matches(actual, linear_reference(x, weight, bias, torch.float32), dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(0, 10), (1, 1), (5, 8191), (3, 8192), (2, 70_000)], ids=str)
def test_highest_logit(shape, dtype, device, generator, interpretable) -> None:
    # Few values, so that every row has ties, within a block and across blocks.
    logits = torch.randint(-3, 4, shape, generator=generator).to(device, dtype)

    token_ids, is_finite = HIGHEST_LOGIT.named("triton")(logits)

    expected = [row.index(max(row)) for row in logits.tolist()]
    assert token_ids.tolist() == expected
    assert is_finite.tolist() == [1] * shape[0]


@DTYPES
@pytest.mark.parametrize(
    ("shape", "rows"),
    [((0, 40), []), ((1, 1), [0]), ((3, 33), [2, 0]), ((4, 4100), [1, 3]), ((2, 8192), [0, 1])],
    ids=str,
)
def test_apply_token_mask(shape, rows, dtype, device, generator, interpretable) -> None:
    logits = torch.randn((shape[0], shape[1] + 3), generator=generator)
    logits[:, ::7] = float("nan")
    strided = logits.to(device, dtype)[:, : shape[1]]
    expected = strided.clone()
    words = -(-shape[1] // 32)
    masks = torch.randint(-(2**31), 2**31, (len(rows), words), generator=generator)
    masks = masks.to(device, torch.int32)
    ids = torch.tensor(rows, dtype=torch.int64, device=device)

    APPLY_TOKEN_MASK.named("triton")(strided, ids, masks)

    apply_token_mask_reference(expected, ids, masks)
    assert torch.equal(strided.nan_to_num(7.5), expected.nan_to_num(7.5))
    for row, mask in zip(rows, masks.tolist(), strict=True):
        for token in range(shape[1]):
            is_banned = not mask[token // 32] >> token % 32 & 1 and token % 7 != 0
            assert is_banned == (strided[row, token].item() == float("-inf"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_highest_logit_reports_rows_that_are_not_finite(
    value, device, generator, interpretable
) -> None:
    logits = torch.randn(4, 9000, generator=generator).to(device)
    logits[1, 8500] = value
    logits[2] = float("-inf")

    token_ids, is_finite = HIGHEST_LOGIT.named("triton")(logits)

    assert is_finite.tolist() == [1, 0, 0, 1]
    assert ((token_ids >= 0) & (token_ids < 9000)).all()


@pytest.mark.parametrize("num_splits", [1, 2, 64])
@pytest.mark.parametrize("vocab_size", [1, 4096, 4097, 13000])
def test_highest_logit_of_rows_in_splits(
    vocab_size, num_splits, device, generator, interpretable, monkeypatch
) -> None:
    """Some splits have no logit; some rows' highest is at an end, or nothing but minus infinity."""
    monkeypatch.setattr(highest_logit, "tune", lambda *sizes: num_splits)
    logits = torch.randn(5, vocab_size, generator=generator).to(device)
    logits[0, 0] = logits[1, -1] = 50.0
    logits[2] = float("-inf")
    logits[3, vocab_size // 2 :] = float("nan")
    logits[4] = -5.0

    token_ids, is_finite = HIGHEST_LOGIT.named("triton")(logits)

    assert token_ids[[0, 1, 4]].tolist() == [0, vocab_size - 1, 0]
    assert is_finite.tolist() == [1, 1, 0, 0, 1]
    assert ((token_ids >= 0) & (token_ids < vocab_size)).all()


ATTENTIONS = pytest.mark.parametrize("name", ["triton", "invariant"])


def check_attention(case: AttentionCase, name, dtype, device, generator) -> None:
    inputs = make_attention_inputs(case, device, dtype, generator)

    actual = PAGED_ATTENTION.named(name)(*inputs.arguments())

    assert_matches(actual, paged_attention_reference(*inputs.arguments(torch.float32)), dtype)


@ATTENTIONS
@DTYPES
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_paged_attention(case, name, dtype, device, generator, interpretable) -> None:
    check_attention(case, name, dtype, device, generator)


@ATTENTIONS
@DTYPES
@pytest.mark.parametrize("case", LARGE_ATTENTION_CASES, ids=str)
def test_paged_attention_large(case, name, dtype, device, generator) -> None:
    check_attention(case, name, dtype, device, generator)


def test_nan_in_a_seen_slot_reaches_the_output(device, generator, interpretable) -> None:
    case = AttentionCase(rows=((1, 70), (1, 70), (9, 30)), num_decodes=2)
    inputs = make_attention_inputs(case, device, torch.float32, generator)
    inputs.cache_layer[inputs.block_tables[0, 2].item(), 0, 5] = float("nan")

    actual = PAGED_ATTENTION.named("triton")(*inputs.arguments())

    assert actual[0].isnan().all()
    assert actual[1:].isfinite().all()


def test_addresses_beyond_two_gigabytes(device, generator) -> None:
    """A pool of more than 2^31 elements, read and written at its far end."""
    case = AttentionCase(rows=((1, 33), (20, 20)), num_decodes=1, num_kv_heads=4, head_dim=64)
    inputs = make_attention_inputs(case, device, torch.bfloat16, generator)
    near = inputs.cache_layer
    num_far_blocks = 2**31 // (3 * 2 * 16 * 4 * 64) + 100
    pool = torch.zeros((num_far_blocks, 3, *near.shape[1:]), dtype=near.dtype, device=device)
    shift = num_far_blocks - near.shape[0]
    pool[shift:, 1] = near
    expected = PAGED_ATTENTION.named("triton")(*inputs.arguments())
    inputs.cache_layer = pool[:, 1]
    inputs.block_tables = inputs.block_tables + shift

    actual = PAGED_ATTENTION.named("triton")(*inputs.arguments())

    assert torch.equal(actual, expected)


@pytest.mark.parametrize("context", [5, 64, 500, 1500])
def test_graph_replays_at_any_context_length(context, device, generator) -> None:
    """Captured at context length 1, replayed at others: same bits as an eager call."""
    case = AttentionCase(rows=((1, context),) * 3, num_decodes=3, head_dim=64)
    inputs = make_attention_inputs(case, device, torch.bfloat16, generator)
    run = PAGED_ATTENTION.named("triton")
    expected = run(*inputs.arguments())
    true_lens = inputs.context_lens.clone()
    inputs.context_lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    run(*inputs.arguments())
    with torch.cuda.graph(graph):
        actual = run(*inputs.arguments())

    inputs.context_lens.copy_(true_lens)
    graph.replay()

    assert torch.equal(actual, expected)


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("window", [0, 40])
def test_one_token_through_attention_is_the_same_overlapped_and_not(
    window, is_fp8, device, generator
) -> None:
    """As in a step: each kernel starts before the one in front has ended, and of a short context
    most splits see nothing."""
    num_heads, head_dim = 16, 64
    width = num_heads * head_dim
    multiply, attend = LINEAR.named("triton"), PAGED_ATTENTION.named("triton")
    rounds = []
    for context in (1, 2, 127, 128, 129, 300, 1500, 17) * 3:
        case = AttentionCase(((1, context),), 1, num_heads, 2, head_dim, 16, window)
        inputs = make_attention_inputs(case, device, HALF, generator)
        inputs = with_fp8_cache(inputs, 1.0, 1.0) if is_fp8 else inputs
        weights = torch.randn(2, width, width, generator=generator).to(device, HALF) / 32
        rounds.append((inputs.arguments()[1:], *weights))
    x = torch.randn(1, width, generator=generator).to(device, HALF)

    def pass_through(stop) -> list[torch.Tensor]:
        results = []
        for arguments, query, output in rounds:
            q = stop(multiply(x, query, None, HALF)).view(1, num_heads, head_dim)
            attended = stop(attend(q, *arguments)).view(1, width)
            results.append(stop(multiply(attended, output, None, HALF)))
        return results

    assert_same_overlapped(pass_through)
