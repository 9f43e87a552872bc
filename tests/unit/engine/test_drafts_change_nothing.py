# SPDX-License-Identifier: Apache-2.0
"""With drafts a request gets the tokens that it gets without, whatever else is on.

One batch holds requests of every kind, so each combination of engine settings is checked with all
sampling controls at once; seeded sampling at temperature 1 included, because a seed gives the same
tokens with and without drafts.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from drafting_model import EOS, VOCAB, make_drafting_model
from engine_harness import make_config, make_request

from pelton.core.clock import MonotonicClock
from pelton.core.config import DType, EngineConfig, KVCacheDType
from pelton.core.grammar import Grammar
from pelton.core.request import FinishReason, GenerateRequest, TokenLogprobs
from pelton.engine import factory
from pelton.engine.engine import Engine
from pelton.engine.factory import make_runner
from pelton.engine.grammar import GrammarCompiler, TokenVocabulary
from pelton.engine.kv.block_tables import BlockTables
from tolerance import LOGIT_ABS

CPU = torch.device("cpu")
CONTEXT = 96
DRAFTERS = ("mtp:1", "mtp:3", "ngram:4")
REPEATED = [5, 6, 7, 8, 9] * 4

Output = tuple[list[int], FinishReason, int | None]


def make_engine(**settings: object) -> Engine:
    config = make_config(**{"max_model_len": CONTEXT, "num_blocks": 400, **settings})  # type: ignore[arg-type]
    config = replace(config, model=replace(config.model, dtype=DType.FLOAT32))
    return build_engine(config)


def build_engine(config: EngineConfig) -> Engine:
    model, geometry = make_drafting_model()
    runner = make_runner(model, geometry, config, CPU, torch.float32)
    return Engine(config, geometry, runner, MonotonicClock(), GrammarCompiler(make_vocabulary))


def make_vocabulary() -> TokenVocabulary:
    """Token i is the letter number i, capitals after small ones."""
    letters = [bytes([ord("a") + i if i < 26 else ord("A") + i - 26]) for i in range(VOCAB)]
    return TokenVocabulary(
        token_bytes=letters,
        special_token_ids=frozenset({EOS}),
        eos_token_ids=(EOS,),
        encode=lambda text: [letters.index(char.encode()) for char in text],
        vocab_size=VOCAB,
    )


def make_requests() -> list[GenerateRequest]:
    """Greedy ones with every control, and seeded ones at temperature 1."""
    controls: dict[str, dict[str, object]] = {
        "plain": {},
        "bias": {"logit_bias": {7: -100.0, 9: 3.0}},
        "repetition": {"repetition_penalty": 1.3},
        "presence": {"presence_penalty": 1.1, "frequency_penalty": 0.7},
        "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
        "early-stop": {"stop_token_ids": tuple(range(0, VOCAB, 6))},
        "min-tokens": {"stop_token_ids": tuple(range(0, VOCAB, 6)), "min_tokens": 9},
        "choices": {"n": 3},
        "ignore": {"ignore_eos": True},
        "to-the-wall": {"ignore_eos": True, "max_tokens": None},
    }
    lengths = {f"length-{count}": {"max_tokens": count} for count in (1, 2, 3, 5)}
    requests = [
        make_request(name, REPEATED, **{"temperature": 0.0, "max_tokens": 30, **control})  # type: ignore[arg-type]
        for name, control in (controls | lengths).items()
    ]
    filters = {"top_k": 5, "top_p": 0.9, "min_p": 0.05}
    requests += [
        make_request(f"seeded-{index}", REPEATED[index:], seed=index, max_tokens=30, **control)  # type: ignore[arg-type]
        for index, control in enumerate(({}, {"temperature": 0.3}, filters, {"n": 2, "top_p": 0.7}))
    ]
    return requests


class Run:
    """Outputs of `requests` on one engine."""

    def __init__(self, engine: Engine, requests: list[GenerateRequest]) -> None:
        self.engine = engine
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], tuple[FinishReason | None, int | None]] = {}
        self.logprobs: list[TokenLogprobs] = []
        self.longest_gain = 0
        for request in requests:
            engine.add(request)
        while engine.has_work:
            for output in engine.step():
                assert output.error is None, output.error
                key = output.request_id, output.index
                self.tokens.setdefault(key, []).extend(output.token_ids)
                self.longest_gain = max(self.longest_gain, len(output.token_ids))
                if output.finish_reason is not None:
                    self.ends[key] = output.finish_reason, output.stop_token_id
                if output.logprobs is not None:
                    assert [entry.token_id for entry in output.logprobs] == output.token_ids
                    self.logprobs += output.logprobs


@cache
def plain() -> Run:
    return Run(make_engine(), make_requests())


def assert_same(run: Run) -> None:
    assert run.tokens == plain().tokens
    assert run.ends == plain().ends
    ours, theirs = run.logprobs, plain().logprobs
    assert [(e.token_id, e.rank) for e in ours] == [(e.token_id, e.rank) for e in theirs]
    assert [e.logprob for e in ours] == pytest.approx([e.logprob for e in theirs], abs=LOGIT_ABS)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_with_keys_and_values_in_fp8(drafter) -> None:
    def fp8_engine(speculative: str) -> Engine:
        config = make_config(
            max_model_len=CONTEXT, num_blocks=400, budget=200, speculative=speculative
        )
        cache = replace(config.cache, kv_cache_dtype=KVCacheDType.FP8)
        return build_engine(replace(config, cache=cache))

    drafted, undrafted = (Run(fp8_engine(kind), make_requests()) for kind in (drafter, "off"))

    assert drafted.tokens == undrafted.tokens
    assert drafted.ends == undrafted.ends
    assert drafted.longest_gain >= 2
    assert undrafted.tokens != plain().tokens


def test_the_requests_end_in_every_way_and_differ() -> None:
    run = plain()
    reasons = Counter(reason for reason, _ in run.ends.values())
    assert reasons[FinishReason.STOP] >= 3
    assert reasons[FinishReason.LENGTH] >= 8
    assert len({tuple(tokens) for tokens in run.tokens.values()}) >= 12
    assert len(run.tokens["to-the-wall", 0]) == CONTEXT - len(REPEATED)
    assert EOS not in run.tokens["min-tokens", 0][:9]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    ("prefix_cache", "budget", "overlap"),
    list(product((True, False), (9, 200), (True, False))),
    ids=lambda value: str(value),
)
def test_tokens_are_those_of_plain_decoding(
    drafter: str, prefix_cache: bool, budget: int, overlap: bool
) -> None:
    engine = make_engine(
        speculative=drafter, prefix_cache=prefix_cache, budget=budget, overlap=overlap
    )

    run = Run(engine, make_requests())

    assert_same(run)
    assert run.longest_gain > 1
    assert sum(engine.stats().accepted_total) > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_the_same_on_a_warm_prefix_cache(drafter: str) -> None:
    engine = make_engine(speculative=drafter)
    assert_same(Run(engine, make_requests()))
    cached = engine.stats().cached_tokens_total

    assert_same(Run(engine, make_requests()))

    # Every prompt's full blocks, but for the one that must compute all its prompt.
    expected = sum((len(r.prompt_token_ids) - 1) // 4 * 4 for r in make_requests()[:-4])
    assert engine.stats().cached_tokens_total - cached >= expected - 20


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_the_same_after_preemptions(drafter: str, overlap: bool) -> None:
    engine = make_engine(speculative=drafter, num_blocks=27, overlap=overlap)

    assert_same(Run(engine, make_requests()))

    assert engine.stats().preemptions_total >= 3


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("overlap", [True, False])
def test_outputs_with_a_grammar_are_the_same(drafter: str, overlap: bool) -> None:
    grammars = (
        Grammar.regex("([b-d]{3}[F-J])*"),
        Grammar.regex("(bcd|efg){1,7}"),
        Grammar.choice(["bcdbcdbcdbcdh", "bcdbcdbcdbcdk"]),
    )
    requests = [
        make_request(f"{i}-{t}", REPEATED, grammar=grammar, temperature=t, seed=i, max_tokens=30)
        for i, grammar in enumerate(grammars)
        for t in (0.0, 1.0)
    ]
    expected = Run(make_engine(), requests)

    engine = make_engine(speculative=drafter, overlap=overlap)
    run = Run(engine, [*requests, make_request("free", REPEATED, temperature=0.0, max_tokens=30)])

    assert {key: run.tokens[key] for key in expected.tokens} == expected.tokens
    assert sum(engine.stats().accepted_total) > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_request_alone_gets_the_same(drafter: str) -> None:
    engine = make_engine(speculative=drafter, slots=1)
    assert_same(Run(engine, make_requests()))


@pytest.mark.parametrize("drafter", ["off", *DRAFTERS])
def test_padded_steps_give_the_same(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that compiles products by their size."""
    monkeypatch.setattr(factory, "is_compiled_by_size", lambda *_: True)

    assert_same(Run(make_engine(speculative=drafter, budget=43), make_requests()))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_block_is_published_with_a_rejected_token(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: set[bytes] = set()
    publish = BlockTables.publish

    def watch(self: BlockTables, table: object, hashes: list[bytes]) -> None:
        published.update(hashes)
        publish(self, table, hashes)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockTables, "publish", watch)
    Run(make_engine(), make_requests())
    without, published = published, set()

    Run(make_engine(speculative=drafter), make_requests())

    assert published
    assert published <= without


def test_what_is_counted_adds_up() -> None:
    engine = make_engine(speculative="mtp:3")

    run = Run(engine, make_requests())

    stats = engine.stats()
    num_tokens = sum(map(len, run.tokens.values()))
    num_firsts = len(run.tokens)
    assert num_tokens == num_firsts + stats.decode_rows_total + sum(stats.accepted_total)
    assert stats.generated_tokens_total == num_tokens
    assert list(stats.drafted_total) == sorted(stats.drafted_total, reverse=True)
    assert all(a <= d for a, d in zip(stats.accepted_total, stats.drafted_total, strict=True))
    assert stats.tokens_per_decode > 1.5


def test_a_chain_of_drafts_is_what_the_layer_says_after_every_accepted_token() -> None:
    """The twin layer's chain is known without it: the model's own greedy output after the same
    tokens without the first. So its cache is right after every step, rejected drafts included."""
    engine = make_engine(speculative="mtp:4", budget=9, prefix_cache=False)
    seen: list[tuple[list[int], list[int]]] = []
    request = make_request("r", REPEATED, temperature=1.0, seed=4, max_tokens=40, ignore_eos=True)
    engine.add(request)
    (choice,) = engine._scheduler._live["r"].choices
    while engine.has_work:
        engine.step()
        if choice.drafts:
            seen.append((list(choice.token_ids), list(choice.drafts)))

    for token_ids, drafts in seen[:: max(1, len(seen) // 8)]:
        check = make_request("c", token_ids[1:], temperature=0.0, max_tokens=4, ignore_eos=True)
        assert Run(make_engine(), [check]).tokens["c", 0] == drafts
    assert len(seen) >= 10
    assert engine.stats().accepted_total < engine.stats().drafted_total


@pytest.mark.slow
def test_sampling_with_drafts_keeps_the_distribution() -> None:
    """20,000 pairs of tokens, drafted and not, by the chi-square test of two samples."""
    num_requests, num_bins = 5000, 64
    counts = []
    for drafter in ("off", "mtp:3"):
        engine = make_engine(speculative=drafter, slots=64, budget=512, num_blocks=800)
        shift = 0 if drafter == "off" else 10**6
        requests = [
            make_request(
                str(index), [9, 4], seed=index + shift, max_tokens=9, ignore_eos=True, top_k=8
            )
            for index in range(num_requests)
        ]
        run = Run(engine, requests)
        bins: Counter[int] = Counter()
        for tokens in run.tokens.values():
            for place in range(1, 9, 2):
                bins[hash((place, *tokens[place : place + 2])) % num_bins] += 1
        counts.append(bins)
        if drafter != "off":
            assert sum(engine.stats().accepted_total) > 5000
    plain_counts, drafted_counts = counts
    assert sum(plain_counts.values()) == sum(drafted_counts.values()) == 4 * num_requests
    statistic = sum(
        (plain_counts[b] - drafted_counts[b]) ** 2 / (plain_counts[b] + drafted_counts[b])
        for b in range(num_bins)
        if plain_counts[b] + drafted_counts[b]
    )
    # The 99.9th percentile of chi-square with 63 degrees of freedom.
    assert statistic < 103.4
