# SPDX-License-Identifier: Apache-2.0
"""Drafting on a card, with and without graphs, under every sampling control and grammars."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from pelton.core.config import EngineConfig, SpeculativeConfig
from pelton.core.geometry import ModelGeometry
from pelton.core.grammar import Grammar
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.factory import make_engine
from pelton.engine.grammar import TokenVocabulary
from tiny_engines import CONFIG, DEEPSEEK, load_from

pytestmark = pytest.mark.gpu

END = 999
FEW = Grammar.regex("([A-Q]{3}[rst])*")
CONTROLS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"logit_bias": {7: -100.0, 40: 4.0}, "logprobs": 2},
    {"grammar": FEW},
    {"grammar": FEW, "n": 2, "max_tokens": 9, "temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"stop_token_ids": tuple(range(0, 1000, 13)), "min_tokens": 5},
    {"max_tokens": 2},
]


def make_vocabulary(geometry: ModelGeometry) -> TokenVocabulary:
    """Token i is the character number 32 + i, as far as ASCII goes."""
    texts = [chr(32 + i) if i < 95 else "" for i in range(geometry.vocab_size)]
    return TokenVocabulary(
        token_bytes=[text.encode() for text in texts],
        special_token_ids=frozenset({END}),
        eos_token_ids=(END,),
        encode=lambda text: [ord(char) - 32 for char in text],
        vocab_size=geometry.vocab_size,
    )


def run(config: EngineConfig) -> tuple[dict[tuple[str, int], list[int]], int]:
    """Tokens by request and choice, and how many drafts were verified."""
    engine = make_engine(
        config, load=load_from(DEEPSEEK, has_mtp=True, gain=4), load_vocabulary=make_vocabulary
    )
    prompt = [37, 38, 39, 40, 41] * 5
    for index, control in enumerate(CONTROLS):
        sampling = SamplingParams(
            **{"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, **control}
        )
        engine.add(
            GenerateRequest(
                request_id=str(index),
                prompt_token_ids=prompt[index % 5 :],
                sampling=sampling,
                seed=index,
            )
        )
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    assert engine.stats().num_used_blocks == 0
    return tokens, sum(engine.stats().drafted_total)


@cache
def plain() -> dict[tuple[str, int], list[int]]:
    config = replace(CONFIG, executor=replace(CONFIG.executor, cuda_graphs=False))
    return run(config)[0]


@pytest.mark.parametrize(
    ("drafter", "graphs", "budget"),
    [("mtp:1", True, 256), ("mtp:3", False, 256), ("mtp:3", True, 48), ("ngram:3", True, 256)],
    ids=str,
)
def test_drafts_change_no_token_under_any_control(drafter: str, graphs: bool, budget: int) -> None:
    config = replace(
        CONFIG,
        scheduler=replace(CONFIG.scheduler, max_num_requests=12, max_num_batched_tokens=budget),
        executor=replace(CONFIG.executor, cuda_graphs=graphs),
        speculative=SpeculativeConfig(speculative=drafter),
    )

    tokens, num_drafted = run(config)

    assert tokens == plain()
    assert num_drafted > (0 if drafter == "ngram:3" else 100)
