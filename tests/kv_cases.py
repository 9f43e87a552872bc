# SPDX-License-Identifier: Apache-2.0
"""Engines of tiny models for pairs, requests for them, and what their clients get."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from drafting_model import VOCAB, make_drafting_model
from kv_pair import Connect, Pair
from pelton.core.config import (
    CacheConfig,
    Device,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    Role,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerPlace,
)
from pelton.core.request import GenerateRequest, RequestOutput, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.factory import LoadModel, make_engine
from tiny_engines import CONFIG, DEEPSEEK, LOADS, load_from


def load_twin(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    model, geometry = make_drafting_model()
    return model.to(device), geometry


BLOCK = 16
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 100)
FAMILIES: dict[str, tuple[LoadModel, dict[str, str]]] = {
    "llama": (LOADS["llama"], {}),
    "llama-fp8-kv": (LOADS["llama"], {"kv": "fp8"}),
    "llama-ngram": (LOADS["llama"], {"speculative": "ngram:3"}),
    "gpt-oss": (LOADS["gpt-oss"], {}),
    "deepseek": (LOADS["deepseek"], {}),
    "deepseek-mtp": (load_from(DEEPSEEK, has_mtp=True, gain=4), {"speculative": "mtp:2"}),
    # The one whose drafts are accepted: random MTP layers guess nothing right. With a budget that
    # leaves room for all drafts, whatever prompts run beside them.
    "twin-mtp": (load_twin, {"speculative": "mtp:3", "budget": "400"}),
}
MOST = ("llama", "gpt-oss", "deepseek-mtp")


def make_config(
    family: str, *, overlap: bool = False, device: Device = Device.CPU, **cache_settings: object
) -> EngineConfig:
    settings = FAMILIES[family][1]
    kv_cache_dtype = KVCacheDType(settings.get("kv", "auto"))
    fields = {"num_blocks": 120, "kv_cache_dtype": kv_cache_dtype, **cache_settings}
    return replace(
        CONFIG,
        cache=CacheConfig(block_size=BLOCK, **fields),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(
            max_num_requests=6,
            max_num_batched_tokens=int(settings.get("budget", "40")),
            overlap=overlap,
        ),
        executor=replace(CONFIG.executor, device=device, num_threads=1),
        speculative=SpeculativeConfig(speculative=settings.get("speculative", "off")),
    )


def make_engine_of(family: str, role: Role, connect: Connect | None, **settings: object) -> Engine:
    """`settings` are `make_config`'s."""
    config = make_config(family, **settings)  # type: ignore[arg-type]
    place = WorkerPlace(role=role)
    return make_engine(config, load=FAMILIES[family][0], place=place, connect=connect)


def pair_of(family: str, **settings: object) -> Pair:
    return Pair(partial(make_engine_of, family, **settings))


def make_request(name: str, length: int, seed: int = 5, **sampling: object) -> GenerateRequest:
    source = random.Random(f"{seed} {length}")
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **sampling}
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=[source.randrange(VOCAB) for _ in range(length)],
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
    )


def prefill_only(name: str, length: int, **fields: object) -> GenerateRequest:
    return replace(make_request(name, length, max_tokens=1), is_prefill_only=True, **fields)


def make_requests(lengths: Sequence[int] = LENGTHS, **sampling: object) -> list[GenerateRequest]:
    return [make_request(str(length), length, **sampling) for length in lengths]


class Answer:
    """What a client gets of one choice, joined; drafts included."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_cached_tokens = self.num_drafts = self.num_accepted = 0
        self.finish_reason: str | None = None
        self.logprobs: list[int] = []

    def push(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        self.num_cached_tokens = output.num_cached_tokens
        self.num_drafts += output.num_drafts
        self.num_accepted += output.num_accepted_drafts
        self.finish_reason = output.finish_reason
        self.logprobs += [entry.token_id for entry in output.logprobs or ()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


Answers = dict[tuple[str, int], Answer]


def join(outputs: Sequence[RequestOutput]) -> Answers:
    answers: Answers = defaultdict(Answer)
    for output in outputs:
        answers[output.request_id, output.index].push(output)
    return dict(answers)


def run_alone(engine: Engine, requests: Sequence[GenerateRequest]) -> Answers:
    outputs = []
    for request in requests:
        engine.add(request)
    while engine.has_work:
        outputs += engine.step()
    return join(outputs)


def run_pair(pair: Pair, requests: Sequence[GenerateRequest]) -> Answers:
    pair.outputs.clear()
    for request in requests:
        pair.add(request)
    pair.until(lambda: not pair.decode.has_work)
    pair.settle()
    pair.until_given_back()
    return join(pair.outputs)
