# SPDX-License-Identifier: Apache-2.0
"""Each weight format against the product with its own dequantised weight."""

from functools import partial

import pytest
import torch

from pelton.core.config import Quantization
from pelton.core.errors import ConfigError
from pelton.layers.linear import Linear
from pelton.models import llama
from pelton.models.llama_config import Config
from pelton.quantization.format import WeightFormat
from pelton.quantization.int4 import (
    GROUP_SIZE,
    MAX_FEW_TOKENS,
    Int4Weight,
    dequantize_groups,
    quantize_groups,
)
from pelton.quantization.int8 import Int8Weight, quantize_rows, weight_limit
from pelton.quantization.onednn import OneDNNWeight, has_bfloat16_products
from pelton.quantization.plain import PlainWeight
from pelton.quantization.select import select_format, select_head_format
from tolerance import FLOAT32_ABS, FLOAT32_REL, assert_matches

FORMATS: dict[str, tuple[WeightFormat, torch.dtype]] = {
    "plain-float32": (PlainWeight, torch.float32),
    "plain-bfloat16": (PlainWeight, torch.bfloat16),
    "onednn-bfloat16": (OneDNNWeight, torch.bfloat16),
    "int4-float32": (partial(Int4Weight, for_many=PlainWeight), torch.float32),
    "int4-bfloat16": (partial(Int4Weight, for_many=PlainWeight), torch.bfloat16),
    "int4-onednn-bfloat16": (partial(Int4Weight, for_many=OneDNNWeight), torch.bfloat16),
}
CPU = torch.device("cpu")
TINY = Config(
    model_type="llama",
    num_layers=1,
    hidden_size=32,
    intermediate_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=32,
    max_context=16,
)


@pytest.mark.parametrize("num_tokens", [1, MAX_FEW_TOKENS, MAX_FEW_TOKENS + 1, 33])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", FORMATS)
def test_product_equals_that_of_the_dequantised_weight(name, has_bias, num_tokens) -> None:
    if "onednn" in name and not has_bfloat16_products():
        pytest.skip("oneDNN has no bfloat16 products on this CPU")
    make, dtype = FORMATS[name]
    weight = torch.randn(48, 96).to(dtype)
    bias = torch.randn(48).to(dtype) if has_bias else None
    x = torch.randn(num_tokens, 96).to(dtype)

    packed = make(weight, bias)

    reference = x.float() @ packed.dequantize().T
    if bias is not None:
        reference += bias.float()
    assert_matches(packed(x), reference, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_int8_product_is_that_of_both_sides_quantised(dtype, num_tokens) -> None:
    packed = Int8Weight(torch.randn(40, 64).to(dtype), None)
    x = torch.randn(num_tokens, 64).to(dtype)

    out = packed(x)

    integers, scales = quantize_rows(x)
    assert_matches(out, (integers.float() * scales[:, None]) @ packed.dequantize().T, dtype)


def test_int8_rows_do_not_depend_on_the_batch() -> None:
    packed = Int8Weight(torch.randn(48, 64), None)
    x = torch.randn(9, 64) * torch.logspace(-3, 3, 9)[:, None]

    together = packed(x)

    assert torch.equal(together, torch.cat([packed(row[None]) for row in x]))


@pytest.mark.parametrize("make", [Int8Weight, partial(Int4Weight, for_many=PlainWeight)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("num_tokens", [3, 9])
def test_what_is_not_finite_stays_so(make, bad, num_tokens) -> None:
    packed = make(torch.randn(32, 32), None)
    x = torch.randn(num_tokens, 32)
    x[1, 5] = bad

    is_finite = packed(x).isfinite().all(dim=1)

    assert is_finite.tolist() == [row != 1 for row in range(num_tokens)]


def test_int8_error_is_half_a_step() -> None:
    weight = torch.randn(16, 32)

    error = (Int8Weight(weight, None).dequantize() - weight).abs()

    highest = weight.abs().amax(dim=1, keepdim=True)
    assert (error <= highest / weight_limit() * 0.501).all()


def test_int8_sums_of_the_largest_products_are_exact() -> None:
    """They are what a processor that adds pairs in 16 bits would saturate at."""
    weight = torch.full((16, 512), 3.0)
    weight[::2, ::3] = -3.0
    packed = Int8Weight(weight, None)
    x = torch.full((5, 512), -7.0)
    x[2:] = 7.0

    assert_matches(packed(x), x @ weight.T, torch.float32)


def test_int8_takes_rows_of_zeros() -> None:
    packed = Int8Weight(torch.zeros(16, 32), None)

    assert torch.equal(packed(torch.zeros(2, 32)), torch.zeros(2, 16))


def test_int4_keeps_weights_that_are_on_its_grid() -> None:
    integers = torch.randint(0, 16, (16, 64))
    integers[:, ::GROUP_SIZE], integers[:, 1::GROUP_SIZE] = 0, 15
    scales, middles = torch.rand(16, 2) + 0.5, torch.randn(16, 2)
    weight = dequantize_groups(integers, scales, middles)

    restored = dequantize_groups(*quantize_groups(weight, torch.float32))

    torch.testing.assert_close(restored, weight, rtol=FLOAT32_REL, atol=FLOAT32_ABS)


@pytest.mark.parametrize("shape", [(24, 64), (32, 48)])
def test_int4_refuses_sizes_its_kernel_does_not_take(shape) -> None:
    with pytest.raises(ConfigError, match=f"{shape[0]} x {shape[1]}. Use int8"):
        Int4Weight(torch.randn(shape), None, PlainWeight)


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_quantised_products_on_a_gpu_are_refused(quantization) -> None:
    with pytest.raises(ConfigError, match="CPU only") as error:
        select_format(quantization, torch.bfloat16, torch.device("cuda"))
    assert error.value.param == "quantization"


def test_formats_by_device_and_dtype() -> None:
    assert select_format(Quantization.NONE, torch.float32, CPU) is PlainWeight
    assert select_format(Quantization.NONE, torch.bfloat16, torch.device("cuda")) is PlainWeight
    assert select_format(Quantization.INT8, torch.bfloat16, CPU) is Int8Weight
    assert select_head_format(Quantization.INT4, torch.bfloat16, CPU) is Int8Weight
    assert select_head_format(Quantization.NONE, torch.float32, CPU) is PlainWeight


def test_the_head_has_a_format_of_its_own() -> None:
    model = llama.Model(TINY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)

    model.pack(PlainWeight, Int8Weight)

    kinds = {name: type(module._packed) for name, module in linears(model)}
    assert kinds.pop("head") is Int8Weight
    assert set(kinds.values()) == {PlainWeight}


def linears(model: llama.Model) -> list[tuple[str, Linear]]:
    return [item for item in model.named_modules() if isinstance(item[1], Linear)]
