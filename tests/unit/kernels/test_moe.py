# SPDX-License-Identifier: Apache-2.0
"""The references of a mixture of experts against loops, and what the CPU runs against them."""

import math
from dataclasses import dataclass

import pytest
import torch

from moe_cases import EXPERT_CASES, ExpertCase, make_expert_ids, make_expert_inputs
from pelton.kernels.moe.expert_product.cost import expert_product_cost, num_distinct_experts
from pelton.kernels.moe.expert_product.op import down_product, gate_up_product
from pelton.kernels.moe.expert_product.reference import expert_product_reference
from pelton.kernels.moe.gate import SWIGLU, Gate, apply_gate
from pelton.kernels.moe.routing import softmax_top_k, softmax_top_k_cost
from pelton.kernels.moe.sort_by_expert import (
    RoutedRows,
    max_tiles,
    sort_by_expert,
    sort_by_expert_cost,
    sort_by_expert_reference,
)
from pelton.kernels.moe.weighted_sum import (
    WeightedRows,
    weighted_sum,
    weighted_sum_cost,
    weighted_sum_reference,
)
from pelton.kernels.rms_norm import (
    add_rms_norm,
    rms_norm_reference,
    sum_add_rms_norm_reference,
)
from pelton.layers.moe.experts import Experts
from pelton.perf.cost import record_costs
from tolerance import FLOAT32_ABS, assert_matches

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
GPT_OSS = Gate(alpha=1.702, limit=7.0, offset=1.0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def test_weights_are_a_softmax_over_the_chosen_alone() -> None:
    logits = torch.tensor([[1.0, 3.0, -2.0, 3.0, 0.0]])

    ids, weights = softmax_top_k(logits, 3)

    assert ids.tolist() == [[1, 3, 0]]
    assert ids.dtype is torch.int32
    total = 2 * math.exp(3) + math.exp(1)
    expected = [math.exp(3) / total, math.exp(3) / total, math.exp(1) / total]
    assert weights[0].tolist() == pytest.approx(expected, abs=FLOAT32_ABS)


@pytest.mark.parametrize("tile_rows", [1, 3, 16])
@pytest.mark.parametrize("case", EXPERT_CASES, ids=str)
def test_tiles_cover_every_row_once(case: ExpertCase, tile_rows: int, generator) -> None:
    expert_ids = make_expert_ids(case, generator)

    routed = sort_by_expert_reference(expert_ids, case.num_experts, tile_rows)

    flat, covered = expert_ids.flatten().tolist(), []
    for expert, first, end in routed.tiles.tolist():
        assert 0 <= end - first <= tile_rows
        rows = routed.order[first:end].tolist()
        assert [flat[row] for row in rows] == [expert] * len(rows)
        assert rows == sorted(rows)
        covered += rows
    assert sorted(covered) == list(range(len(flat)))


@pytest.mark.parametrize("counts", [(1, 1, 1), (7, 0, 0), (3, 4, 5), (16, 1, 0), (15, 17, 1)])
def test_no_routing_makes_more_tiles_than_the_grid_has(counts: tuple[int, ...]) -> None:
    tiles = sum(-(-count // 4) for count in counts)

    assert tiles <= max_tiles(sum(counts), len(counts), 4)


def test_gate_is_its_formula() -> None:
    gate_up = torch.tensor([[0.5, -1.0, 9.0, 8.0, -20.0, -8.0]])

    actual = apply_gate(gate_up, GPT_OSS)[0].tolist()

    for value, (g, u) in zip(actual, [(0.5, -1.0), (7.0, 7.0), (-20.0, -7.0)], strict=True):
        expected = g / (1 + math.exp(-1.702 * g)) * (u + 1)
        assert value == pytest.approx(expected, abs=FLOAT32_ABS)
    silu = torch.nn.functional.silu(gate_up[:, 0::2]) * gate_up[:, 1::2]
    torch.testing.assert_close(apply_gate(gate_up, SWIGLU), silu)


@dataclass
class Chosen:
    expert_ids: torch.Tensor
    weights: torch.Tensor

    def choose(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.expert_ids, self.weights


@pytest.mark.parametrize("case", EXPERT_CASES, ids=str)
def test_layer_is_each_token_through_its_own_experts(
    case: ExpertCase, generator, poisoned_memory
) -> None:
    inputs = make_expert_inputs(case, CPU, torch.float32, generator)
    weights = torch.rand(case.num_tokens, case.top_k, generator=generator)
    layer = Experts(
        case.num_experts, case.hidden_size, case.ffn_size, GPT_OSS, has_bias=case.has_bias
    )
    for name, tensor in (
        ("gate_up", inputs.gate_up), ("gate_up_bias", inputs.gate_up_bias),
        ("down", inputs.down), ("down_bias", inputs.down_bias),
    ):  # fmt: skip
        if tensor is not None:
            getattr(layer, name).copy_(tensor)

    actual = layer(inputs.x, Chosen(inputs.expert_ids, weights)).sum()

    expected = torch.zeros(case.num_tokens, case.hidden_size)
    for t, j in ((t, j) for t in range(case.num_tokens) for j in range(case.top_k)):
        expert = int(inputs.expert_ids[t, j])
        gate_up = inputs.gate_up[expert].float() @ inputs.x[t].float()
        if inputs.gate_up_bias is not None:
            gate_up += inputs.gate_up_bias[expert].float()
        out = inputs.down[expert].float() @ apply_gate(gate_up[None], GPT_OSS)[0]
        if inputs.down_bias is not None:
            out += inputs.down_bias[expert].float()
        expected[t] += weights[t, j] * out
    assert_matches(actual, expected, torch.float32)


@DTYPES
@pytest.mark.parametrize("case", EXPERT_CASES, ids=str)
def test_cpu_products_match_their_references(case: ExpertCase, dtype, generator) -> None:
    inputs = make_expert_inputs(case, CPU, dtype, generator)
    routed = sort_by_expert(inputs.expert_ids, case.num_experts)

    hidden = gate_up_product(inputs.x, routed, inputs.gate_up, inputs.gate_up_bias, SWIGLU)
    rows = down_product(hidden, routed, inputs.down, inputs.down_bias)

    expected = expert_product_reference(
        inputs.x.float(), routed, inputs.gate_up, inputs.gate_up_bias, SWIGLU
    )
    assert_matches(hidden, expected, dtype)
    expected = expert_product_reference(hidden.float(), routed, inputs.down, inputs.down_bias)
    assert_matches(rows, expected, dtype)


@DTYPES
def test_weighted_sum_matches_its_reference(dtype, generator) -> None:
    rows = torch.randn(12, 7, generator=generator).to(dtype)
    weights = torch.rand(4, 3, generator=generator)

    actual = weighted_sum(rows, weights)

    by_hand = sum(weights[:, j, None] * rows.view(4, 3, 7)[:, j].float() for j in range(3))
    assert_matches(actual, by_hand, dtype)
    assert_matches(weighted_sum_reference(rows.float(), weights), by_hand, torch.float32)


@DTYPES
def test_a_weighted_sum_goes_into_a_norm(dtype, generator) -> None:
    rows = torch.randn(12, 7, generator=generator).to(dtype)
    weights = torch.rand(4, 3, generator=generator)
    residual, weight = torch.randn(4, 7, generator=generator), torch.ones(7, dtype=dtype)

    normed, total = add_rms_norm(WeightedRows(rows, weights), residual, weight, 1e-5)

    by_hand = sum(weights[:, j, None] * rows.view(4, 3, 7)[:, j].float() for j in range(3))
    assert_matches(total.to(dtype), by_hand + residual, dtype)
    assert_matches(normed, rms_norm_reference(by_hand + residual, weight.float(), 1e-5), dtype)
    reference = sum_add_rms_norm_reference(rows, weights, residual, weight, 1e-5)
    assert_matches(reference[1], by_hand + residual, torch.float32)


def test_distinct_experts_of_uniform_routing() -> None:
    assert num_distinct_experts(1, 4, 128) == pytest.approx(4)
    assert num_distinct_experts(10**4, 4, 128) == pytest.approx(128)


def test_ops_on_meta_log_costs_and_return_shapes() -> None:
    x = torch.empty(3, 8, device="meta", dtype=torch.bfloat16)
    logits = torch.empty(3, 4, device="meta", dtype=torch.bfloat16)
    gate_up = torch.empty(4, 12, 8, device="meta", dtype=torch.bfloat16)
    down = torch.empty(4, 8, 6, device="meta", dtype=torch.bfloat16)

    with record_costs() as log:
        ids, weights = softmax_top_k(logits, 2)
        routed: RoutedRows = sort_by_expert(ids, 4)
        hidden = gate_up_product(x, routed, gate_up, None, SWIGLU)
        rows = down_product(hidden, routed, down, None)
        out = weighted_sum(rows, weights)

    assert (hidden.shape, rows.shape, out.shape) == ((6, 6), (6, 8), (3, 8))
    num_tiles = routed.tiles.shape[0]
    assert log.entries == [
        ("softmax_top_k", softmax_top_k_cost(3, 4, 2, 2)),
        ("sort_by_expert", sort_by_expert_cost(6, num_tiles)),
        ("gate_up_product", expert_product_cost(3, 2, 4, 8, 12, 2, 16, is_gated=True)),
        ("down_product", expert_product_cost(3, 2, 4, 6, 8, 2, 16, is_gated=False)),
        ("weighted_sum", weighted_sum_cost(3, 2, 8, 2)),
    ]
