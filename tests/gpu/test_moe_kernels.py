# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of a mixture of experts against their references."""

import math
import os
from dataclasses import dataclass

import pytest
import torch

from moe_cases import (
    AWKWARD_LOGITS,
    EXPERT_CASES,
    LARGE_EXPERT_CASES,
    MXFP4_CASES,
    MXFP4_TOKENS,
    ExpertCase,
    ExpertInputs,
    MXFP4ByHand,
    dequantize_by_hand,
    make_expert_ids,
    make_expert_inputs,
    make_mxfp4_weights,
)
from overlapped import assert_same_overlapped
from pelton.kernels.dispatch import batch_invariant
from pelton.kernels.linear import LINEAR
from pelton.kernels.moe.expert_product.op import DOWN_PRODUCT, GATE_UP_PRODUCT
from pelton.kernels.moe.expert_product.reference import expert_product_reference
from pelton.kernels.moe.gate import SWIGLU, Gate
from pelton.kernels.moe.mxfp4_product import hopper, hopper_one
from pelton.kernels.moe.mxfp4_product.hopper import split_rows
from pelton.kernels.moe.mxfp4_product.hopper_one import LoneToken
from pelton.kernels.moe.mxfp4_product.hopper_tiles import tile_weights
from pelton.kernels.moe.mxfp4_product.op import (
    MXFP4_DOWN_PRODUCT,
    MXFP4_GATE_UP_PRODUCT,
    route_rows,
    takes_tiles,
)
from pelton.kernels.moe.router_product import ROUTER_PRODUCT, router_product_reference
from pelton.kernels.moe.routing import SOFTMAX_TOP_K, SoftmaxTopK, softmax_top_k_reference
from pelton.kernels.moe.sort_by_expert import (
    SORT_BY_EXPERT,
    RoutedRows,
    choose_tile_rows,
    sort_by_expert_reference,
)
from pelton.kernels.moe.weighted_sum import WEIGHTED_SUM, weighted_sum_reference
from pelton.kernels.rms_norm import SUM_ADD_RMS_NORM
from tolerance import FLOAT32_ABS, assert_matches

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

# The interpreter computes products of bfloat16 tiles wrongly; float16 stands for it there.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
GATES = pytest.mark.parametrize(
    "gate", [SWIGLU, Gate(alpha=1.702, limit=1.5, offset=1.0)], ids=["swiglu", "clamped"]
)


@DTYPES
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(0, 4, 2), (1, 4, 1), (1, 128, 4), (9, 5, 5), (67, 32, 4), (130, 37, 3)],
)
def test_softmax_top_k(
    num_tokens, num_experts, top_k, dtype, device, generator, interpretable
) -> None:
    # Few values, so that there are ties.
    logits = torch.randint(-6, 7, (num_tokens, num_experts + 3), generator=generator) / 2
    logits = logits.to(device, dtype)[:, :num_experts]

    ids, weights = SOFTMAX_TOP_K.named("triton")(logits, top_k)

    expected_ids, expected_weights = softmax_top_k_reference(logits, top_k)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=FLOAT32_ABS)


@pytest.mark.parametrize("logits", AWKWARD_LOGITS, ids=str)
def test_softmax_top_k_takes_each_expert_once(logits, device, interpretable) -> None:
    logits = torch.tensor([logits], device=device)

    ids, weights = SOFTMAX_TOP_K.named("triton")(logits, 4)

    # A NaN has no order: it counts as 0.
    ordered = logits.nan_to_num(0, neginf=-math.inf)
    expected_ids, expected_weights = softmax_top_k_reference(ordered, 4)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=FLOAT32_ABS)


def test_routing_of_logits_that_are_not_finite_names_experts_that_exist(
    device, generator, interpretable
) -> None:
    logits = torch.randn(3, 5, generator=generator).to(device)
    logits[0] = float("nan")
    logits[1, 1:] = float("-inf")

    ids, weights = SOFTMAX_TOP_K.named("triton")(logits, 2)

    assert ((ids >= 0) & (ids < 5)).all()
    assert weights.isfinite().all()


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize("case", EXPERT_CASES + LARGE_EXPERT_CASES[:3], ids=str)
def test_sort_by_expert(case, tile_rows, device, generator, interpretable) -> None:
    expert_ids = make_expert_ids(case, generator).to(device)

    routed = SORT_BY_EXPERT.named("triton")(expert_ids, case.num_experts, tile_rows)

    expected = sort_by_expert_reference(expert_ids, case.num_experts, tile_rows)
    assert torch.equal(routed.order, expected.order)
    assert torch.equal(routed.tiles, expected.tiles)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_router_product(num_tokens, device, generator) -> None:
    x = torch.randn(num_tokens, 7168, generator=generator).to(device, HALF)
    weight = torch.randn(256, 7168, generator=generator).to(device, HALF)

    logits = ROUTER_PRODUCT.named("torch")(x, weight)

    assert_matches(logits, router_product_reference(x, weight), torch.float32)


def sort(inputs: ExpertInputs, case: ExpertCase) -> RoutedRows:
    num_rows = inputs.expert_ids.numel()
    tile_rows = choose_tile_rows(num_rows, case.num_experts, inputs.expert_ids.device)
    return sort_by_expert_reference(inputs.expert_ids, case.num_experts, tile_rows)


def check_products(case: ExpertCase, gate: Gate, dtype, device, generator) -> None:
    inputs = make_expert_inputs(case, device, dtype, generator)
    routed = sort(inputs, case)
    gate_up_weights = inputs.gate_up, inputs.gate_up_bias
    down_weights = inputs.down, inputs.down_bias

    hidden = GATE_UP_PRODUCT.named("triton")(inputs.x, routed, *gate_up_weights, gate)
    rows = DOWN_PRODUCT.named("triton")(hidden, routed, *down_weights)

    expected = expert_product_reference(inputs.x.float(), routed, *gate_up_weights, gate)
    assert_matches(hidden, expected, dtype)
    expected = expert_product_reference(hidden.float(), routed, *down_weights)
    assert_matches(rows, expected, dtype)


@GATES
@DTYPES
@pytest.mark.parametrize("case", EXPERT_CASES, ids=str)
def test_expert_products(case, dtype, gate, device, generator, interpretable) -> None:
    check_products(case, gate, dtype, device, generator)


@pytest.mark.whole_card
@pytest.mark.parametrize("case", LARGE_EXPERT_CASES, ids=str)
def test_expert_products_large(case, device, device_generator) -> None:
    check_products(case, Gate(1.702, 7.0, 1.0), HALF, device, device_generator)


@dataclass(frozen=True)
class Mxfp4Kernels:
    name: str

    def gate_up(self, x: torch.Tensor, routed, blocks, scales, *rest) -> torch.Tensor:
        weights = self.prepare(x, blocks, scales)
        return MXFP4_GATE_UP_PRODUCT.named(self.name)(x, routed, *weights, *rest)

    def down(self, hidden: torch.Tensor, routed, blocks, scales, bias) -> torch.Tensor:
        weights = self.prepare(hidden, blocks, scales)
        return MXFP4_DOWN_PRODUCT.named(self.name)(hidden, routed, *weights, bias)

    def prepare(self, x: torch.Tensor, blocks, scales) -> tuple[torch.Tensor, torch.Tensor]:
        if self.name != "hopper" or blocks.dtype is not torch.uint8:
            return blocks, scales
        if not takes_tiles(blocks, x.dtype):
            pytest.skip("a Hopper kernel, for bfloat16 and tiles of features")
        return tile_weights(blocks, scales)


@pytest.fixture(params=["triton"] if IS_INTERPRETED else ["triton", "hopper"])
def mxfp4(request) -> Mxfp4Kernels:
    return Mxfp4Kernels(request.param)


def check_mxfp4_products(
    mxfp4, case: ExpertCase, gate: Gate, dtype, device, generator, tile_rows: int | None = None
) -> None:
    inputs = make_expert_inputs(case, device, dtype, generator)
    packed = make_mxfp4_weights(case, device, generator)
    routed = sort(inputs, case)
    if tile_rows is not None:
        routed = sort_by_expert_reference(inputs.expert_ids, case.num_experts, tile_rows)
    gate_up_packed = packed.gate_up_blocks, packed.gate_up_scales
    down_packed = packed.down_blocks, packed.down_scales

    hidden = mxfp4.gate_up(inputs.x, routed, *gate_up_packed, inputs.gate_up_bias, gate)
    rows = mxfp4.down(hidden, routed, *down_packed, inputs.down_bias)

    expected = expert_product_reference(
        inputs.x.float(), routed, MXFP4ByHand(*gate_up_packed), inputs.gate_up_bias, gate
    )
    assert_matches(hidden, expected, dtype)
    expected = expert_product_reference(
        hidden.float(), routed, MXFP4ByHand(*down_packed), inputs.down_bias
    )
    assert_matches(rows, expected, dtype)


@GATES
@DTYPES
@pytest.mark.parametrize("case", MXFP4_CASES, ids=str)
def test_mxfp4_products(mxfp4, case, dtype, gate, device, generator, interpretable) -> None:
    check_mxfp4_products(mxfp4, case, gate, dtype, device, generator)


@pytest.mark.parametrize("tile_rows", [16, 32])
@pytest.mark.parametrize("num_programs", [1, 3])
@pytest.mark.parametrize("case", [*MXFP4_CASES[2:], ExpertCase(50, 2, 1, 3072, 64)], ids=str)
def test_mxfp4_products_of_programs_that_take_several_experts(
    case, num_programs, tile_rows, device, generator, monkeypatch
) -> None:
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda device: num_programs)
    kernels, gate = Mxfp4Kernels("hopper"), Gate(1.702, 1.5, 1.0)

    check_mxfp4_products(kernels, case, gate, torch.bfloat16, device, generator, tile_rows)


@pytest.mark.parametrize("form", ["one warpgroup", "two", "in order"])
@pytest.mark.parametrize("case", MXFP4_TOKENS, ids=str)
def test_mxfp4_products_of_one_token_that_is_not_sorted(
    case, form, device, generator, monkeypatch
) -> None:
    monkeypatch.setattr(hopper_one, "tune", lambda *sizes: 2 if form == "two" else 1)
    with batch_invariant(wanted=form == "in order"):
        check_mxfp4_products_of_one_token(case, device, generator)


@pytest.mark.whole_card
def test_mxfp4_products_of_one_token_of_a_large_model(device, device_generator) -> None:
    check_mxfp4_products_of_one_token(LARGE_EXPERT_CASES[0], device, device_generator)


def check_mxfp4_products_of_one_token(case: ExpertCase, device, generator) -> None:
    """NaN around it; and in one of its experts' rows, which reaches only that expert's result."""
    mxfp4 = Mxfp4Kernels("hopper")
    inputs = make_expert_inputs(case, device, torch.bfloat16, generator)
    packed = make_mxfp4_weights(case, device, generator)
    gate_up = mxfp4.prepare(inputs.x, packed.gate_up_blocks, packed.gate_up_scales)
    down = mxfp4.prepare(inputs.x, packed.down_blocks, packed.down_scales)
    logits = -torch.rand(1, case.num_experts, generator=generator, device=generator.device)
    logits = logits.to(device, torch.bfloat16)
    logits[0, inputs.expert_ids[0].long()] = torch.arange(case.top_k, 0, -1, device=device).to(HALF)
    _, expected_weights = softmax_top_k_reference(logits, case.top_k)
    routed, weights = route_rows(SoftmaxTopK(logits, case.top_k), gate_up[0], down[0])
    assert isinstance(routed, LoneToken)
    gate = Gate(1.702, 1.5, 1.0)

    hidden = mxfp4.gate_up(among_nans(inputs.x), routed, *gate_up, inputs.gate_up_bias, gate)
    rows = mxfp4.down(among_nans(hidden), routed, *down, inputs.down_bias)
    spoiled = hidden.clone()
    spoiled[1] = math.nan
    spoiled_rows = mxfp4.down(spoiled, routed, *down, inputs.down_bias)

    assert_matches(weights, expected_weights, torch.float32)
    by_choice = one_row_tiles(inputs.expert_ids)
    by_hand = MXFP4ByHand(packed.gate_up_blocks, packed.gate_up_scales)
    bias = inputs.gate_up_bias
    expected = expert_product_reference(inputs.x.float(), by_choice, by_hand, bias, gate)
    assert_matches(hidden, expected, torch.bfloat16)
    by_hand = MXFP4ByHand(packed.down_blocks, packed.down_scales)
    expected = expert_product_reference(hidden.float(), by_choice, by_hand, inputs.down_bias)
    assert_matches(rows, expected, torch.bfloat16)
    others = [0, *range(2, case.top_k)]
    assert torch.equal(spoiled_rows[others], rows[others])
    assert spoiled_rows[1].isnan().all()


def test_one_token_through_experts_is_the_same_overlapped_and_not(device, generator) -> None:
    """As in a step: each kernel starts before the one in front has ended, and other experts are
    chosen each time."""
    case, rounds = ExpertCase(1, 64, 4, 1024, 1024), 40
    mxfp4 = Mxfp4Kernels("hopper")
    x = torch.randn(1, case.hidden_size, generator=generator).to(device, torch.bfloat16)
    packed = make_mxfp4_weights(case, device, generator)
    gate_up = mxfp4.prepare(x, packed.gate_up_blocks, packed.gate_up_scales)
    down = mxfp4.prepare(x, packed.down_blocks, packed.down_scales)
    router = torch.randn(rounds, 64, 1024, generator=generator).to(device, torch.bfloat16)
    residual = torch.randn(1, 1024, generator=generator).to(device)
    weight = torch.ones(1024, dtype=torch.bfloat16, device=device)

    def pass_through(turn: int, stop) -> torch.Tensor:
        logits = stop(LINEAR.named("triton")(x, router[turn], None, x.dtype))
        routed, shares = route_rows(SoftmaxTopK(logits, 4), gate_up[0], down[0])
        hidden = stop(mxfp4.gate_up(x, routed, *gate_up, None, SWIGLU))
        rows = stop(mxfp4.down(hidden, routed, *down, None))
        return stop(SUM_ADD_RMS_NORM.named("triton")(rows, shares, residual, weight, 1e-5)[0])

    assert_same_overlapped(lambda stop: [pass_through(turn, stop) for turn in range(rounds)])


@pytest.mark.parametrize("logits", AWKWARD_LOGITS, ids=str)
def test_products_of_one_token_choose_as_softmax_top_k_does(logits, device, generator) -> None:
    """Of experts with the same weights but for a bias of each its own."""
    case = ExpertCase(1, 4, 2, 128, 64)
    packed = make_mxfp4_weights(case, device, generator)
    mxfp4, x = Mxfp4Kernels("hopper"), torch.zeros(1, 128, dtype=HALF, device=device)
    down = mxfp4.prepare(x, packed.down_blocks, packed.down_scales)
    gate_up = mxfp4.prepare(x, packed.gate_up_blocks, packed.gate_up_scales)
    bias = torch.arange(4.0, device=device)[:, None].expand(4, 128).to(HALF).contiguous()
    routing = SoftmaxTopK(torch.tensor([logits], device=device), 2)
    expected_ids, expected_weights = softmax_top_k_reference(
        routing.logits.nan_to_num(0, neginf=-math.inf), 2
    )

    routed, weights = route_rows(routing, gate_up[0], down[0])
    hidden = mxfp4.gate_up(x, routed, *gate_up, bias, SWIGLU)
    rows = mxfp4.down(torch.zeros(2, 64, dtype=HALF, device=device), routed, *down, bias)

    assert rows[:, 0].tolist() == expected_ids[0].tolist()
    expected = bias[expected_ids[0].long(), 0].float()
    assert_matches(hidden[:, 0], expected * expected.sigmoid() * expected, HALF)
    assert_matches(weights, expected_weights, torch.float32)


def one_row_tiles(expert_ids: torch.Tensor) -> RoutedRows:
    """A token's rows in the order of its choices, for the reference."""
    ids = expert_ids.flatten()
    places = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
    return RoutedRows(expert_ids, places, torch.stack((ids, places, places + 1), dim=1), 1)


def among_nans(rows: torch.Tensor) -> torch.Tensor:
    num_rows, width = rows.shape
    memory = rows.new_full((num_rows + 16, width + 16), math.nan)
    memory[:num_rows, :width] = rows
    return memory[:num_rows, :width]


@pytest.mark.whole_card
@pytest.mark.parametrize("case", LARGE_EXPERT_CASES, ids=str)
def test_mxfp4_products_large(mxfp4, case, device, device_generator) -> None:
    check_mxfp4_products(mxfp4, case, Gate(1.702, 7.0, 1.0), HALF, device, device_generator)


HEIGHTS = pytest.mark.parametrize("tile_rows", [16, 32, 64, 128])


@HEIGHTS
@DTYPES
def test_mxfp4_weights_are_unpacked_bit_for_bit(
    mxfp4, dtype, tile_rows, device, generator, interpretable
) -> None:
    """Unit vectors pick single elements: every code, under scales at both ends of the format."""
    exponents = (0, 1, 2, 126, 127, 128, 254) if dtype is torch.float32 else (120, 127, 130)
    if dtype is torch.bfloat16:
        exponents = (27, 60, 110, 120, 127, 130, 150, 160)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 8, 2, 16)
    blocks = blocks.repeat(1, len(exponents), 1, 1).to(device)
    scales = torch.tensor(exponents, dtype=torch.uint8).repeat_interleave(8)
    # 2^127 times 4 or 6 is beyond float32.
    blocks[:, (scales == 254).nonzero()[:, 0]] &= 0x99
    scales = scales[None, :, None].repeat(1, 1, 2).to(device)
    expert_ids = torch.zeros(64, 1, dtype=torch.int32, device=device)
    routed = sort_by_expert_reference(expert_ids, 1, tile_rows)
    units = torch.eye(64, dtype=dtype, device=device)

    rows = mxfp4.down(units, routed, blocks, scales, None)

    expected = dequantize_by_hand(blocks, scales)[0].T
    assert torch.equal(rows.double(), expected)


def test_a_nan_scale_reaches_its_own_feature_only(mxfp4, device, generator, interpretable) -> None:
    case = ExpertCase(5, 1, 1, 64, 32, has_bias=False)
    packed = make_mxfp4_weights(case, device, generator)
    packed.down_scales[0, 3, 0] = 255
    expert_ids = torch.zeros(5, 1, dtype=torch.int32, device=device)
    routed = sort_by_expert_reference(expert_ids, 1, 16)
    hidden = torch.randn(5, 32, generator=generator).to(device, HALF)

    rows = mxfp4.down(hidden, routed, packed.down_blocks, packed.down_scales, None)

    is_nan = rows.isnan().cpu()
    assert is_nan[:, 3].all()
    assert is_nan.sum() == 5


def test_split_rows_add_up(device, generator) -> None:
    """Rows around 2^-60, 1 and 2^125, with numbers far below their largest, and one with a NaN. The
    interpreter casts to e4m3 wrongly."""
    num_inputs = 160
    x = torch.randn(4, num_inputs, generator=generator)
    x *= torch.logspace(-6, 0, num_inputs) * torch.tensor([2.0**-60, 1.0, 2.0**125, 1.0])[:, None]
    x = x.bfloat16()
    x[3, 5] = math.nan

    expert_ids = torch.tensor([[2], [0], [1], [0]], dtype=torch.int32, device=device)
    routed = sort_by_expert_reference(expert_ids, 3, 16)

    parts, scales = split_rows(x.to(device), routed, is_gathered=False)
    gathered, gathered_scales = split_rows(x.to(device), routed, is_gathered=True)

    order = routed.order.long()
    assert torch.equal(gathered.view(torch.uint8), parts.view(torch.uint8)[order])
    assert torch.equal(gathered_scales.view(torch.int32), scales.view(torch.int32)[order])
    # Place [word, half, quarter, code] holds the input of [quarter, word, half, code].
    parts = parts.float().cpu().view(4, 2, 2, 4, 2, 4, 4).permute(0, 1, 2, 5, 3, 4, 6)
    high, low = parts.reshape(4, 2, 256).unbind(1)
    sums = (high.double() + low.double() / 16) * scales.double().cpu()[:, None]
    assert sums[3].isnan().all()
    exact = x[:3].double()
    errors = (sums[:3, :num_inputs] - exact).abs()
    assert (errors <= 2.0**-20 * exact.abs().amax(dim=1, keepdim=True)).all()
    assert (sums[:3, num_inputs:] == 0).all()


MXFP4_NEIGHBOURS = ExpertCase(19, 2, 2, 192, 160, has_bias=False)
"""Tiles that end before their last row, and sizes that end inside a tile."""


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@HEIGHTS
@DTYPES
def test_mxfp4_reads_no_memory_beside_its_inputs(
    mxfp4, dtype, tile_rows, device, generator, interpretable
) -> None:
    """NaN in one token, beside every row and after the last: only that token's rows have it."""
    case = MXFP4_NEIGHBOURS
    packed = make_mxfp4_weights(case, device, generator)
    expert_ids = make_expert_ids(case, generator).to(device)
    routed = sort_by_expert_reference(expert_ids, case.num_experts, tile_rows)
    gate = Gate(1.702, 7.0, 1.0)

    def random_among_nans(*shape: int) -> torch.Tensor:
        return among_nans(torch.randn(shape, generator=generator).to(device, dtype))

    x = random_among_nans(case.num_tokens, case.hidden_size)
    x[7] = math.nan
    hidden = mxfp4.gate_up(x, routed, packed.gate_up_blocks, packed.gate_up_scales, None, gate)
    rows = random_among_nans(routed.num_rows, case.ffn_size)
    rows[7] = math.nan
    out = mxfp4.down(rows, routed, packed.down_blocks, packed.down_scales, None)

    # The first product gives rows in sorted order; the second takes them so and gives the tokens'.
    tokens = (routed.order // case.top_k).tolist()
    assert hidden.isfinite().all(dim=1).tolist() == [token != 7 for token in tokens]
    assert hidden.isnan().all(dim=1).tolist() == [token == 7 for token in tokens]
    out = out[routed.order.long()]
    assert out.isfinite().all(dim=1).tolist() == [place != 7 for place in range(routed.num_rows)]


@HEIGHTS
def test_mxfp4_experts_may_lie_more_than_2_gib_apart(
    mxfp4, tile_rows, device, generator, interpretable
) -> None:
    case = MXFP4_NEIGHBOURS
    packed = make_mxfp4_weights(case, device, generator)
    expert_ids = make_expert_ids(case, generator).to(device)
    routed = sort_by_expert_reference(expert_ids, case.num_experts, tile_rows)
    rows = torch.randn(routed.num_rows, case.ffn_size, generator=generator).to(device, HALF)
    blocks, scales = mxfp4.prepare(rows, packed.down_blocks, packed.down_scales)
    distance = (5 << 29) // blocks.itemsize
    # A CPU gives pages of zeros memory only when they are written.
    memory = torch.zeros(distance + blocks[0].numel(), dtype=blocks.dtype, device=device)
    far = memory.as_strided(blocks.shape, (distance, *blocks.stride()[1:]))
    far.copy_(blocks)

    actual = mxfp4.down(rows, routed, far, scales, None)

    expected = mxfp4.down(rows, routed, blocks, scales, None)
    assert torch.equal(actual, expected)


@pytest.mark.whole_card
@pytest.mark.parametrize("num_tokens", [256, 512, 1024, 8192])
def test_mxfp4_products_are_the_same_bits_every_time(
    mxfp4, num_tokens, device, device_generator
) -> None:
    """Heights of 16, 32, 64 and 128 rows, at the size of a model."""
    case = ExpertCase(num_tokens, 128, 4, 2880, 2880, has_bias=False)
    packed = make_mxfp4_weights(case, device, device_generator)
    expert_ids = make_expert_ids(case, device_generator).to(device)
    tile_rows = choose_tile_rows(expert_ids.numel(), case.num_experts, device)
    routed = sort_by_expert_reference(expert_ids, case.num_experts, tile_rows)
    x = torch.randn(
        num_tokens, case.hidden_size, generator=device_generator, device=device, dtype=HALF
    )

    weights = mxfp4.prepare(x, packed.gate_up_blocks, packed.gate_up_scales)

    def run() -> torch.Tensor:
        return mxfp4.gate_up(x, routed, *weights, None, SWIGLU)

    first = run()
    assert first.isfinite().all()
    for _ in range(20):
        assert torch.equal(run(), first)


def test_a_nan_reaches_its_own_token_only(device, generator, interpretable) -> None:
    case = ExpertCase(6, 4, 2, 32, 32)
    inputs = make_expert_inputs(case, device, torch.float32, generator)
    inputs.x[2] = float("nan")
    routed = sort(inputs, case)
    gate = Gate(1.702, 7.0, 1.0)

    hidden = GATE_UP_PRODUCT.named("triton")(
        inputs.x, routed, inputs.gate_up, inputs.gate_up_bias, gate
    )
    rows = DOWN_PRODUCT.named("triton")(hidden, routed, inputs.down, inputs.down_bias)

    has_nan = rows.view(6, -1).isnan()
    assert has_nan[2].all()
    assert not has_nan[[0, 1, 3, 4, 5]].any()


@DTYPES
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden_size"), [(0, 2, 8), (1, 1, 1), (5, 4, 61), (33, 3, 2880)]
)
def test_weighted_sum(
    num_tokens, top_k, hidden_size, dtype, device, generator, interpretable
) -> None:
    rows = torch.randn(num_tokens * top_k, hidden_size, generator=generator).to(device, dtype)
    weights = torch.rand(num_tokens, top_k, generator=generator).to(device)

    actual = WEIGHTED_SUM.named("triton")(rows, weights)

    assert_matches(actual, weighted_sum_reference(rows.float(), weights), dtype)


def test_a_graph_replays_for_any_routing(device, generator) -> None:
    """Captured on one routing, replayed on others: the same bits as an eager call."""
    case = ExpertCase(48, 32, 4, 512, 256)
    inputs = make_expert_inputs(case, device, torch.bfloat16, generator)
    for weight in (inputs.gate_up, inputs.down, inputs.gate_up_bias, inputs.down_bias):
        weight.nan_to_num_(0.1)
    ids = inputs.expert_ids
    tile_rows = choose_tile_rows(ids.numel(), case.num_experts, device)

    def run() -> torch.Tensor:
        routed = SORT_BY_EXPERT.named("triton")(ids, case.num_experts, tile_rows)
        hidden = GATE_UP_PRODUCT.named("triton")(
            inputs.x, routed, inputs.gate_up, inputs.gate_up_bias, Gate(1.702, 7.0, 1.0)
        )
        return DOWN_PRODUCT.named("triton")(hidden, routed, inputs.down, inputs.down_bias)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = run()
    for routing in ("one", "last", "random"):
        other = ExpertCase(48, 32, 4, 512, 256, routing)
        ids.copy_(make_expert_ids(other, generator))
        expected = run()
        graph.replay()
        assert torch.equal(actual, expected)
    assert math.isfinite(actual.float().sum().item())
