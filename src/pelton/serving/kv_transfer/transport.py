# SPDX-License-Identifier: Apache-2.0
"""The port for moving blocks: how one worker reads another's pool. Messages go another way.

The worker that decodes reads: it copies blocks out of the other's pool into its own. Whoever
computed the blocks takes a digest of them, and the reader takes one of what arrived in its own
memory; where they differ, the blocks were overwritten meanwhile or are not those meant. A digest
has a key, which says of which prompt and which entries the blocks are.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

import msgspec

DIGEST_BYTES = 16
DIGEST_LANES = 16
"""A block's 64-bit words are summed in so many lanes for its digest, at most: BLAKE2b over more
would take longer than a GPU does for the copy."""

Read = Generator[int, None, bytes]
"""Blocks on their way. Each `next` copies some and yields their bytes, 0 while there is nothing to
do but to wait; it never waits itself. Returns the digest of the copies. Raises `OSError` for blocks
that are not there, `ConnectionError` where the other worker is lost. Once closed, early or not, it
writes to the pool no more."""


class PoolHandle(msgspec.Struct, array_like=True, frozen=True):
    """What another process needs to reach a pool. Means something to one kind of transport."""

    kind: str
    payload: bytes


class RemotePool(Protocol):
    """Another worker's pool."""

    def read(
        self, group: int, source_ids: Sequence[int], target_ids: Sequence[int], key: bytes
    ) -> Read:
        """Copies whole blocks into this worker's pool. Raises as the read may."""
        ...

    def close(self) -> None:
        """Lets go of the other's memory, when no read is open. Idempotent."""
        ...


class KVTransport(Protocol):
    """This worker's pool, and the way to others of the same layout."""

    def handle(self) -> PoolHandle | None:
        """None: others cannot read this pool."""
        ...

    def digest(self, group: int, block_ids: Sequence[int], key: bytes) -> bytes:
        """Of blocks of this pool, in this order."""
        ...

    def open(self, handle: PoolHandle) -> RemotePool:
        """Raises `OSError` where the pool cannot be reached."""
        ...


def check_ids(block_ids: Sequence[int], num_blocks: int) -> None:
    """Raises `OSError` for blocks that a pool of so many does not have, or that nobody owns."""
    if block_ids and not 0 < min(block_ids) <= max(block_ids) < num_blocks:
        raise OSError(f"blocks {list(block_ids[:3])} are not among its {num_blocks}")


def find_runs(source_ids: Sequence[int], target_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """(source, target, count) of blocks that follow each other on both sides."""
    first = 0
    for index in range(1, len(source_ids) + 1):
        if (
            index == len(source_ids)
            or source_ids[index] != source_ids[index - 1] + 1
            or target_ids[index] != target_ids[index - 1] + 1
        ):
            yield source_ids[first], target_ids[first], index - first
            first = index
