# SPDX-License-Identifier: Apache-2.0
"""The running choices and all they hold: slots and blocks. Says what fits beside them.

Running choices are kept in three lists, by what they do next, each sorted by key; the choice that
is last in order over all is the first to be preempted. A choice that ended gave everything back but
stays in its list until `tidy`, so that many can end in one step at no cost.
"""

from bisect import insort
from itertools import chain
from operator import attrgetter

from pelton.core.config import EngineConfig, resolved
from pelton.core.geometry import ModelGeometry
from pelton.core.kv_transfer import BlockRange
from pelton.core.step import BlockUpdate
from pelton.engine.kv.block_tables import (
    BlockTable,
    BlockTables,
    group_blocks,
    max_tokens_in_flight,
)
from pelton.engine.kv.blocks import NULL_BLOCK
from pelton.engine.kv.prefix_index import PrefixHit
from pelton.engine.request_state import NO_SLOT, RequestState, State

_key = attrgetter("key")


class RunningChoices:
    def __init__(self, config: EngineConfig, geometry: ModelGeometry) -> None:
        self.block_size = config.cache.block_size
        self.tables = BlockTables(
            geometry.kv_groups,
            group_blocks(
                geometry.kv_groups,
                resolved(config.cache.num_blocks),
                self.block_size,
                config.scheduler,
                shares_prefixes=config.cache.prefix_cache,
            ),
            self.block_size,
            max_tokens_in_flight(config.scheduler),
        )
        self.decoding: list[RequestState] = []
        self.prefilling: list[RequestState] = []
        self.receiving: list[RequestState] = []
        self._num_slots = resolved(config.scheduler.max_num_requests)
        self._free_slots = list(reversed(range(self._num_slots)))
        self._is_untidy = False

    @property
    def count(self) -> int:
        return self._num_slots - len(self._free_slots)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def last(self) -> RequestState | None:
        """The choice that is last in order. The lists must be tidy."""
        tails = [choices[-1] for choices in self._lists() if choices]
        return max(tails, key=_key, default=None)

    def enter(self, choice: RequestState, hit: PrefixHit, updates: list[BlockUpdate]) -> None:
        """Gives a waiting choice a slot and a table that starts with `hit`."""
        choice.advance(State.PREFILLING)
        choice.slot = self._free_slots.pop()
        choice.table = self.tables.open(hit, choice.slot, updates)
        choice.num_planned = choice.num_computed = hit.num_blocks * self.block_size
        choice.next_publish = choice.num_planned + self.block_size
        insort(self.prefilling, choice, key=_key)

    def receive(self, choice: RequestState, hit: PrefixHit) -> list[BlockRange]:
        """Gives a waiting choice a slot and a table for its whole prompt, which starts with `hit`.
        Returns, for each group, the blocks that another engine is to fill."""
        choice.advance(State.RECEIVING)
        choice.slot = self._free_slots.pop()
        choice.table = self.tables.open(hit, choice.slot, [])
        choice.num_cached_tokens = hit.num_blocks * self.block_size
        insort(self.receiving, choice, key=_key)
        return self.tables.reserve(choice.table, len(choice.token_ids))

    def take_in(self, choice: RequestState) -> None:
        """The KV of the prompt is there, all but the last token's, which is the next to run."""
        choice.source = None
        choice.was_admitted = True
        choice.num_planned = choice.num_computed = len(choice.token_ids) - 1
        self.settle_blocks(choice)

    def arrived(self) -> list[RequestState]:
        """Those whose KV is there and that no step has decoded yet."""
        return [choice for choice in self.receiving if choice.source is None]

    def join(self, choice: RequestState, updates: list[BlockUpdate]) -> None:
        """Makes a decode of one that has arrived; appends its table's entries to `updates`."""
        choice.advance(State.DECODING)
        self.receiving.remove(choice)
        insort(self.decoding, choice, key=_key)
        for g, blocks in enumerate(table_of(choice).blocks):
            for entry, block in enumerate(blocks):
                if block != NULL_BLOCK:
                    updates.append(BlockUpdate(g, choice.slot, entry, block))
        self._set_next_check(choice)

    def give_up(self, choice: RequestState) -> None:
        """The KV of a receiving choice does not come: it must wait again, to be computed here."""
        choice.source = None
        self.receiving.remove(choice)
        self._give_back(choice)
        choice.advance(State.WAITING)

    def start_decoding(self, choice: RequestState) -> None:
        choice.advance(State.DECODING)
        self.prefilling.remove(choice)
        insort(self.decoding, choice, key=_key)
        self._set_next_check(choice)

    def preempt(self, choice: RequestState) -> None:
        """Takes everything from the choice that is last in order; it must wait again, at first
        for its rows in flight."""
        (running,) = [choices for choices in self._lists() if choices and choices[-1] is choice]
        running.pop()
        self._give_back(choice)
        choice.advance(State.PREEMPTED if choice.num_pending else State.WAITING)

    def end(self, choice: RequestState) -> None:
        """Gives back what the choice holds, if anything, and finishes it."""
        if choice.table is not None:
            self._give_back(choice)
            self._is_untidy = True
        choice.advance(State.FINISHED)

    def tidy(self) -> None:
        if self._is_untidy:
            self.decoding = [c for c in self.decoding if c.state is State.DECODING]
            self.prefilling = [c for c in self.prefilling if c.state is State.PREFILLING]
            self.receiving = [c for c in self.receiving if c.state is State.RECEIVING]
            self._is_untidy = False

    def try_grow(self, choice: RequestState, num_tokens: int, updates: list[BlockUpdate]) -> bool:
        """Gets blocks for `num_tokens` more than are planned, or none and says False. First gives
        back what their windows do not reach."""
        table = table_of(choice)
        self.tables.free_passed(table, choice.num_planned)
        num_tokens += choice.num_planned
        if not self.tables.try_grow(table, num_tokens, choice.slot, updates):
            return False
        self._set_next_check(choice)
        return True

    def room_for(self, choice: RequestState) -> int:
        """How many tokens more than are planned the choice can get blocks for."""
        return self.tables.growable_tokens(table_of(choice)) - choice.num_planned

    def settle_blocks(self, choice: RequestState) -> None:
        """Publishes the blocks that became full; frees those that no window reaches any more."""
        num_full = choice.num_computed // self.block_size
        table = table_of(choice)
        self.tables.publish(table, choice.chain(num_full, self.block_size))
        self.tables.free_passed(table, choice.num_computed)
        choice.next_publish = (num_full + 1) * self.block_size

    def fits(self, choice: RequestState, hit: PrefixHit) -> bool:
        """Whether a slot is free and all known tokens of `choice` fit beside what running prompts
        still need and a block for each running choice, so that nobody is preempted right away."""
        if not self._free_slots:
            return False
        tables = self.tables
        missing = tables.missing_blocks(len(choice.token_ids), tables.used_blocks(hit))
        for running in self.prefilling:
            held = tables.held_blocks(table_of(running))
            more = tables.missing_blocks(len(running.token_ids), held)
            missing = [a + b for a, b in zip(missing, more, strict=True)]
        return self._are_free([n + self.count for n in missing])

    def could_fit(self, choice: RequestState, hit: PrefixHit) -> bool:
        """Whether preempting every lower priority could make room: an upper bound, since a
        shared block is counted for each of its holders."""
        tables = self.tables
        missing = tables.missing_blocks(len(choice.token_ids), tables.used_blocks(hit))
        for running in chain(*self._lists()):
            if running.priority > choice.priority:
                held = tables.held_blocks(table_of(running))
                missing = [a - b for a, b in zip(missing, held, strict=True)]
        return self._are_free(missing)

    def _are_free(self, num_blocks: list[int]) -> bool:
        pools = self.tables.pools
        return all(n <= pool.num_free for n, pool in zip(num_blocks, pools, strict=True))

    def _set_next_check(self, choice: RequestState) -> None:
        capacity = table_of(choice).num_entries * self.block_size
        choice.next_check = min(capacity, choice.max_len - 1)

    def _lists(self) -> tuple[list[RequestState], ...]:
        return self.decoding, self.prefilling, self.receiving

    def _give_back(self, choice: RequestState) -> None:
        self.tables.close(table_of(choice))
        choice.table = None
        self._free_slots.append(choice.slot)
        choice.slot = NO_SLOT
        choice.num_planned = choice.num_computed = 0
        choice.drafts = []


def table_of(choice: RequestState) -> BlockTable:
    assert choice.table is not None, f"{choice!r} holds no blocks"
    return choice.table
