# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS against transformers, from saved checkpoints, and against itself however work is cut."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import RoundingCache, make_request, run, tokens_of
from transformers import GptOssConfig, GptOssForCausalLM

from moe_cases import dequantize_by_hand
from pelton.core.clock import ManualClock
from pelton.core.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    ExecutorConfig,
    KVCacheDType,
    ModelConfig,
    Quantization,
    SchedulerConfig,
)
from pelton.core.errors import CheckpointError, ConfigError
from pelton.core.geometry import ModelGeometry
from pelton.engine.engine import Engine
from pelton.engine.factory import load_model, make_engine
from pelton.models.language_model import LanguageModel
from tolerance import FP8_KV_LOGPROB, LOGIT_ABS

WINDOW, LAYERS, EXPERTS, HIDDEN, FFN = 13, 4, 6, 64, 32
LENGTHS = (1, 5, 12, 13, 14, 40, 163, 300)
NUM_NEW = 8
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
    # A limit that clamps, and an origin that prompts go past.
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}


@dataclass
class TinyGptOss:
    folder: Path
    reference: GptOssForCausalLM
    """On the very values that the checkpoint holds."""


def make_reference() -> GptOssForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GptOssForCausalLM(GptOssConfig(**SIZES, attn_implementation="eager")).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or name.endswith("sinks"):
                torch.nn.init.normal_(parameter, std=0.5)
    return model


def save_plain(folder: Path) -> TinyGptOss:
    model = make_reference()
    model.save_pretrained(folder)
    return TinyGptOss(folder, model)


def save_mxfp4(folder: Path) -> TinyGptOss:
    """The published layout: blocks and scales in place of the experts' two weights."""
    model = make_reference()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    state = load_file(file)
    generator = torch.Generator().manual_seed(1)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts."
        experts = model.model.layers[layer].mlp.experts
        for name, rows, columns in (
            ("gate_up_proj", 2 * FFN, HIDDEN), ("down_proj", HIDDEN, FFN),
        ):  # fmt: skip
            shape = EXPERTS, rows, columns // 32
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
            state[prefix + name + "_blocks"] = blocks
            state[prefix + name + "_scales"] = scales
            del state[prefix + name]
            values = dequantize_by_hand(blocks, scales).float()
            getattr(experts, name).data.copy_(values.transpose(1, 2))
    save_file(state, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return TinyGptOss(folder, model)


@pytest.fixture(scope="module", params=[save_plain, save_mxfp4], ids=["plain", "mxfp4"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyGptOss:
    return request.param(tmp_path_factory.mktemp("gpt_oss"))


def engine_of(tiny: TinyGptOss, **overrides: Any) -> Engine:
    scheduler = {"max_num_requests": 8, "max_num_batched_tokens": 64, "overlap": False}
    cache = {"block_size": 4, "num_blocks": 500, "prefix_cache": True}
    for name, value in overrides.items():
        (scheduler if name in scheduler else cache)[name] = value
    config = EngineConfig(
        model=ModelConfig(model=str(tiny.folder), dtype=DType.FLOAT32, max_model_len=320),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**scheduler),
        executor=ExecutorConfig(device=Device.CPU, num_threads=1),
    )

    def load(
        node: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> tuple[LanguageModel, ModelGeometry]:
        return load_model(node, device, dtype)

    engine = make_engine(config, ManualClock(), load=load)
    for pool in engine._executor.caches:
        pool.fill_(float("nan"))
    return engine


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    text = [rng.randrange(211) for _ in range(300)]
    return [text[:length] for length in LENGTHS]


def make_requests(prompts: list[list[int]], **sampling: Any) -> list:
    sampling = {"max_tokens": NUM_NEW, **sampling}
    return [make_request(str(index), prompt, **sampling) for index, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(tiny: TinyGptOss, prompts: list[list[int]]) -> dict[tuple[str, int], list[int]]:
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


def test_prompt_logprobs_equal_transformers(tiny, prompts) -> None:
    requests = make_requests(prompts[-2:], max_tokens=1, prompt_logprobs=0)

    outputs = run(engine_of(tiny, max_num_batched_tokens=37), requests)

    for index, prompt in enumerate(prompts[-2:]):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            reference = tiny.reference(ids, use_cache=False).logits[0].log_softmax(dim=-1)
        wanted = reference[:-1].gather(1, ids[0, 1:, None])[:, 0]
        logprobs = outputs[str(index), 0].prompt_logprobs
        got = [entry.logprob for entry in logprobs[1:]]
        torch.testing.assert_close(torch.tensor(got), wanted, rtol=0, atol=LOGIT_ABS)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"max_num_requests": 1}, {"max_num_batched_tokens": 13}, {"overlap": True}],
    ids=["batch", "one by one", "chunks", "overlap"],
)
def test_greedy_tokens_equal_transformers(tiny, prompts, expected, overrides) -> None:
    assert tokens_of(run(engine_of(tiny, **overrides), make_requests(prompts))) == expected


def test_prefix_hits_and_a_second_pass(tiny, prompts, expected) -> None:
    engine = engine_of(tiny)
    cold = run(engine, make_requests(prompts))

    warm = run(engine, make_requests(prompts))

    assert tokens_of(cold) == tokens_of(warm) == expected
    assert warm["7", 0].num_cached_tokens == 296
    assert warm["5", 0].num_cached_tokens == 36


def test_preemption(tiny, prompts) -> None:
    requests = make_requests([[*prompts[5][:16], index] for index in range(7)], max_tokens=60)
    undisturbed = run(engine_of(tiny), requests)
    engine = engine_of(tiny, num_blocks=82, prefix_cache=False)

    outputs = run(engine, requests)

    assert engine.stats().preemptions_total >= 3
    assert tokens_of(outputs) == tokens_of(undisturbed)


def test_tokens_with_an_fp8_cache_do_not_depend_on_how_work_is_cut(tiny, prompts) -> None:
    requests = make_requests(prompts)
    alone = engine_of(tiny, kv_cache_dtype=KVCacheDType.FP8, max_num_requests=1)
    assert {pool.dtype for pool in alone._executor.caches} == {torch.float8_e4m3fn}
    expected = tokens_of(run(alone, requests))
    assert tokens_of(run(alone, requests)) == expected  # from cached prefixes

    batch = engine_of(tiny, kv_cache_dtype=KVCacheDType.FP8, overlap=True)
    chunks = engine_of(tiny, kv_cache_dtype=KVCacheDType.FP8, max_num_batched_tokens=13)
    small = engine_of(tiny, kv_cache_dtype=KVCacheDType.FP8, num_blocks=82, prefix_cache=False)

    assert tokens_of(run(batch, requests)) == expected
    assert tokens_of(run(chunks, requests)) == expected
    assert tokens_of(run(small, requests)) == expected


def test_logprobs_with_an_fp8_cache_are_those_of_rounded_keys_and_values(tiny, prompts) -> None:
    found = {}
    for kv_cache_dtype in (KVCacheDType.AUTO, KVCacheDType.FP8):
        requests = make_requests(prompts[-2:], max_tokens=1, prompt_logprobs=0)
        outputs = run(engine_of(tiny, kv_cache_dtype=kv_cache_dtype), requests)
        found[kv_cache_dtype] = torch.tensor(
            [e.logprob for i in "01" for e in outputs[i, 0].prompt_logprobs[1:]]
        )

    ids = torch.tensor([prompts[-2]])
    cache = RoundingCache([(1.0, 1.0)] * LAYERS)
    with torch.no_grad():
        reference = tiny.reference(ids, cache=cache, use_cache=True).logits[0].log_softmax(dim=-1)
    wanted = reference[:-1].gather(1, ids[0, 1:, None])[:, 0]
    error = (found[KVCacheDType.FP8][: len(wanted)] - wanted).abs()
    # A key that another order of sums rounds to the next e4m3 number shows from there on.
    assert error.quantile(0.5) <= LOGIT_ABS
    distance = (found[KVCacheDType.FP8] - found[KVCacheDType.AUTO]).abs().mean()

    assert 0 < distance <= FP8_KV_LOGPROB


def test_parameters_are_counted(tiny) -> None:
    model, geometry = load_model(
        ModelConfig(model=str(tiny.folder)), torch.device("cpu"), torch.float32
    )

    counted = sum(parameter.numel() for parameter in tiny.reference.parameters())
    assert geometry.num_parameters == counted
    assert [group.layers for group in geometry.kv_groups] == [(0, 2), (1, 3)]
    assert [group.window for group in geometry.kv_groups] == [WINDOW, 0]
    del model


def test_mxfp4_experts_stay_in_four_bits(tmp_path: Path) -> None:
    tiny = save_mxfp4(tmp_path)

    model, _ = load_model(ModelConfig(model=str(tiny.folder)), torch.device("cpu"), torch.float32)

    state = load_file(tiny.folder / "model.safetensors")
    experts = model.blocks[2].moe.experts
    prefix = "model.layers.2.mlp.experts."
    assert torch.equal(experts.gate_up_blocks, state[prefix + "gate_up_proj_blocks"])
    assert torch.equal(experts.down_scales, state[prefix + "down_proj_scales"])
    per_layer = EXPERTS * 3 * FFN * HIDDEN * 17 // 32
    held = sum(p.nbytes for p in experts.parameters() if p.dtype is torch.uint8)
    assert held == per_layer


@pytest.fixture
def plain_copy(tmp_path: Path) -> Path:
    return save_plain(tmp_path).folder


def load_changed(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    load_model(ModelConfig(model=str(folder)), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "'awq' .* supported one is 'mxfp4'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "lacks 16 .*gate_up_proj_blocks"),
        ({"layer_types": ["full_attention"]}, "layer_types .* a list of 4"),
        ({"num_experts_per_tok": 7}, r"at most num_local_experts \(6\)"),
        ({"hidden_act": "gelu"}, "hidden_act .* 'silu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_supported_is_named(plain_copy, changes, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_changed(plain_copy, **changes)


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_experts_are_not_quantised_while_loading(plain_copy, quantization) -> None:
    config = ModelConfig(model=str(plain_copy), quantization=quantization)

    with pytest.raises(ConfigError, match=r"--quantization .* experts .* use none"):
        load_model(config, torch.device("cpu"), torch.float32)
