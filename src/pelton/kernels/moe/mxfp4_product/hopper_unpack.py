# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""MXFP4 weights in the registers of Hopper's left operand: how a thread unpacks them, and the order
of activations that goes with it.

In a chunk of 128 inputs a thread holds two rows of the left operand and 32 inputs of each, which
published checkpoints store in 16 bytes under one scale: one wide load a row, and no exchange
between threads. When a model is loaded the bits in each word are put in an order (`order_codes`)
that takes 14 instructions to unpack eight codes, not 17. Which of the 32 stands at which of the
operand's columns is free, as long as the activations' columns stand in the same order.

Weights are exact where their scale is from 2^-100 to 2^33. Smaller ones lose bits, and larger ones
are NaN: no published checkpoint comes near either.
"""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from pelton.kernels.moe.sort_by_expert import RoutedRows
from pelton.kernels.triton_runtime import cdiv, gl, gluon, tl, triton

CHUNK = 128
"""Inputs of a round: four scale blocks."""
_PLACES = ((15, 6), (12, 3), (14, 9), (13, 0))
"""Where a half word's four codes have their sign and the lowest bit of their magnitude."""
_GATHER_BLOCK = 1024
"""Inputs that a program puts in order."""


@triton.jit
def _gather_inputs_kernel(
    x_ptr, order_ptr, out_ptr, stride_xt, top_k, in_features, width,
    IS_GATHERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    inputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    row = tl.program_id(0)
    x_row = row
    if IS_GATHERED:
        x_row = tl.load(order_ptr + row) // top_k
    x_row_ptr = x_ptr + x_row.to(tl.int64) * stride_xt
    x = tl.load(x_row_ptr + inputs, mask=inputs < in_features, other=0.0)
    # Bits of an input in its chunk: q1 q0 b1 c b0 n1 n0; of its place there: c n1 n0 b1 q1 q0 b0.
    # q is the thread of four, b1 and c the word of its four, b0 the half of it, n the code there.
    x = x.reshape([BLOCK // 128, 2, 2, 2, 2, 2, 2, 2]).permute(0, 4, 6, 7, 3, 1, 2, 5)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + row.to(tl.int64) * width + places, x.reshape([BLOCK]), mask=places < width)


def gather_inputs(
    x: Float[Tensor, "T D"], routed: RoutedRows, num_chunks: int, *, is_gathered: bool
) -> Tensor:
    """[N, chunks]: each chunk's columns in the order of the unpacked weights, and zeros behind the
    last input. `is_gathered`: a row for each routed one; else the rows of `x`."""
    num_rows, in_features = x.shape
    if is_gathered:
        num_rows = routed.num_rows
    out = x.new_empty((num_rows, num_chunks * CHUNK))
    _gather_inputs_kernel[(num_rows, cdiv(num_chunks * CHUNK, _GATHER_BLOCK))](
        x_ptr=x,
        order_ptr=routed.order,
        out_ptr=out,
        stride_xt=x.stride(0),
        top_k=routed.top_k,
        in_features=in_features,
        width=num_chunks * CHUNK,
        IS_GATHERED=is_gathered,
        BLOCK=_GATHER_BLOCK,
        num_warps=4,
    )
    return out


def order_codes(blocks: UInt8[Tensor, "E F D/32 16"]) -> Int[Tensor, "E F D/32 4"]:
    """Puts the bits of published codes in the order that `unpack` takes, in their own memory, which
    must be aligned to 4 bytes. Each half of a word has four codes: from the lowest bit on the
    magnitudes of the fourth, second, first and third, three bits each, and above them, at bits
    15, 12, 14 and 13, the signs of the first to the fourth."""
    words = blocks.view(torch.int32)
    for expert in words:
        ordered = torch.zeros_like(expert)
        for code, (sign, magnitude) in enumerate(_PLACES):
            ordered |= (expert >> 4 * code + 3 & 0x10001) << sign
            ordered |= (expert >> 4 * code & 0x70007) << magnitude
        expert.copy_(ordered)
    return words


def ordered(blocks: Tensor) -> Int[Tensor, "E F D/32 4"]:
    """Blocks as they are if they have been ordered; published ones are copied, and that ordered."""
    if blocks.dtype is torch.int32:
        return blocks
    copied = torch.empty_strided(
        blocks.shape, blocks.stride(), dtype=blocks.dtype, device=blocks.device
    )
    return order_codes(copied.copy_(blocks))


@gluon.jit
def unpack(words, powers):
    """int32 [F, 16] of eight ordered codes each to bfloat16 [F, 128] in the order of
    `gather_inputs`; `powers` [F, 16] holds a word's scale twice, as bfloat16."""
    # Two words a time. A code's bits are put at those of a bfloat16's sign, lowest exponent and
    # highest mantissa bits, which makes its magnitude times 2^-126; the power holds that too. The
    # first pair of `order_codes` is there already, one shift brings the second, two the third, and
    # a product makes both shifts of the last.
    codes = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 u, h;
        and.b32 u, $8, 0x81C081C0;
        mul.rn.bf16x2 $0, u, $10;
        shl.b32 u, $8, 3;
        and.b32 u, u, 0x81C081C0;
        mul.rn.bf16x2 $1, u, $10;
        shr.u32 u, $8, 3;
        shl.b32 h, $8, 1;
        lop3.b32 u, u, h, 0x80008000, 0xD8;
        and.b32 u, u, 0x81C081C0;
        mul.rn.bf16x2 $2, u, $10;
        and.b32 u, $8, 0x20072007;
        mul.lo.u32 u, u, 0x44;
        and.b32 u, u, 0x81C081C0;
        mul.rn.bf16x2 $3, u, $10;
        and.b32 u, $9, 0x81C081C0;
        mul.rn.bf16x2 $4, u, $11;
        shl.b32 u, $9, 3;
        and.b32 u, u, 0x81C081C0;
        mul.rn.bf16x2 $5, u, $11;
        shr.u32 u, $9, 3;
        shl.b32 h, $9, 1;
        lop3.b32 u, u, h, 0x80008000, 0xD8;
        and.b32 u, u, 0x81C081C0;
        mul.rn.bf16x2 $6, u, $11;
        and.b32 u, $9, 0x20072007;
        mul.lo.u32 u, u, 0x44;
        and.b32 u, u, 0x81C081C0;
        mul.rn.bf16x2 $7, u, $11;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        args=[words, powers],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )
    # [F, 16, c, n0, n1] with the word's number in bits q1 q0 b1 b0.
    even = gl.join(gl.join(codes[0], codes[4]), gl.join(codes[1], codes[5]))
    odd = gl.join(gl.join(codes[2], codes[6]), gl.join(codes[3], codes[7]))
    FEATURES: gl.constexpr = words.shape[0]
    tile = gl.join(even, odd).reshape([FEATURES, 2, 2, 2, 2, 2, 2, 2])
    return tile.permute((0, 5, 7, 6, 3, 1, 2, 4)).reshape([FEATURES, 128])


@gluon.jit
def powers_of(scales):
    """2^(s - 33) for scales s [F, 4], as bfloat16 in both halves of an int32: what brings
    an unpacked code to its value times 2^-32. NaN for 255, which means that, and from 161 on."""
    scales = scales.to(gl.int32)
    return gl.where(scales > 160, 0x7FC0, scales * 128 + 94 * 128) * 0x10001
