# SPDX-License-Identifier: Apache-2.0
"""What an engine does before it is ready, so that no request waits for it."""

import multiprocessing

import pytest

from pelton.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    SchedulerConfig,
)
from pelton.engine.factory import make_engine
from pelton.kernels.triton_runtime import triton
from tiny_engines import generate, make_requests

pytestmark = pytest.mark.gpu


def compiled_while_serving(
    geometry: str, layers: int, kv_cache_dtype: KVCacheDType, budget: int
) -> list[str]:
    """Kernels whose first call in this process is a request's."""
    names: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **compiled: names.append(
        f"{compiled['fn'].name} {compiled['key']}"
    )
    config = EngineConfig(
        model=ModelConfig(random_weights=geometry, layers=layers, dtype=DType.BFLOAT16),
        cache=CacheConfig(num_blocks=1000, kv_cache_dtype=kv_cache_dtype, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_requests=16, max_num_batched_tokens=budget),
    )
    engine = make_engine(config)
    num_at_start = len(names)
    steps = [1], [2, 3], [1, 7, 16, 33], [65, 100, 64, 5], [40, 48, 60], [9] * 12, [500, 129]
    for lengths in (*steps, [1025, 30], [2500], [6000]):
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.9}):
            generate(engine, make_requests(lengths, max_tokens=9, **sampling))
    generate(engine, make_requests([5, 200], max_tokens=3, prompt_logprobs=1))
    assert num_at_start > 10, names
    return names[num_at_start:]


@pytest.mark.parametrize(
    ("geometry", "layers", "kv_cache_dtype", "budget"),
    [
        ("llama-3.1-8b", 2, KVCacheDType.AUTO, 2048),
        ("llama-3.1-8b-fp8", 2, KVCacheDType.FP8, 512),
        ("gpt-oss-20b", 2, KVCacheDType.FP8, 2048),
        pytest.param("deepseek-v3", 4, KVCacheDType.AUTO, 2048, marks=pytest.mark.whole_card),
    ],
    ids=["llama", "llama-fp8", "gpt-oss", "deepseek"],
)
def test_no_kernel_compiles_while_requests_wait(geometry, layers, kv_cache_dtype, budget) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        late = pool.apply_async(compiled_while_serving, (geometry, layers, kv_cache_dtype, budget))

        assert late.get(timeout=240) == []
