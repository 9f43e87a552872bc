# SPDX-License-Identifier: Apache-2.0
"""Blocks held for another engine until it has copied them: who may read which, and how long.

A lease is opened when its prompt is queued and grows as chunks of the prompt are computed. It is a
holder of its blocks like a request is, so they keep their content when the request that computed
them ends. It ends when its owner says so, when the owner is gone, or when it was not extended in
time: a frozen owner costs the blocks for `lease_s`, never for ever. A lease's id is never used
twice, so a message about an earlier one finds nothing.
"""

from collections.abc import Iterable, Sequence

from pelton.core.clock import Clock
from pelton.core.errors import InvalidRequestError
from pelton.core.kv_transfer import BlockRange, LeaseNews
from pelton.engine.kv.block_tables import BlockTable
from pelton.engine.kv.blocks import NULL_BLOCK, BlockPool

LEASE_S = 30.0
"""How long a lease lives after it was opened or extended."""


class _Lease:
    __slots__ = ("expires_s", "held", "next_entries", "owner")

    def __init__(self, owner: bytes, first_entries: Sequence[int], expires_s: float) -> None:
        self.owner = owner
        self.next_entries = list(first_entries)
        self.held: list[list[int]] = [[] for _ in first_entries]
        self.expires_s = expires_s


class LeaseTable:
    def __init__(
        self, pools: Sequence[BlockPool], block_size: int, clock: Clock, lease_s: float = LEASE_S
    ) -> None:
        """`pools` stay the caller's."""
        self._pools = pools
        self._block_size = block_size
        self._clock = clock
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}
        self._news: list[LeaseNews] = []

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for lease in self._leases.values() for blocks in lease.held)

    def open(self, lease_id: str, owner: bytes, first_entries: Sequence[int]) -> None:
        """`first_entries`: for each group, the first entry that the owner lacks. Raises
        `InvalidRequestError` for an id in use, or for another number of groups."""
        if lease_id in self._leases or len(first_entries) != len(self._pools):
            raise InvalidRequestError(f"Lease {lease_id!r} is in use or of other KV groups.")
        expires_s = self._clock.now_s() + self._lease_s
        self._leases[lease_id] = _Lease(owner, first_entries, expires_s)

    def offer(
        self,
        lease_id: str,
        table: BlockTable,
        num_computed: int,
        num_cached_tokens: int,
        *,
        is_last: bool,
    ) -> None:
        """The tokens before `num_computed` are in the table's blocks: full ones can be read, and
        with `is_last` the one that is not full. Does nothing for a lease that has ended."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        end = num_computed // self._block_size
        if is_last:
            end = -(-num_computed // self._block_size)
        ranges = []
        for g, pool in enumerate(self._pools):
            first = lease.next_entries[g]
            new = table.blocks[g][first:end]
            assert NULL_BLOCK not in new, f"lease {lease_id} wants blocks that a window passed"
            for block in new:
                pool.acquire(block)
            lease.held[g] += new
            lease.next_entries[g] = max(first, end)
            ranges.append(BlockRange(first, new))
        if is_last or any(item.block_ids for item in ranges):
            self._news.append(LeaseNews(lease_id, lease.owner, ranges, is_last, num_cached_tokens))

    def fail(self, lease_id: str, error: str) -> None:
        """Its prompt will not be computed to the end. Does nothing for a lease that has ended."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._news.append(LeaseNews(lease_id, lease.owner, [], True, error=error))
            self._close(lease_id)

    def take_news(self) -> list[LeaseNews]:
        news, self._news = self._news, []
        return news

    def extend(self, owner: bytes, lease_ids: Iterable[str]) -> None:
        """Those that have ended, or are another's, are left alone."""
        expires_s = self._clock.now_s() + self._lease_s
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is not None and lease.owner == owner:
                lease.expires_s = max(lease.expires_s, expires_s)

    def close(self, lease_id: str, owner: bytes) -> bool:
        """Gives the blocks back. False: it has ended already, or is another's."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.owner != owner:
            return False
        self._close(lease_id)
        return True

    def close_owner(self, owner: bytes) -> list[str]:
        """Ends all leases of an owner that is gone; returns their ids."""
        ended = [lease_id for lease_id, lease in self._leases.items() if lease.owner == owner]
        for lease_id in ended:
            self._close(lease_id)
        return ended

    def fail_expired(self) -> list[str]:
        """Ends the leases that were not extended in time; returns their ids."""
        now_s = self._clock.now_s()
        ended = [i for i, lease in self._leases.items() if lease.expires_s <= now_s]
        for lease_id in ended:
            self.fail(lease_id, "The lease on the blocks was not extended in time.")
        return ended

    def _close(self, lease_id: str) -> None:
        lease = self._leases.pop(lease_id)
        for pool, blocks in zip(self._pools, lease.held, strict=True):
            for block in reversed(blocks):
                pool.free(block)
