# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every family with random weights, and what engines that run them say."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from pelton.core.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    Quantization,
    SchedulerConfig,
)
from pelton.core.request import GenerateRequest, RequestOutput, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.factory import LoadModel, make_engine
from pelton.models.geometries import GEOMETRIES
from pelton.models.random_weights import make_random_model
from pelton.quantization.plain import PlainWeight
from pelton.quantization.select import select_float32_format, select_head_format

VOCAB = 1000
_SMALL = {"hidden_size": 256, "vocab_size": VOCAB, "max_position_embeddings": 512}
LLAMA = {
    **GEOMETRIES["llama-3.1-8b"],
    **_SMALL,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
GPT_OSS = {
    **GEOMETRIES["gpt-oss-20b"],
    **_SMALL,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 16,
    "sliding_window": 24,
}
FP8_DEEPSEEK = {
    **GEOMETRIES["deepseek-v3"],
    **_SMALL,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 32,
}
DEEPSEEK = {**FP8_DEEPSEEK, "quantization_config": None}
CONFIG = EngineConfig(
    model=ModelConfig(model="tiny", dtype=DType.FLOAT32),
    cache=CacheConfig(num_blocks=400),
    scheduler=SchedulerConfig(max_num_requests=24, max_num_batched_tokens=256, overlap=True),
    # Other tests run beside this one.
    executor=ExecutorConfig(cuda_graphs=True, num_threads=2),
)
LENGTHS = [1, 15, 16, 17, 40, 100, 64, 65, 300]


def load_from(geometry: Mapping[str, Any], *, has_mtp: bool = False, gain: float = 1) -> LoadModel:
    """Drawn on the CPU in float32, so that they are the same on every device and in every format
    but for its rounding. `gain`: of the matrices, where outputs would be too much alike. The MTP
    layer, if any, has weights of its own besides."""

    def make(dtype: torch.dtype, has_mtp: bool) -> Any:
        return make_random_model("tiny", geometry, torch.device("cpu"), dtype, has_mtp=has_mtp)

    def load(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
        model, found = make(torch.float32, has_mtp)
        if has_mtp:
            model.load_state_dict(make(torch.float32, False)[0].state_dict(), strict=False)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_matrix = parameter.dim() > 1 and parameter.itemsize > 1
                if name.endswith("_scale") or is_matrix:
                    parameter.mul_(gain)
        if dtype is not torch.float32:
            exact, (model, found) = model, make(dtype, has_mtp)
            model.load_state_dict(exact.state_dict())
        model.to(device).pack(
            PlainWeight,
            select_head_format(Quantization.NONE, dtype, device),
            select_float32_format(Quantization.NONE, dtype, device),
        )
        return model, found

    return load


LOADS: dict[str, LoadModel] = {
    "llama": load_from(LLAMA),
    "gpt-oss": load_from(GPT_OSS, gain=5),
    "deepseek": load_from(DEEPSEEK, gain=4),
}


def make_requests(
    lengths: list[int] = LENGTHS, *, vocab_size: int = VOCAB, **sampling: object
) -> list[GenerateRequest]:
    source = random.Random(5)
    params = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True, **sampling}
    return [
        GenerateRequest(
            request_id=str(index),
            prompt_token_ids=[source.randrange(vocab_size) for _ in range(length)],
            sampling=SamplingParams(**params),
            seed=index,
        )
        for index, length in enumerate(lengths)
    ]


def run(
    engine: Engine, requests: list[GenerateRequest], see: Callable[[RequestOutput], object]
) -> None:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            see(output)


def generate(engine: Engine, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    run(engine, requests, lambda output: tokens[output.request_id].extend(output.token_ids))
    return tokens


def check_replays(engine: Engine, requests: list[GenerateRequest]) -> int:
    """Every step that has a graph eagerly and from it, on the same padded batch: logits, tokens and
    the KV cache are the same bits. Returns the rows of the largest step of decodes alone."""
    runner: Any = engine._executor
    replay = runner.decode_step
    assert replay != runner.decode_eagerly
    sizes: dict[bool, list[int]] = {True: [], False: []}

    def compare(inputs: Any) -> Any:
        batch = inputs.batch
        eager = runner.decode_eagerly(inputs)
        # As integers: memory that was never written may hold a NaN, which equals nothing.
        cache = batch.groups[0].cache[1:].view(torch.uint8)
        cache_before = cache.clone()
        replayed = replay(inputs)
        count = len(inputs.sample_rows)
        assert eager.is_finite[:count].all()
        assert torch.equal(eager.logits[:count], replayed.logits[:count])
        assert torch.equal(eager.token_ids[:count], replayed.token_ids[:count])
        assert torch.equal(cache, cache_before)
        sizes[inputs.row_len > 0].append(batch.num_rows)
        return replayed

    runner.decode_step = compare
    generate(engine, requests)
    # Alone, a prompt makes a step that is small enough for a graph.
    generate(engine, requests[-1:])
    runner.decode_step = replay
    assert len(sizes[True]) >= 25
    assert sizes[False]
    return max(sizes[True])


def eager_and_alone(config: EngineConfig) -> EngineConfig:
    """One request at a time, each step finished before the next."""
    return replace(
        config,
        scheduler=SchedulerConfig(max_num_requests=1, max_num_batched_tokens=512, overlap=False),
        executor=replace(config.executor, cuda_graphs=False),
    )


def prompt_logprobs(device: Device, load: LoadModel) -> torch.Tensor:
    """Of all prompt tokens but the first of each."""
    engine = make_engine(
        replace(CONFIG, executor=replace(CONFIG.executor, device=device)), load=load
    )
    found: dict[str, list[float]] = {}

    def see(output: RequestOutput) -> None:
        found[output.request_id] = [entry.logprob for entry in output.prompt_logprobs[1:]]

    requests = make_requests(max_tokens=1, prompt_logprobs=0)
    run(engine, requests, see)
    return torch.tensor([value for request in requests for value in found[request.request_id]])
