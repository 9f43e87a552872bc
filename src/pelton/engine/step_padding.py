# SPDX-License-Identifier: Apache-2.0
"""The sizes that steps are padded to, so that a step finds its captured graph or compiled product.

A step without prompts is padded to a number of rows with room for as many tokens: one each, or,
where drafts are verified, one and the most drafts that a row may have. Rows with fewer drafts are
shorter, and the room that is left lies behind the last row.

A small step with prompts, which launched kernel by kernel waits for the host far longer than for
the device, is padded to a number of decodes, a number of prompts and a number of tokens for these.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pelton.core.config import DraftMethod, SpeculativeConfig
from pelton.core.step import StepPlan

_MIXED_DECODES = (0, 8, 32, 128, 256)
_MIXED_PROMPTS, _MIXED_TOKENS = 8, (32, 128, 256, 512, 1024)
"""Prompts of a step with a graph, and tokens of all of them."""
_MIXED_MOST_TOKENS = 1100
"""Decodes counted. Behind them the device has as much to do as the host."""
_MIXED_HALF_EMPTY = 512
"""Sizes of more tokens must be half full."""
_MIXED_PAIRS = 2**20
"""The most new tokens of prompts, times the contexts that they end, of a step with a graph: with
more, kernels that are chosen by the rows' lengths are worth more than the launches cost."""
_MIXED_CONTEXT = 2**14
"""The longest context of a prompt in such a step: a graph's attention does not split it."""


class GraphSize(NamedTuple):
    """What the shapes of a padded step follow from."""

    num_rows: int
    row_len: int
    """Tokens that each row has room for; 0: decodes, and behind them prompts of any lengths."""
    num_decodes: int
    num_tokens: int

    @property
    def num_logits(self) -> int:
        return self.num_rows * max(self.row_len, 1)

    @property
    def max_query_len(self) -> int:
        return self.row_len or self.num_tokens - self.num_decodes


def uniform_size(num_rows: int, row_len: int = 1) -> GraphSize:
    """Of a step without prompts."""
    return GraphSize(num_rows, row_len, num_rows if row_len == 1 else 0, num_rows * row_len)


def mixed_sizes(max_rows: int, max_tokens: int) -> tuple[GraphSize, ...]:
    """Of steps with prompts, by tokens, then by rows. These may be more than `max_rows`, by
    padding."""
    most = max_rows - 1
    sizes = {
        GraphSize(decodes + min(_MIXED_PROMPTS, max_rows), 0, decodes, decodes + tokens)
        for decodes in (*(count for count in _MIXED_DECODES if count < most), most)
        for tokens in _MIXED_TOKENS
        if decodes + tokens <= min(max_tokens, _MIXED_MOST_TOKENS)
    }
    return tuple(sorted(sizes, key=lambda size: (size.num_tokens, size.num_rows)))


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
    graph_sizes: tuple[GraphSize, ...] = ()
    """Of every graph to capture."""
    mixed_sizes: tuple[GraphSize, ...] = ()
    """Those of steps with prompts among them, by tokens, then by rows."""

    def size(self, plan: StepPlan) -> GraphSize | None:
        """None: the step is not padded to the size of a graph."""
        row_len = self.row_len(plan)
        if row_len:
            return uniform_size(self.rows(plan.num_rows, row_len), row_len)
        if not self.mixed_sizes or plan.drafts or plan.prompt_logprob_rows:
            return None
        new = plan.num_tokens[plan.num_decodes :]
        contexts = [
            start + count for count, start in zip(new, plan.starts[plan.num_decodes :], strict=True)
        ]
        num_pairs = sum(count * context for count, context in zip(new, contexts, strict=True))
        if num_pairs > _MIXED_PAIRS or max(contexts) > _MIXED_CONTEXT:
            return None
        fitting = (
            size
            for size in self.mixed_sizes
            if plan.num_decodes <= size.num_decodes
            and len(new) <= size.num_rows - size.num_decodes
            and sum(new) <= size.max_query_len
        )
        size = next(fitting, None)
        if size and size.num_tokens > max(_MIXED_HALF_EMPTY, 2 * (plan.num_decodes + sum(new))):
            return None
        return size

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
        return self.draft_rows[bisect_left(self.draft_rows, num_rows)]


NO_PADDING = StepPadding()


def pad_for_graphs(max_rows: int, max_tokens: int, speculative: SpeculativeConfig) -> StepPadding:
    """With a graph for every step without prompts, but for steps of drafts of more than
    `max_tokens` tokens, and for small steps with prompts and no drafts. The executor's own drafter
    needs graphs of one row length only: its rows have drafts in nearly every step."""
    num_drafts = speculative.num_drafts
    ladder = decode_ladder(max_rows)
    draft_ladder: tuple[int, ...] = ()
    if num_drafts and max_tokens > num_drafts:
        draft_ladder = decode_ladder(min(max_rows, max_tokens // (1 + num_drafts)))
    always_for_drafts = speculative.method is DraftMethod.MTP and draft_ladder[-1:] == (max_rows,)
    uniform = [uniform_size(rows, 1 + num_drafts) for rows in draft_ladder]
    if not always_for_drafts:
        uniform += [uniform_size(rows) for rows in ladder]
    mixed: tuple[GraphSize, ...] = ()
    if speculative.method is not DraftMethod.MTP:
        mixed = mixed_sizes(max_rows, max_tokens)
    return StepPadding(
        decode_rows=make_padding(ladder),
        draft_rows=draft_ladder,
        num_drafts=num_drafts,
        always_for_drafts=always_for_drafts,
        graph_sizes=(*uniform, *mixed),
        mixed_sizes=mixed,
    )
