# SPDX-License-Identifier: Apache-2.0
"""Costs on plain integers, and ops on `meta` tensors logging them."""

import math

import pytest
import torch

from pelton.core.batch import AttentionRows
from pelton.kernels.apply_token_mask import apply_token_mask, apply_token_mask_cost
from pelton.kernels.draw_tokens.cost import draw_tokens_cost
from pelton.kernels.draw_tokens.op import draw_tokens
from pelton.kernels.draw_tokens.reference import RandomRows
from pelton.kernels.fp8.norm import NormQuantization, add_rms_norm_fp8, rms_norm_fp8
from pelton.kernels.fp8.silu_mul import silu_mul_fp8
from pelton.kernels.highest_logit import highest_logit
from pelton.kernels.linear import linear
from pelton.kernels.moe.weighted_sum import WeightedRows
from pelton.kernels.paged_attention.cost import paged_attention_cost
from pelton.kernels.paged_attention.op import paged_attention
from pelton.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_cost
from pelton.kernels.rope_write_kv import rope_write_kv, rope_write_kv_cost
from pelton.kernels.silu_mul import silu_mul
from pelton.perf.cost import OpCost, record_costs


@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize(("new", "context"), [(1, 1), (1, 40), (7, 7), (12, 40)])
def test_attention_counts_the_pairs_that_are_seen(new, context, window) -> None:
    pairs = sum(
        1
        for position in range(context - new, context)
        for seen in range(position + 1)
        if not window or position - seen < window
    )

    cost = paged_attention_cost([(new, context)], 4, 2, 8, 2, 2, window)

    assert cost.flops == 4 * pairs * 4 * 8


def test_attention_reads_the_context_once_a_kv_head() -> None:
    cost = paged_attention_cost([(1, 1000)], num_heads=32, num_kv_heads=8, head_dim=128,
                                element_bytes=2, kv_element_bytes=2)  # fmt: skip

    assert cost.bytes == 2 * (2 * 1000 * 8 * 128 + 2 * 32 * 128)


def test_a_cache_in_fp8_is_read_and_written_by_the_byte() -> None:
    cost = paged_attention_cost([(1, 1000)], 32, 8, 128, 2, 1)
    assert cost.bytes == 2 * 1000 * 8 * 128 + 2 * 2 * 32 * 128

    write = rope_write_kv_cost(3, 32, 8, 128, 2, 2, 1)
    assert write.bytes == 3 * 128 * (2 * (32 + 8 + 8) + 2 * 32 + 8 + 8)

    q, kv = (torch.empty(3, n, 16, device="meta", dtype=torch.bfloat16) for n in (4, 2))
    cache = torch.empty(5, 2, 16, 2, 16, device="meta", dtype=torch.float8_e4m3fn)
    ints = torch.empty(3, device="meta", dtype=torch.int32)
    tables = torch.empty(3, 4, device="meta", dtype=torch.int32)
    with record_costs() as log:
        rope_write_kv(q, kv, kv, ints, torch.empty(9, 16, device="meta"), cache, ints, 0.5, 0.5)
        rows = AttentionRows(
            block_tables=tables, query_starts=ints, context_lens=ints, num_decodes=3,
            max_query_len=1, max_context_len=9,
        )  # fmt: skip
        paged_attention(q, cache, rows, 0.25, 0, None, 0.5, 0.5)
    assert [cost for _, cost in log.entries] == [
        rope_write_kv_cost(3, 4, 2, 16, 2, 2, 1),
        paged_attention_cost([(1, 9)] * 3, 4, 2, 16, 2, 1),
    ]


def test_ops_on_meta_log_costs_and_return_shapes() -> None:
    x = torch.empty(3, 64, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(64, device="meta", dtype=torch.bfloat16)
    q = torch.empty(3, 4, 16, device="meta", dtype=torch.bfloat16)
    kv = torch.empty(3, 2, 16, device="meta", dtype=torch.bfloat16)
    cache = torch.empty(5, 2, 16, 2, 16, device="meta", dtype=torch.bfloat16)
    ints = torch.empty(3, device="meta", dtype=torch.int32)
    tables = torch.empty(1, 4, device="meta", dtype=torch.int32)
    starts = torch.empty(2, device="meta", dtype=torch.int32)

    with record_costs() as log:
        assert rms_norm(x, weight, 1e-5).shape == (3, 64)
        assert add_rms_norm(x, x.float(), weight, 1e-5)[1].shape == (3, 64)
        assert silu_mul(x).shape == (3, 32)
        angles = torch.empty(9, 16, device="meta")
        assert rope_write_kv(q, kv, kv, ints, angles, cache, ints).shape == (3, 4, 16)
        assert linear(x, torch.empty(7, 64, device="meta", dtype=x.dtype)).shape == (3, 7)
        assert highest_logit(x)[0].shape == (3,)
        rows = AttentionRows(
            block_tables=tables, query_starts=starts, context_lens=ints[:1], num_decodes=0,
            max_query_len=3, max_context_len=3,
        )  # fmt: skip
        out = paged_attention(q, cache, rows, 0.25, 0)
    assert out.shape == (3, 4, 16)
    assert [name for name, _ in log.entries] == [
        "rms_norm", "add_rms_norm", "silu_mul", "rope_write_kv", "linear",
        "highest_logit", "paged_attention",
    ]  # fmt: skip
    assert log.entries[0][1] == rms_norm_cost(3, 64, 2, 2) == OpCost(4 * 192, (2 * 192 + 64) * 2)
    assert log.entries[6][1] == paged_attention_cost([(3, 3)], 4, 2, 16, 2, 2)
    assert log.total == sum((cost for _, cost in log.entries), start=OpCost(0, 0))


def test_a_norm_that_adds_up_experts_rows_costs_what_it_moves() -> None:
    rows = torch.empty(12, 64, device="meta", dtype=torch.bfloat16)
    shares = torch.empty(3, 4, device="meta")
    weight = torch.empty(64, device="meta", dtype=torch.bfloat16)

    with record_costs() as log:
        parts = WeightedRows(rows, shares)
        normed, total = add_rms_norm(parts, torch.empty(3, 64, device="meta"), weight, 1e-5)

    assert (normed.shape, normed.dtype) == ((3, 64), torch.bfloat16)
    assert (total.shape, total.dtype) == ((3, 64), torch.float32)
    read = 12 * 64 * 2 + 12 * 4 + 3 * 64 * 4 + 64 * 2
    written = 3 * 64 * (2 + 4)
    expected = OpCost(5 * 3 * 64 + 2 * 12 * 64, read + written)
    assert log.entries == [("sum_add_rms_norm", expected)]


@pytest.mark.parametrize("keeps_normed", [False, True])
def test_a_norm_that_quantises_costs_what_it_moves(keeps_normed) -> None:
    x = torch.empty(3, 256, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(256, device="meta", dtype=torch.bfloat16)
    then = NormQuantization(128, math.inf, keeps_normed)

    with record_costs() as log:
        values, scales, normed = rms_norm_fp8(x, weight, 1e-5, then)
        quantized, total = add_rms_norm_fp8(x, x.float(), weight, 1e-5, then)

    assert (values.shape, scales.shape, total.shape) == ((3, 256), (3, 2), (3, 256))
    assert (normed is not None) == (quantized[2] is not None) == keeps_normed
    assert [name for name, _ in log.entries] == ["rms_norm_fp8", "add_rms_norm_fp8"]
    written = 3 * 256 * (1 + 2 * keeps_normed) + 3 * 2 * 4
    assert log.entries[0][1].bytes == 2 * (3 * 256 + 256) + written
    residuals = 2 * 3 * 256 * 4
    assert log.entries[1][1].bytes == 2 * (3 * 256 + 256) + residuals + written


def test_a_gate_that_quantises_costs_what_it_moves() -> None:
    with record_costs() as log:
        gate_up = torch.empty(3, 600, device="meta", dtype=torch.bfloat16)
        values, scales = silu_mul_fp8(gate_up, 128, math.inf)

    assert (values.shape, scales.shape) == ((3, 300), (3, 3))
    assert [name for name, _ in log.entries] == ["silu_mul_fp8"]
    assert log.total.bytes == 3 * 600 * 2 + 3 * 300 + 3 * 3 * 4


def test_drawing_tokens_costs_one_reading_of_their_rows() -> None:
    logits = torch.empty(9, 64, device="meta", dtype=torch.bfloat16)
    column = torch.empty(3, device="meta")
    rows = RandomRows(column.long(), column, column, column.int(), column, column, True, True)

    with record_costs() as log:
        drawn = draw_tokens(logits, torch.empty(9, device="meta", dtype=torch.int32), rows)

    assert (drawn.shape, drawn.dtype) == ((3,), torch.int32)
    assert log.entries == [("draw_tokens", draw_tokens_cost(3, 64, 2))]
    assert log.total.bytes == 3 * (64 * 2 + 32)


def test_a_token_mask_costs_a_bit_more_than_reading_and_writing_its_rows() -> None:
    logits = torch.empty(9, 64, device="meta", dtype=torch.float32)
    rows = torch.empty(3, device="meta", dtype=torch.int64)

    with record_costs() as log:
        apply_token_mask(logits, rows, torch.empty(3, 2, device="meta", dtype=torch.int32))

    assert log.entries == [("apply_token_mask", apply_token_mask_cost(3, 64, 4))]
    assert log.total.bytes == 3 * (2 * 64 * 4 + 2 * 4 + 8)
