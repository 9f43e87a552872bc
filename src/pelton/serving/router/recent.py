# SPDX-License-Identifier: Apache-2.0
"""Where the router itself sent prompts lately, so that a burst of siblings lands together.

Events say that a worker has a block only once it has computed it. Until then a decision counts as
if they had arrived. Only some depths of a prompt are noted, eight to an octave (1 to 15, 16, 18,
20, ... 30, 32, 36, ...), the same for all prompts: a 100,000-token prompt has 80 instead of 6,250,
and a common prefix is found to within an eighth.
"""

from collections.abc import Sequence
from functools import lru_cache

from pelton.core.block_hash import BlockHash

Incarnation = str
"""Worker and generation, in one string: its hash is worked out once."""

_Table = dict[BlockHash, tuple[Incarnation, ...]]


class RecentDecisions:
    def __init__(self, lifetime_s: float, max_entries: int = 100_000) -> None:
        """A decision is remembered for one to two `lifetime_s`, less when there are more than
        `max_entries` depths to remember."""
        self.lifetime_s = lifetime_s
        self._max_entries = max_entries
        self._new: _Table = {}
        self._old: _Table = {}
        self._turned_at_s = float("-inf")

    def note(self, incarnation: Incarnation, hashes: Sequence[BlockHash], now_s: float) -> None:
        self._forget(now_s)
        table = self._new
        for depth in noted_depths(len(hashes)):
            block_hash = hashes[depth - 1]
            holders = table.get(block_hash, ())
            if incarnation not in holders:
                table[block_hash] = (*holders, incarnation)

    def depths(self, hashes: Sequence[BlockHash], now_s: float) -> dict[Incarnation, int]:
        """How many leading blocks each worker will soon have; those with none are left out."""
        self._forget(now_s)
        found: dict[Incarnation, int] = {}
        for table in (self._new, self._old) if hashes else ():
            # Who is noted at a depth is noted at all smaller ones: fewer holders are never new,
            # and as many as at the first block are all.
            num_found, num_all = 0, len(table.get(hashes[0], ()))
            for depth in reversed(noted_depths(len(hashes))) if num_all else ():
                holders = table.get(hashes[depth - 1], ())
                if len(holders) > num_found:
                    num_found = len(holders)
                    for incarnation in holders:
                        if found.get(incarnation, 0) < depth:
                            found[incarnation] = depth
                    if num_found == num_all:
                        break
        return found

    def _forget(self, now_s: float) -> None:
        age_s = now_s - self._turned_at_s
        if age_s >= self.lifetime_s or len(self._new) >= self._max_entries:
            self._old = self._new if age_s < 2 * self.lifetime_s else {}
            self._new = {}
            self._turned_at_s = now_s


@lru_cache(maxsize=4096)
def noted_depths(num_blocks: int) -> tuple[int, ...]:
    """In rising order; the whole length is always among them."""
    depths, depth, step = [], 1, 1
    while depth < num_blocks:
        depths.append(depth)
        depth += step
        if depth == 16 * step:
            step *= 2
    return (*depths, num_blocks) if num_blocks else ()
