# SPDX-License-Identifier: Apache-2.0
"""The blocks of one KV group: who holds them, which are free, and what the free ones still hold.

A block is in exactly one of three places:

    used    one or more requests hold it (its reference count)
    cached  nobody holds it, but it keeps its published hash and can be revived by a hit
    empty   nobody holds it and no hash names it

Free means cached or empty. Allocation takes empty blocks first, then the cached block that was
freed longest ago, whose hash is then forgotten. Block 0 is the null block: padding writes there,
block tables hold it where a request has no block; it is never allocated. Every operation is O(1).
"""

from collections import OrderedDict

from pelton.core.block_hash import BlockHash

NULL_BLOCK = 0

CacheChange = tuple[bool, BlockHash]
"""True: the content can be found from now on; False: no longer."""


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` includes the null block."""
        assert num_blocks >= 2, num_blocks
        self.num_usable = num_blocks - 1
        self._num_references = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._empty = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._changes: list[CacheChange] | None = None

    def watch(self) -> list[CacheChange]:
        """A list that gets every change of what can be found, in order, from now on; it starts with
        what can be found now. Whoever asked for it empties it; there is one for all who ask."""
        if self._changes is None:
            self._changes = [(True, block_hash) for block_hash in self._block_of]
        return self._changes

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def allocate(self) -> int:
        """Takes a free block for its first holder and returns it; there must be one."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget_hash(block)
        self._num_references[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Adds a holder to a published block, used or cached."""
        if self._num_references[block] == 0:
            del self._cached[block]
        self._num_references[block] += 1

    def free(self, block: int) -> None:
        """Takes one holder away. The last one leaves the block cached if a hash names it."""
        assert self._num_references[block] > 0, f"block {block} freed once too often"
        self._num_references[block] -= 1
        if self._num_references[block]:
            return
        if self._hashes[block] is None:
            self._empty.append(block)
        else:
            self._cached[block] = None

    def is_free(self, block: int) -> bool:
        return self._num_references[block] == 0

    def find(self, block_hash: BlockHash) -> int | None:
        return self._block_of.get(block_hash)

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Names a used block by its content. Where another block has the same content already,
        that one keeps the name and this one stays unnamed."""
        assert self._num_references[block] > 0, f"block {block} published while free"
        if block_hash not in self._block_of and self._hashes[block] is None:
            self._block_of[block_hash] = block
            self._hashes[block] = block_hash
            if self._changes is not None:
                self._changes.append((True, block_hash))

    def unpublish(self, block_hash: BlockHash) -> None:
        """Makes sure that nobody finds this content from now on."""
        block = self._block_of.get(block_hash)
        if block is None:
            return
        self._forget_hash(block)
        if block in self._cached:
            del self._cached[block]
            self._empty.append(block)

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hashes[block]
        assert block_hash is not None, f"block {block} is cached without a hash"
        del self._block_of[block_hash]
        self._hashes[block] = None
        if self._changes is not None:
            self._changes.append((False, block_hash))

    def check(self) -> None:
        """Asserts that blocks are conserved. O(blocks): for tests and debugging."""
        empty, cached = set(self._empty), set(self._cached)
        used = {block for block, count in enumerate(self._num_references) if count}
        assert len(empty) == len(self._empty), "a block is twice in the empty list"
        num_places = len(empty) + len(cached) + len(used)
        everything = set(range(NULL_BLOCK + 1, self.num_usable + 1))
        assert empty | cached | used == everything, everything - (empty | cached | used)
        assert num_places == len(everything), "a block is in two places"
        named = {block for block, name in enumerate(self._hashes) if name is not None}
        assert named == set(self._block_of.values()), "hashes and their index disagree"
        assert cached <= named, f"cached without a hash: {cached - named}"
        assert not empty & named, f"empty with a hash: {empty & named}"
