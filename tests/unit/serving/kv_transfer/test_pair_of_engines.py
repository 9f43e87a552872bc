# SPDX-License-Identifier: Apache-2.0
"""A prompt computed by another engine gives what it gives in one engine: tokens, usage, drafts."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
from kv_pair import Connect, Pair, assert_all_is_given_back

from pelton.core.config import (
    CacheConfig,
    Device,
    EngineConfig,
    KVCacheDType,
    Role,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerPlace,
)
from pelton.core.request import GenerateRequest, RequestOutput, SamplingParams
from pelton.engine.engine import Engine
from pelton.engine.factory import LoadModel, make_engine
from tiny_engines import CONFIG, DEEPSEEK, LOADS, VOCAB, load_from

BLOCK = 16
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 100)
FAMILIES: dict[str, tuple[LoadModel, dict[str, str]]] = {
    "llama": (LOADS["llama"], {}),
    "llama-fp8-kv": (LOADS["llama"], {"kv": "fp8"}),
    "llama-ngram": (LOADS["llama"], {"speculative": "ngram:3"}),
    "gpt-oss": (LOADS["gpt-oss"], {}),
    "deepseek": (LOADS["deepseek"], {}),
    "deepseek-mtp": (load_from(DEEPSEEK, has_mtp=True, gain=4), {"speculative": "mtp:2"}),
}
MOST = ("llama", "gpt-oss", "deepseek-mtp")


def make_config(family: str, **cache_settings: object) -> EngineConfig:
    settings = FAMILIES[family][1]
    kv_cache_dtype = KVCacheDType(settings.get("kv", "auto"))
    fields = {"num_blocks": 120, "kv_cache_dtype": kv_cache_dtype, **cache_settings}
    return replace(
        CONFIG,
        cache=CacheConfig(block_size=BLOCK, **fields),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_num_requests=6, max_num_batched_tokens=40, overlap=False),
        executor=replace(CONFIG.executor, device=Device.CPU, num_threads=1),
        speculative=SpeculativeConfig(speculative=settings.get("speculative", "off")),
    )


def make_engine_of(
    family: str, role: Role, connect: Connect | None, **cache_settings: object
) -> Engine:
    config = make_config(family, **cache_settings)
    place = WorkerPlace(role=role)
    return make_engine(config, load=FAMILIES[family][0], place=place, connect=connect)


def pair_of(family: str, **cache_settings: object) -> Pair:
    return Pair(partial(make_engine_of, family, **cache_settings))


def make_request(name: str, length: int, seed: int = 5, **sampling: object) -> GenerateRequest:
    source = random.Random(f"{seed} {length}")
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **sampling}
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=[source.randrange(VOCAB) for _ in range(length)],
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
    )


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


def run_pair(pair: Pair, requests: Sequence[GenerateRequest], max_turns: int = 2000) -> Answers:
    pair.outputs.clear()
    for request in requests:
        pair.add(request)
    for _ in range(max_turns):
        if not pair.decode.has_work:
            break
        pair.pump()
    assert not pair.decode.has_work, "the pair never came to an end"
    pair.settle()
    assert_all_is_given_back(pair.prefill)
    return join(pair.outputs)


@cache
def expected(family: str) -> Answers:
    return run_alone(make_engine_of(family, Role.MIXED, None), make_requests())


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_one_engine(family: str) -> None:
    with pair_of(family) as pair:
        answers = run_pair(pair, make_requests())
        stats = pair.decode.stats()

    assert answers == expected(family)
    assert (stats.pulls_total, stats.pull_fallbacks_total) == (len(LENGTHS) - 1, 0)
    assert pair.prefill.stats().prefills_total == len(LENGTHS) - 1
    assert stats.pulled_bytes_total > 0


@pytest.mark.parametrize("family", MOST)
def test_one_after_the_other_with_every_kind_of_hit(family: str) -> None:
    requests = make_requests((3 * BLOCK + 1, 2 * BLOCK))
    prompt = requests[0].prompt_token_ids + make_request("", 40, seed=9).prompt_token_ids
    longer = replace(requests[0], request_id="longer", prompt_token_ids=prompt)
    order = [*requests, longer, *(replace(r, request_id=r.request_id + "'") for r in requests)]
    alone = make_engine_of(family, Role.MIXED, None)
    with pair_of(family) as pair:
        for request in order:
            assert run_pair(pair, [request]) == run_alone(alone, [request])
        # The second time, all but the last token of the first prompt was found where it decodes.
        assert pair.prefill.stats().prefills_total == len(order) - 1


def test_what_is_cached_here_is_not_sent_again() -> None:
    request = make_request("a", 4 * BLOCK + 1)
    longer = make_request("b", 2 * BLOCK)
    longer.prompt_token_ids[:0] = request.prompt_token_ids[: 4 * BLOCK]
    with pair_of("llama") as pair:
        run_pair(pair, [request])
        first = pair.decode.stats().pulled_bytes_total
        run_pair(pair, [longer])
        second = pair.decode.stats().pulled_bytes_total - first

    assert first == 4 * (second // 2)


@pytest.mark.parametrize("family", MOST)
def test_controls_and_choices(family: str) -> None:
    requests = [
        make_request("seeded", 70, temperature=1.0, seed=3, top_p=0.9, logprobs=2),
        make_request("choices", 70, temperature=1.0, n=3),
        make_request("penalty", 33, repetition_penalty=1.5, frequency_penalty=0.5),
        make_request("short", 34, max_tokens=1),
        make_request("every-logprob", 40, prompt_logprobs=1),
    ]
    alone = run_alone(make_engine_of(family, Role.MIXED, None), requests)
    with pair_of(family) as pair:
        assert run_pair(pair, requests) == alone
        # Log-probabilities of the prompt need all of it to be computed here.
        assert pair.decode.stats().pulls_total == len(requests) - 1


@pytest.mark.parametrize("family", MOST)
def test_without_prefix_cache(family: str) -> None:
    requests = make_requests()
    alone = run_alone(make_engine_of(family, Role.MIXED, None, prefix_cache=False), requests)
    with pair_of(family, prefix_cache=False) as pair:
        assert run_pair(pair, requests) == alone


@pytest.mark.parametrize("family", MOST)
def test_few_blocks_on_both_sides(family: str) -> None:
    requests = make_requests((100, 90, 80, 70, 60, 50), max_tokens=40)
    with pair_of(family, num_blocks=21, prefix_cache=False) as pair:
        answers = run_pair(pair, requests)
        assert pair.decode.stats().preemptions_total > 0
    alone = run_alone(make_engine_of(family, Role.MIXED, None, prefix_cache=False), requests)
    assert {key: a.token_ids for key, a in answers.items()} == {
        key: a.token_ids for key, a in alone.items()
    }


def test_short_prompts_are_computed_where_they_are_decoded() -> None:
    with Pair(partial(make_engine_of, "llama"), min_tokens=48) as pair:
        answers = run_pair(pair, make_requests())
        assert answers == expected("llama")
        assert pair.prefill.stats().prefills_total == sum(n >= 48 for n in LENGTHS)
