# SPDX-License-Identifier: Apache-2.0
"""Block tables of requests over all KV groups: grow, publish, let the window pass, give back.

Every group of a table has the same number of entries: entry i is for tokens [i * block_size,
(i + 1) * block_size). An entry is the null block where the group no longer (or never) needed
one. A table's blocks belong to the request that opened it until it is closed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pelton.core.block_hash import BlockHash
from pelton.core.config import SchedulerConfig, resolved
from pelton.core.geometry import KVGroup
from pelton.core.kv_transfer import BlockRange
from pelton.core.step import BlockUpdate
from pelton.engine.kv.blocks import NULL_BLOCK, BlockPool, CacheChange
from pelton.engine.kv.prefix_index import PrefixHit, find_longest_hit, first_visible_block


@dataclass(slots=True)
class BlockTable:
    blocks: list[list[int]]
    """For each group, a block id for each entry."""
    num_passed: list[int]
    """For each group, the leading entries that hold no block because the window passed them."""
    num_published: int
    """Leading entries whose content has a published hash."""

    @property
    def num_entries(self) -> int:
        return len(self.blocks[0])


def max_tokens_in_flight(config: SchedulerConfig) -> int:
    """The most tokens of one request that may be planned and not committed."""
    return resolved(config.max_num_batched_tokens) * (2 if resolved(config.overlap) else 1)


def peak_blocks(group: KVGroup, block_size: int, num_tokens: int, max_in_flight: int) -> int:
    """The most blocks that a request of `num_tokens` holds in `group` at any time, when up to
    `max_in_flight` of its tokens may be planned and not committed. A window's blocks are freed
    when a block fills, hence one more than the window and the tokens in flight can touch."""
    blocks = -(-num_tokens // block_size)
    if not group.window:
        return blocks
    return min(blocks, -(-(group.window - 1 + max_in_flight) // block_size) + 2)


def group_blocks(
    groups: Sequence[KVGroup],
    num_blocks: int,
    block_size: int,
    scheduler: SchedulerConfig,
    *,
    shares_prefixes: bool,
) -> list[int]:
    """The blocks of each group's pool, the null block included. A full attention group has
    `num_blocks`. A window group has no more than running requests can hold at once, and with
    `shares_prefixes` an eighth of `num_blocks` besides, for the windows at the ends of cached
    prefixes. `scheduler` must be resolved."""
    num_requests = resolved(scheduler.max_num_requests)
    in_flight = -(-max_tokens_in_flight(scheduler) // block_size)
    cached = num_blocks // 8 if shares_prefixes else 0
    counts = []
    for group in groups:
        # One more for each: its tokens in flight may start in the middle of a block.
        used = num_requests * (window_blocks(group.window, block_size) + 1) + in_flight
        counts.append(min(num_blocks, 1 + used + cached) if group.window else num_blocks)
    return counts


def window_blocks(window: int, block_size: int) -> int:
    """The most blocks that the `window` last tokens touch."""
    return -(-(window - 1) // block_size) + 1


class BlockTables:
    """Makes and changes block tables; the pools of all groups belong to it."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        max_in_flight: int,
    ) -> None:
        """`num_blocks` is that of each group, the null block included."""
        self.pools = [BlockPool(count) for count in num_blocks]
        self.block_size = block_size
        self._groups = groups
        self._windows = [group.window for group in groups]
        self._window_groups = [g for g, group in enumerate(groups) if group.window]
        self._max_in_flight = max_in_flight

    def watch(self) -> list[CacheChange]:
        """`BlockPool.watch` of the group that decides most about a hit: full attention needs every
        block of a prefix, a window only the last ones. Without full attention, the first group."""
        full = [pool for pool, window in zip(self.pools, self._windows, strict=True) if not window]
        return (full or self.pools)[0].watch()

    def find_hit(self, hashes: Sequence[BlockHash]) -> PrefixHit:
        return find_longest_hit(self.pools, self._windows, self.block_size, hashes)

    def no_hit(self) -> PrefixHit:
        return PrefixHit(0, [[] for _ in self.pools])

    def held_blocks(self, table: BlockTable) -> list[int]:
        """For each group, the blocks that the table holds."""
        return [table.num_entries - passed for passed in table.num_passed]

    def used_blocks(self, hit: PrefixHit) -> list[int]:
        """For each group, the blocks of a hit that somebody holds, so that sharing costs none."""
        return [
            sum(block != NULL_BLOCK and not pool.is_free(block) for block in blocks)
            for pool, blocks in zip(self.pools, hit.blocks, strict=True)
        ]

    def missing_blocks(self, num_tokens: int, held: list[int]) -> list[int]:
        """For each group, the free blocks that a request of `num_tokens` takes beyond `held`."""
        return [
            max(0, peak_blocks(group, self.block_size, num_tokens, self._max_in_flight) - count)
            for group, count in zip(self._groups, held, strict=True)
        ]

    def open(self, hit: PrefixHit, slot: int, updates: list[BlockUpdate]) -> BlockTable:
        """A table that starts with the blocks of `hit`; appends its entries to `updates`."""
        num_passed = []
        for g, (pool, blocks) in enumerate(zip(self.pools, hit.blocks, strict=True)):
            for entry, block in enumerate(blocks):
                if block != NULL_BLOCK:
                    pool.acquire(block)
                    updates.append(BlockUpdate(g, slot, entry, block))
            num_passed.append(blocks.count(NULL_BLOCK))
        return BlockTable([list(blocks) for blocks in hit.blocks], num_passed, hit.num_blocks)

    def growable_tokens(self, table: BlockTable) -> int:
        """How many tokens the table could cover if it took every free block."""
        num_free = min(pool.num_free for pool in self.pools)
        return (table.num_entries + num_free) * self.block_size

    def try_grow(
        self, table: BlockTable, num_tokens: int, slot: int, updates: list[BlockUpdate]
    ) -> bool:
        """Makes the table cover `num_tokens` in every group, or changes nothing and says False.
        Appends the new entries to `updates`."""
        first = table.num_entries
        last = -(-num_tokens // self.block_size)
        for pool in self.pools:
            if pool.num_free < last - first:
                return False
        for g, pool in enumerate(self.pools):
            blocks = table.blocks[g]
            for entry in range(first, last):
                block = pool.allocate()
                blocks.append(block)
                updates.append(BlockUpdate(g, slot, entry, block))
        return True

    def reserve(self, table: BlockTable, num_tokens: int) -> list[BlockRange]:
        """Makes the table cover `num_tokens`, for which there must be room. All but the last come
        from elsewhere: a window group gets blocks for what the last one sees only. Returns, for
        each group, the new blocks that are to be filled."""
        position = num_tokens - 1
        self.free_passed(table, position)
        first = table.num_entries
        last = position // self.block_size + 1
        num_filled = -(-position // self.block_size)
        ranges = []
        for g, (pool, window) in enumerate(zip(self.pools, self._windows, strict=True)):
            start = max(first, first_visible_block(position, window, self.block_size))
            if start > first:
                table.num_passed[g] = start
            new = [pool.allocate() for _ in range(start, last)]
            table.blocks[g] += [NULL_BLOCK] * (start - first) + new
            ranges.append(BlockRange(start, new[: num_filled - start]))
        return ranges

    def publish(self, table: BlockTable, hashes: Sequence[BlockHash]) -> None:
        """Names the table's leading blocks, one hash each; those named before are skipped."""
        for g, pool in enumerate(self.pools):
            blocks = table.blocks[g]
            for entry in range(table.num_published, len(hashes)):
                if blocks[entry] != NULL_BLOCK:
                    pool.publish(blocks[entry], hashes[entry])
        table.num_published = len(hashes)

    def free_passed(self, table: BlockTable, position: int) -> None:
        """Frees the published blocks that no token from `position` on can attend to. Tokens before
        it may still be in flight: steps run in the order of their launch, so whoever gets such a
        block writes to it after they have read it."""
        for g in self._window_groups:
            blocks = table.blocks[g]
            last = first_visible_block(position, self._windows[g], self.block_size)
            last = min(last, table.num_published)
            for entry in range(table.num_passed[g], last):
                self.pools[g].free(blocks[entry])
                blocks[entry] = NULL_BLOCK
            table.num_passed[g] = max(table.num_passed[g], last)

    def unpublish(self, hashes: Sequence[BlockHash]) -> None:
        """Makes sure that nobody finds blocks of these names from now on."""
        for pool in self.pools:
            for block_hash in hashes:
                pool.unpublish(block_hash)

    def close(self, table: BlockTable) -> None:
        """Frees what the table holds, its last block first: a prefix outlives what follows it."""
        for pool, blocks, passed in zip(self.pools, table.blocks, table.num_passed, strict=True):
            for block in reversed(blocks[passed:]):
                pool.free(block)
            blocks.clear()

    def check(self) -> None:
        for pool in self.pools:
            pool.check()
