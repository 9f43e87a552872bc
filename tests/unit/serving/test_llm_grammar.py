# SPDX-License-Identifier: Apache-2.0
"""Grammars through the whole engine, on a tiny model: whatever happens, outputs follow them."""

import dataclasses
import itertools
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pelton import LLM, Grammar, SamplingParams
from pelton.core.clock import MonotonicClock
from pelton.core.errors import DeadlineExceededError, InvalidRequestError
from pelton.core.request import FinishReason, GenerateRequest, RequestOutput
from pelton.engine.engine import Engine

PATTERN = r"(abc|x[0-9]{2,9}|\"[a-z]*\")(,(abc|x[0-9]{2}))*!"
GRAMMAR = Grammar.regex(PATTERN)
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=3, grammar=GRAMMAR)
GREEDY = dataclasses.replace(SAMPLED, temperature=0.0)
FREE = dataclasses.replace(SAMPLED, grammar=None)
PROMPTS = ["hello", "a longer prompt than that", "x", "abc abc abc"]


def make_llm(tiny_llama, **options: Any) -> LLM:
    sizes = {"kv_memory_bytes": 2**22, "max_model_len": 256, "max_num_requests": 4}
    return LLM(str(tiny_llama.single), dtype="float32", **{**sizes, **options})


@pytest.fixture(scope="module")
def llm(tiny_llama) -> Iterator[LLM]:
    with make_llm(tiny_llama) as llm:
        yield llm


def follows(text: str, reason: FinishReason) -> bool:
    """A whole match, or the start of one that max_tokens cut."""
    if reason is FinishReason.STOP:
        return re.fullmatch(PATTERN, text) is not None
    starts = r"(abc|x[0-9]{2,9}|\"[a-z]*\")(,(abc|x[0-9]{2}))*(,(a|ab|x[0-9]?)?)?|\"[a-z]*"
    return re.fullmatch(starts, text) is not None


def texts_of(llm: LLM, sampling: SamplingParams, prompts: Any = PROMPTS) -> list[str]:
    results = llm.generate(prompts, sampling, progress=False)
    for result in results:
        for choice in result.choices:
            assert follows(choice.text, choice.finish_reason), choice
    return [choice.text for result in results for choice in result.choices]


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_outputs_follow_their_grammar_and_do_not_depend_on_how_they_are_made(
    tiny_llama, llm: LLM, sampling: SamplingParams
) -> None:
    alone = [texts_of(llm, sampling, prompt)[0] for prompt in PROMPTS]

    assert texts_of(llm, sampling) == alone
    for options in (
        {"overlap": True},
        {"max_num_batched_tokens": 5},
        {"num_blocks": 69, "block_size": 1, "overlap": True, "max_model_len": 68},  # preempts
        {"prefix_cache": False},
        {"speculative": "ngram:3"},
    ):
        with make_llm(tiny_llama, **options) as other:
            assert texts_of(other, sampling) == alone, options
            if "num_blocks" in options and sampling is GREEDY:
                assert other._local.engine.stats().preemptions_total > 0


def test_each_of_n_choices_has_its_own_place(llm: LLM) -> None:
    texts = texts_of(llm, dataclasses.replace(SAMPLED, n=6), ["hello"])

    assert len(set(texts)) > 1


def test_rows_without_a_grammar_are_not_touched(tiny_llama, llm: LLM) -> None:
    [alone] = llm.generate("hello", FREE, progress=False)

    with make_llm(tiny_llama, overlap=True) as other:
        beside, _ = other.generate(["hello", "hello"], [FREE, SAMPLED], progress=False)

    assert beside.choices[0].token_ids == alone.choices[0].token_ids


def test_other_controls_keep_working(llm: LLM) -> None:
    sampling = dataclasses.replace(
        SAMPLED, logprobs=2, stop=(",",), repetition_penalty=1.3, top_p=0.9, logit_bias={65: 5.0}
    )
    [result] = llm.generate("hello", sampling, progress=False)
    [choice] = result.choices
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids)
    assert "," not in choice.text
    assert all(entry.logprob <= 0 for entry in choice.logprobs)


def test_max_tokens_inside_the_grammar_is_a_length_end(llm: LLM) -> None:
    [result] = llm.generate("hello", dataclasses.replace(SAMPLED, max_tokens=1), progress=False)

    assert result.choices[0].finish_reason is FinishReason.LENGTH


def test_only_end_tokens_follow_when_they_do_not_end_the_output(llm: LLM) -> None:
    sampling = SamplingParams(
        max_tokens=8, ignore_eos=True, grammar=Grammar.choice(["a"]), skip_special_tokens=False
    )
    [result] = llm.generate("hello", sampling, progress=False)
    ids = result.choices[0].token_ids
    assert len(ids) == 8
    assert set(ids[1:]) <= set(llm.tokenizer.eos_token_ids)


def test_a_broken_grammar_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        llm.generate(["a", "b"], [FREE, SamplingParams(grammar=Grammar.regex("("))])
    assert not llm._local.engine.has_work


class TestRequestsWhoseGrammarIsBeingCompiled:
    """Straight at the engine, with a compiler that is held up."""

    @pytest.fixture
    def engine(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Engine:
        engine = llm._local.engine
        assert engine._grammars is not None
        self.gate = threading.Event()
        compile_now = engine._grammars._compile

        def compile_later(grammar: Grammar) -> Any:
            self.gate.wait(60)
            return compile_now(grammar)

        monkeypatch.setattr(engine._grammars, "_compile", compile_later)
        return engine

    counter = itertools.count()

    def add(self, engine: Engine, **fields: Any) -> str:
        """A grammar that no other test compiled."""
        number = next(self.counter)
        grammar = Grammar.regex(f"a{{{number + 2}}}")
        sampling = SamplingParams(max_tokens=40, n=2, grammar=fields.pop("grammar", grammar))
        request_id = f"r{number}"
        engine.add(
            GenerateRequest(
                request_id=request_id, prompt_token_ids=[70], sampling=sampling, seed=1, **fields
            )
        )
        return request_id

    def run(self, engine: Engine) -> list[RequestOutput]:
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        return [output for output in outputs if output.finish_reason is not None]

    def test_they_hold_up_nobody_else(self, engine: Engine) -> None:
        self.add(engine)
        plain = SamplingParams(max_tokens=3, ignore_eos=True)
        engine.add(
            GenerateRequest(request_id="plain", prompt_token_ids=[70], sampling=plain, seed=1)
        )
        ended = []
        while not ended:
            ended = [o.request_id for o in engine.step() if o.finish_reason is not None]
        assert ended == ["plain"]
        assert engine.stats().num_waiting == 2
        self.gate.set()
        assert {output.finish_reason for output in self.run(engine)} == {FinishReason.STOP}

    def test_they_can_be_cancelled_whole_or_in_part(self, engine: Engine) -> None:
        whole, part = self.add(engine), self.add(engine)
        engine.cancel(whole)
        engine.cancel(part, 1)
        self.gate.set()
        reasons = {(o.request_id, o.index): o.finish_reason for o in self.run(engine)}
        assert reasons == {
            (whole, 0): FinishReason.CANCELLED,
            (whole, 1): FinishReason.CANCELLED,
            (part, 0): FinishReason.STOP,
            (part, 1): FinishReason.CANCELLED,
        }

    def test_they_end_at_their_deadline(self, engine: Engine) -> None:
        self.add(engine, deadline_s=MonotonicClock().now_s())
        outputs = self.run(engine)
        self.gate.set()
        assert {output.error_code for output in outputs} == {DeadlineExceededError.code}

    def test_one_that_does_not_compile_ends_alone(self, engine: Engine) -> None:
        self.gate.set()
        self.add(engine, grammar=Grammar.regex("("))
        self.add(engine)
        outputs = self.run(engine)
        assert [output.error_code for output in outputs][:2] == ["invalid_grammar"] * 2
        assert {output.finish_reason for output in outputs[2:]} == {FinishReason.STOP}

    def test_an_id_is_not_taken_twice(self, engine: Engine) -> None:
        request_id = self.add(engine)
        self.counter = itertools.count(int(request_id[1:]))
        with pytest.raises(InvalidRequestError, match="has not ended"):
            self.add(engine)
        self.gate.set()
        self.run(engine)
