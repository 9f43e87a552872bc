# SPDX-License-Identifier: Apache-2.0
"""Random models of two layers in transformers and in Pelton, with the same weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from pelton.core.clock import ManualClock
from pelton.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pelton.core.geometry import ModelGeometry
from pelton.core.request import GenerateRequest, RequestOutput, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.factory import make_runner
from pelton.models import llama
from pelton.models.llama_config import Config
from pelton.models.loader import load_weights
from pelton.quantization.plain import PlainWeight

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = 13


def make_llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))


def make_tied_llama3() -> PreTrainedModel:
    config = LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE)
    return LlamaForCausalLM(config)


def make_biased_llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True))


def make_mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW))


def make_qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=False))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": make_llama,
    "llama3-rope-tied": make_tied_llama3,
    "llama-biased": make_biased_llama,
    "mistral-window": make_mistral,
    "qwen2": make_qwen2,
}


@dataclass
class StateCheckpoint:
    """A transformers model as the loader sees a checkpoint."""

    config: dict[str, object]
    state: dict[str, Tensor]
    name: str = "tiny"
    path: Path = Path("tiny")

    @property
    def tensor_names(self) -> list[str]:
        return list(self.state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.state[name].shape)

    def read(self, name: str) -> Tensor:
        return self.state[name]


class RoundingCache(DynamicCache):
    """What a cache in e4m3 gives back, of the keys and values that transformers computes."""

    def __init__(self, scales: Sequence[tuple[float, float]]) -> None:
        super().__init__()
        self._scales = scales

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        rounded = [
            (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            for x, scale in zip((keys, values), self._scales[layer], strict=True)
        ]
        return super().update(*rounded, layer, *args, **kwargs)


@dataclass
class TinyModel:
    reference: PreTrainedModel
    model: llama.Model
    geometry: ModelGeometry

    def make_engine(self, **overrides: object) -> Engine:
        """`overrides` name fields of the scheduler's and the cache's config."""
        scheduler = SchedulerConfig(max_num_requests=8, max_num_batched_tokens=64, overlap=False)
        cache = CacheConfig(block_size=4, num_blocks=300, kv_memory_bytes=1)
        for name, value in overrides.items():
            if hasattr(scheduler, name):
                scheduler = replace(scheduler, **{name: value})
            else:
                cache = replace(cache, **{name: value})
        config = EngineConfig(
            model=ModelConfig(model="tiny", max_model_len=128), cache=cache, scheduler=scheduler
        )
        device = torch.device("cpu")
        runner = make_runner(self.model, self.geometry, config, device, torch.float32)
        for pool in runner.caches:
            pool.fill_(float("nan"))
        return Engine(config, self.geometry, runner, ManualClock())


def make_tiny_model(family: str, seed: int = 0) -> TinyModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reference = FAMILIES[family]().eval()
        for name, parameter in reference.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
    hf_config = reference.config.to_dict()
    config = Config.from_hf(hf_config)
    state = reference.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    model = llama.Model(config)
    load_weights(model, llama.weights(config), StateCheckpoint(hf_config, state))
    model.pack(PlainWeight)
    return TinyModel(reference, model, config.geometry("tiny"))


def make_request(
    request_id: str, prompt: list[int], *, seed: int = 0, priority: int = 0, **sampling: object
) -> GenerateRequest:
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **sampling}
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
        priority=priority,
    )


def run(engine: Engine, requests: list[GenerateRequest]) -> dict[tuple[str, int], RequestOutput]:
    """All outputs, each choice's joined into one."""
    for request in requests:
        engine.add(request)
    joined: dict[tuple[str, int], RequestOutput] = {}
    while engine.has_work:
        for output in engine.step():
            key = output.request_id, output.index
            joined[key] = _join(joined[key], output) if key in joined else output
    return joined


def _join(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (first.logprobs or []) + (second.logprobs or [])
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
    )


def tokens_of(outputs: dict[tuple[str, int], RequestOutput]) -> dict[tuple[str, int], list[int]]:
    assert all(output.error is None for output in outputs.values()), outputs
    return {key: output.token_ids for key, output in outputs.items()}
