# SPDX-License-Identifier: Apache-2.0
"""MXFP4: the dequantiser against one that shares nothing with it, and the CPU's products."""

import pytest
import torch

from moe_cases import (
    MXFP4_CASES,
    ExpertCase,
    dequantize_by_hand,
    make_expert_inputs,
    make_mxfp4_weights,
)
from pelton.kernels.dispatch import batch_invariant
from pelton.kernels.moe.expert_product.cost import expert_product_cost
from pelton.kernels.moe.expert_product.reference import expert_product_reference
from pelton.kernels.moe.gate import SWIGLU, Gate
from pelton.kernels.moe.mxfp4_product import hopper
from pelton.kernels.moe.mxfp4_product.hopper_tiles import tile_weights
from pelton.kernels.moe.mxfp4_product.op import (
    mxfp4_down_product,
    mxfp4_gate_up_product,
    tallest_tile,
)
from pelton.kernels.moe.mxfp4_product.reference import (
    dequantize_mxfp4,
    mxfp4_product_reference,
)
from pelton.kernels.moe.sort_by_expert import sort_by_expert
from pelton.perf.cost import record_costs
from tolerance import assert_matches

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
GATE = Gate(alpha=1.702, limit=7.0, offset=1.0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@DTYPES
def test_every_code_under_every_scale_is_exact(dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(252, 1, 1)
    # Above 2^125, 4 and 6 times the scale are infinite.
    scales = torch.arange(252, dtype=torch.uint8)[:, None].repeat(1, 16)

    values = dequantize_mxfp4(blocks, scales, dtype)

    assert values.dtype is dtype
    assert torch.equal(values.double(), dequantize_by_hand(blocks, scales))
    assert torch.equal(values.signbit(), dequantize_by_hand(blocks, scales).signbit())


def test_the_last_scale_is_not_a_number() -> None:
    scales = torch.tensor([[127, 255]], dtype=torch.uint8)

    values = dequantize_mxfp4(torch.full((1, 2, 16), 0x21, dtype=torch.uint8), scales)

    assert values[0, :2].tolist() == [0.5, 1.0]
    assert values[0, 32:].isnan().all()


@pytest.mark.parametrize("tile_rows", [16, 32])
def test_rows_and_chunks_fit_into_a_multiprocessors_shared_memory(tile_rows) -> None:
    """232,448 bytes of a program on Hopper, of which barriers and what layouts change take some."""
    for in_features in range(32, 3073, 32):
        num_chunks = -(-in_features // 128)
        stages = hopper.tune(tile_rows, in_features)
        rows = num_chunks * 2 * tile_rows * 128
        assert hopper.fits_rows(in_features)
        assert stages >= 2
        assert rows + 4 * stages * (64 * 64 + 4 * 64) <= 232_448 - 1024
    assert not hopper.fits_rows(3104)


def test_tiles_are_low_where_one_of_two_products_must_not_depend_on_their_height() -> None:
    published = torch.zeros(1, 64, 1, 16, dtype=torch.uint8)
    tiled = torch.zeros(1, 1, 1, 64, 4, dtype=torch.int32)

    assert tallest_tile(tiled, tiled) == 128
    with batch_invariant():
        assert tallest_tile(tiled, tiled) == tallest_tile(published, tiled) == 64
        assert tallest_tile(published, published) == 128


def test_tiles_hold_each_feature_where_the_kernels_look_for_it(generator) -> None:
    """Codes and scales read back one by one, as a thread of the kernels meets them."""
    blocks = torch.randint(0, 256, (2, 128, 5, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(110, 122, (2, 128, 5), generator=generator).to(torch.uint8)
    scales[1, 77, 0] = 255

    words, powers = tile_weights(blocks, scales)

    assert (words.shape, words.dtype) == ((2, 2, 5, 64, 4), torch.int32)
    signs = (7, 15, 23, 31, 3, 11, 19, 27)
    for expert, feature, block in ((0, 0, 0), (0, 9, 3), (1, 77, 2), (1, 127, 4)):
        in_tile = feature % 64
        row = in_tile // 16 * 16 + in_tile % 2 * 8 + in_tile % 16 // 2
        largest, exponent = powers[expert, feature // 64, [5, block], row].tolist()
        assert largest == scales[expert, feature].max()
        if largest == 255:
            continue
        assert largest - 11 + exponent == scales[expert, feature, block]
        place = row ^ (block % 4 * 2)
        codes = []
        for word in words[expert, feature // 64, block, place].tolist():
            for code, sign in enumerate(signs):
                codes.append((word >> sign & 1) << 3 | word >> 4 * code & 7)
        published = blocks[expert, feature, block].tolist()
        assert codes == [code for byte in published for code in (byte & 15, byte >> 4)]


def test_codes_far_below_their_rows_largest_are_rounded_to_its_exponents() -> None:
    """Every code under scales from 1 to 18 below the largest."""
    scales = torch.tensor([[127, *range(126, 108, -1)]], dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | (codes << 4)).expand(64, 19, 16).contiguous()

    words, powers = tile_weights(blocks[None], scales.expand(64, 19).contiguous()[None])

    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    for block in range(19):
        exponent = powers[0, 0, block, 0].item()
        for number, word in enumerate(words[0, 0, block, block % 4 * 2].tolist()):
            for place in range(8):
                code = number * 4 + place // 2
                actual = magnitudes[word >> 4 * place & 7] * 2.0 ** (exponent - 11)
                exact = magnitudes[code & 7] * 2.0**-block
                assert abs(actual - exact) <= (0.0 if block <= 11 else 2.0**-13)


@DTYPES
@pytest.mark.parametrize("case", MXFP4_CASES, ids=str)
def test_products_are_those_of_the_dequantised_weights(
    case: ExpertCase, dtype, generator, poisoned_memory
) -> None:
    inputs = make_expert_inputs(case, CPU, dtype, generator)
    packed = make_mxfp4_weights(case, CPU, generator)
    routed = sort_by_expert(inputs.expert_ids, case.num_experts)
    gate_up = packed.gate_up_blocks, packed.gate_up_scales
    down = packed.down_blocks, packed.down_scales

    hidden = mxfp4_gate_up_product(inputs.x, routed, *gate_up, inputs.gate_up_bias, GATE)
    rows = mxfp4_down_product(hidden, routed, *down, inputs.down_bias)

    x, weight = inputs.x.float(), dequantize_by_hand(*gate_up).float()
    expected = expert_product_reference(x, routed, weight, inputs.gate_up_bias, GATE)
    assert_matches(hidden, expected, dtype)
    reference = mxfp4_product_reference(x, routed, *gate_up, inputs.gate_up_bias, GATE)
    assert torch.equal(reference, expected)
    weight = dequantize_by_hand(*down).float()
    expected = expert_product_reference(hidden.float(), routed, weight, inputs.down_bias)
    assert_matches(rows, expected, dtype)
    reference = mxfp4_product_reference(hidden.float(), routed, *down, inputs.down_bias)
    assert torch.equal(reference, expected)


def test_ops_on_meta_count_four_bits_and_a_quarter() -> None:
    x = torch.empty(3, 64, device="meta", dtype=torch.bfloat16)
    ids = torch.empty(3, 2, device="meta", dtype=torch.int32)

    def packed(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = 4, rows, columns // 32
        blocks = torch.empty((*shape, 16), device="meta", dtype=torch.uint8)
        return blocks, torch.empty(shape, device="meta", dtype=torch.uint8)

    with record_costs() as log:
        routed = sort_by_expert(ids, 4)
        hidden = mxfp4_gate_up_product(x, routed, *packed(192, 64), None, SWIGLU)
        rows = mxfp4_down_product(hidden, routed, *packed(64, 96), None)

    assert (hidden.shape, rows.shape) == ((6, 96), (6, 64))
    assert log.entries[1:] == [
        ("mxfp4_gate_up_product", expert_product_cost(3, 2, 4, 64, 192, 2, 4.25, is_gated=True)),
        ("mxfp4_down_product", expert_product_cost(3, 2, 4, 96, 64, 2, 4.25, is_gated=False)),
    ]
