# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pelton.kernels.dispatch import forced_implementation
from pelton.kernels.silu_mul import silu_mul
from pelton.layers import norm as norm_module
from pelton.layers import rope as rope_module
from pelton.layers.embedding import Embedding
from pelton.layers.fp8_linear import FP8Linear
from pelton.layers.linear import Linear
from pelton.layers.norm import InputNorm, RMSNorm
from pelton.layers.rope import make_rope_table
from pelton.models.config_keys import ConfigKeys
from pelton.models.llama_config import Config
from pelton.quantization import fp8 as fp8_module
from pelton.quantization.fp8 import FP8Rows, plain_rows
from pelton.quantization.fp8_scheme import FP8Scheme, Granularity
from pelton.quantization.plain import PlainWeight
from tolerance import ANGLE_ABS, FLOAT32_ABS, assert_matches


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_table_equals_transformers(rope: dict[str, object]) -> None:
    hf_config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=8,
        max_position_embeddings=2048,
        rope_parameters=rope,
    )
    positions = torch.arange(2048)
    cos, sin = LlamaRotaryEmbedding(hf_config)(torch.empty(1, 1, 64), positions[None])
    config = Config.from_hf(hf_config.to_dict())

    table = make_rope_table(2048, 64, config.rope_theta, config.rope_factors)

    assert table.dtype is torch.float32
    # transformers multiplies in float32, which at position 2,047 is off by some 1e-4 radians.
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=0, atol=ANGLE_ABS)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=0, atol=ANGLE_ABS)


@pytest.mark.parametrize(
    "changes",
    [{}, {"truncate": False}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"attention_factor": 1.2}],
    ids=str,
)
def test_yarn_table_equals_transformers(changes: dict[str, object]) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 256,
        **changes,
    }
    hf_config = GptOssConfig(head_dim=64, max_position_embeddings=8192, rope_parameters=rope)
    positions = torch.arange(2048)
    cos, sin = GptOssRotaryEmbedding(hf_config)(torch.empty(1, 1, 64), positions[None])
    keys = ConfigKeys(hf_config.to_dict())

    table = make_rope_table(
        2048, 64, keys.rope_theta(), keys.yarn_factors(64), magnitude=keys.yarn_magnitude()
    )

    torch.testing.assert_close(table[:, :32], cos[0], rtol=0, atol=ANGLE_ABS)
    torch.testing.assert_close(table[:, 32:], sin[0], rtol=0, atol=ANGLE_ABS)


def test_rope_table_is_exact_far_out() -> None:
    table = make_rope_table(131072, 8, 10000.0)

    angle = torch.tensor(131071.0, dtype=torch.float64)
    assert table[-1, 0].item() == pytest.approx(angle.cos().item(), abs=FLOAT32_ABS)
    assert table[-1, 4].item() == pytest.approx(angle.sin().item(), abs=FLOAT32_ABS)


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_the_same_packed_and_not(has_bias: bool) -> None:
    layer = Linear(24, (8, 4, 4), has_bias=has_bias)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 24)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)

    before = layer(x)
    layer.pack(PlainWeight)

    assert torch.equal(before, expected)
    assert torch.equal(layer(x), expected)
    assert "weight" not in dict(layer.named_parameters())


@pytest.mark.parametrize("keeps_plain", [False, True])
@pytest.mark.parametrize("granularity", list(Granularity))
def test_norms_and_gates_quantise_for_the_product_behind_them(
    granularity, keeps_plain, monkeypatch
) -> None:
    """Where a device multiplies in FP8, as references do anywhere: the bits of doing it apart."""
    for module in (norm_module, fp8_module):
        monkeypatch.setattr(module, "computes_in_fp8", lambda device: True)
    bound = math.inf if granularity is Granularity.BLOCK else 1.5
    scheme = FP8Scheme(granularity=granularity, activation_bound=bound)
    linear = FP8Linear(300, (128, 9), scheme)
    linear.weight.copy_(torch.randn(137, 300).to(linear.weight.dtype))
    linear.weight_scale.copy_(torch.rand(linear.weight_scale.shape) + 0.1)
    norm = InputNorm(300, 1e-5, linear.fp8, keeps_plain=keeps_plain)
    torch.nn.init.normal_(norm.weight)
    x, residual = torch.randn(2, 5, 300)

    with forced_implementation("reference"):
        apart = norm(x), *norm.add(x, residual)
        norm.absorb()
        linear.pack(PlainWeight)
        together = norm(x), *norm.add(x, residual)

        assert torch.equal(together[2], apart[2])
        for rows, expected in zip(together[:2], apart[:2], strict=True):
            assert isinstance(rows, FP8Rows)
            assert torch.equal(linear(rows), linear(expected))
            if keeps_plain:
                assert torch.equal(plain_rows(rows), expected)
        gate_up = torch.randn(5, 600)
        assert torch.equal(linear.gated(gate_up), linear(silu_mul(gate_up)))
    if not keeps_plain:
        with pytest.raises(AssertionError, match="were not kept"):
            plain_rows(together[0])


def test_packing_a_tied_weight_leaves_its_owner() -> None:
    embedding = Embedding(10, 4)
    torch.nn.init.normal_(embedding.weight)
    head = Linear(4, (10,))
    head.weight = embedding.weight

    head.pack(PlainWeight)

    ids = torch.tensor([3, 9])
    assert torch.equal(embedding(ids), embedding.weight[ids])
    x = torch.randn(2, 4)
    assert torch.equal(head(x), x @ embedding.weight.T)


def test_norm_alone_is_the_norm_of_the_sum() -> None:
    norm = RMSNorm(32, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x, residual = torch.randn(5, 32), torch.randn(5, 32)

    normed, total = norm.add(x, residual)

    assert torch.equal(total, x + residual)
    assert_matches(normed, norm(x + residual), torch.float32)
    reference = torch.nn.functional.rms_norm(x + residual, (32,), norm.weight, 1e-5)
    assert_matches(normed, reference, torch.float32)


def test_a_rope_table_computed_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_rope_table(50, 16, 10000.0, [2.0] * 8, magnitude=1.5)
    monkeypatch.setattr(rope_module, "_CHUNK", 7)

    assert torch.equal(make_rope_table(50, 16, 10000.0, [2.0] * 8, magnitude=1.5), whole)
