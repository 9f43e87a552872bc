# SPDX-License-Identifier: Apache-2.0
"""How a worker tells routers what its prefix cache holds.

Events of one worker's incarnation are numbered from 0 without gaps. Who misses some asks for
everything from a number on and gets either those events or, where the worker no longer has them, a
dump: the state as a whole and the number that comes next.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from pelton.core.block_hash import BlockHash


class EventKind(Enum):
    STORED = auto()
    """The blocks can be found from now on."""
    REMOVED = auto()


class CacheEvent(msgspec.Struct, array_like=True, frozen=True):
    sequence: int
    kind: EventKind
    hashes: tuple[BlockHash, ...]


class CacheDump(msgspec.Struct, array_like=True, frozen=True):
    """Everything that can be found after the events before `next_sequence`."""

    next_sequence: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What a router asks a worker for, once events are missing."""

    worker_id: str
    generation: int
    from_sequence: int


class EventLog:
    """The worker's side: numbers what happens to its cache and answers replay requests.

    Keeps the newest events, at most `max_events` with `max_hashes`, and, for dumps, the set of
    hashes that can be found now.
    """

    def __init__(self, max_events: int = 10_000, max_hashes: int = 200_000) -> None:
        self._events: deque[CacheEvent] = deque()
        self._max_events, self._max_hashes = max_events, max_hashes
        self._num_hashes = 0
        """In the events."""
        self._hashes: set[BlockHash] = set()
        self.next_sequence = 0

    def record(self, kind: EventKind, hashes: Iterable[BlockHash]) -> CacheEvent:
        """Takes note of what happened, and returns the event to publish."""
        event = CacheEvent(self.next_sequence, kind, tuple(hashes))
        if kind is EventKind.STORED:
            self._hashes.update(event.hashes)
        else:
            self._hashes.difference_update(event.hashes)
        self.next_sequence += 1
        self._events.append(event)
        self._num_hashes += len(event.hashes)
        while len(self._events) > self._max_events or self._num_hashes > self._max_hashes:
            self._num_hashes -= len(self._events.popleft().hashes)
        return event

    def replay(self, from_sequence: int) -> list[CacheEvent] | CacheDump:
        """The events from `from_sequence` on, or a dump where the first of them is gone."""
        oldest = self.next_sequence - len(self._events)
        if oldest <= from_sequence <= self.next_sequence:
            return [event for event in self._events if event.sequence >= from_sequence]
        return CacheDump(self.next_sequence, tuple(self._hashes))
