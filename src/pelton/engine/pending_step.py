# SPDX-License-Identifier: Apache-2.0
"""A launched step: the way of its results from the device to the scheduler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from pelton.core.request import TokenLogprobs
from pelton.core.step import StepPlan, StepResult
from pelton.engine.sampler import LogprobTensors
from pelton.engine.staging import Download, IntArray


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    row: int
    token_ids: Int[Tensor, " n"]
    values: LogprobTensors


class DraftDownload:
    """Drafts on their way from the device, where they were made after the step's tokens were
    sampled: the host takes those tokens in and plans the next step meanwhile."""

    def __init__(self, token_ids: Int[Tensor, "n k"]) -> None:
        self.num_drafts = token_ids.shape[1]
        self._download = Download([token_ids])
        self._rows: list[list[int]] | None = None

    def row(self, index: int) -> list[int]:
        """Waits for the device."""
        return self.settle()[index]

    def settle(self) -> list[list[int]]:
        """All rows. Waits for the device: then what was enqueued before the drafts is done."""
        if self._rows is None:
            self._rows = self._download.wait()[0].tolist()
        return self._rows


class DraftedTokens(Sequence[int]):
    """The first `count` drafts of one row. Their number is known at once; reading one waits."""

    __slots__ = ("_count", "_download", "_index")

    def __init__(self, download: DraftDownload, index: int, count: int) -> None:
        self._download = download
        self._index = index
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> "Sequence[int]": ...
    def __getitem__(self, place: int | slice) -> "int | Sequence[int]":
        if isinstance(place, slice) and not place.start and place.step is None:
            return DraftedTokens(self._download, self._index, len(range(self._count)[place]))
        return self._download.row(self._index)[: self._count][place]


class LaunchedStep:
    """Implements `core.ports.PendingStep`. The copy to the host starts when it is made."""

    def __init__(
        self,
        plan: StepPlan,
        sample_rows: IntArray,
        token_ids: Int[Tensor, " N"],
        is_finite: Int[Tensor, " N"],
        logprobs: LogprobTensors | None,
        num_logprobs: IntArray,
        prompt_logprobs: list[PromptLogprobs],
        grammar_failures: Mapping[int, str],
    ) -> None:
        """`sample_rows` is the plan's row of each sampled token, several for a row with drafts.
        `num_logprobs`: for each sampled token, how many top entries its row asked for; -1: none.
        `grammar_failures`: index into `sample_rows` to a sentence. Where that is after drafts,
        nothing is sampled; the next step of the row finds the same at its start."""
        self._result: StepResult | None = None
        self._grammar_failures: dict[int, str] = {}
        self._dead_ends: dict[int, int] = {}
        """By row: how many tokens of it may be taken."""
        for index, reason in grammar_failures.items():
            row = int(sample_rows[index])
            place = index - int(np.searchsorted(sample_rows, row))
            if place:
                self._dead_ends[row] = place
            else:
                self._grammar_failures[row] = reason
        self._plan = plan
        self._sample_rows = sample_rows
        self._logprob_rows = np.flatnonzero(num_logprobs >= 0)
        self._num_logprobs = num_logprobs
        self._prompt_rows = [item.row for item in prompt_logprobs]
        tensors = [token_ids, is_finite]
        if logprobs is not None:
            tensors += logprobs.tensors()
        for item in prompt_logprobs:
            tensors += (item.token_ids, *item.values.tensors())
        self._drafts: dict[int, Sequence[int]] = {}
        self._written_with: DraftDownload | None = None
        self._has_logprobs = logprobs is not None
        self._download = Download(tensors)

    @classmethod
    def empty(cls, plan: StepPlan) -> "LaunchedStep":
        """Of a plan without rows."""
        none = torch.zeros(0, dtype=torch.int32)
        rows = np.zeros(0, np.int32)
        return cls(plan, rows, none, none, None, rows, [], {})

    def expect_drafts(self, rows: list[int], token_ids: Int[Tensor, "n k"]) -> None:
        """`rows` are the plan's that sampled a token, and so go on. Starts their own copy."""
        download = DraftDownload(token_ids)
        if len(rows) < self._plan.num_rows:
            # Of a prompt that goes on, the drafter's keys and values are written by now or with
            # the drafts, and whoever reads its blocks for another worker asks for no event.
            self._written_with = download
        for index, row in enumerate(rows):
            self._drafts[row] = DraftedTokens(download, index, download.num_drafts)

    def wait(self) -> StepResult:
        if self._result is None:
            self._result = self._read()
            if self._written_with is not None:
                self._written_with.settle()
        return self._result

    def _read(self) -> StepResult:
        token_ids, is_finite, *rest = self._download.wait()
        sampled: list[list[int]] = [[] for _ in range(self._plan.num_rows)]
        for row, token_id in zip(self._sample_rows.tolist(), token_ids.tolist(), strict=True):
            sampled[row].append(token_id)
        for row, guesses in self._plan.drafts.items():
            del sampled[row][1 + num_right(guesses, sampled[row]) :]
        for row, num_tokens in self._dead_ends.items():
            del sampled[row][num_tokens:]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if self._has_logprobs:
            columns, rest = rest[:4], rest[4:]
            chosen = token_ids[self._logprob_rows].tolist()
            entries = _entries(chosen, columns, self._num_logprobs[self._logprob_rows].tolist())
            rows = self._sample_rows[self._logprob_rows].tolist()
            for row, entry in zip(rows, entries, strict=True):
                known = logprobs.setdefault(row, [])
                if len(known) < len(sampled[row]):
                    known.append(entry)
        prompt_logprobs = {}
        for index, row in enumerate(self._prompt_rows):
            chosen, *columns = rest[5 * index : 5 * index + 5]
            num_top = columns[2].shape[1]
            prompt_logprobs[row] = _entries(chosen.tolist(), columns, [num_top] * len(chosen))
        return StepResult(
            self._plan.step_id,
            sampled,
            logprobs,
            prompt_logprobs,
            self._failures(is_finite, sampled),
            self._grammar_failures,
            self._drafts,
        )

    def _failures(self, is_finite: IntArray, sampled: list[list[int]]) -> dict[int, str]:
        """Rows with a token that was sampled from unusable logits; rejected drafts do not count."""
        if is_finite.all():
            return {}
        failures: dict[int, str] = {}
        rows = self._sample_rows
        for index in np.flatnonzero(is_finite == 0).tolist():
            row = int(rows[index])
            place = index - int(np.searchsorted(rows, row))
            if place < len(sampled[row]) and row not in failures:
                num_drafts = len(self._plan.drafts.get(row, ()))
                position = self._plan.starts[row] + self._plan.num_tokens[row] - num_drafts + place
                failures[row] = f"The model's logits for position {position} are not finite."
        return failures


def num_right(guesses: Sequence[int], sampled: list[int]) -> int:
    """How many leading guesses are what was sampled in their places."""
    for place, (guess, token) in enumerate(zip(guesses, sampled, strict=False)):
        if guess != token:
            return place
    return len(guesses)


def _entries(
    token_ids: list[int], columns: list[npt.NDArray[Any]], num_top: list[int]
) -> list[TokenLogprobs]:
    logprobs, ranks, top_ids, top_logprobs = (column.tolist() for column in columns)
    return [
        TokenLogprobs(
            token_id,
            logprobs[index],
            ranks[index],
            list(zip(top_ids[index][:count], top_logprobs[index][:count], strict=True)),
        )
        for index, (token_id, count) in enumerate(zip(token_ids, num_top, strict=True))
    ]
