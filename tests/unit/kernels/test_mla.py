# SPDX-License-Identifier: Apache-2.0
"""Latent attention on a CPU: beside plain attention, its own reference, and its cost."""

import pytest
import torch

from pelton.core.batch import AttentionRows
from pelton.kernels.head_product import HEAD_PRODUCT, head_product, head_product_reference
from pelton.kernels.mla.cost import latent_attention_cost, latent_prefill_cost
from pelton.kernels.mla.cpu import latent_attention_cpu
from pelton.kernels.mla.op import latent_attention
from pelton.kernels.mla.prefill import LATENT_PREFILL, PrefillInputs, Spans, latent_prefill
from pelton.kernels.mla.reference import latent_attention_reference
from pelton.kernels.mla.write_latent import write_latent
from pelton.kernels.moe.fp8_product import dequantize_experts
from pelton.kernels.moe.grouped_routing import GroupedRouting, sigmoid_top_k
from pelton.perf.cost import record_costs
from tolerance import assert_matches

HEADS, LATENT, ROPE, NOPE, VALUE = 4, 32, 8, 12, 10


def make_inputs(rows: list[tuple[int, int]], num_decodes: int = 0, dtype=torch.float32):
    tables = torch.arange(len(rows) * 12, dtype=torch.int32).view(len(rows), 12) + 1
    cache = torch.full((len(rows) * 12 + 1, 2, 8, LATENT + ROPE), float("nan"), dtype=dtype)
    for row, (_, context) in enumerate(rows):
        for position in range(context):
            entry = torch.randn(LATENT + ROPE)
            cache[tables[row, position // 8], 1, position % 8] = entry.to(dtype)
    num_tokens = sum(new for new, _ in rows)
    starts = torch.tensor([0] + [new for new, _ in rows]).cumsum(0).to(torch.int32)
    return (
        torch.randn(num_tokens, HEADS, LATENT).to(dtype),
        torch.randn(num_tokens, HEADS, ROPE).to(dtype),
        cache[:, 1],
        AttentionRows(
            block_tables=tables,
            query_starts=starts,
            context_lens=torch.tensor([context for _, context in rows], dtype=torch.int32),
            num_decodes=num_decodes,
            max_query_len=max(new for new, _ in rows),
            max_context_len=max(context for _, context in rows),
        ),
        0.2,
    )


def test_absorbed_attention_is_plain_attention_over_keys_and_values() -> None:
    inputs = make_inputs([(5, 20)])
    w_keys, w_values = torch.randn(HEADS, NOPE, LATENT), torch.randn(HEADS, LATENT, VALUE)
    q_nope = torch.randn(5, HEADS, NOPE)
    entries = inputs[2][inputs[3].block_tables[0, :3].long()].reshape(-1, LATENT + ROPE)[:20]
    keys = torch.einsum("cl,hkl->hck", entries[:, :LATENT], w_keys)
    keys = torch.cat((keys, entries[None, :, LATENT:].expand(HEADS, -1, -1)), dim=2)
    values = torch.einsum("cl,hlv->hcv", entries[:, :LATENT], w_values)
    q = torch.cat((q_nope, inputs[1]), dim=2)
    scores = torch.einsum("thk,hck->htc", q, keys) * 0.2
    scores = scores.masked_fill(torch.arange(20) > torch.arange(15, 20)[:, None], float("-inf"))
    expected = torch.einsum("htc,hcv->thv", scores.softmax(2), values)

    attended = latent_attention(head_product(q_nope, w_keys), *inputs[1:])

    assert_matches(head_product(attended, w_values), expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "num_decodes"),
    [
        ([(1, 1)], 1),
        ([(1, 17), (1, 0), (1, 96)], 3),
        ([(1, 9), (7, 7), (3, 40), (1, 8)], 1),
    ],
    ids=str,
)
def test_cpu_is_the_reference(rows, num_decodes, dtype) -> None:
    inputs = make_inputs(rows, num_decodes, dtype)
    wide = [x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in inputs]  # fmt: skip

    assert_matches(latent_attention_cpu(*inputs), latent_attention_reference(*wide), dtype)


def make_spans(*spans: tuple[int, int, int, int]) -> Spans:
    return Spans(spans, torch.tensor(spans, dtype=torch.int32))


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_parts_of_a_context_merge_to_attention_over_all_of_it(name: str) -> None:
    """300 queries of one row behind a prefix of 200 in two parts, and 2 of one without."""
    q = torch.randn(302, HEADS, NOPE + ROPE)
    keys, values = torch.randn(502, HEADS, NOPE), torch.randn(502, HEADS, VALUE)
    rope_keys = torch.randn(502, ROPE)
    out = torch.full((302, HEADS, VALUE), float("nan"))
    lse = torch.full((302, HEADS), float("nan"))
    own = make_spans((0, 300, 200, 300), (300, 2, 500, 2))
    parts = (own, make_spans((0, 300, 0, 150)), make_spans((0, 300, 150, 50)))

    for index, spans in enumerate(parts):
        inputs = PrefillInputs(
            q[:, :, :NOPE], q[:, :, NOPE:], keys, rope_keys, values, spans, 0.2, index == 0
        )
        LATENT_PREFILL.named(name)(inputs, out, lse, index > 0)

    whole = torch.cat((keys, rope_keys[:, None].expand(-1, HEADS, -1)), dim=2)
    scores = torch.einsum("thk,nhk->htn", q, whole) * 0.2
    query, key = torch.arange(302)[:, None], torch.arange(502)
    is_seen = (query < 300) & (key <= query + 200)
    is_seen |= (query >= 300) & (key >= 500) & (key <= query + 200)
    scores = scores.masked_fill(~is_seen, float("-inf"))
    assert_matches(out, torch.einsum("htn,nhv->thv", scores.softmax(2), values), torch.float32)
    assert_matches(lse, scores.logsumexp(2).T, torch.float32)


def test_queries_without_keys_are_zeros_and_merge_to_what_comes() -> None:
    q, keys, values = torch.randn(2, 1, 6), torch.randn(1, 1, 4), torch.randn(1, 1, 5)
    out, lse = torch.full((2, 1, 5), float("nan")), torch.full((2, 1), float("nan"))

    def run(spans: Spans, *, is_causal: bool, continues: bool) -> None:
        q_nope, q_rope, rope_keys = q[:, :, :4], q[:, :, 4:], torch.ones(1, 2)
        inputs = PrefillInputs(q_nope, q_rope, keys, rope_keys, values, spans, 1.0, is_causal)
        latent_prefill(inputs, out, lse, continues)

    run(make_spans((0, 2, 0, 0)), is_causal=False, continues=False)
    assert out.eq(0).all()
    assert lse.eq(float("-inf")).all()

    run(make_spans((0, 2, 0, 1)), is_causal=True, continues=True)
    assert out[0].eq(0).all()
    assert lse[0] == float("-inf")
    assert torch.equal(out[1], values[0])

    run(make_spans((0, 2, 0, 0)), is_causal=False, continues=True)
    assert torch.equal(out[1], values[0])


def test_head_product_is_its_reference() -> None:
    x, weight = torch.randn(3, 5, 7 + 2)[:, :, :7], torch.randn(5, 7, 4)

    out = HEAD_PRODUCT.named("torch")(x, weight)

    assert_matches(out, head_product_reference(x, weight), torch.float32)


def test_router_limits_a_token_to_the_best_groups() -> None:
    """Group 1 has the best pair, group 2 the best expert; the bias counts in the choice alone."""
    scores = torch.tensor([[0.5, 0.1, 0.6, 0.6, 0.9, 0.1]])
    bias = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.0])
    rule = GroupedRouting(top_k=2, num_groups=3, top_groups=1, scale=2.0)

    ids, weights = sigmoid_top_k(scores.logit(), bias, rule)

    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.0]]))


def test_experts_are_dequantised_bit_for_bit() -> None:
    gate, up = (torch.randn(2, 130, 129).to(torch.float8_e4m3fn) for _ in range(2))
    scales = [torch.rand(2, 2, 2) for _ in range(2)]
    weight = torch.stack((gate.view(torch.uint8), up.view(torch.uint8)), dim=2).flatten(1, 2)
    interleaved = torch.stack(scales, dim=2).flatten(1, 2)

    values = dequantize_experts(weight.view(torch.float8_e4m3fn), interleaved, True)

    for index, (part, scale) in enumerate(zip((gate, up), scales, strict=True)):
        spread = scale.repeat_interleave(128, 1)[:, :130].repeat_interleave(128, 2)[:, :, :129]
        assert torch.equal(values[:, index::2], part.float() * spread)


def test_cost_counts_the_pairs_that_are_seen() -> None:
    cost = latent_attention_cost([(3, 10), (1, 7)], 4, 32, 8, 2)

    assert cost.flops == 2 * (8 + 9 + 10 + 7) * 4 * (2 * 32 + 8)
    assert cost.bytes == 2 * (4 * 4 * (2 * 32 + 8) + 17 * 40)


def test_prefill_cost_counts_pairs_and_the_state_it_goes_on_from() -> None:
    cost = latent_prefill_cost(
        [(3, 10), (1, 7)], 4, 12, 8, 10, 2, 4, is_causal=False, continues=True
    )
    causal = latent_prefill_cost([(3, 10)], 4, 12, 8, 10, 2, 2, is_causal=True, continues=False)

    assert cost.flops == 2 * (30 + 7) * 4 * 30
    keys = 17 * (4 * (12 + 10) + 8)
    assert cost.bytes == 2 * (4 * 4 * 20 + keys) + 2 * 4 * 4 * (4 * 10 + 4)
    assert causal.flops == 2 * (8 + 9 + 10) * 4 * 30


def test_ops_on_meta_log_costs() -> None:
    def meta(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=dtype)

    ints = meta(3, dtype=torch.int32)
    with record_costs() as log:
        q = head_product(meta(3, HEADS, NOPE), meta(HEADS, NOPE, LATENT))
        q_rope = write_latent(meta(3, HEADS, ROPE), meta(3, LATENT), meta(3, ROPE), ints,
                              meta(9, ROPE), meta(5, 16, LATENT + ROPE), ints)  # fmt: skip
        rows = AttentionRows(
            block_tables=meta(3, 4), query_starts=ints, context_lens=ints, num_decodes=3,
            max_query_len=1, max_context_len=20,
        )  # fmt: skip
        out = latent_attention(q, q_rope, meta(5, 16, LATENT + ROPE), rows, 0.1)
        routing = sigmoid_top_k(meta(3, 8), meta(8), GroupedRouting(top_k=2))
    assert (out.shape, routing[0].shape) == ((3, HEADS, LATENT), (3, 2))
    names = [name for name, _ in log.entries]
    assert names == ["head_product", "write_latent", "latent_attention", "sigmoid_top_k"]
    assert log.entries[2][1] == latent_attention_cost([(1, 20)] * 3, HEADS, LATENT, ROPE, 2)
