# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Sums of blocks' words in lanes, and the blocks' copies, on a GPU: how KV moves between two.

    sums[part, i, lane] = sum over the part's rows of words[ids[i], row, lane], modulo 2^64

A word is loaded once: what is added up is what is stored. `native.sum_words` is the same on a CPU.
Ids and sums may lie in the host's pinned memory, where a kernel reads and writes them without a
copy before it and after.
"""

from typing import Any

from jaxtyping import Int, UInt
from torch import Tensor

from pelton.kernels.triton_runtime import IS_INTERPRETED, tl, triton

_TILE_WORDS = 4096
_MAX_PROGRAMS = 64
"""Of a launch, however many blocks: enough for NVLink, and half of a Hopper card is left to the
steps that run meanwhile."""
_WANTED_PARTS = 128
_MAX_PARTS = 8


@triton.jit(
    do_not_specialize=["source_address", "num_rows", "part_rows", "num_blocks", "num_items"]
)
def _sum_words_kernel(
    words_ptr, ids_ptr, sums_ptr, source_address,
    num_rows, part_rows, num_blocks, num_items,
    COPIES: tl.constexpr, LANES: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, LANES)  # [LANES]
    rows = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    block_words = tl.cast(num_rows, tl.int64) * LANES
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        place, part = item % num_blocks, item // num_blocks
        block_ptr = words_ptr + tl.load(ids_ptr + place) * block_words
        source_ptr = block_ptr
        if COPIES:
            base_ptr = tl.cast(source_address, tl.int64).to(words_ptr.dtype)
            source_ptr = base_ptr + tl.load(ids_ptr + num_blocks + place) * block_words
        end = tl.minimum((part + 1) * part_rows, num_rows)
        sums = tl.zeros([BLOCK_R, LANES], tl.uint64)
        for start in range(part * part_rows, end, BLOCK_R):
            places = (start + rows)[:, None]
            offsets, mask = places * LANES + lanes[None, :], places < end
            words = tl.load(source_ptr + offsets, mask=mask, other=0)
            if COPIES:
                tl.store(block_ptr + offsets, words, mask=mask)
            sums += words.to(tl.uint64)
        item_sums_ptr = sums_ptr + tl.cast(item, tl.int64) * LANES
        tl.store(item_sums_ptr + lanes, tl.sum(sums, axis=0).to(tl.int64))


def count_parts(num_blocks: int) -> int:
    """Into how many parts `SumWords` should take each of so many blocks."""
    return max(1, min(_WANTED_PARTS // max(num_blocks, 1), _MAX_PARTS))


class SumWords:
    """Adds up, and copies into, blocks of one pool. What Triton finds out about arguments with each
    call is kept here: it takes the host as long as a GPU takes for the copy."""

    def __init__(self, words: UInt[Tensor, "P R L"]) -> None:
        """Words are unsigned, of any size, in a power of two lanes, contiguous."""
        assert words.is_contiguous(), words.stride()
        self._words = words
        self._num_rows, self.lanes = words.shape[1:]
        self._kernels: dict[tuple[bool, bool], Any] = {}

    def __call__(
        self,
        ids: Int[Tensor, "k B"],
        sums: Int[Tensor, "S B L"],
        source_address: int | None = None,
        stream: int | None = None,
    ) -> None:
        """Writes `sums` of the blocks `ids[0]`, each in S parts. With `source_address` it first
        copies them from blocks `ids[1]` of another pool of such blocks there, which this device
        reaches.

        `ids` and `sums` are int64, contiguous, and begin at a multiple of 16 bytes; `stream` is a
        handle of CUDA's, else it is the current one."""
        num_parts, num_blocks, _ = sums.shape
        num_items = num_parts * num_blocks
        if not num_items:
            return
        copies, address = source_address is not None, source_address or 0
        block_rows = _TILE_WORDS // self.lanes
        arguments = (
            *(self._words, ids, sums, address, self._num_rows, -(-self._num_rows // num_parts)),
            *(num_blocks, num_items, copies, self.lanes, block_rows),
        )
        grid = (min(num_items, _MAX_PROGRAMS), 1, 1)
        if IS_INTERPRETED:
            _sum_words_kernel[grid](*arguments)
            return
        key = copies, address < 2**31  # Triton's type of an integer
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = _sum_words_kernel.warmup(*arguments, grid=grid, num_warps=8)
            self._kernels[key] = kernel
        kernel[grid](*arguments, stream=stream)
