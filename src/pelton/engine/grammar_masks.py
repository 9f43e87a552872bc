# SPDX-License-Identifier: Apache-2.0
"""The masks of a step's rows that have a grammar.

The mask of step N+1 needs the token of step N on the host. So that such rows overlap like all
others, it is filled after the forward pass of step N+1 was launched: the device computes it while
the host reads the token, moves the matchers and fills the masks, which the sampler then waits for.

    device   forward N │ sample N │ forward N+1            │ sample N+1 │
    host     launch N+1's forward │ read N, move, fill     │ launch the sampler, commit N, plan N+2
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from pelton.core.grammar import TokenMatcher
from pelton.core.ports import PendingStep
from pelton.core.step import Admission
from pelton.engine.staging import IntArray


@dataclass(frozen=True, slots=True)
class FilledMasks:
    rows: IntArray
    """Indices into the rows of logits, ascending."""
    masks: IntArray
    """[n, words] for them; see `core.grammar.TokenMatcher.fill_masks`."""
    failures: dict[int, str]
    """Index to a sentence, for rows of logits that no token can be chosen from: not after the
    output, or not after the drafts before them. All is allowed there."""


class GrammarMasks:
    """Moves the matchers of the requests that hold slots, and asks them what may come next."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._matchers: list[TokenMatcher | None] = [*repeat(None, num_slots)]
        self._unread: list[tuple[PendingStep, int, TokenMatcher]] = []
        """Steps, their plans' rows, and the matchers that have not seen these rows' tokens."""

    def admit(self, admission: Admission) -> None:
        matcher = admission.matcher
        self._matchers[admission.slot] = matcher
        if matcher is not None:
            # A choice that was preempted: all it has sampled is in its tokens by now.
            self._unread = [item for item in self._unread if item[2] is not matcher]
            matcher.restart(admission.token_ids[admission.num_prompt_tokens :])

    def fill(
        self, slots: IntArray, drafts: Mapping[int, Sequence[int]] | None = None
    ) -> FilledMasks | None:
        """Masks for rows of logits, one for each of `slots`. None: no row has a grammar.

        `drafts`: index into `slots` to the tokens drafted there; such an entry stands for
        1 + len(drafts) rows of logits, one after the other. Waits for the tokens of steps that
        were noted.
        """
        matchers = self._matchers
        held = [(i, m) for i, s in enumerate(slots.tolist()) if (m := matchers[s]) is not None]
        if not held:
            return None
        self._read_tokens()
        drafted = {} if drafts is None else drafts
        sizes = [1 + len(drafted.get(index, ())) for index in range(len(slots))]
        firsts = np.cumsum(sizes) - sizes
        rows = [
            row for index, _ in held for row in range(firsts[index], firsts[index] + sizes[index])
        ]
        masks = np.empty((len(rows), self._num_words), np.int32)
        failures: dict[int, str] = {}
        start = 0
        for index, matcher in held:
            part = masks[start : start + sizes[index]]
            dead_end, reason = _fill(matcher, part, drafted.get(index, ()))
            if reason:
                failures[int(firsts[index]) + dead_end] = reason
            start += sizes[index]
        return FilledMasks(np.array(rows, np.int32), masks, failures)

    def note(self, step: PendingStep, rows: IntArray, slots: IntArray) -> None:
        """`step` was launched; its plan's row `rows[i]` samples for the request in `slots[i]`."""
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            matcher = self._matchers[slot]
            if matcher is not None:
                self._unread.append((step, row, matcher))

    def _read_tokens(self) -> None:
        unread, self._unread = self._unread, []
        for step, row, matcher in unread:
            matcher.advance(step.wait().sampled[row])


def _fill(matcher: TokenMatcher, masks: IntArray, drafts: Sequence[int]) -> tuple[int, str]:
    """The first row that no token can be chosen from, and why; no reason: there is none."""
    if matcher.error:
        masks[:] = -1
        return 0, matcher.error
    dead_end = matcher.fill_masks(masks, drafts)
    if dead_end == len(masks):
        return dead_end, ""
    masks[dead_end:] = -1
    return dead_end, matcher.error or "No token of the vocabulary can go on in the grammar."
