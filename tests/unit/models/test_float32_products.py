# SPDX-License-Identifier: Apache-2.0
"""Products of a Llama in bfloat16 whose results stay float32 for what reads them, as on a GPU."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from pelton.bench.accuracy import Scores, compare, score
from pelton.core.clock import ManualClock
from pelton.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pelton.engine.engine import Engine
from pelton.engine.factory import make_runner
from pelton.kernels.dispatch import forced_implementation
from pelton.models import llama
from pelton.models.build import default_dtype
from pelton.models.llama_config import Config
from pelton.quantization.fp8_scheme import FP8Scheme, Granularity
from pelton.quantization.plain import PlainWeight

CONFIG = Config(
    model_type="llama",
    num_layers=4,
    hidden_size=64,
    intermediate_size=160,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=97,
    max_context=64,
)
IN_FLOAT32 = partial(PlainWeight, dtype=torch.float32)
PRODUCTS = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Numbers that bfloat16 holds."""
    generator = torch.Generator().manual_seed(1)
    state = llama.Model(CONFIG).state_dict()
    for name, weight in state.items():
        drawn = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
        state[name] = (drawn if weight.dim() > 1 else 1 + 0.1 * drawn).bfloat16()
    return state


def score_texts(weights: dict[str, torch.Tensor], dtype: torch.dtype, **formats: Any) -> Scores:
    with default_dtype(dtype):
        model = llama.Model(CONFIG)
    model.load_state_dict(weights)
    model.pack(PlainWeight, **formats)
    config = EngineConfig(
        model=ModelConfig(model="tiny", max_model_len=64),
        cache=CacheConfig(num_blocks=40, kv_memory_bytes=1, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_requests=8, max_num_batched_tokens=128, overlap=False),
    )
    geometry = CONFIG.geometry("tiny")
    runner = make_runner(model, geometry, config, torch.device("cpu"), dtype)
    source = random.Random(2)
    texts = [[source.randrange(97) for _ in range(60)] for _ in range(8)]
    with forced_implementation("reference"):  # sums in float32, rounded once: what a GPU does
        return score(Engine(config, geometry, runner, ManualClock()), texts)


def test_they_are_nearer_to_float32(weights: dict[str, torch.Tensor]) -> None:
    exact = score_texts(weights, torch.float32)
    rounded = score_texts(weights, torch.bfloat16, head_format=IN_FLOAT32)

    kept = score_texts(weights, torch.bfloat16, head_format=IN_FLOAT32, float32_format=IN_FLOAT32)

    assert 0 < compare(kept, exact).rms_error < 0.9 * compare(rounded, exact).rms_error


@pytest.mark.parametrize(
    "fp8", [None, FP8Scheme(granularity=Granularity.CHANNEL)], ids=["plain", "fp8"]
)
def test_which_they_are(fp8: FP8Scheme | None) -> None:
    """None of an FP8 checkpoint, where quantisers read them."""
    model = llama.Model(replace(CONFIG, fp8=fp8))

    for block in model.blocks:
        given = [block.get_submodule(name).gives_float32 for name in PRODUCTS]
        assert given == [fp8 is None] * len(PRODUCTS)
    assert not model.head.gives_float32
