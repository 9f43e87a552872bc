# SPDX-License-Identifier: Apache-2.0
"""Block accounting: where a block is, what it is called, and who holds it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pelton.engine.kv.blocks import NULL_BLOCK, BlockPool


def take_all(pool: BlockPool) -> list[int]:
    return [pool.allocate() for _ in range(pool.num_free)]


def test_all_but_the_null_block_are_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(take_all(pool)) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used, pool.num_cached) == (0, 4, 0)
    assert NULL_BLOCK not in range(1, 5)


def test_a_freed_block_keeps_its_name_until_it_is_reused() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, b"a")
    pool.free(block)
    assert pool.find(b"a") == block
    assert pool.num_cached == 1
    assert pool.allocate() == block
    assert pool.find(b"a") is None


def test_blocks_without_a_name_are_reused_first_then_the_one_freed_longest_ago() -> None:
    pool = BlockPool(4)
    first, second, third = take_all(pool)
    pool.publish(first, b"1")
    pool.publish(second, b"2")
    for block in (second, first, third):
        pool.free(block)
    assert take_all(pool) == [third, second, first]


def test_a_hit_revives_a_cached_block_for_several_holders() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.publish(block, b"a")
    pool.free(block)
    pool.acquire(block)
    pool.acquire(block)
    pool.free(block)
    assert not pool.is_free(block)
    pool.free(block)
    assert pool.is_free(block)


def test_the_first_block_of_a_content_keeps_the_name() -> None:
    pool = BlockPool(3)
    first, second = take_all(pool)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    pool.free(second)
    assert pool.find(b"a") == first
    assert pool.num_cached == 0


def test_an_unpublished_block_is_found_no_more_used_or_cached() -> None:
    pool = BlockPool(3)
    first, second = take_all(pool)
    pool.publish(first, b"a")
    pool.publish(second, b"b")
    pool.free(second)
    for name in (b"a", b"b", b"never published"):
        pool.unpublish(name)
    pool.check()
    assert pool.find(b"a") is pool.find(b"b") is None
    assert pool.num_cached == 0


def test_freeing_once_too_often_is_a_bug() -> None:
    pool = BlockPool(2)
    pool.free(pool.allocate())
    with pytest.raises(AssertionError, match="once too often"):
        pool.free(1)


class BlockPoolMachine(RuleBasedStateMachine):
    """Any order of operations against a model that counts holders in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.holders: dict[int, int] = {}

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert block not in self.holders
        self.holders[block] = 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.holders)))
        self.pool.free(block)
        self.holders[block] -= 1
        if not self.holders[block]:
            del self.holders[block]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), name=st.integers(0, 9))
    def publish(self, data: st.DataObject, name: int) -> None:
        self.pool.publish(data.draw(st.sampled_from(sorted(self.holders))), bytes([name]))

    @rule(name=st.integers(0, 9))
    def unpublish(self, name: int) -> None:
        self.pool.unpublish(bytes([name]))
        assert self.pool.find(bytes([name])) is None

    @rule(name=st.integers(0, 9))
    def hit(self, name: int) -> None:
        block = self.pool.find(bytes([name]))
        if block is not None:
            self.pool.acquire(block)
            self.holders[block] = self.holders.get(block, 0) + 1

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.pool.check()
        assert self.pool.num_used == len(self.holders)
        assert self.pool.num_used + self.pool.num_free == self.pool.num_usable


BlockPoolMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None
)
TestBlockPool = BlockPoolMachine.TestCase
