# SPDX-License-Identifier: Apache-2.0
"""What an engine does before it is ready, so that no request waits for it."""

import multiprocessing
from typing import Any

import pytest
import zmq

from pelton.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ExecutorConfig,
    KVCacheDType,
    ModelConfig,
    Role,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerPlace,
)
from pelton.core.geometry import ModelGeometry
from pelton.core.grammar import Grammar
from pelton.engine.engine import Engine
from pelton.engine.factory import make_engine
from pelton.engine.grammar import TokenVocabulary
from pelton.kernels.triton_runtime import triton
from pelton.serving.kv_transfer.cuda_ipc import CudaTransport
from pelton.serving.kv_transfer.link import KVLink
from tiny_engines import generate, make_requests

pytestmark = pytest.mark.gpu

CONTROLS: list[dict[str, Any]] = [
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.2, "temperature": 0.8, "top_k": 20, "min_p": 0.01},
    {"logit_bias": {7: 1.0}, "min_tokens": 2, "stop_token_ids": (8,)},
    {"logprobs": 0},
    {"logprobs": 3, "temperature": 0.8},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 1},
    {"grammar": Grammar.regex("[a-z]*")},
    {"grammar": Grammar.regex("[a-z]*"), "temperature": 0.8},
]


def make_config(
    geometry: str,
    *,
    layers: int = 2,
    kv_cache_dtype: KVCacheDType = KVCacheDType.AUTO,
    budget: int = 2048,
    graphs: bool = True,
    deterministic: bool = False,
    speculative: str = "off",
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(random_weights=geometry, layers=layers, dtype=DType.BFLOAT16),
        cache=CacheConfig(num_blocks=1000, kv_cache_dtype=kv_cache_dtype, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_requests=16, max_num_batched_tokens=budget),
        executor=ExecutorConfig(cuda_graphs=graphs, deterministic=deterministic),
        speculative=SpeculativeConfig(speculative=speculative),
    )


def make_vocabulary(geometry: ModelGeometry) -> TokenVocabulary:
    """Token i is the character number 32 + i, as far as ASCII goes; the last one ends the text."""
    end = geometry.vocab_size - 1
    return TokenVocabulary(
        token_bytes=[bytes([32 + i]) if i < 95 else b"" for i in range(geometry.vocab_size)],
        special_token_ids=frozenset({end}),
        eos_token_ids=(end,),
        encode=lambda text: [ord(char) - 32 for char in text],
        vocab_size=geometry.vocab_size,
    )


def serve(engine: Engine) -> None:
    steps = [1], [2, 3], [1, 7, 16, 33], [65, 100, 64, 5], [40, 48, 60], [9] * 12, [500, 129]
    for lengths in (*steps, [1025, 30], [2500], [6000]):
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.9}):
            generate(engine, make_requests(lengths, max_tokens=9, **sampling))
    for control in CONTROLS:
        for lengths in ([5], [5, 200]):
            generate(engine, make_requests(lengths, max_tokens=3, **control))


def move_kv(link: KVLink) -> None:
    """Of the engine's blocks onto themselves, as if another worker had them."""
    _, transport = link.shared
    assert isinstance(transport, CudaTransport)
    blocks = transport.blocks
    for group, (num_blocks, _) in enumerate(blocks.shapes):
        for ids in ([1], [1, 2, 3], range(1, num_blocks)):
            digest = transport.digest(group, ids, b"key")
            copies = blocks.start_copies(group, ids, ids, blocks.addresses[group])
            assert copies.digest(b"key") == digest


def compiled_while_serving(config: EngineConfig) -> list[str]:
    """Kernels whose first call in this process is a request's."""
    names: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **compiled: names.append(
        f"{compiled['fn'].name} {compiled['key']}"
    )
    link = KVLink(Role.DECODE, zmq.Poller())
    engine = make_engine(
        config,
        load_vocabulary=make_vocabulary,
        place=WorkerPlace(role=Role.DECODE),
        connect=link.connect,
    )
    num_at_start = len(names)
    serve(engine)
    move_kv(link)
    link.close()
    assert num_at_start > 10, names
    return names[num_at_start:]


@pytest.mark.parametrize(
    "config",
    [
        make_config("llama-3.1-8b"),
        make_config("llama-3.1-8b", graphs=False, speculative="ngram:2"),
        make_config("llama-3.1-8b", deterministic=True, budget=512),
        make_config("llama-3.1-8b-fp8", kv_cache_dtype=KVCacheDType.FP8, budget=512),
        make_config("gpt-oss-20b", kv_cache_dtype=KVCacheDType.FP8),
        pytest.param(make_config("deepseek-v3", layers=4), marks=pytest.mark.whole_card),
        pytest.param(
            make_config("deepseek-v3", layers=4, speculative="mtp:2"), marks=pytest.mark.whole_card
        ),
    ],
    ids=[
        *["llama", "llama-without-graphs", "llama-deterministic", "llama-fp8", "gpt-oss"],
        *["deepseek", "deepseek-mtp"],
    ],
)
def test_no_kernel_compiles_while_requests_wait(config: EngineConfig) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        late = pool.apply_async(compiled_while_serving, (config,))

        assert late.get(timeout=240) == []
