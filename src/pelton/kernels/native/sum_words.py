# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Sums of a block's 64-bit words in lanes, and the block's copy, in one pass over memory.

    sums[b, lane] = sum over rows of words[b, row, lane], modulo 2^64

The lanes stay in registers, so each word is loaded once: what is added up is what is stored. Stores
go past the cache (LLVM's `nontemporal`): a line that is written whole need not be read first, which
is a third of what a copy asks of the memory. Imports no torch; compiled when imported, and kept on
disk (`kept_code`). `serving.kv_transfer.host_blocks` has it in plain NumPy.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from pelton.kernels.native.kept_code import keep_code

intrinsic: Any = extending.intrinsic

LANES = 64
_ROW_BYTES = LANES * 8
_ALIGNMENT = 32
"""Of what is written past the cache."""
_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_WORD, _ALIGNMENT // 8)
_VECTORS_PER_ROW = _ROW_BYTES // _ALIGNMENT


@intrinsic
def _sum_rows(context, source, num_rows, sums):
    def generate(cg, builder, signature, values):
        source, num_rows, sums = values
        _write_pass(builder, source, None, num_rows, sums)
        return cg.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _copy_rows(context, source, target, num_rows, sums):
    def generate(cg, builder, signature, values):
        _write_pass(builder, *values)
        return cg.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def _order_stores(context):
    """Stores that went past the cache become visible to other threads before later ones do."""

    def generate(cg, builder, signature, values):
        builder.fence("seq_cst")
        return cg.get_dummy_value()

    return types.void(), generate


def _write_pass(builder, source, target, num_rows, sums) -> None:
    """Code that goes through the rows of one block."""

    def vector_at(base, index):
        return builder.gep(builder.inttoptr(base, _VECTOR.as_pointer()), [index])

    lanes = [cgutils.alloca_once(builder, _VECTOR) for _ in range(_VECTORS_PER_ROW)]
    for lane in lanes:
        builder.store(ir.Constant(_VECTOR, None), lane)
    past_the_cache = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    with cgutils.for_range(builder, num_rows) as loop:
        first = builder.mul(loop.index, ir.Constant(_WORD, _VECTORS_PER_ROW))
        for number, lane in enumerate(lanes):
            index = builder.add(first, ir.Constant(_WORD, number))
            words = builder.load(vector_at(source, index), align=8)
            if target is not None:
                stored = builder.store(words, vector_at(target, index), align=_ALIGNMENT)
                stored.set_metadata("nontemporal", past_the_cache)
            builder.store(builder.add(builder.load(lane), words), lane)
    for number, lane in enumerate(lanes):
        place = vector_at(sums, ir.Constant(_WORD, number))
        builder.store(builder.load(lane), place, align=8)


def _compiled(signature: str) -> Any:
    def compile_it(function):
        made = keep_code(numba.njit(nogil=True)(function), function)
        made.compile(signature)
        made.disable_compile()
        return made

    return compile_it


@_compiled("void(int64, int64, int64, int64)")
def _sum_blocks(source, num_blocks, block_bytes, sums):
    for block in range(num_blocks):
        start = source + block * block_bytes
        _sum_rows(start, block_bytes // _ROW_BYTES, sums + block * _ROW_BYTES)


@_compiled("void(int64, int64, int64, int64, int64)")
def _copy_blocks(source, target, num_blocks, block_bytes, sums):
    for block in range(num_blocks):
        start = block * block_bytes
        num_rows = block_bytes // _ROW_BYTES
        _copy_rows(source + start, target + start, num_rows, sums + block * _ROW_BYTES)
    _order_stores()


def can_take(blocks: npt.NDArray[np.uint8]) -> bool:
    """Whether `copy_and_sum` can write to these blocks."""
    return blocks.shape[1] % _ROW_BYTES == 0 and blocks.ctypes.data % _ALIGNMENT == 0


def copy_and_sum(
    sources: npt.NDArray[np.uint8] | None, targets: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint64]:
    """Copies blocks, [blocks, bytes], if there are any to copy. Returns the sums of the copies, or
    of what is there: [blocks, LANES]. Other threads of Python go on meanwhile."""
    num_blocks, block_bytes = targets.shape
    sums = np.empty((num_blocks, LANES), np.uint64)
    arguments = targets.ctypes.data, num_blocks, block_bytes, sums.ctypes.data
    if sources is None:
        _sum_blocks(*arguments)
    else:
        assert sources.shape == targets.shape, (sources.shape, targets.shape)
        _copy_blocks(sources.ctypes.data, *arguments)
    return sums
