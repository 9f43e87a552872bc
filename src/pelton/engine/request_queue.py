# SPDX-License-Identifier: Apache-2.0
"""A priority queue whose items may die while they wait.

Dead items are dropped when they come to the front, and all at once when they outnumber the living:
a queue never holds more than twice what lives, and every operation is O(log n) amortised.
"""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")

_SMALL = 64


class LiveQueue(Generic[Item]):
    def __init__(self, is_dead: Callable[[Item], bool]) -> None:
        self._is_dead = is_dead
        self._heap: list[tuple[float, int, Item]] = []
        self._compact_above = _SMALL

    def push(self, rank: float, tie: int, item: Item) -> None:
        """`tie` orders equal ranks and must be unique among them."""
        heapq.heappush(self._heap, (rank, tie, item))
        if len(self._heap) > self._compact_above:
            self._heap = [entry for entry in self._heap if not self._is_dead(entry[2])]
            heapq.heapify(self._heap)
            self._compact_above = max(_SMALL, 2 * len(self._heap))

    def peek(self) -> Item | None:
        """The living item of lowest rank, left in the queue."""
        while self._heap:
            item = self._heap[0][2]
            if not self._is_dead(item):
                return item
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Item:
        """Takes what `peek` just returned."""
        return heapq.heappop(self._heap)[2]
