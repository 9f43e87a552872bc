# SPDX-License-Identifier: Apache-2.0
"""The FP8 kernels against their references."""

import math
from functools import partial

import pytest
import torch

from pelton.kernels.fp8.linear import FP8_LINEAR, fp8_linear_reference
from pelton.kernels.fp8.norm import (
    ADD_RMS_NORM_FP8,
    RMS_NORM_FP8,
    NormQuantization,
    add_rms_norm_fp8,
    add_rms_norm_fp8_reference,
)
from pelton.kernels.fp8.quantize import QUANTIZE_FP8, quantize_fp8, quantize_fp8_reference
from pelton.kernels.fp8.scales import FP8Operands
from pelton.kernels.fp8.silu_mul import SILU_MUL_FP8, silu_mul_fp8_reference
from pelton.kernels.rms_norm import ADD_RMS_NORM, RMS_NORM, add_rms_norm
from pelton.kernels.silu_mul import SILU_MUL
from tolerance import E4M3_STEP_ABS, E4M3_STEP_REL, FP8_SUM, assert_matches

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

E4M3 = torch.float8_e4m3fn
SHAPES = [(0, 64), (1, 1), (3, 61), (5, 128), (2, 300), (17, 256)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("bound", [math.inf, 0.5], ids=str)
@pytest.mark.parametrize("group_size", [128, 0], ids=["runs", "token"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_is_the_reference_bit_for_bit(
    shape, group_size, bound, device, generator, interpretable
) -> None:
    wide = torch.randn(shape[0], shape[1] + 16, generator=generator)
    wide *= torch.logspace(-4, 4, shape[0])[:, None]
    x = wide.to(device)[:, : shape[1]]

    q, scales = QUANTIZE_FP8.named("triton")(x, group_size or shape[1], bound)

    expected_q, expected_scales = quantize_fp8_reference(x, group_size or shape[1], bound)
    assert torch.equal(bits(q), bits(expected_q))
    assert torch.equal(scales, expected_scales)


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, under the interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_a_run_that_is_not_finite_has_a_nan_scale(bad, device, interpretable) -> None:
    x = torch.ones(2, 300, device=device)
    x[1, 130] = bad

    _, scales = QUANTIZE_FP8.named("triton")(x, 128, math.inf)

    assert scales.isnan().tolist() == [[False] * 3, [False, True, False]]


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("has_blocks", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize(
    "shape",
    [
        *[(0, 128, 128), (1, 64, 40), (1, 300, 129), (1, 61, 5), (1, 2200, 130), (1, 600, 344)],
        *[(2, 300, 129), (2, 600, 344), (3, 2200, 70), (8, 304, 40), (5, 128, 60)],
        *[(3, 128, 128), (70, 256, 130), (17, 61, 5)],
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["triton", "invariant"])
def test_linear(shape, has_blocks, has_bias, name, device, generator, interpretable) -> None:
    arguments = make_products(shape, has_blocks, has_bias, device, generator)

    actual = FP8_LINEAR.named(name)(FP8Operands(*arguments, torch.float32))

    expected = fp8_linear_reference(FP8Operands(*arguments, torch.float32))
    assert_matches(actual, expected, torch.float32, None if device.type == "cpu" else FP8_SUM)


@pytest.mark.parametrize("has_blocks", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize(
    "shape",
    [
        *[(1, 7168, 2112), (1, 1536, 24576), (1, 18432, 7168), (1, 4096, 28672), (1, 576, 1536)],
        *[(2, 7168, 2112), (2, 1536, 24576), (3, 7168, 2112), (8, 7168, 2112), (4, 18432, 7168)],
        *[(64, 7168, 2112), (65, 2048, 7168), (67, 2048, 7168), (1000, 7168, 512)],
        (129, 1536, 24576),
    ],
    ids=str,
)
def test_large_products_in_bfloat16(shape, has_blocks, device, device_generator) -> None:
    arguments = make_products(shape, has_blocks, False, device, device_generator)
    expected = fp8_linear_reference(FP8Operands(*arguments, torch.float32))

    for name in ("library", "triton", "invariant"):
        actual = FP8_LINEAR.named(name)(FP8Operands(*arguments, torch.bfloat16))
        assert_matches(actual, expected, torch.bfloat16)


@pytest.mark.parametrize("keeps_normed", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize("group_size", [128, 0], ids=["runs", "token"])
@pytest.mark.parametrize(
    "shape", [(0, 64), (1, 1), (3, 61), (5, 128), (2, 300), (7, 1536), (1, 7168)], ids=str
)
def test_norms_quantise_bit_for_bit_as_two_kernels(
    shape, group_size, keeps_normed, device, generator, interpretable
) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    then = NormQuantization(group_size or shape[1], 2.5, keeps_normed)
    wide = torch.randn(2, shape[0], shape[1] + 16, generator=generator) * 3
    x = wide[0].to(device, dtype)[:, : shape[1]]
    residual = wide[1].to(device)[:, : shape[1]]
    weight = torch.randn(shape[1], generator=generator).to(device, dtype)

    quantized = RMS_NORM_FP8.named("triton")(x, weight, 1e-5, then)
    total_quantized, total = ADD_RMS_NORM_FP8.named("triton")(x, residual, weight, 1e-5, then)

    normed = RMS_NORM.named("triton")(x, weight, 1e-5)
    total_normed, expected_total = ADD_RMS_NORM.named("triton")(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    for actual, expected in ((quantized, normed), (total_quantized, total_normed)):
        q, scales, kept = actual
        expected_q, expected_scales = QUANTIZE_FP8.named("triton")(expected, then.group_size, 2.5)
        assert torch.equal(bits(q), bits(expected_q))
        assert torch.equal(scales, expected_scales)
        assert scales.stride() == expected_scales.stride()
        assert torch.equal(kept, expected) if keeps_normed else kept is None


@pytest.mark.parametrize("shape", [(512, 4096), (64, 7168), (4096, 1536)], ids=str)
def test_many_norms_quantise_bit_for_bit_as_two_kernels(shape, device, generator) -> None:
    """Enough numbers to meet those that another order of summation would round otherwise."""
    x, residual = torch.randn(2, *shape, generator=generator).to(device)
    x = x.bfloat16()
    weight = torch.randn(shape[1], generator=generator).to(device, torch.bfloat16)
    group_size = 128 if shape[1] != 4096 else 4096

    (q, scales, _), _ = add_rms_norm_fp8(
        x, residual, weight, 1e-6, NormQuantization(group_size, math.inf, keeps_normed=False)
    )

    normed, _ = add_rms_norm(x, residual, weight, 1e-6)
    expected_q, expected_scales = quantize_fp8(normed, group_size)
    assert torch.equal(bits(q), bits(expected_q))
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("group_size", [128, 0], ids=["runs", "token"])
@pytest.mark.parametrize(
    "shape", [(0, 64), (1, 1), (3, 61), (5, 128), (2, 300), (3, 2200), (1, 14336)], ids=str
)
def test_gates_quantise_bit_for_bit_as_two_kernels(
    shape, group_size, device, generator, interpretable
) -> None:
    num_tokens, ffn_size = shape
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    wide = torch.randn(num_tokens, 2 * ffn_size + 16, generator=generator) * 3
    gate_up = wide.to(device, dtype)[:, : 2 * ffn_size]

    q, scales = SILU_MUL_FP8.named("triton")(gate_up, group_size or ffn_size, 2.5)

    gated = SILU_MUL.named("triton")(gate_up, gate_up.dtype)
    expected_q, expected_scales = QUANTIZE_FP8.named("triton")(gated, group_size or ffn_size, 2.5)
    assert torch.equal(bits(q), bits(expected_q))
    assert torch.equal(scales, expected_scales)
    assert scales.stride() == expected_scales.stride()
    assert_quantized_matches(
        (q, scales), silu_mul_fp8_reference(gate_up, group_size or ffn_size, 2.5)
    )


def assert_quantized_matches(actual, expected) -> None:
    """Numbers on the edge between two steps of the format may fall to either side."""
    assert_matches(actual[1], expected[1], torch.float32)
    torch.testing.assert_close(
        actual[0].float(), expected[0].float(), rtol=E4M3_STEP_REL, atol=E4M3_STEP_ABS
    )


@pytest.mark.parametrize("group_size", [128, 300], ids=str)
def test_norms_that_quantise_match_their_references(
    group_size, device, generator, interpretable
) -> None:
    x, residual = torch.randn(2, 5, 300, generator=generator).to(device)
    weight = torch.randn(300, generator=generator).to(device)
    then = NormQuantization(group_size, math.inf, keeps_normed=True)

    (q, scales, kept), total = ADD_RMS_NORM_FP8.named("triton")(x, residual, weight, 1e-5, then)

    (expected_q, expected_scales, expected_kept), expected_total = add_rms_norm_fp8_reference(
        x, residual, weight, 1e-5, then
    )
    assert torch.equal(total, expected_total)
    assert_matches(kept, expected_kept, torch.float32)
    assert_quantized_matches((q, scales), (expected_q, expected_scales))


def make_products(shape, has_blocks, has_bias, device, generator):
    num_tokens, in_features, out_features = shape
    draw = partial(torch.randn, generator=generator, device=generator.device)
    x = draw(num_tokens, in_features).to(device)
    x, x_scales = quantize_fp8_reference(x, 128 if has_blocks else in_features, math.inf)
    weight = draw(out_features, in_features).to(device, E4M3)
    blocks = (-(-out_features // 128), -(-in_features // 128))
    scales = torch.rand(
        blocks if has_blocks else (out_features, 1), generator=generator, device=generator.device
    )
    bias = draw(out_features).to(device) if has_bias else None
    # As `quantize_fp8` lays them out: the scales of one run of all tokens together.
    return x, x_scales.t().contiguous().t(), weight, scales.to(device) + 0.1, bias
