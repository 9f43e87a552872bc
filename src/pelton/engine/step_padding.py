# SPDX-License-Identifier: Apache-2.0
"""The sizes that steps are padded to, so that a step finds its captured graph or compiled product.

A step without prompts is padded to a number of rows with room for as many tokens: one each, or,
where drafts are verified, one and the most drafts that a row may have. Rows with fewer drafts are
shorter, and the room that is left lies behind the last row.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pelton.core.config import DraftMethod, SpeculativeConfig
from pelton.core.step import StepPlan


def decode_ladder(max_rows: int) -> tuple[int, ...]:
    """Row counts with a graph: steps of 8 up to 128, then of 64; `max_rows` is the last."""
    sizes = {1, 2, 4, 8, *range(16, 129, 8), *range(192, max_rows, 64), max_rows}
    return tuple(sorted(size for size in sizes if size <= max_rows))


def token_ladder(max_tokens: int) -> tuple[int, ...]:
    """Token counts of steps on a CPU: 1, 2, 4, 8, 16, then four to each doubling; `max_tokens` is
    the last.

    oneDNN compiles a product anew for every number of rows and keeps what it compiled, half a
    megabyte for each product: with steps of any size that adds up to a gigabyte, and a step of a
    new size waits.
    """
    sizes = {1, 2, 4, 8, 16, max_tokens}
    octave = 16
    while octave < max_tokens:
        sizes |= {octave * quarter // 4 for quarter in range(4, 8)}
        octave *= 2
    return tuple(sorted(size for size in sizes if size <= max_tokens))


def no_padding(count: int) -> int:
    return count


def make_padding(ladder: Sequence[int]) -> Callable[[int], int]:
    """The rule from a step's rows to the rows of the graph that runs it."""

    def padded_rows(num_rows: int) -> int:
        return ladder[bisect_left(ladder, num_rows)]

    return padded_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPadding:
    decode_rows: Callable[[int], int] = no_padding
    """From the rows of a step of decodes and nothing else to the rows it is padded to."""
    tokens: Callable[[int], int] = no_padding
    """The same for the tokens, and the logits, of a step whose rows keep their lengths."""
    draft_rows: Sequence[int] = ()
    """Row counts, ascending, that steps of drafts are padded to, with room for `1 + num_drafts`
    tokens each. A step of more rows is not padded so."""
    num_drafts: int = 0
    """The most of one row."""
    always_for_drafts: bool = False
    """Steps without prompts have room for drafts even if no row has one."""
    graph_sizes: tuple[tuple[int, int], ...] = ()
    """(rows, tokens of each) of every graph to capture."""

    def row_len(self, plan: StepPlan) -> int:
        """Tokens that each row has room for; 0: the step is not padded by rows."""
        if plan.num_rows > plan.num_decodes + len(plan.drafts):
            return 0
        fits = bool(self.draft_rows) and plan.num_rows <= self.draft_rows[-1]
        if fits and (plan.drafts or self.always_for_drafts):
            return 1 + self.num_drafts
        return 0 if plan.drafts else 1

    def rows(self, num_rows: int, row_len: int) -> int:
        if row_len == 1:
            return self.decode_rows(num_rows)
        if not row_len:
            return num_rows
        return self.draft_rows[bisect_left(self.draft_rows, num_rows)]


NO_PADDING = StepPadding()


def pad_for_graphs(max_rows: int, max_tokens: int, speculative: SpeculativeConfig) -> StepPadding:
    """With a graph for every step without prompts, but for steps of drafts of more than
    `max_tokens` tokens. The executor's own drafter needs graphs of one row length only: its rows
    have drafts in nearly every step."""
    num_drafts = speculative.num_drafts
    ladder = decode_ladder(max_rows)
    draft_ladder: tuple[int, ...] = ()
    if num_drafts and max_tokens > num_drafts:
        draft_ladder = decode_ladder(min(max_rows, max_tokens // (1 + num_drafts)))
    always_for_drafts = speculative.method is DraftMethod.MTP and draft_ladder[-1:] == (max_rows,)
    decodes = () if always_for_drafts else tuple((rows, 1) for rows in ladder)
    return StepPadding(
        decode_rows=make_padding(ladder),
        draft_rows=draft_ladder,
        num_drafts=num_drafts,
        always_for_drafts=always_for_drafts,
        graph_sizes=decodes + tuple((rows, 1 + num_drafts) for rows in draft_ladder),
    )
