# SPDX-License-Identifier: Apache-2.0
"""Which worker has how much of a prompt in its prefix cache.

One table of blocks: each block's hash with a mask of the workers that have it, a bit for each
incarnation. A prompt's blocks are looked up from the first on, at most `_NUM_PROBED` of them evenly
spaced, until no worker is left that has all of them; where the last drop out, bisection finds after
which block, since a hash names all tokens before it. What a worker has evicted of a prefix and kept
of what follows (caches forget what was freed longest ago, and a prefix is used at least as recently
as what follows it, so this is rare) counts as a hole where a block that is looked up is missing:
every hole of more than 1/32 of the prompt is found. A wrong depth costs time on a badly chosen
worker, never a wrong token.

A restarted worker gets another bit, so what it had is gone at once; its old bit is cleared and used
again later, a part of the table at each message from a worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pelton.core.block_hash import BlockHash
from pelton.serving.router.events import CacheDump, CacheEvent, EventKind, ReplayRequest

_NUM_PROBED = 32
_NUM_PARTS = 256
"""By a hash's first byte. A table grows by being copied, which for a million blocks takes longer
than a token may."""
_MAX_MASKS = 16_384
"""That are kept as one object each; more start anew, which costs reading, never an answer."""

_Workers = int
"""A set of incarnations, a bit for each."""


@dataclass(slots=True)
class _Contents:
    """What one incarnation of a worker has, as far as its events tell."""

    generation: int
    bit: _Workers
    num_blocks: int = 0
    next_sequence: int = 0
    asked_at_s: float | None = None
    """When events were found missing. None: none are."""


class PrefixIndex:
    def __init__(self, replay_timeout_s: float = 1.0) -> None:
        """A replay that does not come within `replay_timeout_s` is asked for again."""
        self._workers: dict[str, _Contents] = {}
        self._parts: list[dict[BlockHash, _Workers]] = [{} for _ in range(_NUM_PARTS)]
        self._ids: dict[_Workers, str] = {}
        """The worker of each bit."""
        self._known: _Workers = 0
        self._gone: _Workers = 0
        """Bits that may still be in the table."""
        self._clearing: _Workers = 0
        self._num_cleared = 0
        """Parts of the table in which no bit of `_clearing` is left."""
        self._masks: dict[_Workers, _Workers] = {}
        """One object for each mask: of a chain of blocks it is read once from memory."""
        self._replay_timeout_s = replay_timeout_s

    def add_worker(self, worker_id: str, generation: int) -> None:
        """Nothing is known of this incarnation yet; what an earlier one had is gone."""
        contents = self._workers.get(worker_id)
        if contents is None or contents.generation < generation:
            self.remove_worker(worker_id)
            self._workers[worker_id] = _Contents(generation, self._take_bit(worker_id))

    def remove_worker(self, worker_id: str) -> None:
        contents = self._workers.pop(worker_id, None)
        if contents is not None:
            self._leave_bit(contents)

    def num_blocks(self, worker_id: str) -> int:
        contents = self._workers.get(worker_id)
        return contents.num_blocks if contents is not None else 0

    def apply(
        self, worker_id: str, generation: int, events: Sequence[CacheEvent], now_s: float
    ) -> ReplayRequest | None:
        """Takes events as they arrive, or the replay of some. Events seen before and those of
        workers or incarnations that are not registered change nothing. When some are missing,
        returns what to ask the worker for and takes nothing that came after the gap: the replay
        includes it."""
        if self._gone:
            self._clear_part()
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
                    self._store(contents, event.hashes)
                else:
                    self._remove(contents, event.hashes)
        return None

    def expect(
        self, worker_id: str, generation: int, next_sequence: int, now_s: float
    ) -> ReplayRequest | None:
        """The worker says which event comes next: shows when the newest ones were lost."""
        if self._gone:
            self._clear_part()
        contents = self._find(worker_id, generation)
        if contents is None or next_sequence <= contents.next_sequence:
            return None
        return self._report_gap(worker_id, contents, now_s)

    def load_dump(self, worker_id: str, generation: int, dump: CacheDump) -> None:
        """Replaces what is known. A dump older than that is ignored."""
        contents = self._find(worker_id, generation)
        if contents is not None and dump.next_sequence >= contents.next_sequence:
            self._leave_bit(contents)
            contents.bit, contents.num_blocks = self._take_bit(worker_id), 0
            self._store(contents, dump.hashes)
            contents.next_sequence = dump.next_sequence
            contents.asked_at_s = None

    def depths(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """How many leading blocks of the prompt each worker has; those with none are left out. Of
        prompts of more than `_NUM_PROBED` blocks this is exact for who has the most, and for the
        others rounded down to a block that was looked up."""
        depths: dict[str, int] = {}
        num_blocks = len(hashes)
        workers = self._find_holders(hashes[0]) & self._known if num_blocks else 0
        parts, low = self._parts, 1
        stride = -(-num_blocks // _NUM_PROBED)
        while workers and low < num_blocks:
            high = low + stride if low + stride < num_blocks else num_blocks
            block_hash = hashes[high - 1]
            having = workers & parts[block_hash[0]].get(block_hash, 0)
            if having:
                if having != workers:
                    self._note(workers & ~having, low, depths)
                    workers = having
                low = high
            else:
                self._narrow(hashes, workers, low, high - 1, depths)
                return depths
        self._note(workers, num_blocks, depths)
        return depths

    def _narrow(
        self,
        hashes: Sequence[BlockHash],
        workers: _Workers,
        low: int,
        high: int,
        depths: dict[str, int],
    ) -> None:
        """Of workers that all have `low` blocks and not the one after `high`."""
        while low < high:
            middle = (low + high) >> 1
            having = workers & self._find_holders(hashes[middle])
            if having:
                self._note(workers & ~having, low, depths)
                workers, low = having, middle + 1
            else:
                high = middle
        self._note(workers, low, depths)

    def _note(self, workers: _Workers, depth: int, depths: dict[str, int]) -> None:
        while workers:
            bit = workers & -workers
            depths[self._ids[bit]] = depth
            workers ^= bit

    def _find_holders(self, block_hash: BlockHash) -> _Workers:
        """With those that are gone."""
        return self._parts[block_hash[0]].get(block_hash, 0)

    def _store(self, contents: _Contents, hashes: Sequence[BlockHash]) -> None:
        parts, bit, masks = self._parts, contents.bit, self._masks
        for block_hash in hashes:
            part = parts[block_hash[0]]
            holders = part.get(block_hash)
            if holders is None:
                part[block_hash] = bit
            elif holders & bit:
                continue
            else:
                part[block_hash] = masks.setdefault(holders | bit, holders | bit)
            contents.num_blocks += 1
        if len(masks) > _MAX_MASKS:
            masks.clear()

    def _remove(self, contents: _Contents, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            part = self._parts[block_hash[0]]
            holders = part.get(block_hash, 0)
            if holders & contents.bit:
                left = holders ^ contents.bit
                if left:
                    part[block_hash] = self._masks.setdefault(left, left)
                else:
                    del part[block_hash]
                contents.num_blocks -= 1

    def _take_bit(self, worker_id: str) -> _Workers:
        taken = self._known | self._gone
        bit = ~taken & (taken + 1)  # the lowest that is not
        self._known |= bit
        self._ids[bit] = worker_id
        return bit

    def _leave_bit(self, contents: _Contents) -> None:
        self._known ^= contents.bit
        del self._ids[contents.bit]
        if contents.num_blocks:
            self._gone |= contents.bit

    def _clear_part(self) -> None:
        """Takes the next part of the table through the bits that are gone."""
        if not self._clearing:
            self._clearing, self._num_cleared = self._gone, 0
        part, keep, masks = self._parts[self._num_cleared], ~self._clearing, self._masks
        self._parts[self._num_cleared] = {
            block_hash: masks.setdefault(left, left)
            for block_hash, holders in part.items()
            if (left := holders & keep)
        }
        self._num_cleared += 1
        if self._num_cleared == _NUM_PARTS:
            self._gone ^= self._clearing
            self._clearing = 0

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
