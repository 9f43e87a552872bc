# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What all kernels share that Numba compiles from Python for the CPU, but for copies of blocks.

A kernel is a function of (part, num_parts, arguments): torch's own OpenMP threads run it side by
side, each with its part, so a kernel starts as fast as an op of torch's and no second pool of
threads gets in the way. `arguments` points to packed 64-bit integers and doubles. Tensors pass as
addresses: a kernel reads and writes through `load` and `store`, whose first argument names the
number format. bfloat16 is computed on in float32 and rounded to nearest even.

Compiled code is kept on disk (`kept_code`).
"""

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import extending, types
from numba.core.ccallback import CFunc
from torch import Tensor

from pelton.kernels.native.kept_code import keep_code

OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    # Sums may be taken in any order; infinities and NaN stay what they are.
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
}


def compiled(function: Any) -> Any:
    """For functions that kernels call; compiled at the first call."""
    return keep_code(numba.njit(**OPTIONS)(function), function)


def exact(function: Any) -> Any:
    """As `compiled`, and rounds each operation as it is written."""
    return keep_code(numba.njit(**(OPTIONS | {"fastmath": False}))(function), function)


intrinsic: Any = extending.intrinsic

BF16, F32 = np.uint16(0), np.float32(0)
"""Stand for the number format in `load` and `store`; bfloat16 passes as its bits."""

_GRAIN = 16384
"""Elements that make another thread worth waking."""


@intrinsic
def load(context, tag, address, index):
    """Element `index` of the `tag` array at `address`, as float32."""

    def generate(cg, builder, signature, values):
        _, base, position = values
        if tag == types.float32:
            return builder.load(_element(builder, base, position, ir.FloatType()))
        bits = builder.load(_element(builder, base, position, ir.IntType(16)))
        wide = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(tag, types.int64, types.int64), generate


@intrinsic
def store(context, tag, address, index, value):
    """Writes the float32 `value`, rounded to `tag`'s format."""

    def generate(cg, builder, signature, values):
        _, base, position, number = values
        if tag == types.float32:
            builder.store(number, _element(builder, base, position, ir.FloatType()))
            return cg.get_dummy_value()
        word = ir.IntType(32)
        bits = builder.bitcast(number, word)
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        # A NaN's bits could carry over into those of an infinity; it becomes the quiet NaN.
        is_nan = builder.fcmp_unordered("uno", number, number)
        rounded = builder.select(is_nan, ir.Constant(word, 0x7FC00000), rounded)
        short = builder.trunc(builder.lshr(rounded, ir.Constant(word, 16)), ir.IntType(16))
        builder.store(short, _element(builder, base, position, ir.IntType(16)))
        return cg.get_dummy_value()

    return types.void(tag, types.int64, types.int64, types.float32), generate


@intrinsic
def ordered(context, value):
    """A float32 as an int32 of the same order, with NaN (positive) above all: the largest of
    these is found by vector instructions, where that of numbers that may be NaN is not."""

    def generate(cg, builder, signature, values):
        return _flip_if_negative(builder, builder.bitcast(values[0], ir.IntType(32)))

    return types.int32(types.float32), generate


@intrinsic
def unordered(context, value):
    """The float32 that `ordered` gave the int32 of."""

    def generate(cg, builder, signature, values):
        return builder.bitcast(_flip_if_negative(builder, values[0]), ir.FloatType())

    return types.float32(types.int32), generate


def _flip_if_negative(builder, bits):
    word = ir.IntType(32)
    sign = builder.ashr(bits, ir.Constant(word, 31))
    return builder.xor(bits, builder.and_(sign, ir.Constant(word, 0x7FFFFFFF)))


@intrinsic
def store_int8(context, address, index, value):
    """Writes a float32 of a whole number in [-127, 127]."""

    def generate(cg, builder, signature, values):
        base, position, number = values
        # By way of 32 bits, which processors convert many of at a time.
        integer = builder.trunc(builder.fptosi(number, ir.IntType(32)), ir.IntType(8))
        builder.store(integer, _element(builder, base, position, ir.IntType(8)))
        return cg.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def load_int32(context, address, index):
    def generate(cg, builder, signature, values):
        number = builder.load(_element(builder, values[0], values[1], ir.IntType(32)))
        return builder.sext(number, ir.IntType(64))

    return types.int64(types.int64, types.int64), generate


@intrinsic
def load_int64(context, address, index):

    def generate(cg, builder, signature, values):
        return builder.load(_element(builder, values[0], values[1], ir.IntType(64)))

    return types.int64(types.int64, types.int64), generate


argument: Any = load_int64
"""The packed integer at an index."""


@intrinsic
def real_argument(context, arguments, index):
    """The packed double at `index`, as float32."""

    def generate(cg, builder, signature, values):
        number = builder.load(_element(builder, values[0], values[1], ir.DoubleType()))
        return builder.fptrunc(number, ir.FloatType())

    return types.float32(types.int64, types.int64), generate


@intrinsic
def store_int32(context, address, index, value):
    def generate(cg, builder, signature, values):
        base, position, number = values
        short = builder.trunc(number, ir.IntType(32))
        builder.store(short, _element(builder, base, position, ir.IntType(32)))
        return cg.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def store_int64(context, address, index, value):
    def generate(cg, builder, signature, values):
        base, position, number = values
        builder.store(number, _element(builder, base, position, ir.IntType(64)))
        return cg.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _element(builder, base, index, element):
    pointer = builder.inttoptr(base, element.as_pointer())
    return builder.gep(pointer, [index])


@numba.njit(inline="always", **OPTIONS)
def exp(x):
    """e^x to 2 units in the last place, without a branch, so that loops of it vectorise.

    x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial (Cephes, expf.c), times 2^n.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + np.float32(1.0)) * power


_openmp = ctypes.CDLL("libgomp.so.1")  # torch's, which is in the process already
_run_parallel = _openmp.GOMP_parallel
_run_parallel.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
_run_parallel.restype = None
for _symbol in ("omp_get_thread_num", "omp_get_num_threads"):
    _address = ctypes.cast(getattr(_openmp, _symbol), ctypes.c_void_p).value
    llvmlite.binding.add_symbol(_symbol, _address)
thread_num: Any = types.ExternalFunction("omp_get_thread_num", types.int32())
num_threads: Any = types.ExternalFunction("omp_get_num_threads", types.int32())

_SIGNATURE = types.void(types.int64)


def kernel(function: Callable[[int], None]) -> "Kernel":
    """Makes a kernel of a function of the arguments' address; compiled at its first call."""
    return Kernel(function)


class Kernel:
    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function
        self._address = 0
        self._compiled: Any = None
        self._pack: Callable[..., bytes] = struct.pack

    def __call__(self, num_elements: int, *arguments: int | float) -> None:
        """Runs on as many of torch's threads as `num_elements` of work are worth. The arguments'
        types are the same at every call."""
        if not self._address:
            self._compile(arguments)
        num_threads = 1 + num_elements // _GRAIN
        if num_threads > 1:
            num_threads = min(torch.get_num_threads(), num_threads)
        _run_parallel(self._address, self._pack(*arguments), num_threads, 0)

    def _compile(self, arguments: tuple[int | float, ...]) -> None:
        signature = _SIGNATURE.args, _SIGNATURE.return_type
        self._compiled = keep_code(CFunc(self._function, signature, {}, OPTIONS), self._function)
        self._compiled.compile()
        letters = "".join("d" if isinstance(value, float) else "q" for value in arguments)
        self._pack = struct.Struct("=" + letters).pack
        self._address = self._compiled.address


def is_bfloat16(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bfloat16
