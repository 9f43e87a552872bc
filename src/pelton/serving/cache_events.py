# SPDX-License-Identifier: Apache-2.0
"""A worker's side of cache events: from what an engine's blocks go through to what routers read.

Nothing is noted before the first router subscribes. Events say which content can be found, by the
hashes of `core.block_hash`: a hash stands for a block's tokens, all tokens before them and the salt
of the request, so an event needs neither the parent nor the tenant of a block.
"""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from pelton.engine.kv.blocks import CacheChange
from pelton.serving.router.events import CacheDump, CacheEvent, EventKind, EventLog


class WatchedEngine(Protocol):
    def watch_cache(self) -> list[CacheChange] | None: ...


class CachePublisher:
    """Owned by the worker's loop, which calls it between steps."""

    def __init__(self, engine: WatchedEngine) -> None:
        self._engine = engine
        self._changes: list[CacheChange] = []
        self._log = EventLog()
        self.subscribers: set[bytes] = set()
        """Clients that get every event."""

    def subscribe(self, client: bytes) -> None:
        changes = self._engine.watch_cache()
        if changes is not None:
            self._changes = changes
        self.subscribers.add(client)

    def take(self) -> list[CacheEvent]:
        """What happened since the last call, numbered."""
        changes, self._changes[:] = self._changes[:], []
        return [self._log.record(kind, hashes) for kind, hashes in _runs(changes)]

    @property
    def next_sequence(self) -> int:
        """Of the first event that `take` has not returned."""
        return self._log.next_sequence

    def replay(self, from_sequence: int) -> list[CacheEvent] | CacheDump:
        """Events that `take` has returned, or all that they amount to."""
        return self._log.replay(from_sequence)


def _runs(changes: list[CacheChange]) -> Iterator[tuple[EventKind, list[bytes]]]:
    """Changes of one kind that follow each other make one event."""
    for is_stored, run in groupby(changes, key=itemgetter(0)):
        kind = EventKind.STORED if is_stored else EventKind.REMOVED
        yield kind, [block_hash for _, block_hash in run]
