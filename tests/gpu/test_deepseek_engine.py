# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 on a GPU: the engine against itself one request at a time, and against the CPU."""

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
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.factory import LoadModel, make_engine
from pelton.engine.speculative.mtp import MTPDrafter
from pelton.models.geometries import GEOMETRIES
from pelton.models.random_weights import make_random_model
from pelton.quantization.plain import PlainWeight
from tolerance import LOGIT_ABS

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
TINY = {
    **GEOMETRIES["deepseek-v3"],
    "hidden_size": 256,
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
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
PLAIN = {**TINY, "quantization_config": None}
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
    return load_on(PLAIN, device, dtype)


def load_with_mtp(config, device, dtype):
    return load_on(PLAIN, device, dtype, has_mtp=True)


def load_on(geometry, device, dtype, has_mtp=False):
    """The same weights with and without the MTP layer, which has its own besides."""
    model, found = make_random_model("tiny", geometry, CPU, dtype, has_mtp=has_mtp)
    if has_mtp:
        plain, _ = make_random_model("tiny", geometry, CPU, dtype)
        model.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_scale") or (parameter.dim() > 1 and parameter.itemsize > 1):
                parameter.mul_(4)
    model.to(device).pack(PlainWeight)
    return model, found


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


def prompt_logprobs(device: Device, load: LoadModel) -> list[float]:
    config = replace(CONFIG, executor=ExecutorConfig(device=device))
    engine = make_engine(config, load=load)
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


def test_prompt_logprobs_are_those_of_the_cpu() -> None:
    on_cpu = torch.tensor(prompt_logprobs(Device.CPU, load_tiny))
    on_gpu = torch.tensor(prompt_logprobs(Device.CUDA, load_tiny))

    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=LOGIT_ABS)


def test_products_in_fp8_agree_with_dequantised_ones() -> None:
    """The CPU multiplies what the card multiplies in FP8: the same logits but for what three
    mantissa bits of activations leave: a few percent of each of a dozen products."""

    def load(config, device, dtype):
        return load_on(TINY, device, dtype)

    on_cpu = torch.tensor(prompt_logprobs(Device.CPU, load))
    on_gpu = torch.tensor(prompt_logprobs(Device.CUDA, load))

    assert torch.corrcoef(torch.stack([on_cpu, on_gpu]))[0, 1] > 0.9
    assert (on_gpu - on_cpu).mean().abs() < 0.05 * on_cpu.std()


@pytest.mark.parametrize("drafter", ["mtp:1", "mtp:3", "ngram:3"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("budget", [64, 512], ids=lambda n: f"budget{n}")
def test_drafts_change_no_token(drafter, graphs, budget, expected) -> None:
    config = replace(
        CONFIG,
        scheduler=replace(CONFIG.scheduler, max_num_batched_tokens=budget),
        executor=ExecutorConfig(cuda_graphs=graphs),
        speculative=SpeculativeConfig(speculative=drafter),
    )
    engine = make_engine(config, load=load_with_mtp)

    cold = generate(engine, make_requests())
    warm = generate(engine, make_requests())

    assert cold == warm == expected
    if drafter != "ngram:3":
        assert engine.stats().drafted_total[0] > 100


@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_replayed_drafts_are_bit_for_bit_the_eager_ones(num_rows) -> None:
    """In bfloat16, on the same padded batch: logits, drafts and both layers' caches."""
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, dtype=DType.BFLOAT16),
        speculative=SpeculativeConfig(speculative="mtp:2"),
    )
    engine = make_engine(config, load=load_with_mtp)
    runner = engine._executor
    eager_draft = MTPDrafter(runner._model.mtp_layer(), runner._slots, 2).draft
    replay, replay_draft = runner.decode_step, runner.draft_step
    num_compared = []

    def compare(inputs):
        eager = runner.decode_eagerly(inputs)
        replayed = replay(inputs)
        count = len(inputs.sample_rows)
        assert torch.equal(eager.logits[:count], replayed.logits[:count])
        return replayed

    def compare_drafts(inputs, hidden_states):
        count = len(set(inputs.sample_rows.tolist()))
        # As integers: memory that was never written may hold a NaN, which equals nothing.
        cache = inputs.batch.groups[0].cache[1:].view(torch.int16)
        tokens = runner._slots.tokens
        known = tokens.clone()
        eager = eager_draft(inputs, hidden_states.clone())[:count]
        tokens.copy_(known)  # the drafts that it holds now would be read as known tokens
        cache_of_eager = cache.clone()
        replayed = replay_draft(inputs, hidden_states)
        assert torch.equal(eager, replayed[:count])
        assert torch.equal(cache, cache_of_eager)
        num_compared.append(inputs.row_len)
        return replayed

    runner.decode_step, runner.draft_step = compare, compare_drafts
    generate(engine, make_requests()[:num_rows])

    assert num_compared.count(3) >= 10


@pytest.mark.whole_card
def test_layers_of_random_weights_are_made_on_the_device() -> None:
    config = ModelConfig(random_weights="deepseek-v3", layers=4, dtype=DType.BFLOAT16)
    engine = make_engine(replace(CONFIG, model=config, cache=CacheConfig()))

    tokens = generate(engine, make_requests(max_tokens=8))

    model = engine._executor._model
    experts = model.blocks[3].mlp.experts
    assert experts.gate_up.dtype is torch.float8_e4m3fn
    assert experts.gate_up.device.type == "cuda"
    assert all(len(value) == 8 for value in tokens.values())
