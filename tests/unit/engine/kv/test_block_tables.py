# SPDX-License-Identifier: Apache-2.0
"""Block tables over groups: all or nothing, windows, and what is left when a table closes."""

import pytest

from pelton.core.config import SchedulerConfig
from pelton.core.geometry import KVGroup
from pelton.core.step import BlockUpdate
from pelton.engine.kv.block_tables import (
    BlockTables,
    group_blocks,
    peak_blocks,
    window_blocks,
)


def make_tables(*windows: int, num_blocks: int = 9, max_in_flight: int = 4) -> BlockTables:
    groups = [
        KVGroup(name=str(window), layers=(0,), num_kv_heads=1, head_dim=1, window=window)
        for window in windows
    ]
    return BlockTables(groups, [num_blocks] * len(groups), 4, max_in_flight)


def names(count: int) -> list[bytes]:
    return [bytes([index]) for index in range(count)]


def test_growing_reports_each_new_entry_of_each_group() -> None:
    tables = make_tables(0, 8)
    updates: list[BlockUpdate] = []
    table = tables.open(tables.no_hit(), 3, updates)
    assert tables.try_grow(table, 5, 3, updates)
    assert updates == [(0, 3, 0, 1), (0, 3, 1, 2), (1, 3, 0, 1), (1, 3, 1, 2)]


def test_growth_that_one_group_cannot_hold_changes_nothing() -> None:
    tables = make_tables(0, 8)
    tables.pools[1].allocate()
    updates: list[BlockUpdate] = []
    table = tables.open(tables.no_hit(), 0, updates)
    assert not tables.try_grow(table, 8 * 4, 0, updates)
    assert (updates, tables.pools[0].num_used) == ([], 0)


def test_the_window_frees_what_it_passed_and_keeps_its_name() -> None:
    tables = make_tables(0, 5)
    table = tables.open(tables.no_hit(), 0, [])
    tables.try_grow(table, 16, 0, [])
    tables.publish(table, names(4))
    tables.free_passed(table, 12)
    tables.free_passed(table, 12)
    assert table.blocks == [[1, 2, 3, 4], [0, 0, 3, 4]]
    assert tables.pools[1].find(b"\x00") == 1
    assert [pool.num_used for pool in tables.pools] == [4, 2]


def test_a_closed_table_gives_everything_back_tail_first() -> None:
    tables = make_tables(0, 5)
    table = tables.open(tables.no_hit(), 0, [])
    tables.try_grow(table, 16, 0, [])
    tables.publish(table, names(4))
    tables.free_passed(table, 12)
    tables.close(table)
    tables.check()
    assert [pool.num_used for pool in tables.pools] == [0, 0]
    for _ in range(5):
        tables.pools[0].allocate()
    assert tables.pools[0].find(b"\x03") is None
    assert tables.pools[0].find(b"\x00") == 1


def test_a_table_opened_on_a_hit_shares_its_blocks() -> None:
    tables = make_tables(0, 5)
    first = tables.open(tables.no_hit(), 0, [])
    tables.try_grow(first, 12, 0, [])
    tables.publish(first, names(3))
    updates: list[BlockUpdate] = []
    second = tables.open(tables.find_hit(names(2)), 1, updates)
    assert second.blocks == [[1, 2], [0, 2]]
    assert updates == [(0, 1, 0, 1), (0, 1, 1, 2), (1, 1, 1, 2)]
    tables.close(first)
    assert [pool.num_used for pool in tables.pools] == [2, 1]


def test_missing_blocks_count_free_hits_and_not_used_ones() -> None:
    tables = make_tables(0, 5)
    table = tables.open(tables.no_hit(), 0, [])
    tables.try_grow(table, 8, 0, [])
    tables.publish(table, names(2))
    hit = tables.find_hit(names(2))
    assert tables.missing_blocks(16, tables.held_blocks(table)) == [2, 2]
    assert tables.missing_blocks(16, tables.used_blocks(hit)) == [2, 3]
    tables.close(table)
    assert tables.missing_blocks(16, tables.used_blocks(hit)) == [4, 4]


def test_passed_blocks_are_not_held() -> None:
    tables = make_tables(0, 5)
    table = tables.open(tables.no_hit(), 0, [])
    tables.try_grow(table, 16, 0, [])
    tables.publish(table, names(4))
    tables.free_passed(table, 12)
    assert tables.held_blocks(table) == [4, 2]


def test_a_passed_block_is_kept_until_it_is_published() -> None:
    tables = make_tables(0, 5)
    table = tables.open(tables.no_hit(), 0, [])
    tables.try_grow(table, 16, 0, [])
    tables.publish(table, names(1))
    tables.free_passed(table, 12)
    assert tables.held_blocks(table) == [4, 3]
    tables.publish(table, names(4))
    tables.free_passed(table, 12)
    assert tables.held_blocks(table) == [4, 2]


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 128])
def test_window_blocks_are_what_the_window_touches_at_most(window: int) -> None:
    touched = max(last // 4 - (last - window + 1) // 4 + 1 for last in range(window, window + 8))
    assert window_blocks(window, 4) == touched


def test_a_window_group_gets_what_it_can_use_and_no_more() -> None:
    groups = [
        KVGroup(name=str(window), layers=(0,), num_kv_heads=1, head_dim=1, window=window)
        for window in (0, 9)
    ]
    scheduler = SchedulerConfig(max_num_requests=5, max_num_batched_tokens=16, overlap=True)

    def counts(num_blocks: int, shares_prefixes: bool = False) -> list[int]:
        return group_blocks(groups, num_blocks, 4, scheduler, shares_prefixes=shares_prefixes)

    # The null block; three blocks of window and one more for each request; 32 tokens in flight.
    assert counts(1000) == [1000, 1 + 5 * (3 + 1) + 8]
    assert counts(1000, shares_prefixes=True) == [1000, 1 + 5 * (3 + 1) + 8 + 125]
    assert counts(20) == [20, 20]


def test_unpublished_content_is_not_found_again() -> None:
    tables = make_tables(0, 5)
    table = tables.open(tables.no_hit(), 0, [])
    tables.try_grow(table, 12, 0, [])
    tables.publish(table, names(3))
    tables.free_passed(table, 12)
    tables.unpublish(names(3))
    assert tables.find_hit(names(3)).num_blocks == 0
    tables.check()


@pytest.mark.parametrize(("num_tokens", "peak"), [(1, 1), (16, 4), (17, 5), (1000, 5)])
def test_a_window_bounds_what_a_request_ever_holds(num_tokens: int, peak: int) -> None:
    group = KVGroup(name="w", layers=(0,), num_kv_heads=1, head_dim=1, window=7)
    assert peak_blocks(group, 4, num_tokens, max_in_flight=4) == peak
