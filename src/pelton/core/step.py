# SPDX-License-Identifier: Apache-2.0
"""What the scheduler hands the executor for one step, and what comes back.

A plan is complete when built and holds no tensors; drafts that the executor made itself may still
be on the way from the device, and whoever reads one waits for it. Rows are kept as parallel lists
because the executor turns each list into one array. Decode rows (one token, everything before it
in the KV cache) come first, then decode rows with drafts, then prefill chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pelton.core.grammar import TokenMatcher
from pelton.core.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Admission:
    """A request (one choice of it) that takes a slot with this step.

    The executor keeps the token ids, sampling parameters and block table of the slot until the
    slot is admitted again; the scheduler never reuses a slot whose last step is still in flight
    in a way that could mix two requests, because steps run in the order they were launched.
    """

    slot: int
    token_ids: list[int]
    """Prompt plus the outputs so far (after preemption). The executor must not mutate it."""
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    """Of this choice: the request's seed mixed with the choice's index."""
    eos_token_ids: tuple[int, ...]
    """Tokens banned until min_tokens: end-of-sequence (unless ignored) and stop token ids."""
    matcher: TokenMatcher | None = None
    """The choice's place in its grammar. The executor moves it while the choice has the slot."""


class BlockUpdate(NamedTuple):
    """Entry `entry` of `slot`'s block table in `group` becomes `block_id` before the step runs."""

    group: int
    slot: int
    entry: int
    block_id: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    admissions: list[Admission]
    block_updates: list[BlockUpdate]
    slots: list[int]
    """Row r computes tokens [starts[r], starts[r] + num_tokens[r]) of the request in slots[r]."""
    starts: list[int]
    num_tokens: list[int]
    samples: list[bool]
    """Whether row r's last token yields a new token (false for all but a prompt's last chunk).
    The new token's position is starts[r] + num_tokens[r]. A row with drafts samples after each of
    its tokens."""
    num_decodes: int
    """Rows [0, num_decodes) are decodes: num_tokens == 1 and samples."""
    prompt_logprob_rows: list[int] = field(default_factory=list)
    """Rows of requests that asked for prompt_logprobs and still are in their prompt."""
    drafts: dict[int, Sequence[int]] = field(default_factory=dict)
    """Row to the tokens guessed for the places after its first token: the row computes that token
    and its drafts, num_tokens[r] == 1 + len(drafts[r])."""

    @property
    def num_rows(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Host values of one step, in the order of the plan's rows."""

    step_id: int
    sampled: list[list[int]]
    """For each row: its new tokens; empty where the row does not sample. A row with drafts has one
    more than were right, the last being the token sampled after those."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Row to one entry for each of its new tokens, for rows that asked."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Row to one entry for each of its tokens' *next* prompt tokens: entry i is about the token at
    position starts[r] + i + 1; positions past the prompt are left out."""
    failed_rows: dict[int, str] = field(default_factory=dict)
    """Row to a sentence, where the logits were not finite. Such a row has no usable token."""
    grammar_failures: dict[int, str] = field(default_factory=dict)
    """Row to a sentence, where the grammar could not be followed. No usable token either."""
    drafts: dict[int, Sequence[int]] = field(default_factory=dict)
    """Row to the executor's guesses for the tokens that follow its new ones, where it drafts."""
