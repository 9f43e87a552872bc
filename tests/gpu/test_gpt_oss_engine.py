# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS on a GPU: the engine against itself one request at a time, and against the CPU."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pelton.core.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    ExecutorConfig,
    KVCacheDType,
    ModelConfig,
    SchedulerConfig,
)
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.factory import make_engine
from pelton.models.geometries import GEOMETRIES
from pelton.models.random_weights import make_random_model
from tolerance import LOGIT_ABS

pytestmark = pytest.mark.gpu

TINY = {
    **GEOMETRIES["gpt-oss-20b"],
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 16,
    "sliding_window": 24,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
CONFIG = EngineConfig(
    model=ModelConfig(model="tiny", dtype=DType.FLOAT32),
    cache=CacheConfig(num_blocks=400),
    scheduler=SchedulerConfig(max_num_requests=24, max_num_batched_tokens=256, overlap=True),
    executor=ExecutorConfig(cuda_graphs=True),
)
LENGTHS = [1, 15, 16, 17, 40, 3, 100, 64, 65, 31, 300]


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    """float32 products must not be rounded to tf32."""
    assert not torch.backends.cuda.matmul.allow_tf32
    return


def load_tiny(config, device, dtype):
    """Drawn on the CPU, so that every device has the same weights; large enough that outputs
    differ from each other."""
    model, geometry = make_random_model("tiny", TINY, torch.device("cpu"), dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.mul_(5)
    return model.to(device), geometry


def make_requests(**sampling: object) -> list[GenerateRequest]:
    source = random.Random(5)
    params = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **sampling}
    return [
        GenerateRequest(
            request_id=str(index),
            prompt_token_ids=[source.randrange(1000) for _ in range(length)],
            sampling=SamplingParams(**params),
            seed=index,
        )
        for index, length in enumerate(LENGTHS)
    ]


def generate(engine: Engine, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
    return tokens


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    config = replace(
        CONFIG,
        scheduler=SchedulerConfig(max_num_requests=1, max_num_batched_tokens=512, overlap=False),
        executor=ExecutorConfig(cuda_graphs=False),
    )
    engine = make_engine(config, load=load_tiny)
    tokens: dict[str, list[int]] = {}
    for request in make_requests():
        tokens |= generate(engine, [request])
    assert len({tuple(value) for value in tokens.values()}) == len(LENGTHS)
    return tokens


@pytest.mark.parametrize("overlap", [False, True], ids=["step-by-step", "overlap"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("budget", [64, 512], ids=lambda n: f"budget{n}")
def test_greedy_tokens_are_those_of_each_request_alone(overlap, graphs, budget, expected) -> None:
    config = replace(
        CONFIG,
        scheduler=replace(CONFIG.scheduler, overlap=overlap, max_num_batched_tokens=budget),
        executor=ExecutorConfig(cuda_graphs=graphs),
    )
    engine = make_engine(config, load=load_tiny)

    cold = generate(engine, make_requests())
    warm = generate(engine, make_requests())

    assert cold == warm == expected


def test_preempted_requests_keep_their_tokens(expected) -> None:
    config = replace(CONFIG, cache=CacheConfig(num_blocks=36, prefix_cache=False))
    engine = make_engine(config, load=load_tiny)

    assert generate(engine, make_requests()) == expected
    assert engine.stats().preemptions_total >= 1


@pytest.mark.parametrize("budget", [64, 512], ids=lambda n: f"budget{n}")
def test_with_an_fp8_cache_tokens_hardly_depend_on_how_work_is_cut(budget) -> None:
    """A key that rounds to the next e4m3 number may turn a near tie: in a request or two."""
    cache = replace(CONFIG.cache, kv_cache_dtype=KVCacheDType.FP8)
    config = replace(
        CONFIG, cache=cache, scheduler=replace(CONFIG.scheduler, max_num_batched_tokens=budget)
    )
    alone = replace(
        CONFIG,
        cache=cache,
        scheduler=SchedulerConfig(max_num_requests=1, max_num_batched_tokens=512, overlap=False),
        executor=ExecutorConfig(cuda_graphs=False),
    )
    one_by_one = generate(make_engine(alone, load=load_tiny), make_requests())
    engine = make_engine(config, load=load_tiny)

    cold, warm = generate(engine, make_requests()), generate(engine, make_requests())

    for tokens in (cold, warm):
        equal = sum(tokens[name] == one_by_one[name] for name in tokens)
        assert equal >= len(LENGTHS) - 2


def test_prompt_logprobs_are_those_of_the_cpu() -> None:
    def logprobs(device: Device) -> list[float]:
        config = replace(CONFIG, executor=ExecutorConfig(device=device))
        engine = make_engine(config, load=load_tiny)
        requests = make_requests(max_tokens=1, prompt_logprobs=0)
        found: list[float] = []
        for request in requests:
            engine.add(request)
        outputs = {}
        while engine.has_work:
            for output in engine.step():
                outputs[output.request_id] = output
        for request in requests:
            entries = outputs[request.request_id].prompt_logprobs
            found += [entry.logprob for entry in entries[1:]]
        return found

    on_cpu, on_gpu = torch.tensor(logprobs(Device.CPU)), torch.tensor(logprobs(Device.CUDA))

    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=LOGIT_ABS)


@pytest.mark.whole_card
def test_experts_of_random_weights_are_made_on_the_device() -> None:
    config = ModelConfig(random_weights="gpt-oss-20b", layers=2, dtype=DType.BFLOAT16)
    engine = make_engine(replace(CONFIG, model=config, cache=CacheConfig()))

    tokens = generate(engine, make_requests(max_tokens=8))

    model = engine._executor._model
    held = sum(parameter.nbytes for parameter in model.parameters())
    experts = 2 * 32 * 3 * 2880 * 2880 * 17 // 32
    assert experts < held < experts + 3 * 2**30
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert all(len(value) == 8 for value in tokens.values())
