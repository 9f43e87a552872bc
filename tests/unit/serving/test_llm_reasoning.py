# SPDX-License-Identifier: Apache-2.0
"""Reasoning models in this process: what they think is no part of the answer."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pelton import LLM, Grammar, SamplingParams
from pelton.bench.evaluation.run import evaluate
from pelton.bench.evaluation.task import ExactMatch
from pelton.bench.tokenise import tokenise_samples
from pelton.bench.traffic import Sample
from pelton.core.errors import InvalidRequestError
from scripted_model import save_harmony_model, save_r1_model

HELLO = [{"role": "user", "content": "hello"}]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAID = {"harmony": (" I think so", "Hello there"), "r1": (" hmm ok", "Hi all")}


@pytest.fixture(scope="module", params=list(SAID))
def spoken(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, tuple[str, str], str]]:
    folder = tmp_path_factory.mktemp(request.param)
    (save_harmony_model if request.param == "harmony" else save_r1_model)(folder)
    options: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 2**25}
    with LLM(str(folder), max_model_len=512, **options) as llm:
        yield llm, SAID[request.param], str(folder)


def test_reasoning_is_apart_from_the_answer(spoken: Any) -> None:
    llm, (thought, answer), _ = spoken
    [result] = llm.chat(HELLO, GREEDY, progress=False)
    [choice] = result.choices
    assert (choice.reasoning, choice.text) == (thought, answer)
    thoughts: list[str] = []
    assert "".join(llm.stream_chat(HELLO, GREEDY, on_reasoning=thoughts.append)) == answer
    assert "".join(thoughts) == thought


def test_a_prompt_that_is_no_chat_is_continued_as_text(spoken: Any) -> None:
    llm, _, _ = spoken
    [result] = llm.generate([llm.encode_chat(HELLO)], GREEDY, progress=False)
    assert result.choices[0].reasoning == ""
    assert (
        result.choices[0].token_ids
        == llm.chat(HELLO, GREEDY, progress=False)[0].choices[0].token_ids
    )


def test_a_grammar_holds_once_the_reasoning_is_over(spoken: Any) -> None:
    llm, (thought, _), _ = spoken
    sampling = SamplingParams(temperature=0, max_tokens=60, grammar=Grammar.regex("[0-9]{3}"))
    [choice] = llm.chat(HELLO, sampling, progress=False)[0].choices
    assert choice.reasoning == thought
    assert len(str(int("1" + choice.text))) == 4


def test_answers_of_a_chat_are_compared_without_reasoning(spoken: Any) -> None:
    llm, (_, answer), _ = spoken
    item = ExactMatch(line=1, prompt=None, messages=HELLO, answers=(answer,))
    scores = evaluate(llm, [item], max_tokens=40, progress=False, source="task")
    assert scores.exact_match is not None
    assert scores.exact_match["accuracy"] == 1


def test_a_benchmark_sends_the_prompts_that_a_chat_does(spoken: Any) -> None:
    llm, _, folder = spoken
    [sample] = tokenise_samples([Sample(messages=HELLO, max_tokens=1)], folder)
    assert sample.input_tokens == llm.encode_chat(HELLO)


@pytest.mark.parametrize(
    "message", [{}, {"role": "user"}, {"role": "you", "content": "a"}], ids=json.dumps
)
def test_malformed_messages_are_named(spoken: Any, message: dict[str, str]) -> None:
    llm, _, _ = spoken
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]"):
        llm.chat([message], GREEDY, progress=False)
