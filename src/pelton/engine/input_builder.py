# SPDX-License-Identifier: Apache-2.0
"""Turns a step plan into the model's batch: static device buffers, refilled in place.

All index arithmetic is vectorised numpy over the step's rows and tokens, sent by one copy. Token
ids and block table rows are gathered on the device from the slot table, because the newest token
of a running request may exist only there.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pelton.core.batch import ForwardBatch, KVGroupBatch
from pelton.core.geometry import ModelGeometry
from pelton.core.step import StepPlan
from pelton.engine.kv.pool import KVPool
from pelton.engine.slot_table import SlotTable
from pelton.engine.staging import IntArray, StaticInputs
from pelton.engine.step_padding import NO_PADDING, GraphSize, StepPadding


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Valid until the next step is built."""

    batch: ForwardBatch
    targets: Int[Tensor, " N"]
    """Where in the flattened token table the token sampled from each of `logit_rows` goes."""
    sample_rows: IntArray
    """The plan's row behind each of `logit_rows`; shorter than `targets` where rows are padding.
    A row with drafts is there once for each of its tokens."""
    positions: IntArray
    """Of the tokens sampled, one for each of `sample_rows`."""
    token_index: Int[Tensor, " T"]
    """Where in the flattened token table each of the batch's tokens stands."""
    size: GraphSize | None
    """Of a step that a graph may run."""
    going_on: "GoingOn"

    @property
    def row_len(self) -> int:
        """Of a step without prompts that a graph may run: the most tokens of a row, for which each
        of the rows has room. Else 0."""
        return self.size.row_len if self.size else 0


@dataclass(frozen=True, slots=True)
class GoingOn:
    """The n rows that sample, in the batch's order, for the layer that drafts; padding included
    where the step's rows are padded."""

    slots: Int[Tensor, " n"]
    first_logits: Int[Tensor, " n"]
    """Index into `logit_rows` of the row's first one; one for each of its drafts follows."""
    num_drafts: Int[Tensor, " n"]


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Sizes of a batch, padding included."""

    size: GraphSize | None
    num_rows: int
    num_decodes: int
    num_tokens: int
    num_logits: int
    num_going_on: int
    max_query_len: int
    max_context_len: int
    chunk_lens: tuple[tuple[int, int], ...] = ()
    has_prompt_logprobs: bool = False


class InputBuilder:
    def __init__(
        self,
        geometry: ModelGeometry,
        pool: KVPool,
        slots: SlotTable,
        *,
        max_num_rows: int,
        max_num_tokens: int,
        device: torch.device,
        padding: StepPadding = NO_PADDING,
        all_hidden_states: bool = False,
    ) -> None:
        """`padding` never asks for more tokens than `max_num_tokens`; beyond `max_num_rows`, a step
        with prompts may have rows of padding. `all_hidden_states`: those of a prompt's tokens that
        sample nothing are read, too."""
        self._geometry = geometry
        self._pool = pool
        self._slots = slots
        max_num_rows = max(max_num_rows, *(size.num_rows for size in padding.graph_sizes), 0)
        self._max_num_tokens = max_num_tokens
        self._max_num_rows = max_num_rows
        self._padding = padding
        self._all_hidden_states = all_hidden_states
        self._trash = slots.tokens.numel() - 1
        group_names = [f"slot_mapping_{index}" for index in range(len(geometry.kv_groups))]
        per_token = dict.fromkeys(("positions", "token_index", *group_names), max_num_tokens)
        per_row = dict.fromkeys(
            ("context_lens", "slot_ids", "going_on_slots", "first_logits", "num_drafts"),
            max_num_rows,
        )
        self._max_num_logits = min(max_num_rows * (1 + padding.num_drafts), max_num_tokens)
        per_logit = dict.fromkeys(("logit_rows", "targets"), self._max_num_logits)
        self._group_names = group_names
        self._static = StaticInputs(
            {**per_token, **per_row, **per_logit, "query_starts": max_num_rows + 1}, device
        )
        self._token_ids = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self._block_tables = tuple(
            torch.zeros((max_num_rows, table.shape[1]), dtype=torch.int32, device=device)
            for table in slots.block_tables
        )

    def build(self, plan: StepPlan) -> StepInputs:
        """The plan must have been applied to the slot table already."""
        size = self._padding.size(plan)
        num_rows, num_decodes = plan.num_rows, plan.num_decodes
        num_tokens = self._padding.tokens(sum(plan.num_tokens))
        if size is not None:
            num_rows, num_decodes, num_tokens = size.num_rows, size.num_decodes, size.num_tokens
        assert num_tokens <= self._max_num_tokens, (num_tokens, self._max_num_tokens)
        assert num_rows <= self._max_num_rows, (num_rows, self._max_num_rows)
        # Rows of padding lie behind the decodes and behind the other rows. Among decodes such a row
        # is one token of an empty request: its key and value go to the null block. Elsewhere it has
        # no token; padding tokens behind the last row belong to none.
        places = np.arange(plan.num_rows)
        places[plan.num_decodes :] += max(num_decodes - plan.num_decodes, 0)
        slots = np.full(num_rows, self._slots.padding_slot, np.int32)
        starts, counts, context_lens = np.zeros((3, num_rows), np.int32)
        counts[:num_decodes] = 1
        slots[places], starts[places], counts[places] = plan.slots, plan.starts, plan.num_tokens
        context_lens[places] = starts[places] + counts[places]

        host = self._static.begin()
        query_starts = host["query_starts"][: num_rows + 1]
        query_starts[0] = 0
        np.cumsum(counts, out=query_starts[1:])
        host["context_lens"][:num_rows] = context_lens
        host["slot_ids"][:num_rows] = slots
        self._fill_tokens(host, slots, starts, counts, num_tokens)

        is_uniform = size is not None and size.row_len > 0
        samples = _find_samples(plan, every_row=is_uniform)
        num_going_on = num_rows if is_uniform else len(samples.going_on)
        num_logits = min(self._padding.tokens(len(samples.rows)), self._max_num_logits)
        if size is not None:
            num_logits = size.num_logits
        rows = places[samples.rows]
        _fill(host["logit_rows"], query_starts[rows] + samples.places, num_logits, num_tokens - 1)
        targets = slots[rows] * self._slots.token_stride + samples.positions
        _fill(host["targets"], targets, num_logits, self._trash)
        if self._padding.num_drafts:
            first_logits = samples.counts.cumsum() - samples.counts
            padding_slot, going_on = self._slots.padding_slot, places[samples.going_on]
            _fill(host["going_on_slots"], slots[going_on], num_going_on, padding_slot)
            _fill(host["first_logits"], first_logits, num_going_on, num_logits - 1)
            _fill(host["num_drafts"], samples.counts - 1, num_going_on, 0)
        self._static.flush()
        bounds = _Bounds(
            size=size,
            num_rows=num_rows,
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            num_logits=num_logits,
            num_going_on=num_going_on,
            max_query_len=size.max_query_len if size else int(counts.max()),
            max_context_len=int(context_lens.max()),
            chunk_lens=() if size else _chunk_lens(plan),
            has_prompt_logprobs=bool(plan.prompt_logprob_rows),
        )
        return self._view(bounds, samples.rows, samples.positions)

    def build_padding(self, size: GraphSize) -> StepInputs:
        """A step of padding rows, with the longest context as its bound: what a graph is captured
        on."""
        num_rows, num_tokens, num_logits = size.num_rows, size.num_tokens, size.num_logits
        counts = np.full(num_rows, size.row_len, np.int32)
        counts[: size.num_decodes] = 1
        host = self._static.begin()
        host["query_starts"][: num_rows + 1] = np.cumsum([0, *counts])
        host["logit_rows"][:num_logits] = np.arange(num_logits)
        host["first_logits"][:num_rows] = np.arange(num_rows) * max(size.row_len, 1)
        for name in ("context_lens", "num_drafts"):
            host[name][:num_rows] = 0
        for name in ("slot_ids", "going_on_slots"):
            host[name][:num_rows] = self._slots.padding_slot
        for name in ("positions", *self._group_names):
            host[name][:num_tokens] = 0
        host["targets"][:num_logits] = self._trash
        host["token_index"][:num_tokens] = self._trash
        self._static.flush()
        bounds = _Bounds(
            size=size,
            num_rows=num_rows,
            num_decodes=size.num_decodes,
            num_tokens=num_tokens,
            num_logits=num_logits,
            num_going_on=num_rows,
            max_query_len=size.max_query_len,
            max_context_len=self._slots.max_tokens,
        )
        none = np.zeros(0, np.int32)
        return self._view(bounds, none, none)

    def _fill_tokens(
        self,
        host: dict[str, IntArray],
        slots: IntArray,
        starts: IntArray,
        counts: IntArray,
        padded_tokens: int,
    ) -> None:
        if (counts == 1).all():
            token_slots, positions = slots, starts
        else:
            token_slots = np.repeat(slots, counts)
            first_tokens = np.cumsum(counts) - counts
            positions = np.arange(len(token_slots), dtype=np.int32)
            positions += np.repeat(starts - first_tokens.astype(np.int32), counts)
        _fill(host["positions"], positions, padded_tokens, 0)
        index = token_slots * self._slots.token_stride + positions
        _fill(host["token_index"], index, padded_tokens, self._trash)
        block_size = self._slots.block_size
        entries, offsets = np.divmod(positions, block_size)
        for name, table in zip(self._group_names, self._slots.host_block_tables, strict=True):
            mapping = table[token_slots, entries] * block_size + offsets
            _fill(host[name], mapping, padded_tokens, 0)

    def _view(self, bounds: _Bounds, sample_rows: IntArray, positions: IntArray) -> StepInputs:
        static, num_tokens = self._static.tensors, bounds.num_tokens
        token_ids = self._token_ids[:num_tokens]
        flat_tokens = self._slots.tokens.view(-1)
        token_index = static["token_index"][:num_tokens]
        torch.index_select(flat_tokens, 0, token_index, out=token_ids)
        logit_rows = static["logit_rows"][: bounds.num_logits]
        reads_all = self._all_hidden_states or bounds.has_prompt_logprobs
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=static["positions"][:num_tokens],
            query_starts=static["query_starts"][: bounds.num_rows + 1],
            context_lens=static["context_lens"][: bounds.num_rows],
            groups=self._group_batches(bounds.num_rows, num_tokens),
            logit_rows=logit_rows,
            hidden_rows=None if reads_all or bounds.num_logits >= num_tokens else logit_rows,
            num_decodes=bounds.num_decodes,
            max_query_len=bounds.max_query_len,
            max_context_len=bounds.max_context_len,
            chunk_lens=bounds.chunk_lens,
        )
        targets = static["targets"][: bounds.num_logits]
        going_on = GoingOn(
            *(
                static[name][: bounds.num_going_on]
                for name in ("going_on_slots", "first_logits", "num_drafts")
            )
        )
        return StepInputs(
            batch, targets, sample_rows, positions, token_index, bounds.size, going_on
        )

    def _group_batches(self, num_rows: int, num_tokens: int) -> tuple[KVGroupBatch, ...]:
        static = self._static.tensors
        slot_ids = static["slot_ids"][:num_rows]
        groups = []
        for index, group in enumerate(self._geometry.kv_groups):
            tables = self._block_tables[index][:num_rows]
            torch.index_select(self._slots.block_tables[index], 0, slot_ids, out=tables)
            groups.append(
                KVGroupBatch(
                    cache=self._pool.caches[index],
                    block_tables=tables,
                    slot_mapping=static[self._group_names[index]][:num_tokens],
                    window=group.window,
                )
            )
        return tuple(groups)


@dataclass(frozen=True, slots=True)
class _Samples:
    """The tokens that a step samples, in the order of its rows; a row with drafts has several."""

    going_on: IntArray
    """The plan's rows that sample."""
    counts: IntArray
    """Tokens sampled in each of them: one more than it has drafts."""
    rows: IntArray
    """The plan's row of each token sampled."""
    places: IntArray
    """After which of the row's tokens it is sampled."""
    positions: IntArray
    """Of the token sampled."""


def _find_samples(plan: StepPlan, *, every_row: bool) -> _Samples:
    """`every_row`: the step has no prompts, so that each of its rows samples."""
    starts, counts = np.array(plan.starts, np.int32), np.array(plan.num_tokens, np.int32)
    going_on = np.arange(plan.num_rows, dtype=np.int32)
    if not every_row:
        going_on = np.flatnonzero(plan.samples).astype(np.int32)
    if not plan.drafts:
        places = counts[going_on] - 1
        ones = np.ones_like(going_on)
        return _Samples(going_on, ones, going_on, places, starts[going_on] + places + 1)
    num_samples = np.ones(plan.num_rows, np.int32)
    for row, drafts in plan.drafts.items():
        num_samples[row] += len(drafts)
    num_samples = num_samples[going_on]
    rows = np.repeat(going_on, num_samples)
    ends = np.repeat(num_samples.cumsum(dtype=np.int32), num_samples)
    tokens_back = ends - np.arange(1, len(rows) + 1, dtype=np.int32)
    places = counts[rows] - 1 - tokens_back
    return _Samples(going_on, num_samples, rows, places, starts[rows] + places + 1)


def _chunk_lens(plan: StepPlan) -> tuple[tuple[int, int], ...]:
    if plan.num_rows == plan.num_decodes + len(plan.drafts):
        return ()
    rows = slice(plan.num_decodes, plan.num_rows)
    pairs = zip(plan.num_tokens[rows], plan.starts[rows], strict=True)
    return tuple((count, start + count) for count, start in pairs)


def _fill(host: IntArray, values: IntArray, length: int, padding: int) -> None:
    host[: len(values)] = values
    host[len(values) : length] = padding
