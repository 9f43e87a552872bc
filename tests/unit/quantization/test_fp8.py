# SPDX-License-Identifier: Apache-2.0
"""FP8 checkpoints: what is read from their config, and their weights bit for bit."""

import math

import pytest
import torch

from pelton.core.errors import CheckpointError
from pelton.kernels.fp8.linear import fp8_linear
from pelton.kernels.fp8.quantize import quantize_fp8
from pelton.layers.fp8_linear import FP8Linear, make_linear
from pelton.quantization.fp8 import FP8Weight, dequantize_fp8
from pelton.quantization.fp8_scheme import FP8Scheme, Granularity, read_fp8_scheme, scheme_of
from pelton.quantization.plain import PlainWeight
from tolerance import FP8_PRODUCT_RMS, assert_matches

E4M3 = torch.float8_e4m3fn
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
          "weight_block_size": [128, 128]}  # fmt: skip


def compressed_tensors(strategy: str = "channel", **changes: object) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head", "re:.*layers\\.1\\.mlp.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": strategy,
                            "symmetric": True, "dynamic": False},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token",
                                      "symmetric": True, "dynamic": True, **changes},
            }
        },
    }  # fmt: skip


def scheme(settings: dict[str, object]) -> FP8Scheme:
    found = read_fp8_scheme({"quantization_config": settings})
    assert found is not None
    return found


def test_schemes_are_read() -> None:
    assert read_fp8_scheme({}) is None
    blocks = scheme(BLOCKS)
    assert (blocks.granularity, blocks.scale_name) == (Granularity.BLOCK, "weight_scale_inv")
    assert scheme({"quant_method": "fp8"}).granularity is Granularity.TENSOR
    assert scheme(compressed_tensors("tensor")).granularity is Granularity.TENSOR
    meta = scheme({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
                   "modules_to_not_convert": ["model.layers.0", "self_attn"]})  # fmt: skip
    assert (meta.granularity, meta.activation_bound) == (Granularity.CHANNEL, 1200.0)
    assert meta.covers("model.layers.10.mlp.up_proj")
    assert not meta.covers("model.layers.0.mlp.up_proj")
    assert not meta.covers("model.layers.10.self_attn.q_proj")


def test_skipped_modules_may_be_named_by_a_regular_expression() -> None:
    channels = scheme(compressed_tensors())

    assert channels.covers("model.layers.0.mlp.up_proj")
    assert not channels.covers("model.layers.1.mlp.up_proj")
    assert not channels.covers("lm_head")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "awq"}, "'awq'.*nearest supported one is .*int4"),
        ({"quant_method": "modelopt"}, "'modelopt'.*nearest.*FP8-dynamic"),
        ({**BLOCKS, "activation_scheme": "none"}, "activation_scheme 'none'.*FP8-dynamic"),
        ({**BLOCKS, "weight_block_size": [64, 64]}, r"\[64, 64\].*\[128, 128\]"),
        (compressed_tensors("group"), "scale a group.*FP8-dynamic"),
        ({**compressed_tensors(), "format": "pack-quantized"}, "pack-quantized.*FP8-dynamic"),
    ],
)
def test_other_formats_are_refused_with_the_nearest(settings, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_fp8_scheme({"quantization_config": settings})


def test_a_fused_product_is_quantised_wholly_or_not() -> None:
    partly = FP8Scheme(granularity=Granularity.CHANNEL, skipped=("q_proj",))

    assert scheme_of(partly, ["a.q_proj"]) is None
    assert scheme_of(partly, ["a.k_proj", "a.v_proj"]) is partly
    with pytest.raises(CheckpointError, match=r"leaves a\.q_proj unquantised"):
        scheme_of(partly, ["a.q_proj", "a.k_proj"])


def fill(linear: FP8Linear) -> None:
    linear.weight.copy_(torch.randn(linear.weight.shape).to(E4M3))
    linear.weight_scale.copy_(torch.rand(linear.weight_scale.shape) + 0.1)


def dequantized_by_hand(linear: FP8Linear, granularity: Granularity) -> torch.Tensor:
    out = torch.empty(linear.weight.shape)
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            if granularity is Granularity.BLOCK:
                scale = linear.weight_scale[row // 128, column // 128]
            elif granularity is Granularity.CHANNEL:
                scale = linear.weight_scale[row, 0]
            else:
                scale = linear.weight_scale[0 if row < linear.parts[0] else 1]
            out[row, column] = linear.weight[row, column].float() * scale
    return out


@pytest.mark.parametrize("granularity", list(Granularity))
def test_dequantised_weight_is_exact(granularity) -> None:
    parts = (128, 9) if granularity is Granularity.BLOCK else (5, 9)
    linear = FP8Linear(133, parts, FP8Scheme(granularity=granularity), has_bias=True)
    fill(linear)
    linear.bias.normal_()
    expected = dequantized_by_hand(linear, granularity)

    assert torch.equal(linear.dequantize(), expected)
    bias = linear.bias.clone()
    linear.pack(PlainWeight)

    x = torch.randn(3, 133)
    assert_matches(linear(x), x @ expected.T + bias, torch.float32)


@pytest.mark.parametrize("has_blocks", [False, True], ids=["rows", "blocks"])
def test_product_in_fp8_is_within_the_format_of_the_dequantised_one(has_blocks) -> None:
    weight = torch.randn(200, 300).to(E4M3)
    scales = torch.rand((2, 3) if has_blocks else (200, 1)) + 0.5
    bias = torch.randn(200)
    packed = FP8Weight(weight, scales, bias, has_blocks=has_blocks)
    assert torch.equal(packed.dequantize(), dequantize_fp8(weight, scales))
    x = torch.randn(9, 300) * torch.logspace(-3, 3, 9)[:, None]

    expected = x @ dequantize_fp8(weight, scales).T

    error = (packed(x) - bias - expected).square().mean(1).sqrt() / expected.square().mean(1).sqrt()
    assert (error < FP8_PRODUCT_RMS).all(), error


def test_blocks_that_would_not_line_up_are_refused() -> None:
    with pytest.raises(CheckpointError, match="fuses one of 64 rows"):
        make_linear(128, (64, 64), FP8Scheme(granularity=Granularity.BLOCK))


def test_activations_above_the_bound_are_clipped() -> None:
    q, scales = quantize_fp8(torch.tensor([[1.0, -8.0, 0.5]]), 3, 2.0)

    assert (q.float() * scales).tolist() == [[1.0, -2.0, 0.5]]
    assert math.isclose(scales.item(), 2.0 / 448, rel_tol=1e-6)


def test_ops_on_meta_log_their_costs() -> None:
    from pelton.perf.cost import record_costs

    x = torch.empty(4, 256, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(512, 256, device="meta", dtype=E4M3)
    with record_costs() as log:
        q, scales = quantize_fp8(x, 128)
        blocks = torch.empty(4, 2, device="meta")
        assert fp8_linear(q, scales, weight, blocks, None, torch.bfloat16).shape == (4, 512)
    assert [name for name, _ in log.entries] == ["quantize_fp8", "fp8_linear"]
    assert log.entries[1][1].flops == 2 * 4 * 256 * 512
    assert log.entries[1][1].bytes == 4 * 256 + 256 * 512 + 4 * (8 + 8) + 2 * 4 * 512
