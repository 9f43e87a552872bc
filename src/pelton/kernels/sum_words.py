# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Sums of blocks' words in lanes, and the blocks' copies, on a GPU: how KV moves between two.

    sums[part, i, lane] = sum over the part's rows of words[ids[i], row, lane], modulo 2^64

A word is loaded once: what is added up is what is stored. `native.sum_words` is the same on a CPU.
Ids and sums may lie in the host's pinned memory, where a kernel reads and writes them without a
copy before it and after.
"""

from jaxtyping import Int, UInt
from torch import Tensor

from pelton.kernels.triton_runtime import tl, triton

_TILE_WORDS = 2048
_WANTED_PROGRAMS = 128
_MAX_PARTS = 8


@triton.jit(do_not_specialize=["num_rows", "part_rows"])
def _sum_words_kernel(
    words_ptr, ids_ptr, sums_ptr, source_address, num_rows, part_rows,
    COPIES: tl.constexpr, LANES: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    part = tl.program_id(1)
    lanes = tl.arange(0, LANES)  # [LANES]
    rows = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    block_words = tl.cast(num_rows, tl.int64) * LANES
    block_ptr = words_ptr + tl.load(ids_ptr + place) * block_words
    source_ptr = block_ptr
    if COPIES:
        base_ptr = tl.cast(source_address, tl.int64).to(words_ptr.dtype)
        source_ptr = base_ptr + tl.load(ids_ptr + tl.num_programs(0) + place) * block_words
    end = tl.minimum((part + 1) * part_rows, num_rows)
    sums = tl.zeros([BLOCK_R, LANES], tl.uint64)
    for start in range(part * part_rows, end, BLOCK_R):
        places = (start + rows)[:, None]
        offsets, mask = places * LANES + lanes[None, :], places < end
        words = tl.load(source_ptr + offsets, mask=mask, other=0)
        if COPIES:
            tl.store(block_ptr + offsets, words, mask=mask)
        sums += words.to(tl.uint64)
    sums_ptr += (tl.cast(part, tl.int64) * tl.num_programs(0) + place) * LANES
    tl.store(sums_ptr + lanes, tl.sum(sums, axis=0).to(tl.int64))


def count_parts(num_blocks: int) -> int:
    """Into how many parts `sum_words` should take each of so many blocks."""
    return max(1, min(_WANTED_PROGRAMS // max(num_blocks, 1), _MAX_PARTS))


def sum_words(
    words: UInt[Tensor, "P R L"],
    ids: Int[Tensor, "k B"],
    sums: Int[Tensor, "S B L"],
    source_address: int | None = None,
) -> None:
    """Writes `sums` of the blocks `ids[0]` of `words`, each in S parts. With `source_address` it
    first copies them from blocks `ids[1]` of another pool of such blocks there, which this device
    reaches.

    Words are unsigned, of any size, in a power of two lanes; `ids` and `sums` are int64; all three
    are contiguous."""
    num_rows, lanes = words.shape[1:]
    num_parts, num_blocks, _ = sums.shape
    assert words.is_contiguous(), words.stride()
    if not num_blocks:
        return
    _sum_words_kernel[(num_blocks, num_parts)](
        words,
        ids,
        sums,
        source_address or 0,
        num_rows,
        -(-num_rows // num_parts),
        COPIES=source_address is not None,
        LANES=lanes,
        BLOCK_R=_TILE_WORDS // lanes,
        num_warps=8,
    )
