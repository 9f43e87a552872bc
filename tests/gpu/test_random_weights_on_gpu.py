# SPDX-License-Identifier: Apache-2.0
"""Layers of real width with random weights: made on the device, in the format they are kept in."""

from dataclasses import replace

import pytest
import torch

from pelton.core.config import CacheConfig, DType, ExecutorConfig, ModelConfig
from pelton.engine.engine import Engine
from pelton.engine.factory import make_engine
from tiny_engines import CONFIG, generate, make_requests

pytestmark = pytest.mark.gpu


def check_engine(geometry: str, layers: int, cache: CacheConfig) -> Engine:
    """It answers, and all of its weights are on the device."""
    model = ModelConfig(random_weights=geometry, layers=layers, dtype=DType.BFLOAT16)
    executor = ExecutorConfig(cuda_graphs=False)
    engine = make_engine(replace(CONFIG, model=model, cache=cache, executor=executor))

    tokens = generate(engine, make_requests([1, 40], max_tokens=3))

    assert [len(value) for value in tokens.values()] == [3, 3]
    parameters = list(engine._executor._model.parameters())
    assert {parameter.device.type for parameter in parameters} == {"cuda"}
    return engine


def test_gpt_oss() -> None:
    engine = check_engine("gpt-oss-20b", 2, CacheConfig(num_blocks=100))

    held = sum(parameter.nbytes for parameter in engine._executor._model.parameters())
    experts = 2 * 32 * 3 * 2880 * 2880 * 17 // 32
    assert experts < held < experts + 3 * 2**30


@pytest.mark.whole_card
def test_deepseek() -> None:
    """With all of the card's memory for its KV."""
    engine = check_engine("deepseek-v3", 4, CacheConfig())

    experts = engine._executor._model.blocks[3].mlp.experts
    assert experts.gate_up.dtype is torch.float8_e4m3fn
