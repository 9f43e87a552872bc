# SPDX-License-Identifier: Apache-2.0
"""A queue that forgets the dead."""

from pelton.engine.request_queue import LiveQueue


def test_items_come_by_rank_then_tie() -> None:
    queue: LiveQueue[str] = LiveQueue(lambda item: False)
    for rank, tie, item in ((1, 2, "c"), (0, 3, "a"), (1, 1, "b")):
        queue.push(rank, tie, item)
    assert [(queue.peek(), queue.pop()) for _ in range(3)] == [("a",) * 2, ("b",) * 2, ("c",) * 2]
    assert queue.peek() is None


def test_dead_items_never_come_to_the_front() -> None:
    dead: set[int] = set()
    queue: LiveQueue[int] = LiveQueue(dead.__contains__)
    for item in range(4):
        queue.push(item, item, item)
    dead.update({0, 1})
    assert queue.peek() == 2


def test_the_queue_does_not_grow_with_the_dead() -> None:
    dead: set[int] = set()
    queue: LiveQueue[int] = LiveQueue(dead.__contains__)
    for item in range(10_000):
        queue.push(item, item, item)
        if item % 10:
            dead.add(item)
    assert len(queue._heap) <= 2 * 1000 + 64
    assert queue.peek() == 0
