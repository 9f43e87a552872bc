# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""How MXFP4 weights lie in memory on Hopper.

When a model is loaded, 64 features and 32 inputs at a time become a tile of a kilobyte. What a
program reads of an expert is then one run of memory: in the published order it would be pieces of
64 bytes, which come at three quarters of the rate. In a chunk of 128 inputs a thread of the kernels
holds two rows of the matrix units' left operand and of each the 32 inputs of a block: one wide load
a row, one scale, and no exchange between threads.

A row's scales become exponents from 0 to 11 beside one for the row, so that a code under its
exponent is a number of e4m3. A block with a scale more than 11 powers of two below its row's
largest gets the exponent 0 and codes rounded to it, an error of at most 2^-15.5 of the largest
number that the row can hold. Rows whose largest scale is below 2^-120 are zero.
"""

from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from pelton.kernels.moe.mxfp4_product.reference import BLOCK
from pelton.kernels.triton_runtime import TensorDescriptor, gl, gluon

CHUNK = 128
"""Inputs of a round of the kernels: four blocks."""
TILE_F = 64
"""Features of a tile: the rows of a matrix instruction."""
_HIGHEST = 11
_LOWERED = (
    (0, 1, 2, 3, 4, 5, 6, 7),
    (0, 0, 1, 2, 2, 3, 4, 5),
    (0, 0, 0, 1, 1, 2, 2, 3),
    (0, 0, 0, 0, 0, 1, 1, 2),
    (0, 0, 0, 0, 0, 0, 0, 1),
    (0, 0, 0, 0, 0, 0, 0, 0),
)
"""The magnitude codes of a number divided by 2 so many times, rounded to nearest even."""


def tile_weights(
    blocks: UInt8[Tensor, "E F D/32 16"], scales: UInt8[Tensor, "E F D/32"]
) -> tuple[Int[Tensor, "E F/64 D/32 64 4"], UInt8[Tensor, "E F/64 D/32+1 64"]]:
    """Published weights as the kernels take them: words of codes and exponents, behind which is the
    largest scale of each row, all contiguous in new memory.

    A tile's row 16 i + 8 k + j is its feature 16 i + 2 j + k, so that a thread's two rows of the
    left operand are neighbours, a gate and its up-projection. In the words, row r of a chunk's
    block b stands at place r ^ 2 b, for the banks of shared memory.
    """
    num_experts, num_features, num_blocks, _ = blocks.shape
    num_tiles, device = num_features // TILE_F, blocks.device
    assert num_features % TILE_F == 0, num_features
    rows = torch.arange(TILE_F, device=device)
    features = rows // 16 * 16 + rows % 8 * 2 + rows % 16 // 8
    block = torch.arange(num_blocks, device=device)[:, None]
    places = features[rows ^ block % 4 * 2]  # [D/32, 64]
    lowered = _lowered_bytes(device)
    shape = num_experts, num_tiles, num_blocks, TILE_F
    words = torch.empty((*shape, 4), dtype=torch.int32, device=device)
    for tiles, published, powers in zip(words, blocks, scales, strict=True):
        missing = powers.amax(dim=1, keepdim=True).int() - _HIGHEST - powers.int()
        if (missing > 0).any():
            published = lowered[missing.clamp(0, 5)[..., None], published.int()]
        by_row = published.view(torch.int32).view(num_tiles, TILE_F, num_blocks, 4)
        tiles.copy_(_order_signs(by_row[:, places, block]))
    largest = scales.amax(dim=2, keepdim=True)
    # Unsigned: what is too low has wrapped around to above 11.
    exponents = scales + _HIGHEST - largest
    exponents[exponents > _HIGHEST] = 0
    powers = torch.cat((exponents, largest), dim=2)
    powers = powers.view(num_experts, num_tiles, TILE_F, num_blocks + 1)[:, :, features]
    return words, powers.transpose(2, 3).contiguous()


def _lowered_bytes(device: torch.device) -> UInt8[Tensor, "6 256"]:
    codes = [[code & 8 | row[code & 7] for code in range(16)] for row in _LOWERED]
    pairs = [[row[byte >> 4] << 4 | row[byte & 15] for byte in range(256)] for row in codes]
    return torch.tensor(pairs, dtype=torch.uint8, device=device)


def _order_signs(words: Int[Tensor, "*axes"]) -> Int[Tensor, "*axes"]:
    """Words of eight codes with their magnitudes where they are. The signs of the first four become
    the highest bits of the four bytes, those of the last four the bits in their middle."""
    ordered = words & 0x77777777
    for code in range(4):
        ordered |= (words >> 4 * code + 3 & 1) << 8 * code + 7
        ordered |= (words >> 4 * code + 19 & 1) << 8 * code + 3
    return ordered


def describe_words(words: Int[Tensor, "E F/64 D/32 64 4"], num_tiles: int) -> Any:
    """For the copy engine: a chunk of so many tiles. A block's words are one line; it takes a box
    line by line, and lines of 16 bytes came at half the memory's rate."""
    box = [1, num_tiles, CHUNK // BLOCK, TILE_F * 4]
    return TensorDescriptor.from_tensor(words.flatten(3), box, gl.NVMMASharedLayout(0, 32, 4))


def describe_scales(scales: UInt8[Tensor, "E F/64 D/32+1 64"]) -> Any:
    """For the copy engine: a chunk of one tile."""
    box = [1, 1, CHUNK // BLOCK * TILE_F]
    return TensorDescriptor.from_tensor(scales.flatten(2), box, gl.NVMMASharedLayout(0, 8, 3))


@gluon.jit
def scale_of(largest):
    """2^(s - 133) for a row's largest scale s: what brings a code times 2^(exponent - 5) to its
    value. NaN for 255, which means that."""
    largest = largest.to(gl.int32)
    bits = gl.where(largest > 6, (largest - 6) << 23, 0)
    return gl.where(largest == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def unpack(words, exponents):
    """int32 [F, 16] of eight codes each, and their blocks' exponents [F, 16], to e4m3 [F, 128]: a
    thread's codes stay its own, in an order that is the same for all rows."""
    # 0, 0.5, 1, 1.5 and 2, 3, 4, 6 times 2^(exponent - 5) in e4m3, a byte each.
    low = exponents * 0x08080800 + 0x14100800
    high = exponents * 0x08080808 + 0x24201C18
    # Four words a time, a block's.
    codes = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, t, u;
        and.b32 s, $8, 0x77777777;
        prmt.b32 t, $12, $16, s;
        lop3.b32 $0, t, $8, 0x80808080, 0xF8;
        shr.u32 s, s, 16;
        prmt.b32 t, $12, $16, s;
        shl.b32 u, $8, 4;
        lop3.b32 $1, t, u, 0x80808080, 0xF8;
        and.b32 s, $9, 0x77777777;
        prmt.b32 t, $12, $16, s;
        lop3.b32 $2, t, $9, 0x80808080, 0xF8;
        shr.u32 s, s, 16;
        prmt.b32 t, $12, $16, s;
        shl.b32 u, $9, 4;
        lop3.b32 $3, t, u, 0x80808080, 0xF8;
        and.b32 s, $10, 0x77777777;
        prmt.b32 t, $12, $16, s;
        lop3.b32 $4, t, $10, 0x80808080, 0xF8;
        shr.u32 s, s, 16;
        prmt.b32 t, $12, $16, s;
        shl.b32 u, $10, 4;
        lop3.b32 $5, t, u, 0x80808080, 0xF8;
        and.b32 s, $11, 0x77777777;
        prmt.b32 t, $12, $16, s;
        lop3.b32 $6, t, $11, 0x80808080, 0xF8;
        shr.u32 s, s, 16;
        prmt.b32 t, $12, $16, s;
        shl.b32 u, $11, 4;
        lop3.b32 $7, t, u, 0x80808080, 0xF8;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        args=[words, low, high],
        dtype=(gl.float8e4nv,) * 8,
        is_pure=True,
        pack=4,
    )
    # A register holds four codes of one word and stands for one element of each: [F, q and code,
    # half, w0, w1].
    first = gl.join(gl.join(codes[0], codes[1]), gl.join(codes[2], codes[3]))
    second = gl.join(gl.join(codes[4], codes[5]), gl.join(codes[6], codes[7]))
    FEATURES: gl.constexpr = words.shape[0]
    tile = gl.join(first, second).reshape([FEATURES, 4, 4, 2, 2, 2])
    return tile.permute((0, 5, 4, 3, 1, 2)).reshape([FEATURES, 128])


@gluon.jit
def unpack_chunk(exponents, words, left_layout: gl.constexpr):
    """Of a tile, as they lie in shared memory: e4m3 [F, chunk]."""
    TILE_F: gl.constexpr = words.shape[3] // 4
    words_layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[TILE_F, 16],
    )  # fmt: skip
    # Each exponent beside its four words.
    scales_3d: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[TILE_F, 4, 4],
    )  # fmt: skip
    # Copied as they lie in memory, read as [TILE_F, 16] and [TILE_F, 4].
    w_shared: gl.constexpr = gl.SharedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0], [2, 4], [4, 8]]
    )
    s_shared: gl.constexpr = gl.SharedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0], [0, 1], [0, 2]]
    )
    exponents = exponents._reinterpret(gl.uint8, [TILE_F, 4], s_shared)
    exponents = exponents.load(gl.SliceLayout(2, scales_3d)).to(gl.int32)
    exponents = gl.expand_dims(exponents, 2)
    exponents = exponents + gl.zeros([TILE_F, 4, 4], gl.int32, scales_3d)
    exponents = gl.convert_layout(
        exponents.reshape([TILE_F, 16]), words_layout, assert_trivial=True
    )
    codes = words._reinterpret(gl.int32, [TILE_F, 16], w_shared).load(words_layout)
    return gl.convert_layout(unpack(codes, exponents), left_layout, assert_trivial=True)


@gluon.jit
def add_part(acc, part):
    """A chunk's sums, of high parts and low ones side by side, added to those before: in the
    order that all kernels of split activations have."""
    high, low = gl.split(part.reshape([acc.shape[0], acc.shape[1], 2]))
    return acc + high + low * 0.0625


@gluon.jit
def store_tile(acc, stored, IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr):
    """float32 [F, T] without the scales of features and rows."""
    (
        x_scales_ptr, scales_ptr, bias_ptr, order_ptr, out_ptr, stride_on, tile, num_scales,
        first, end, alpha, limit, offset,
    ) = stored  # fmt: skip
    TILE_F: gl.constexpr = acc.shape[0]
    BLOCK_T: gl.constexpr = acc.shape[1]
    rows = gl.arange(0, TILE_F, gl.SliceLayout(1, acc.type.layout))
    largest = gl.load(scales_ptr + (tile * (num_scales + 1) + num_scales) * TILE_F + rows)
    places = first + gl.arange(0, BLOCK_T, gl.SliceLayout(0, acc.type.layout))
    x_scales = gl.load(x_scales_ptr + places, mask=places < end, other=0.0)
    acc = acc * scale_of(largest)[:, None] * x_scales[None, :]
    if HAS_BIAS:
        features = tile * TILE_F + rows // 16 * 16 + rows % 8 * 2 + rows % 16 // 8
        acc += gl.load(bias_ptr + features).to(gl.float32)[:, None]
    # [F / 16, 8, T, 2]: neighbours lie in one thread.
    low, high = gl.split(acc.reshape([TILE_F // 16, 2, 8, BLOCK_T]).permute((0, 2, 3, 1)))
    low = low.reshape([TILE_F // 2, BLOCK_T])
    high = high.reshape([TILE_F // 2, BLOCK_T])
    pairs = gl.arange(0, TILE_F // 2, gl.SliceLayout(1, low.type.layout))
    pairs = tile * (TILE_F // 2) + pairs
    places = first + gl.arange(0, BLOCK_T, gl.SliceLayout(0, low.type.layout))
    is_row = places < end
    out_rows = places if IS_GATED else gl.load(order_ptr + places, mask=is_row, other=0)
    row_ptrs = out_ptr + (out_rows.to(gl.int64) * stride_on)[None, :]
    if IS_GATED:
        # Written so that a NaN stays one.
        low = gl.where(low > limit, limit, low)
        high = gl.where(high > limit, limit, gl.where(high < -limit, -limit, high))
        gated = low / (1.0 + gl.exp(-alpha * low)) * (high + offset)
        gl.store(row_ptrs + pairs[:, None], gated.to(gl.bfloat16), mask=is_row[None, :])
    else:
        gl.store(row_ptrs + 2 * pairs[:, None], low.to(gl.bfloat16), mask=is_row[None, :])
        gl.store(row_ptrs + 2 * pairs[:, None] + 1, high.to(gl.bfloat16), mask=is_row[None, :])
