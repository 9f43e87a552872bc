# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 against transformers, from saved checkpoints, and itself however it is cut."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_request, run, tokens_of
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from pelton.core.clock import ManualClock
from pelton.core.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    ExecutorConfig,
    KVCacheDType,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from pelton.core.errors import CheckpointError, ConfigError
from pelton.engine.engine import Engine
from pelton.engine.factory import LoadVocabulary, make_engine
from pelton.models.deepseek_v3_config import Config
from tolerance import LOGIT_ABS

LENGTHS = (1, 5, 16, 17, 40, 163, 300)
NUM_NEW, HIDDEN, EXPERTS, BLOCK = 8, 192, 8, 128
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.1,
    # An origin that prompts go past, and a softmax scale that YaRN changes.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    },
}


@dataclass
class Tiny:
    folder: Path
    reference: DeepseekV3ForCausalLM
    """On the very values that the checkpoint holds."""


def make_reference() -> DeepseekV3ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = DeepseekV3Config(**SIZES, attn_implementation="eager")
        model = DeepseekV3ForCausalLM(config).eval()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def save_plain(folder: Path) -> Tiny:
    model = make_reference()
    model.save_pretrained(folder)
    return Tiny(folder, model)


def save_fp8(folder: Path) -> Tiny:
    """The published layout: e4m3 weights and their blocks' scales in place of each product's."""
    tiny = save_plain(folder)
    file = folder / "model.safetensors"
    state = load_file(file)
    for name in [name for name in state if "_proj" in name and name.endswith(".weight")]:
        weight = state[name]
        blocks = torch.zeros(-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK))
        values = torch.empty_like(weight)
        quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for row in range(blocks.shape[0]):
            for column in range(blocks.shape[1]):
                part = (slice(row * BLOCK, (row + 1) * BLOCK),
                        slice(column * BLOCK, (column + 1) * BLOCK))  # fmt: skip
                scale = weight[part].abs().max() / 448
                blocks[row, column] = scale
                quantized[part] = (weight[part] / scale).to(torch.float8_e4m3fn)
                values[part] = quantized[part].float() * scale
        state[name], state[name + "_scale_inv"] = quantized, blocks
        set_weight(tiny.reference, name, values)
    save_file(state, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return tiny


def set_weight(model: DeepseekV3ForCausalLM, name: str, values: torch.Tensor) -> None:
    """transformers stacks the experts that the checkpoint has one by one."""
    if ".experts." not in name:
        model.get_parameter(name).data.copy_(values)
        return
    prefix, _, rest = name.partition(".experts.")
    expert, kind, _ = rest.split(".")
    experts = model.get_submodule(prefix + ".experts")
    stacked = experts.down_proj if kind == "down_proj" else experts.gate_up_proj
    rows = slice(0, None) if kind == "down_proj" else slice(0, 128)
    if kind == "up_proj":
        rows = slice(128, 256)
    stacked.data[int(expert), rows] = values


@pytest.fixture(scope="module", params=[save_plain, save_fp8], ids=["plain", "fp8"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return request.param(tmp_path_factory.mktemp("deepseek"))


def engine_of(
    tiny: Tiny,
    *,
    speculative: str = "off",
    load_vocabulary: LoadVocabulary | None = None,
    **overrides: Any,
) -> Engine:
    scheduler = {"max_num_requests": 8, "max_num_batched_tokens": 64, "overlap": False}
    cache = {"block_size": 4, "num_blocks": 500, "prefix_cache": True}
    for name, value in overrides.items():
        (scheduler if name in scheduler else cache)[name] = value
    config = EngineConfig(
        model=ModelConfig(model=str(tiny.folder), dtype=DType.FLOAT32, max_model_len=320),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**scheduler),
        executor=ExecutorConfig(device=Device.CPU, num_threads=1),
        speculative=SpeculativeConfig(speculative=speculative),
    )
    engine = make_engine(config, ManualClock(), load_vocabulary=load_vocabulary)
    for pool in engine._executor.caches:
        pool.fill_(float("nan"))
    return engine


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = random.Random(3)
    text = [source.randrange(211) for _ in range(300)]
    return [text[:length] for length in LENGTHS]


def make_requests(prompts: list[list[int]], **sampling: Any) -> list:
    sampling = {"max_tokens": NUM_NEW, **sampling}
    return [make_request(str(index), prompt, **sampling) for index, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(tiny: Tiny, prompts: list[list[int]]) -> dict[tuple[str, int], list[int]]:
    """Each prompt continued greedily by transformers, alone."""
    tokens = {}
    for index, prompt in enumerate(prompts):
        ids = list(prompt)
        for _ in range(NUM_NEW):
            with torch.no_grad():
                logits = tiny.reference(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
        tokens[str(index), 0] = ids[len(prompt) :]
    return tokens


def check_prompt_logprobs(tiny: Tiny, prompts: list[list[int]], budget: int) -> None:
    requests = make_requests(prompts[-2:], max_tokens=1, prompt_logprobs=0)

    outputs = run(engine_of(tiny, max_num_batched_tokens=budget), requests)

    for index, prompt in enumerate(prompts[-2:]):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            reference = tiny.reference(ids, use_cache=False).logits[0].log_softmax(dim=-1)
        wanted = reference[:-1].gather(1, ids[0, 1:, None])[:, 0]
        got = [entry.logprob for entry in outputs[str(index), 0].prompt_logprobs[1:]]
        torch.testing.assert_close(torch.tensor(got), wanted, rtol=0, atol=LOGIT_ABS)


def test_prompt_logprobs_equal_transformers(tiny, prompts) -> None:
    check_prompt_logprobs(tiny, prompts, 37)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"max_num_requests": 1}, {"max_num_batched_tokens": 13}, {"overlap": True}],
    ids=["batch", "one by one", "chunks", "overlap"],
)
def test_greedy_tokens_equal_transformers(tiny, prompts, expected, overrides) -> None:
    assert tokens_of(run(engine_of(tiny, **overrides), make_requests(prompts))) == expected


@pytest.mark.parametrize("budget", [13, 37, 64, 400])
def test_unabsorbed_chunks_equal_transformers(
    tiny, prompts, expected, budget, parts_of_prefixes
) -> None:
    engine = engine_of(tiny, max_num_batched_tokens=budget)

    cold = run(engine, make_requests(prompts))
    warm = run(engine, make_requests(prompts))

    assert tokens_of(cold) == tokens_of(warm) == expected
    assert max(parts_of_prefixes) >= 5


@pytest.mark.parametrize("budget", [37, 512])
def test_unabsorbed_prompt_logprobs_equal_transformers(
    tiny, prompts, budget, parts_of_prefixes
) -> None:
    check_prompt_logprobs(tiny, prompts, budget)

    assert (max(parts_of_prefixes) >= 5) == (budget < 300)


def test_prefix_hits_change_nothing(tiny, prompts, expected) -> None:
    engine = engine_of(tiny)
    cold = run(engine, make_requests(prompts))

    warm = run(engine, make_requests(prompts))

    assert tokens_of(cold) == tokens_of(warm) == expected
    assert warm[str(len(prompts) - 1), 0].num_cached_tokens >= 296


def test_preemption_changes_nothing(tiny) -> None:
    check_preemption(tiny)


def test_preemption_changes_nothing_unabsorbed(tiny, parts_of_prefixes) -> None:
    check_preemption(tiny)

    assert max(parts_of_prefixes) >= 1


def check_preemption(tiny: Tiny) -> None:
    prompts = [[(7 * row + 3 * place) % 211 for place in range(16)] for row in range(7)]
    requests = make_requests(prompts, max_tokens=20)
    undisturbed = run(engine_of(tiny), requests)
    engine = engine_of(tiny, num_blocks=85, prefix_cache=False)
    held = [engine.add(make_request("long", [1] * 236, max_tokens=20))]

    outputs = run(engine, requests)

    assert held == [None]
    assert engine.stats().preemptions_total >= 1
    del outputs["long", 0]
    assert tokens_of(outputs) == tokens_of(undisturbed)


def test_latents_are_not_kept_in_fp8(tiny) -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8 .* caches latents.* use auto"):
        engine_of(tiny, kv_cache_dtype=KVCacheDType.FP8)


def test_geometry_counts_parameters_and_latents(tiny) -> None:
    config = Config.from_hf(json.loads((tiny.folder / "config.json").read_text()))
    counted = sum(parameter.numel() for parameter in tiny.reference.parameters())
    biases = (config.num_layers - config.num_dense_layers) * EXPERTS

    geometry = config.geometry()

    assert geometry.num_parameters == counted + biases
    [group] = geometry.kv_groups
    assert group.block_bytes(16, 2) == 16 * 3 * (32 + 16) * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "n_group.*divisor of n_routed_experts"),
        ({"topk_group": 5}, "topk_group.*at most n_group"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok.*at most 4"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"topk_method": "greedy"}, "topk_method.*noaux_tc"),
    ],
)
def test_what_is_not_implemented_is_refused(changes, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        Config.from_hf({**SIZES, **changes})


def test_experts_in_other_fp8_layouts_are_refused() -> None:
    config = Config.from_hf({**SIZES, "quantization_config": {"quant_method": "fp8"}})

    with pytest.raises(CheckpointError, match=r"scale a tensor.*weight_block_size \[128, 128\]"):
        config.expert_fp8(1)
