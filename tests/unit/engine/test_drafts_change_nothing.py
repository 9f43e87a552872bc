# SPDX-License-Identifier: Apache-2.0
"""With drafts a request gets the tokens that it gets without, whatever else is on.

One batch holds requests of every kind, so each combination of engine settings is checked with all
sampling controls, stops and grammars at once; seeded sampling at temperature 1 included, because a
seed gives the same tokens with and without drafts.
"""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from engine_harness import make_config, make_request

from drafting_model import EOS, VOCAB, make_drafting_model
from pelton.core.clock import MonotonicClock
from pelton.core.config import DType, EngineConfig, KVCacheDType
from pelton.core.grammar import Grammar
from pelton.core.request import FinishReason, GenerateRequest, RequestOutput, TokenLogprobs
from pelton.engine import factory
from pelton.engine.decode_step import DecodeOutput
from pelton.engine.engine import Engine
from pelton.engine.factory import make_runner
from pelton.engine.grammar import GrammarCompiler, TokenVocabulary
from pelton.engine.input_builder import StepInputs
from pelton.engine.kv.block_tables import BlockTables
from pelton.serving.detokenizer import OutputDetokenizer
from pelton.serving.http.choice import Choice
from tolerance import LOGIT_ABS

CPU = torch.device("cpu")
CONTEXT = 96
DRAFTERS = ("mtp:1", "mtp:3", "ngram:4")
REPEATED = [5, 6, 7, 8, 9] * 4


def make_engine(**settings: object) -> Engine:
    config = make_config(**{"max_model_len": CONTEXT, "num_blocks": 400, **settings})  # type: ignore[arg-type]
    config = replace(config, model=replace(config.model, dtype=DType.FLOAT32))
    return build_engine(config)


def build_engine(config: EngineConfig) -> Engine:
    model, geometry = make_drafting_model()
    runner = make_runner(model, geometry, config, CPU, torch.float32)
    return Engine(config, geometry, runner, MonotonicClock(), GrammarCompiler(make_vocabulary))


class Letters:
    """As much of a tokenizer as reading outputs takes. Token i is the letter number i, capitals
    after small ones."""

    token_bytes: ClassVar = [
        bytes([ord("a") + i if i < 26 else ord("A") + i - 26]) for i in range(VOCAB)
    ]
    plain_token_bytes: ClassVar = [b"", *token_bytes[1:]]


LETTERS: Any = Letters()


def make_vocabulary() -> TokenVocabulary:
    letters = LETTERS.token_bytes
    return TokenVocabulary(
        token_bytes=letters,
        special_token_ids=frozenset({EOS}),
        eos_token_ids=(EOS,),
        encode=lambda text: [letters.index(char.encode()) for char in text],
        vocab_size=VOCAB,
    )


@cache
def next_letters() -> str:
    """How the model goes on after `REPEATED`."""
    fields = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    request = make_request("first", REPEATED, **fields)  # type: ignore[arg-type]
    engine = make_engine()
    engine.add(request)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.token_ids]
    return b"".join(LETTERS.token_bytes[token] for token in tokens).decode()


def make_requests() -> list[GenerateRequest]:
    """Greedy ones with every control, and seeded ones at temperature 1."""
    text = next_letters()
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
    held = {
        "held-open": {"grammar": Grammar.regex("([b-d]{3}[F-J])*")},
        "held-short": {"grammar": Grammar.regex("(bcd|efg){1,7}"), "repetition_penalty": 1.2},
        "held-choices": {"grammar": Grammar.choice(["bcdbcdbcdbcdh", "bcdbcdbcdbcdk"]), "n": 2},
        "held-cut": {"grammar": Grammar.regex("[b-h]+"), "max_tokens": 7, "logprobs": 2},
        "held-on": {"grammar": Grammar.regex("(fghij){2}"), "ignore_eos": True},
        "held-bias": {"grammar": Grammar.regex("[b-z]{5,}"), "logit_bias": {9: 4.0, 8: 2.0}},
    }
    stops = {
        "stop-one": {"stop": (text[8:9],)},
        "stop-long": {"stop": (text[10:13],), "include_stop_str_in_output": True},
        "stop-late": {"stop": (text[2:4], text[14:16]), "min_tokens": 12},
        "stop-held": {"stop": ("cd",), "grammar": Grammar.regex("([b-d]{3}[F-J])*"), "n": 2},
    }
    requests += [
        make_request(
            f"{name}-{temperature}",
            REPEATED,
            seed=5,
            **{"temperature": temperature, "max_tokens": 30, **control},  # type: ignore[arg-type]
        )
        for name, control in (held | stops).items()
        for temperature in (0.0, 1.0)
    ]
    filters = {"top_k": 5, "top_p": 0.9, "min_p": 0.05}
    requests += [
        make_request(f"seeded-{index}", REPEATED[index:], seed=index, max_tokens=30, **control)  # type: ignore[arg-type]
        for index, control in enumerate(({}, {"temperature": 0.3}, filters, {"n": 2, "top_p": 0.7}))
    ]
    return requests


class Run:
    """Outputs of `requests` on one engine, as a server reads them: stop strings are found in the
    text, and end the choice in the engine."""

    def __init__(self, engine: Engine, requests: list[GenerateRequest]) -> None:
        self.engine, self.requests = engine, requests
        self.choices = {
            (request.request_id, index): Choice(
                index,
                request,
                OutputDetokenizer(LETTERS, request.prompt_token_ids, request.sampling),
                keeps_token_ids=True,
            )
            for request in requests
            for index in range(request.sampling.n)
        }
        self.ends: dict[tuple[str, int], tuple[str | None, int | None]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self.longest_gain = 0
        self.num_ended_by_drafts = 0
        self.run()

    def run(self) -> None:
        for request in self.requests:
            self.engine.add(request)
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.error is None, output.error
                self.take(output)

    def take(self, output: RequestOutput) -> None:
        key = output.request_id, output.index
        choice = self.choices[key]
        if choice.finish_reason is not None:
            return
        if output.logprobs is not None:
            assert [entry.token_id for entry in output.logprobs] == output.token_ids
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[output.request_id] = output.prompt_logprobs
        choice.take(output)
        self.longest_gain = max(self.longest_gain, len(output.token_ids))
        is_all_drafts = 0 < output.num_accepted_drafts == len(output.token_ids)
        self.num_ended_by_drafts += is_all_drafts
        if choice.finish_reason is not None:
            self.ends[key] = choice.finish_reason, output.stop_token_id
            if output.finish_reason is None:
                self.engine.cancel(*key)

    @property
    def tokens(self) -> dict[tuple[str, int], list[int]]:
        return {key: choice.token_ids for key, choice in self.choices.items()}

    @property
    def texts(self) -> dict[tuple[str, int], str]:
        return {key: choice.text for key, choice in self.choices.items()}

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Of all choices, then of all prompts."""
        found = [entry for choice in self.choices.values() for entry in choice.logprobs]
        for _, entries in sorted(self.prompt_logprobs.items()):
            found += [entry for entry in entries if entry is not None]
        return found


@cache
def plain() -> Run:
    return Run(make_engine(), make_requests())


def assert_same(run: Run) -> None:
    assert run.tokens == plain().tokens
    assert run.texts == plain().texts
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
    assert reasons["stop"] >= 20
    assert reasons["length"] >= 12
    assert len({tuple(tokens) for tokens in run.tokens.values()}) >= 25
    stopped = [key for key, end in run.ends.items() if end == ("stop", None)]
    assert {key[0][:9] for key in stopped} >= {"stop-one-", "stop-long", "stop-late"}
    assert run.texts["stop-long-0.0", 0] == next_letters()[:13]
    assert len(run.tokens["stop-late-0.0", 0]) >= 12
    assert set(run.texts["held-cut-0.0", 0]) <= set("bcdefgh")
    assert len(run.tokens["to-the-wall", 0]) == CONTEXT - len(REPEATED)
    assert EOS not in run.tokens["min-tokens", 0][:9]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    ("prefix_cache", "budget", "overlap", "num_blocks"),
    # Every three values together, in half of the 16 combinations.
    [
        (prefix_cache, budget, overlap, num_blocks)
        for prefix_cache, budget, overlap, num_blocks in product(
            (True, False), (9, 200), (True, False), (27, 400)
        )
        if (prefix_cache + overlap + (budget == 200) + (num_blocks == 400)) % 2 == 0
    ],
    ids=lambda value: str(value),
)
def test_tokens_are_those_of_plain_decoding(
    drafter: str, prefix_cache: bool, budget: int, overlap: bool, num_blocks: int
) -> None:
    """Prompts whole and in chunks; with few blocks, also preempted while drafting."""
    engine = make_engine(
        speculative=drafter,
        prefix_cache=prefix_cache,
        budget=budget,
        overlap=overlap,
        num_blocks=num_blocks,
    )

    run = Run(engine, make_requests())

    assert_same(run)
    assert run.longest_gain > 1
    stats = engine.stats()
    assert sum(stats.accepted_total) > 0
    assert (stats.preemptions_total > 0) == (num_blocks < 100)
    assert stats.num_used_blocks == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_the_same_on_a_warm_prefix_cache(drafter: str) -> None:
    engine = make_engine(speculative=drafter)
    assert_same(Run(engine, make_requests()))
    cached = engine.stats().cached_tokens_total

    assert_same(Run(engine, make_requests()))

    # Every prompt's full blocks, but for the one that must compute all its prompt.
    expected = sum((len(r.prompt_token_ids) - 1) // 4 * 4 for r in make_requests()[:-4])
    assert engine.stats().cached_tokens_total - cached >= expected - 20


@pytest.mark.parametrize("drafter", ["off", *DRAFTERS])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_where_a_grammar_gets_stuck_along_drafts_no_token_comes_out(
    drafter: str, length: int
) -> None:
    text = next_letters()[:length]
    grammar = Grammar.lark(f'start: "{text}" stuck\nstuck: stuck', param="field")
    engine = make_engine(speculative=drafter)
    outputs: list[RequestOutput] = []
    engine.add(make_request("r", REPEATED, temperature=0.0, grammar=grammar, logprobs=0))
    while engine.has_work:
        outputs += engine.step()

    tokens = [token for output in outputs for token in output.token_ids]
    assert b"".join(LETTERS.token_bytes[token] for token in tokens).decode() == text
    assert sum(len(output.logprobs or ()) for output in outputs) == length
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert "(field)" in (outputs[-1].error or "")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_request_alone_gets_the_same(drafter: str) -> None:
    engine = make_engine(speculative=drafter, slots=1)
    assert_same(Run(engine, make_requests()))


@pytest.mark.parametrize("drafter", ["off", *DRAFTERS])
def test_padded_steps_give_the_same(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that compiles products by their size."""
    monkeypatch.setattr(factory, "is_compiled_by_size", lambda *_: True)

    assert_same(Run(make_engine(speculative=drafter, budget=43), make_requests()))


@pytest.mark.parametrize("drafter", ["off", *DRAFTERS])
@pytest.mark.parametrize("budget", [43, 400], ids=lambda budget: f"budget{budget}")
def test_steps_padded_as_for_graphs_give_the_same(
    drafter: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request that ends inside a draft has a row with fewer drafts than its neighbours; where
    the executor does not draft itself, prompts come in padded steps too."""
    monkeypatch.setattr(factory, "has_graphs", lambda _: True)
    engine = make_engine(speculative=drafter, budget=budget)
    runner: Any = engine._executor
    decode, row_lens = runner.decode_step, Counter[int]()

    def count(inputs: StepInputs) -> DecodeOutput:
        row_lens[inputs.row_len] += 1
        return decode(inputs)

    runner.decode_step = count
    cold, warm = Run(engine, make_requests()), Run(engine, make_requests())

    assert_same(cold)
    assert warm.tokens == cold.tokens
    assert (row_lens[0] >= 5) == (not drafter.startswith("mtp"))


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

    # One that ends at a stop string has tokens that nobody reads.
    run = Run(engine, [request for request in make_requests() if not request.sampling.stop])

    stats = engine.stats()
    num_tokens = sum(map(len, run.tokens.values()))
    num_decoded = num_tokens - len(run.tokens)
    # A row gives one token more than its accepted drafts, unless one of these is the end.
    assert num_decoded == (
        stats.decode_rows_total + sum(stats.accepted_total) - run.num_ended_by_drafts
    )
    assert run.num_ended_by_drafts > 0
    assert stats.tokens_per_decode == num_decoded / stats.decode_rows_total
    assert stats.generated_tokens_total == num_tokens
    assert list(stats.drafted_total) == sorted(stats.drafted_total, reverse=True)
    assert all(a <= d for a, d in zip(stats.accepted_total, stats.drafted_total, strict=True))
    assert stats.tokens_per_decode > 1.3


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


@pytest.mark.parametrize("drafter", [*DRAFTERS, "ngram:2"])
@pytest.mark.parametrize("seed", range(3))
def test_storms_of_cancels_leave_nothing_behind(drafter: str, seed: int) -> None:
    """Whatever is cancelled whenever, others get their tokens and every block comes back."""
    source = random.Random(seed)
    engine = make_engine(
        speculative=drafter,
        overlap=bool(seed % 2),
        budget=source.choice([9, 40]),
        num_blocks=source.choice([30, 60]),
        slots=source.choice([3, 8]),
    )
    idle = engine.stats()
    expected = {key: list(tokens) for key, tokens in plain().tokens.items()}
    requests = make_requests()
    source.shuffle(requests)
    got: dict[tuple[str, int], list[int]] = {}
    ended: set[tuple[str, int]] = set()
    cancelled: set[str] = set()
    while requests or engine.has_work:
        if requests and source.random() < 0.4:
            engine.add(requests.pop())
        if got and source.random() < 0.3:
            name, index = source.choice(sorted(got))
            cancelled.add(name)
            engine.cancel(name, source.choice([None, index]))
        for output in engine.step():
            key = output.request_id, output.index
            got.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.finish_reason is not FinishReason.ERROR, output.error
                assert key not in ended
                ended.add(key)
        engine._scheduler._running.tables.check()

    for key, tokens in got.items():
        wanted = expected[key]
        length = min(len(tokens), len(wanted))  # a stop string ends nothing here
        assert tokens[:length] == wanted[:length], key
        assert key[0] in cancelled or len(tokens) >= len(wanted)
    assert ended >= got.keys()
    assert len(cancelled) >= 5
    stats = engine.stats()
    assert (stats.num_used_blocks, stats.num_running) == (0, 0)
    assert stats.num_blocks == idle.num_blocks


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["mtp:3", "ngram:3"])
def test_sampling_with_drafts_keeps_the_distribution(drafter: str) -> None:
    """10,000 pairs of tokens, drafted and not, by the chi-square test of two samples."""
    num_requests, num_bins = 2500, 64
    prompt: list[int] = [9, 4]
    control: dict[str, Any] = {"top_k": 8}
    if drafter.startswith("ngram"):  # few tokens to choose from, so that lookup finds some
        prompt = [5, 6, 7, 6, 5, 5, 7, 7, 6, 6, 5, 7, 5, 6]
        control = {"logit_bias": {5: 40.0, 6: 40.0, 7: 40.0}, "temperature": 3.0}
    counts = []
    for method in ("off", drafter):
        engine = make_engine(speculative=method, slots=64, budget=512, num_blocks=800)
        shift = 0 if method == "off" else 10**6
        requests = [
            make_request(
                str(index), prompt, seed=index + shift, max_tokens=9, ignore_eos=True, **control
            )
            for index in range(num_requests)
        ]
        run = Run(engine, requests)
        bins: Counter[int] = Counter()
        for tokens in run.tokens.values():
            for place in range(1, 9, 2):
                bins[hash((place, *tokens[place : place + 2])) % num_bins] += 1
        counts.append(bins)
        if method != "off":
            assert sum(engine.stats().accepted_total) > 2000
            assert len({tuple(tokens[1:3]) for tokens in run.tokens.values()}) >= 8
    plain_counts, drafted_counts = counts
    assert sum(plain_counts.values()) == sum(drafted_counts.values()) == 4 * num_requests
    statistic = sum(
        (plain_counts[b] - drafted_counts[b]) ** 2 / (plain_counts[b] + drafted_counts[b])
        for b in range(num_bins)
        if plain_counts[b] + drafted_counts[b]
    )
    # The 99.9th percentile of chi-square with 63 degrees of freedom.
    assert statistic < 103.4
