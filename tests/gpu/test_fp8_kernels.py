# SPDX-License-Identifier: Apache-2.0
"""The FP8 kernels against their references."""

import math
from functools import partial

import pytest
import torch

from pelton.kernels.fp8.linear import FP8_LINEAR, fp8_linear_reference
from pelton.kernels.fp8.quantize import QUANTIZE_FP8, quantize_fp8_reference
from tolerance import FP8_SUM, assert_matches

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
        *[(0, 128, 128), (1, 64, 40), (1, 300, 129), (1, 61, 5), (1, 2200, 130), (1, 1100, 400)],
        *[(3, 128, 128), (70, 256, 130), (17, 61, 5)],
    ],
    ids=str,
)
def test_linear(shape, has_blocks, has_bias, device, generator, interpretable) -> None:
    arguments = make_products(shape, has_blocks, has_bias, device, generator)

    actual = FP8_LINEAR.named("triton")(*arguments, torch.float32)

    expected = fp8_linear_reference(*arguments, torch.float32)
    assert_matches(actual, expected, torch.float32, None if device.type == "cpu" else FP8_SUM)


@pytest.mark.parametrize("has_blocks", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize(
    "shape",
    [
        *[(1, 7168, 2112), (1, 1536, 24576), (1, 18432, 7168), (1, 4096, 28672), (1, 576, 1536)],
        *[
            (64, 7168, 2112),
            (65, 2048, 7168),
            (67, 2048, 7168),
            (1000, 7168, 512),
            (129, 1536, 24576),
        ],
    ],
    ids=str,
)
def test_large_products_in_bfloat16(shape, has_blocks, device, device_generator) -> None:
    arguments = make_products(shape, has_blocks, False, device, device_generator)
    expected = fp8_linear_reference(*arguments, torch.float32)

    for name in ("library", "triton"):
        actual = FP8_LINEAR.named(name)(*arguments, torch.bfloat16)
        assert_matches(actual, expected, torch.bfloat16)


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
