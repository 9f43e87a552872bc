# SPDX-License-Identifier: Apache-2.0
from collections import Counter

import pytest
import torch

from pelton.core.config import KVCacheDType, ModelConfig, SpeculativeConfig
from pelton.core.errors import ConfigError
from pelton.core.request import SamplingParams
from pelton.engine import factory
from pelton.engine.factory import load_model
from pelton.engine.step_cost import step_costs
from pelton.kernels.moe.expert_product.cost import num_distinct_experts
from pelton.kernels.moe.mxfp4_product.reference import dequantize_mxfp4
from pelton.models import geometries
from pelton.models.deepseek_v3_config import Config as DeepseekV3Config
from pelton.models.geometries import GEOMETRIES, find_geometry
from pelton.models.random_weights import make_random_model, measure_router_spread
from pelton.models.registry import find_architecture
from pelton.quantization.plain import PlainWeight
from pelton.serving.llm import LLM

TINY = {
    **GEOMETRIES["llama-3.1-8b"],
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("llama-3.1-8b", 8030),
        ("llama-3.1-8b-fp8", 8030),
        ("llama-3.1-70b", 70553),
        ("llama-3.1-70b-fp8", 70553),
        ("llama-3.1-405b", 405853),
        ("llama-3.1-405b-fp8", 405853),
        ("smollm2-135m", 134),
        ("deepseek-v3", 671026),
        ("gpt-oss-20b", 20914),
        ("gpt-oss-120b", 116829),
    ],
    ids=str,
)
def test_geometries_have_the_parameters_of_their_namesakes(name: str, millions: int) -> None:
    config = find_geometry(name)
    geometry = find_architecture(config).config_from_hf(config).geometry(name)

    assert geometry.num_parameters // 10**6 == millions


def test_weights_are_random_normal_and_norms_one() -> None:
    model, geometry = make_random_model("tiny", TINY, torch.device("cpu"), torch.bfloat16)

    parameters = dict(model.named_parameters())
    matrix = parameters["blocks.1.mlp.down.weight"].float()
    assert matrix.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(matrix.mean().item()) < 1e-3
    assert (parameters["blocks.0.mlp_norm.weight"] == 1).all()
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    assert geometry.name == "tiny (random weights)"


def test_the_seed_decides_the_weights() -> None:
    def first_weight(seed: int) -> torch.Tensor:
        model, _ = make_random_model("tiny", TINY, torch.device("cpu"), torch.float32, seed)
        return model.state_dict()["blocks.0.mlp.down.weight"]

    assert torch.equal(first_weight(1), first_weight(1))
    assert not torch.equal(first_weight(1), first_weight(2))


TINY_GPT_OSS = {
    **GEOMETRIES["gpt-oss-120b"],
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 32,
    "vocab_size": 512,
}


def test_experts_are_drawn_in_mxfp4_at_the_size_of_other_weights() -> None:
    model, geometry = make_random_model("tiny", TINY_GPT_OSS, torch.device("cpu"), torch.bfloat16)

    experts = model.blocks[1].moe.experts
    assert experts.gate_up_blocks.dtype is torch.uint8
    for blocks, scales in (
        (experts.gate_up_blocks, experts.gate_up_scales),
        (experts.down_blocks, experts.down_scales),
    ):
        weight = dequantize_mxfp4(blocks, scales)
        assert weight.std().item() == pytest.approx(0.018, rel=0.05)
    assert all(p.isfinite().all() for p in model.parameters() if p.is_floating_point())
    assert geometry.name == "tiny (random weights)"


def test_routing_is_neither_uniform_nor_collapsed() -> None:
    config = {**TINY_GPT_OSS, "hidden_size": 2880, "num_local_experts": 128}
    model, _ = make_random_model("tiny", config, torch.device("cpu"), torch.bfloat16)
    dense, _ = make_random_model("tiny", TINY, torch.device("cpu"), torch.bfloat16)

    spread = measure_router_spread(model)

    assert spread is not None
    assert 1.5 < spread.busiest < 8
    assert spread.idle < 0.1
    assert measure_router_spread(dense) is None


@pytest.mark.parametrize("name", ["llama-3.1-70b-fp8", "llama-3.1-405b-fp8"])
def test_dense_models_are_drawn_in_fp8_where_their_checkpoints_are(name: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 16}
    config = {**GEOMETRIES[name], **sizes, "num_hidden_layers": 2, "vocab_size": 512}

    model, _ = make_random_model("tiny", config, torch.device("cpu"), torch.bfloat16)

    parameters = dict(model.named_parameters())
    up = "blocks.1.mlp.gate_up"
    scaled = parameters[f"{up}.weight"].float() * parameters[f"{up}.weight_scale"].float()
    assert scaled.std().item() == pytest.approx(0.02, rel=0.05)
    attention = parameters["blocks.1.attention.qkv.weight"]
    is_fbgemm = name.startswith("llama-3.1-405b")
    assert attention.dtype is (torch.bfloat16 if is_fbgemm else torch.float8_e4m3fn)
    assert (parameters["blocks.0.mlp.down.weight"].dtype is torch.bfloat16) == is_fbgemm
    assert all(p.isfinite().all() for p in parameters.values() if p.itemsize > 1)


@pytest.mark.parametrize(
    "options", [{"kv_cache_dtype": KVCacheDType.FP8}, {"speculative": "mtp:1"}]
)
def test_what_a_geometry_cannot_do_is_refused_before_weights_are_drawn(
    options, monkeypatch
) -> None:
    monkeypatch.setattr(factory, "make_random_model", lambda *_, **__: pytest.fail("it drew"))
    name = "deepseek-v3" if "kv_cache_dtype" in options else "gpt-oss-20b"
    if "speculative" in options:
        options = {"speculative": SpeculativeConfig(**options)}

    with pytest.raises(ConfigError, match=r"use auto|needs a model with an MTP layer"):
        load_model(ModelConfig(random_weights=name), torch.device("cpu"), torch.bfloat16, **options)


def load(**settings: object) -> None:
    load_model(ModelConfig(**settings), torch.device("cpu"), torch.bfloat16)  # type: ignore[arg-type]


def test_a_geometry_is_cut_to_its_first_layers() -> None:
    config = ModelConfig(random_weights="smollm2-135m", layers=2)

    model, geometry = load_model(config, torch.device("cpu"), torch.bfloat16)

    assert len(model.blocks) == geometry.num_layers == 2
    assert geometry.name == config.label == "smollm2-135m (random weights)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"random_weights": "gpt-5"}, "--random-weights must be one of .*gpt-oss-20b.*'gpt-5'"),
        ({"random_weights": "smollm2-135m", "layers": 31}, "--layers must be at most 30"),
        ({"layers": 2}, "--layers cuts a geometry of --random-weights"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(**settings)


def test_a_geometry_may_run_behind_another_models_tokenizer(tiny_llama, monkeypatch) -> None:
    """Of a larger vocabulary: what the tokenizer has no text for decodes to nothing."""
    config = {**TINY_GPT_OSS, "vocab_size": 5000, "max_position_embeddings": 256}
    monkeypatch.setattr(geometries, "GEOMETRIES", {"tiny-oss": config})
    options = {"kv_memory_bytes": 2**24, "device": "cpu", "max_num_requests": 4}

    with LLM(str(tiny_llama.single), random_weights="tiny-oss", layers=1, **options) as llm:
        results = llm.generate(
            ["hello", "again"], SamplingParams(max_tokens=20, ignore_eos=True), progress=False
        )
        label = llm.config.model.label

    assert label == "tiny-oss (random weights)"
    assert [len(result.choices[0].token_ids) for result in results] == [20, 20]
    assert any(token >= 400 for result in results for token in result.choices[0].token_ids)


TINY_DEEPSEEK = {
    **GEOMETRIES["deepseek-v3"],
    "hidden_size": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "n_routed_experts": 64,
    "vocab_size": 512,
}


def test_deepseek_is_drawn_in_fp8_blocks_at_the_size_of_other_weights() -> None:
    model, _ = make_random_model("tiny", TINY_DEEPSEEK, torch.device("cpu"), torch.bfloat16)

    experts = model.blocks[1].mlp.experts
    assert experts.gate_up.dtype is torch.float8_e4m3fn
    spread = measure_router_spread(model)
    assert spread is not None
    assert 1.2 < spread.busiest < 12
    assert spread.idle < 0.5
    model.pack(PlainWeight)
    values = experts.down.float()
    assert values.std().item() == pytest.approx(0.02, rel=0.1)


def test_deepseeks_step_is_costed_in_its_own_format() -> None:
    """On `meta`, where nothing is allocated: every weight of the step is an FP8 one's byte."""
    architecture = find_architecture(TINY_DEEPSEEK)
    config = architecture.config_from_hf(TINY_DEEPSEEK)
    with torch.device("meta"):
        model = architecture.build(config)
    model.pack(PlainWeight)

    log = step_costs(
        model, config.geometry(), num_rows=8, new_tokens=1, context_len=100, block_size=16,
        kv_dtype=torch.float32,
    )  # fmt: skip

    calls = Counter(name for name, _ in log.entries)
    assert calls["fp8_gate_up_product"] == calls["fp8_down_product"] == calls["router_product"] == 2
    assert calls["latent_attention"] == calls["write_latent"] == 3
    assert calls["fp8_linear"] == 3 * (3 + 2)
    # All but what attention and experts give is quantised by the norm or the gate before.
    assert (calls["rms_norm_fp8"], calls["add_rms_norm_fp8"]) == (3, 2 * 3)
    assert (calls["silu_mul_fp8"], calls["quantize_fp8"]) == (3, 3 + 2)
    [down] = {cost.bytes for name, cost in log.entries if name == "fp8_down_product"}
    used = num_distinct_experts(8, TINY_DEEPSEEK["num_experts_per_tok"], 64)
    assert down == int(used * (128 * 256 + 8) + 64 * (128 + 4)) + 64 * 256 * 4


def test_a_long_row_is_costed_un_absorbed_with_its_prefix() -> None:
    geometry = {**TINY_DEEPSEEK, "kv_lora_rank": 512}
    architecture = find_architecture(geometry)
    config = architecture.config_from_hf(geometry)
    with torch.device("meta"):
        model = architecture.build(config)
    model.pack(PlainWeight)

    log = step_costs(
        model, config.geometry(), num_rows=2, new_tokens=70, context_len=80, block_size=16,
        kv_dtype=torch.float32,
    )  # fmt: skip

    calls = Counter(name for name, _ in log.entries)
    assert calls["latent_prefill"] == 2 * 3
    assert not {"latent_attention", "head_product"} & set(calls)
    made = [cost for name, cost in log.entries if name == "linear"][:2]
    assert [cost.flops for cost in made] == [2 * n * 512 * 4 * 256 for n in (192, 64)]


def test_drafts_are_costed_as_tokens_to_verify_and_runs_of_the_layer_that_makes_them() -> None:
    architecture = find_architecture(TINY_DEEPSEEK)
    config = DeepseekV3Config.from_hf(TINY_DEEPSEEK).with_mtp()
    with torch.device("meta"):
        model = architecture.build(config)
    model.pack(PlainWeight)

    log = step_costs(
        model, config.geometry(), num_rows=8, new_tokens=1, context_len=100, block_size=16,
        kv_dtype=torch.float32, num_drafts=2,
    )  # fmt: skip

    written = Counter(cost.bytes for name, cost in log.entries if name == "write_latent")
    ids = [cost.flops for name, cost in log.entries if name == "highest_logit"]
    per_token, rest = divmod(min(written), 8)
    assert rest == 0
    # Three layers and the MTP layer over 8 x 3 tokens, then one run of 8.
    assert written == {24 * per_token: 4, 8 * per_token: 1}
    vocab_size = TINY_DEEPSEEK["vocab_size"]
    assert ids == [24 * vocab_size, 8 * vocab_size, 8 * vocab_size]
