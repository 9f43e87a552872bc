# SPDX-License-Identifier: Apache-2.0
"""Which worker has how much of a prompt in its prefix cache.

A set of hashes for each worker. The chain makes a search by bisection possible: a hash names all
tokens before it, so a worker that has block i had every block before it once. It may have evicted
some of them since (caches forget what was freed longest ago, and a prefix is used at least as
recently as what follows it, so this is rare). `depths` can then be wrong about the part beyond such
a hole; `verify` looks at evenly spaced blocks of one worker, which finds every hole of more than
1/64 of the prompt. A wrong depth costs time on a badly chosen worker, never a wrong token.

Sets for each worker, instead of one table of blocks with a bit mask of workers: a restarted
worker's blocks vanish by dropping its set, whatever the number of blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pelton.core.block_hash import BlockHash
from pelton.serving.router.events import CacheDump, CacheEvent, EventKind, ReplayRequest

_NUM_VERIFIED = 64


@dataclass(slots=True)
class _Contents:
    """What one incarnation of a worker has, as far as its events tell."""

    generation: int
    next_sequence: int = 0
    hashes: set[BlockHash] = field(default_factory=set)
    asked_at_s: float | None = None
    """When events were found missing. None: none are."""


class PrefixIndex:
    def __init__(self, replay_timeout_s: float = 1.0) -> None:
        """A replay that does not come within `replay_timeout_s` is asked for again."""
        self._workers: dict[str, _Contents] = {}
        self._replay_timeout_s = replay_timeout_s

    def add_worker(self, worker_id: str, generation: int) -> None:
        """Nothing is known of this incarnation yet; what an earlier one had is gone."""
        contents = self._workers.get(worker_id)
        if contents is None or contents.generation < generation:
            self._workers[worker_id] = _Contents(generation)

    def remove_worker(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    def num_blocks(self, worker_id: str) -> int:
        contents = self._workers.get(worker_id)
        return len(contents.hashes) if contents is not None else 0

    def apply(
        self, worker_id: str, generation: int, events: Sequence[CacheEvent], now_s: float
    ) -> ReplayRequest | None:
        """Takes events as they arrive, or the replay of some. Events seen before and those of
        workers or incarnations that are not registered change nothing. When some are missing,
        returns what to ask the worker for and takes nothing that came after the gap: the replay
        includes it."""
        contents = self._find(worker_id, generation)
        if contents is None:
            return None
        for event in events:
            if event.sequence > contents.next_sequence:
                return self._report_gap(worker_id, contents, now_s)
            if event.sequence == contents.next_sequence:
                contents.next_sequence += 1
                contents.asked_at_s = None
                if event.kind is EventKind.STORED:
                    contents.hashes.update(event.hashes)
                else:
                    contents.hashes.difference_update(event.hashes)
        return None

    def expect(
        self, worker_id: str, generation: int, next_sequence: int, now_s: float
    ) -> ReplayRequest | None:
        """The worker says which event comes next: shows when the newest ones were lost."""
        contents = self._find(worker_id, generation)
        if contents is None or next_sequence <= contents.next_sequence:
            return None
        return self._report_gap(worker_id, contents, now_s)

    def load_dump(self, worker_id: str, generation: int, dump: CacheDump) -> None:
        """Replaces what is known. A dump older than that is ignored."""
        contents = self._find(worker_id, generation)
        if contents is not None and dump.next_sequence >= contents.next_sequence:
            contents.hashes = set(dump.hashes)
            contents.next_sequence = dump.next_sequence
            contents.asked_at_s = None

    def depths(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """How many leading blocks of the prompt each worker has, if it has no holes. Workers with
        none are left out."""
        depths: dict[str, int] = {}
        if not hashes:
            return depths
        first, num_blocks = hashes[0], len(hashes)
        holders = [(i, c.hashes) for i, c in self._workers.items() if first in c.hashes]
        low, is_common = 0, False
        for worker_id, held in holders:
            last, low, high = low, 1, num_blocks
            if is_common:
                # Two workers have the same part, such as what all prompts begin with: try that.
                if hashes[last - 1] not in held:
                    high = last - 1
                elif last == num_blocks or hashes[last] not in held:
                    low = high = last
                else:
                    low = last + 1
            while low < high:
                middle = (low + high) >> 1
                if hashes[middle] in held:
                    low = middle + 1
                else:
                    high = middle
            is_common = low == last
            depths[worker_id] = low
        return depths

    def verify(self, worker_id: str, hashes: Sequence[BlockHash], depth: int) -> int:
        """`depth` if no hole shows before it; otherwise the number of blocks before the hole."""
        held = self._workers[worker_id].hashes if worker_id in self._workers else set()
        stride = -(-depth // _NUM_VERIFIED) or 1
        if held.issuperset(hashes[:depth:stride]):
            return depth
        for index in range(0, depth, stride):
            if hashes[index] not in held:
                while index and hashes[index - 1] not in held:
                    index -= 1
                return index
        return depth

    def _find(self, worker_id: str, generation: int) -> _Contents | None:
        contents = self._workers.get(worker_id)
        return contents if contents is not None and contents.generation == generation else None

    def _report_gap(
        self, worker_id: str, contents: _Contents, now_s: float
    ) -> ReplayRequest | None:
        asked_at_s = contents.asked_at_s
        if asked_at_s is not None and now_s - asked_at_s < self._replay_timeout_s:
            return None
        contents.asked_at_s = now_s
        return ReplayRequest(worker_id, contents.generation, contents.next_sequence)
