# SPDX-License-Identifier: Apache-2.0
"""Scores a model on a task, in this process.

Exact match compares the answer with white space at its ends removed; of a chat with a reasoning
model, without the reasoning. A choice's score is the sum of its tokens' log-probabilities after the
prompt; `accuracy_per_byte` divides it by the choice's length first, so that short choices have no
advantage. Perplexity is over all tokens but the first of each text; `bits_per_byte` is the same in
a unit that does not depend on the tokenizer.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pelton.bench.evaluation.task import ExactMatch, Item, MultipleChoice, Text
from pelton.core.errors import ConfigError, InvalidRequestError
from pelton.core.request import SamplingParams
from pelton.serving.llm import LLM
from pelton.serving.results import RequestResult


@dataclass(slots=True)
class Scores:
    """Each part is there only if the task has items of its kind."""

    exact_match: dict[str, Any] | None = None
    multiple_choice: dict[str, Any] | None = None
    perplexity: dict[str, Any] | None = None
    items: list[dict[str, Any]] = field(default_factory=list)
    """One for each line of the task, in its order."""

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class _Scored:
    """Token ids whose log-probabilities from `first` on are wanted."""

    token_ids: list[int]
    first: int


def evaluate(
    llm: LLM, items: Sequence[Item], *, max_tokens: int, progress: bool, source: str
) -> Scores:
    """`source` names the task in errors. Raises `ConfigError` for an item that does not fit."""
    scores = Scores()
    results: dict[int, dict[str, Any]] = {}
    exact = [item for item in items if isinstance(item, ExactMatch)]
    choice = [item for item in items if isinstance(item, MultipleChoice)]
    texts = [item for item in items if isinstance(item, Text)]
    if exact:
        scores.exact_match = _run_exact(llm, exact, max_tokens, progress, source, results)
    if choice:
        scores.multiple_choice = _run_choice(llm, choice, progress, source, results)
    if texts:
        scores.perplexity = _run_texts(llm, texts, progress, source, results)
    scores.items = [{"line": line, **results[line]} for line in sorted(results)]
    return scores


def _run_exact(
    llm: LLM,
    items: Sequence[ExactMatch],
    max_tokens: int,
    progress: bool,
    source: str,
    results: dict[int, dict[str, Any]],
) -> dict[str, Any]:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    plain = [item for item in items if item.messages is None]
    chats = [item for item in items if item.messages is not None]
    prompts = [llm.tokenizer.encode(item.prompt or "") for item in plain]
    encoded = prompts + [_encode_chat(llm, source, item) for item in chats]
    for item, ids in zip(plain + chats, encoded, strict=True):
        _check_length(llm, source, item.line, len(ids))
    done = llm.generate(prompts, sampling, progress=progress) if plain else []
    if chats:
        conversations = [item.messages or [] for item in chats]
        done += llm.chat(conversations, sampling, progress=progress)
    num_right = 0
    for item, result in zip(plain + chats, done, strict=True):
        text = _finished(result, source, item.line).strip()
        is_right = text in [answer.strip() for answer in item.answers]
        num_right += is_right
        results[item.line] = {"kind": "exact_match", "is_right": is_right, "output": text}
    return _accuracy(num_right, len(items))


def _run_choice(
    llm: LLM,
    items: Sequence[MultipleChoice],
    progress: bool,
    source: str,
    results: dict[int, dict[str, Any]],
) -> dict[str, Any]:
    scored = []
    for item in items:
        num_prompt = len(llm.tokenizer.encode(item.prompt))
        for text in item.choices:
            ids = llm.tokenizer.encode(item.prompt + text)
            _check_length(llm, source, item.line, len(ids))
            # Where the tokens of prompt and choice merge, the merged one belongs to the choice.
            first = min(num_prompt, len(ids) - 1)
            prefix = llm.tokenizer.encode(item.prompt)
            while first > 1 and ids[:first] != prefix[:first]:
                first -= 1
            scored.append(_Scored(ids, max(first, 1)))
    sums = iter(_logprob_sums(llm, scored, progress))
    num_right = num_right_per_byte = 0
    for item in items:
        values = [next(sums) for _ in item.choices]
        per_byte = [v / len(t.encode()) for v, t in zip(values, item.choices, strict=True)]
        picked = values.index(max(values))
        picked_per_byte = per_byte.index(max(per_byte))
        num_right += picked == item.answer
        num_right_per_byte += picked_per_byte == item.answer
        results[item.line] = {
            "kind": "multiple_choice",
            "is_right": picked == item.answer,
            "picked": picked,
            "logprobs": values,
        }
    accuracy = _accuracy(num_right, len(items))
    return {**accuracy, "accuracy_per_byte": num_right_per_byte / len(items)}


def _run_texts(
    llm: LLM,
    items: Sequence[Text],
    progress: bool,
    source: str,
    results: dict[int, dict[str, Any]],
) -> dict[str, Any]:
    scored = []
    for item in items:
        ids = llm.tokenizer.encode(item.text)
        _check_length(llm, source, item.line, len(ids))
        if len(ids) < 2:
            raise ConfigError(f"{source}:{item.line}: a text of one token has no perplexity.")
        scored.append(_Scored(ids, 1))
    total, num_tokens, num_bytes = 0.0, 0, 0
    for item, part, value in zip(items, scored, _logprob_sums(llm, scored, progress), strict=True):
        count = len(part.token_ids) - 1
        total += value
        num_tokens += count
        num_bytes += len(item.text.encode())
        perplexity = math.exp(-value / count)
        results[item.line] = {"kind": "perplexity", "perplexity": perplexity, "num_tokens": count}
    return {
        "perplexity": math.exp(-total / num_tokens),
        "bits_per_byte": -total / math.log(2) / num_bytes,
        "num_tokens": num_tokens,
        "num_items": len(items),
    }


def _logprob_sums(llm: LLM, scored: Sequence[_Scored], progress: bool) -> list[float]:
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [item.token_ids for item in scored]
    sums = []
    for item, result in zip(
        scored, llm.generate(prompts, sampling, progress=progress), strict=True
    ):
        entries = result.prompt_logprobs
        assert entries is not None, "prompt_logprobs were asked for"
        sums.append(math.fsum(entry.logprob for entry in entries[item.first :] if entry))
    return sums


def _encode_chat(llm: LLM, source: str, item: ExactMatch) -> list[int]:
    assert item.messages is not None, item
    try:
        return llm.encode_chat(item.messages)
    except InvalidRequestError as error:
        raise ConfigError(f"{source}:{item.line}: {error.message}") from error


def _check_length(llm: LLM, source: str, line: int, num_tokens: int) -> None:
    limit = int(llm.config.model.max_model_len)
    if not 0 < num_tokens < limit:
        raise ConfigError(
            f"{source}:{line}: {num_tokens} tokens do not fit the context of {limit}, of which one"
            " must be left for the output."
        )


def _finished(result: RequestResult, source: str, line: int) -> str:
    choice = result.choices[0]
    if choice.error is not None:
        raise InvalidRequestError(f"{source}:{line}: {choice.error}")
    return choice.text


def _accuracy(num_right: int, num_items: int) -> dict[str, Any]:
    """With the standard error of the mean of yes-or-no values."""
    accuracy = num_right / num_items
    error = math.sqrt(accuracy * (1 - accuracy) / max(num_items - 1, 1))
    return {"accuracy": accuracy, "standard_error": error, "num_items": num_items}
