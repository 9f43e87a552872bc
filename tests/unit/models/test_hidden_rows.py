# SPDX-License-Identifier: Apache-2.0
"""A model's last layer goes on behind attention with the tokens alone that somebody reads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pelton.core.batch import ForwardBatch
from pelton.engine.step_cost import make_batch
from pelton.models.build import default_dtype
from pelton.models.registry import find_architecture
from pelton.perf.cost import record_costs
from pelton.quantization.plain import PlainWeight
from tiny_engines import CONFIG, DEEPSEEK, GPT_OSS, LLAMA, LOADS
from tolerance import assert_matches

CPU = torch.device("cpu")
NEW_TOKENS, NUM_ROWS, CONTEXT_LEN = 7, 3, 20


def make_prompts(family: str) -> tuple[Any, ForwardBatch]:
    model, geometry = LOADS[family](CONFIG.model, CPU, torch.float32)
    batch = make_batch(
        geometry,
        NUM_ROWS,
        NEW_TOKENS,
        CONTEXT_LEN,
        block_size=4,
        kv_dtype=torch.float32,
        device=CPU,
    )
    return model, batch


def run(
    model: Any, batch: ForwardBatch, wanted: Sequence[int] | None
) -> tuple[Tensor, list[Tensor]]:
    """-> hidden states and the caches, which were the same random numbers before."""
    generator = torch.Generator().manual_seed(0)
    for group in batch.groups:
        group.cache.copy_(torch.randn(group.cache.shape, generator=generator))
    rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int32)
    with torch.inference_mode():
        hidden_states = model(replace(batch, hidden_rows=rows))
    return hidden_states, [group.cache.clone() for group in batch.groups]


@pytest.mark.parametrize("wanted", [[6, 13, 20], [20, 0], [4, 4, 4, 4], []])
@pytest.mark.parametrize("family", LOADS)
def test_the_hidden_states_that_are_wanted_are_those_of_all_tokens(
    family: str, wanted: list[int]
) -> None:
    model, batch = make_prompts(family)

    expected, caches = run(model, batch, None)
    found, found_caches = run(model, batch, wanted)

    assert expected.shape[0] == NUM_ROWS * NEW_TOKENS
    assert found.shape == (len(wanted), expected.shape[1])
    if wanted:
        assert_matches(found, expected[wanted], torch.float32)
    assert all(map(torch.equal, found_caches, caches))


@pytest.mark.parametrize("raw", [LLAMA, GPT_OSS, DEEPSEEK], ids=["llama", "gpt-oss", "deepseek"])
def test_only_a_part_of_the_last_layer_leaves_tokens_out(raw: dict[str, Any]) -> None:
    architecture = find_architecture(raw)
    config = architecture.config_from_hf(raw)
    meta = torch.device("meta")
    with meta, default_dtype(torch.float32):
        model = architecture.build(config)
        model.pack(PlainWeight)
    sizes = NUM_ROWS, NEW_TOKENS, CONTEXT_LEN
    batch = make_batch(
        config.geometry("tiny"), *sizes, block_size=4, kv_dtype=torch.float32, device=meta
    )

    def count_flops(num_wanted: int | None) -> float:
        rows = None
        if num_wanted is not None:
            rows = torch.empty(num_wanted, dtype=torch.int32, device=meta)
        with torch.inference_mode(), record_costs() as log:
            model(replace(batch, hidden_rows=rows))
        return sum(cost.flops for _, cost in log.entries)

    whole, some, least = count_flops(None), count_flops(3), count_flops(0)

    assert some - least == pytest.approx((whole - least) * 3 / (NUM_ROWS * NEW_TOKENS))
    assert 0.3 < (whole - least) * len(model.blocks) / whole < 1.5
