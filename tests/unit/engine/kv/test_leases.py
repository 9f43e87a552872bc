# SPDX-License-Identifier: Apache-2.0
"""Blocks held for others: until they say so, are gone, or are not heard of in time."""

import pytest

from pelton.core.block_hash import hash_block
from pelton.core.clock import ManualClock
from pelton.core.errors import InvalidRequestError
from pelton.core.geometry import KVGroup
from pelton.engine.kv.block_tables import BlockTable, BlockTables
from pelton.engine.kv.leases import LeaseTable

BLOCK, LEASE_S = 4, 30.0


class Leased:
    """A table of 14 tokens over two groups, the second with a window, and a lease on it."""

    def __init__(self, first_entries: tuple[int, int] = (0, 2)) -> None:
        groups = [
            KVGroup(name=str(g), layers=(g,), num_kv_heads=1, head_dim=1, window=window)
            for g, window in enumerate((0, 5))
        ]
        self.tables = BlockTables(groups, [20, 20], BLOCK, 8)
        self.clock = ManualClock()
        self.leases = LeaseTable(self.tables.pools, BLOCK, self.clock, LEASE_S)
        self.leases.open("a", b"me", first_entries)
        self.table: BlockTable = self.tables.open(self.tables.no_hit(), 0, [])
        self.tables.try_grow(self.table, 14, 0, [])
        self.start = [list(blocks) for blocks in self.table.blocks]

    def offer(self, num_computed: int, *, is_last: bool = False) -> list[tuple[int, list[int]]]:
        self.leases.offer("a", self.table, num_computed, 0, is_last=is_last)
        news = self.leases.take_news()
        return [(item.first_entry, item.block_ids) for one in news for item in one.ranges]

    @property
    def num_used(self) -> list[int]:
        return [pool.num_used for pool in self.tables.pools]


def test_blocks_are_offered_once_each_when_they_are_full() -> None:
    it = Leased()
    full, window = it.start
    assert it.offer(3) == []
    assert it.offer(9) == [(0, full[:2]), (2, [])]
    assert it.offer(9) == []
    assert it.offer(13) == [(2, full[2:3]), (2, window[2:3])]
    assert it.offer(14, is_last=True) == [(3, full[3:]), (3, window[3:])]
    assert it.leases.num_blocks == 6


def test_blocks_outlive_the_request_that_computed_them_but_not_the_lease() -> None:
    it = Leased()
    it.offer(14, is_last=True)
    it.tables.close(it.table)
    assert it.num_used == [4, 2]
    assert not it.leases.close("a", b"somebody else")
    assert it.leases.close("a", b"me")
    assert not it.leases.close("a", b"me")
    assert it.num_used == [0, 0]
    it.tables.check()


def test_a_window_passes_blocks_that_nobody_leases() -> None:
    it = Leased()
    it.offer(12)
    hashes = [hash_block(b"", [n]) for n in range(3)]
    it.tables.publish(it.table, hashes)
    it.tables.free_passed(it.table, 13)
    assert it.offer(14, is_last=True) == [(3, it.start[0][3:]), (3, it.start[1][3:])]


def test_a_lease_ends_that_is_not_extended() -> None:
    it = Leased()
    it.offer(14, is_last=True)
    it.clock.advance(LEASE_S - 1)
    it.leases.extend(b"somebody else", ["a"])
    it.leases.extend(b"me", ["a", "unknown"])
    it.clock.advance(LEASE_S - 1)
    assert it.leases.fail_expired() == []
    it.clock.advance(1)
    assert it.leases.fail_expired() == ["a"]
    (news,) = it.leases.take_news()
    assert (news.lease_id, news.owner, news.is_last) == ("a", b"me", True)
    assert news.error is not None
    assert it.offer(14, is_last=True) == []
    assert it.leases.num_blocks == 0


def test_an_owner_that_is_gone_holds_nothing() -> None:
    it = Leased()
    it.leases.open("b", b"me", (0, 0))
    it.leases.open("c", b"somebody else", (0, 0))
    it.offer(14, is_last=True)
    assert it.leases.close_owner(b"me") == ["a", "b"]
    assert len(it.leases) == 1
    it.tables.close(it.table)
    assert it.num_used == [0, 0]


def test_a_failure_is_told_once() -> None:
    it = Leased()
    it.leases.fail("a", "No.")
    it.leases.fail("a", "No.")
    assert [news.error for news in it.leases.take_news()] == ["No."]


@pytest.mark.parametrize(("lease_id", "entries"), [("a", (0, 0)), ("b", (0,))])
def test_what_cannot_be_leased(lease_id: str, entries: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError):
        Leased().leases.open(lease_id, b"me", entries)
