# SPDX-License-Identifier: Apache-2.0
"""The kernels of latent attention and of DeepSeek's experts against their references."""

import math
import os
from dataclasses import replace

import pytest
import torch

from latent_cases import make_latent_inputs
from moe_cases import EXPERT_CASES, ExpertCase, make_expert_ids
from pelton.kernels.fp8.quantize import quantize_fp8_reference
from pelton.kernels.mla.hopper import suits_hopper_latent
from pelton.kernels.mla.op import LATENT_ATTENTION
from pelton.kernels.mla.prefill import (
    LATENT_PREFILL,
    PrefillInputs,
    Spans,
)
from pelton.kernels.mla.reference import latent_attention_reference
from pelton.kernels.mla.write_latent import WRITE_LATENT, write_latent_reference
from pelton.kernels.moe.expert_product.triton import new_rows
from pelton.kernels.moe.fp8_product import (
    FP8_DOWN_PRODUCT,
    FP8_GATE_UP_PRODUCT,
    fp8_expert_product_reference,
    launch_product,
)
from pelton.kernels.moe.fp8_tall import launch_tall_product, suits_tall_product
from pelton.kernels.moe.gate import SWIGLU
from pelton.kernels.moe.grouped_routing import (
    SIGMOID_TOP_K,
    GroupedRouting,
    sigmoid_top_k_reference,
)
from pelton.kernels.moe.sort_by_expert import choose_tile_rows, sort_by_expert_reference
from pelton.kernels.triton_runtime import runs_hopper
from tolerance import FLOAT32_ABS, FLOAT32_REL, FP8_SUM, assert_matches

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

# The interpreter computes products of bfloat16 tiles wrongly; float16 stands for it there.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
E4M3 = torch.float8_e4m3fn

# `make_latent_inputs` says of what.
LATENT_CASES = [
    (((1, 1),), 1, 4, 32, 16, 16),
    (((1, 15), (1, 16), (1, 17)), 3, 4, 24, 8, 16),
    (((1, 97), (1, 0), (1, 3)), 3, 16, 32, 16, 16),
    (((1, 70),) * 9, 9, 3, 64, 16, 4),
    (((1, 1), (9, 9)), 0, 2, 32, 16, 16),
    (((17, 33), (1, 40), (5, 5)), 0, 5, 32, 16, 16),
    (((1, 71), (1, 16), (23, 23), (4, 88)), 2, 4, 32, 16, 32),
    (((3, 50), (3, 20), (3, 3)), 0, 8, 32, 16, 16),
]
LARGE_LATENT_CASES = [
    (((1, 4099),), 1, 128, 512, 64, 64),
    (tuple((1, 1 + 37 * row) for row in range(48)), 48, 128, 512, 64, 16),
    (((1, 300), (1, 17), (515, 515), (129, 2053)), 2, 128, 512, 64, 16),
    (tuple((4, 500 + row) for row in range(16)), 0, 128, 512, 64, 16),
    # Ends of tiles, of blocks and of splits; tiles of several tokens, and a last one half empty.
    (((1, 64), (1, 1), (1, 0), (1, 65), (1, 128), (1, 127)), 6, 128, 512, 64, 32),
    (tuple((1, 60 + row) for row in range(70)), 70, 128, 512, 64, 16),
    (((4, 70), (4, 4), (3, 200), (1, 1)), 0, 64, 512, 64, 64),
    # Two tokens of a tile of which one sees nothing in the last split.
    (((5, 70), (2, 128), (2, 300), (2, 65)), 0, 96, 512, 64, 128),
]


def check_latent_attention(case, name, dtype, device, generator) -> None:
    inputs = make_latent_inputs(case, device, dtype, generator)

    actual = LATENT_ATTENTION.named(name)(*inputs)

    wide = [x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in inputs]  # fmt: skip
    assert_matches(actual, latent_attention_reference(*wide), dtype)


@DTYPES
@pytest.mark.parametrize("name", ["triton", "invariant"])
@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_latent_attention(case, name, dtype, device, generator, interpretable) -> None:
    check_latent_attention(case, name, dtype, device, generator)


@DTYPES
@pytest.mark.parametrize("name", ["triton", "invariant"])
@pytest.mark.parametrize("case", LARGE_LATENT_CASES, ids=lambda case: f"R{len(case[0])}")
def test_large_latent_attention(case, name, dtype, device, generator) -> None:
    check_latent_attention(case, name, dtype, device, generator)
    inputs = make_latent_inputs(case, device, dtype, generator)
    assert suits_hopper_latent(*inputs[:3]) == (runs_hopper(device) and dtype is HALF)


def test_nan_in_a_seen_latent_reaches_the_output(device, generator, interpretable) -> None:
    case = (((1, 70), (1, 70), (9, 30)), 2, 4, 32, 16, 16)
    inputs = make_latent_inputs(case, device, torch.float32, generator)
    inputs[2][inputs[3].block_tables[0, 2].item(), 5] = float("nan")

    actual = LATENT_ATTENTION.named("triton")(*inputs)

    assert actual[0].isnan().all()
    assert actual[1:].isfinite().all()


@pytest.mark.parametrize("name", ["triton", "invariant"])
def test_nan_in_a_latent_of_many_heads_reaches_its_rows_only(name, device, generator) -> None:
    rows = (*((1, 300),) * 2, (3, 140))
    inputs = make_latent_inputs((rows, 2, 128, 512, 64, 16), device, torch.bfloat16, generator)
    assert suits_hopper_latent(*inputs[:3]) == runs_hopper(device)
    inputs[2][inputs[3].block_tables[0, 18].item(), 5, 400] = float("nan")

    actual = LATENT_ATTENTION.named(name)(*inputs)

    assert actual[0].isnan().all()
    assert actual[1:].isfinite().all()


# (spans of (queries, keys), heads, (nope, rope, value), causal)
PREFILL_CASES = [
    (((1, 1),), 2, (16, 16, 16), True),
    (((2, 2), (33, 33), (32, 32)), 2, (24, 8, 20), True),
    (((31, 64), (70, 97), (1, 40)), 1, (16, 8, 16), True),
    (((5, 3), (40, 2)), 1, (16, 8, 16), True),
    (((1, 1), (64, 33), (2, 129)), 2, (32, 16, 16), False),
    (((35, 0), (3, 64)), 1, (16, 8, 16), False),
    ((), 2, (16, 8, 16), True),
]
LARGE_PREFILL_CASES = [
    (tuple((n, n) for n in (1, 2, 127, 128, 129, 1000)), 16, (128, 64, 128), True),
    (((128, 2053), (64, 64), (300, 5)), 128, (128, 64, 128), True),
    (((1, 1), (2, 63), (127, 64), (128, 65), (129, 1000), (1000, 129)), 16, (128, 64, 128), False),
    (((2048, 8192),), 16, (128, 64, 128), False),
]


def make_prefill_inputs(case, device, dtype, generator):
    """Queries, keys and values in shuffled spans, with gaps of NaN between those of two spans."""
    lengths, num_heads, (nope, rope, value), is_causal = case
    source = generator.device

    def place(runs, *shape):
        rows = torch.full((sum(runs) + 3 * len(runs) + 3, *shape), float("nan"), device=source)
        starts, start = [], 3
        for run in runs:
            rows[start : start + run] = torch.randn(run, *shape, generator=generator, device=source)
            starts.append(start)
            start += run + 3
        return rows.to(device, dtype), starts

    queries, first_queries = place([n for n, _ in lengths], num_heads, nope + rope)
    made, first_keys = place([n for _, n in lengths], num_heads, nope + value)
    entries, _ = place([n for _, n in lengths], 8 + rope)
    host = tuple(
        (first_query, num_queries, first_key, num_keys)
        for first_query, first_key, (num_queries, num_keys) in zip(
            first_queries, first_keys, lengths, strict=True
        )
    )
    on_device = torch.tensor(host, dtype=torch.int32).view(-1, 4).to(device)
    inputs = PrefillInputs(
        queries[:, :, :nope], queries[:, :, nope:], made[:, :, :nope], entries[:, 8:],
        made[:, :, nope:], Spans(host, on_device), (nope + rope) ** -0.5, is_causal,
    )  # fmt: skip
    is_query = torch.zeros(queries.shape[0], dtype=torch.bool)
    for first_query, num_queries, _, _ in host:
        is_query[first_query : first_query + num_queries] = True
    return inputs, is_query.to(device)


def run_prefill(function, inputs, dtype, before=None):
    q_nope, values = inputs.q_nope, inputs.values
    if before is None:
        out = q_nope.new_full((*q_nope.shape[:2], values.shape[2]), float("nan"), dtype=dtype)
        lse = q_nope.new_full(q_nope.shape[:2], float("nan"), dtype=torch.float32)
    else:
        out, lse = before[0].to(dtype, copy=True), before[1].clone()
    function(inputs, out, lse, before is not None)
    return out, lse


def widen(inputs: PrefillInputs) -> PrefillInputs:
    names = ("q_nope", "q_rope", "keys", "rope_keys", "values")
    return replace(inputs, **{name: getattr(inputs, name).float() for name in names})


def check_lse(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=FLOAT32_REL, atol=10 * FLOAT32_ABS)


def check_latent_prefill(case, dtype, device, generator) -> None:
    """Alone, and continuing from what half of the queries have seen before."""
    inputs, is_query = make_prefill_inputs(case, device, dtype, generator)
    shape = inputs.q_nope.shape[:2]
    source = generator.device
    mean = torch.randn(*shape, inputs.values.shape[2], generator=generator, device=source).to(
        device
    )
    seen = torch.randn(shape, generator=generator, device=source).to(device)
    seen[::2] = float("-inf")
    mean[::2] = 0.0
    for before in (None, (mean, seen)):
        out, lse = run_prefill(LATENT_PREFILL.named("triton"), inputs, dtype, before)
        # The reference, a few queries at a time.
        wide = run_prefill(LATENT_PREFILL.named("cpu"), widen(inputs), torch.float32, before)
        assert_matches(out[is_query], wide[0][is_query], dtype)
        check_lse(lse[is_query], wide[1][is_query])
        untouched = ~is_query
        assert before is not None or out[untouched].isnan().all()
        assert before is None or torch.equal(lse[untouched], seen[untouched])


@DTYPES
@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_latent_prefill(case, dtype, device, generator, interpretable) -> None:
    check_latent_prefill(case, dtype, device, generator)


@DTYPES
@pytest.mark.parametrize("case", LARGE_PREFILL_CASES, ids=lambda case: f"R{len(case[0])}-{case[3]}")
def test_large_latent_prefill(case, dtype, device, device_generator) -> None:
    check_latent_prefill(case, dtype, device, device_generator)


def test_a_prefix_in_parts_is_the_prefix(device, generator, interpretable) -> None:
    """45 keys in one call, and causal ones last in three calls in another order."""
    case = (((5, 45),), 2, (16, 8, 16), True)
    inputs, is_query = make_prefill_inputs(case, device, torch.float32, generator)
    run = LATENT_PREFILL.named("triton")
    whole = run_prefill(run, inputs, torch.float32)
    [(first_query, _, first_key, _)] = inputs.spans.host

    state = None
    for first, count, is_causal in ((40, 5, True), (33, 7, False), (0, 33, False)):
        span = (first_query, 5, first_key + first, count)
        spans = Spans((span,), torch.tensor([span], dtype=torch.int32, device=device))
        part = replace(inputs, spans=spans, is_causal=is_causal)
        state = run_prefill(run, part, torch.float32, state)

    assert_matches(state[0][is_query], whole[0][is_query], torch.float32)
    check_lse(state[1][is_query], whole[1][is_query])


def test_nan_in_a_seen_key_reaches_its_queries(device, generator, interpretable) -> None:
    case = (((40, 40), (3, 3)), 1, (16, 8, 16), True)
    inputs, _ = make_prefill_inputs(case, device, torch.float32, generator)
    (first_query, _, first_key, _), (other_query, _, _, _) = inputs.spans.host
    inputs.keys[first_key + 35] = float("nan")

    out, _ = run_prefill(LATENT_PREFILL.named("triton"), inputs, torch.float32)

    assert out[first_query + 35 : first_query + 40].isnan().all()
    assert out[first_query : first_query + 35].isfinite().all()
    assert out[other_query : other_query + 3].isfinite().all()


@DTYPES
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "latent", "rope"),
    [(0, 4, 32, 16), (1, 17, 24, 8), (65, 3, 64, 2), (5, 2, 24, 12)],
)
def test_write_latent(
    num_tokens, num_heads, latent, rope, dtype, device, generator, interpretable
) -> None:
    q = torch.randn(num_tokens, num_heads, 8 + rope, generator=generator).to(device, dtype)
    kv = torch.randn(num_tokens, latent + rope, generator=generator).to(device, dtype)
    positions = torch.randint(0, 100, (num_tokens,), generator=generator).to(device)
    angles = torch.rand(100, rope // 2, generator=generator) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    pool = torch.full((8, 3, 16, latent + rope), float("nan"), dtype=dtype)
    slots = torch.randperm(7 * 16, generator=generator)[:num_tokens].to(device) + 16
    expected_pool = pool.float().to(device)
    pool = pool.to(device)

    actual = WRITE_LATENT.named("triton")(
        q[:, :, 8:], kv[:, :latent], kv[:, latent:], positions, cos_sin, pool[:, 1], slots
    )

    expected = write_latent_reference(
        q[:, :, 8:].float(), kv[:, :latent].float(), kv[:, latent:].float(), positions, cos_sin,
        expected_pool[:, 1], slots,
    )  # fmt: skip
    assert_matches(actual, expected, dtype)
    is_written = ~expected_pool.isnan()
    assert torch.equal(~pool.isnan(), is_written)
    assert_matches(pool[is_written], expected_pool[is_written], dtype)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "rule"),
    [
        (0, 8, GroupedRouting(top_k=2)),
        (5, 6, GroupedRouting(top_k=6, is_normalized=False)),
        (7, 24, GroupedRouting(top_k=4, num_groups=4, top_groups=2, scale=2.5)),
        (3, 256, GroupedRouting(top_k=8, num_groups=8, top_groups=4, scale=2.5)),
        (2, 384, GroupedRouting(top_k=8)),
    ],
    ids=str,
)
def test_sigmoid_top_k(num_tokens, num_experts, rule, device, generator, interpretable) -> None:
    # A few values and no bias for half of the experts: ties among experts and groups.
    logits = torch.randint(-4, 5, (num_tokens, num_experts + 3), generator=generator) / 2
    logits = logits.to(device)[:, :num_experts]
    bias = torch.randint(-1, 2, (num_experts,), generator=generator).float().to(device)

    ids, weights = SIGMOID_TOP_K.named("triton")(logits, bias, rule)

    expected_ids, expected_weights = sigmoid_top_k_reference(logits, bias, rule)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=FLOAT32_REL, atol=FLOAT32_ABS)


def check_fp8_experts(case: ExpertCase, dtype, device, generator) -> None:
    ids = make_expert_ids(case, generator).to(device)
    tile_rows = choose_tile_rows(ids.numel(), case.num_experts, device)
    routed = sort_by_expert_reference(ids, case.num_experts, tile_rows)

    limit = FP8_SUM if dtype is torch.float32 and device.type == "cuda" else None

    def make(*shape):
        return torch.randn(*shape, generator=generator, device=generator.device).to(device)

    x = quantize_fp8_reference(make(case.num_tokens, case.hidden_size), 128, math.inf)
    hidden = quantize_fp8_reference(make(routed.num_rows, case.ffn_size), 128, math.inf)
    gate_up = make(case.num_experts, 2 * case.ffn_size, case.hidden_size).to(E4M3)
    down = make(case.num_experts, case.hidden_size, case.ffn_size).to(E4M3)
    hidden_blocks, ffn_blocks = -(-case.hidden_size // 128), -(-case.ffn_size // 128)
    scales = make(case.num_experts, 2 * ffn_blocks, hidden_blocks).abs() / 10
    down_scales = make(case.num_experts, hidden_blocks, ffn_blocks).abs() / 10

    actual = FP8_GATE_UP_PRODUCT.named("triton")(*x, routed, gate_up, scales, dtype, SWIGLU)
    expected = fp8_expert_product_reference(*x, routed, gate_up, scales, torch.float32, SWIGLU)
    assert_matches(actual, expected, dtype, limit)

    actual = FP8_DOWN_PRODUCT.named("triton")(*hidden, routed, down, down_scales, dtype)
    expected = fp8_expert_product_reference(*hidden, routed, down, down_scales, torch.float32)
    assert_matches(actual, expected, dtype, limit)


@pytest.mark.parametrize(
    "case",
    [*EXPERT_CASES[:6], ExpertCase(9, 3, 2, 200, 136), ExpertCase(3, 5, 1, 128, 256, "one")],
    ids=str,
)
def test_fp8_experts(case, device, generator, interpretable) -> None:
    check_fp8_experts(case, torch.float32, device, generator)


@pytest.mark.parametrize("num_tokens", [1, 64, 1024])
def test_large_fp8_experts(num_tokens, device, device_generator) -> None:
    case = ExpertCase(num_tokens, 32, 8, 7168, 2048, has_bias=False)

    check_fp8_experts(case, torch.bfloat16, device, device_generator)


@pytest.mark.parametrize(
    "case",
    [
        ExpertCase(1, 4, 2, 128, 128),
        ExpertCase(300, 4, 2, 256, 128),
        ExpertCase(1001, 8, 3, 384, 256),
        ExpertCase(777, 5, 1, 1024, 384, "one"),
        ExpertCase(2000, 16, 3, 640, 896, "last"),
    ],
    ids=str,
)
def test_tall_fp8_product_gives_the_same_bits(case, device, generator) -> None:
    """As the kernel for any tile, beside idle experts' weights and a token of NaN."""
    if not runs_hopper(device):
        pytest.skip("a Hopper kernel")
    ids = make_expert_ids(case, generator)
    idle = sorted(set(range(case.num_experts)) - set(ids.flatten().tolist()))
    routed = sort_by_expert_reference(ids.to(device), case.num_experts, 128)

    def check(num_rows, in_features, out_features, num_scale_rows, gate) -> None:
        values = torch.randn(num_rows, in_features, generator=generator)
        values[num_rows // 2] = math.nan
        x, x_scales = quantize_fp8_reference(values.to(device), 128, math.inf)
        shape = case.num_experts, out_features, in_features
        weight = torch.randn(shape, generator=generator).to(device, E4M3)
        for expert in idle:
            weight[expert] = math.nan
        shape = case.num_experts, num_scale_rows, in_features // 128
        scales = torch.rand(shape, generator=generator).to(device)
        assert suits_tall_product(x, routed, weight, torch.bfloat16)
        expected = new_rows(x, routed, out_features, gate, torch.bfloat16)
        launch_product(x, x_scales, routed, weight, scales, gate, expected)
        actual = torch.empty_like(expected)
        launch_tall_product(x, x_scales, routed, weight, scales, gate, actual)
        assert expected.isnan().any(dim=1).sum() == (case.top_k if gate else 1)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)

    ffn_blocks = case.ffn_size // 128
    check(case.num_tokens, case.hidden_size, 2 * case.ffn_size, 2 * ffn_blocks, SWIGLU)
    check(routed.num_rows, case.ffn_size, case.hidden_size, case.hidden_size // 128, None)
