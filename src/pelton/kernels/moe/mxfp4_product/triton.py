# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Grouped products with MXFP4 experts, unpacked in registers on the way to the matrix units.

The kernel of `expert_product.triton` with another load: a tile of packed bytes and one of scales
become two tiles of the activations' format, one of even inputs and one of odd ones, which never
need to be woven together. Memory is read at 4.25 bits an element.
"""

from jaxtyping import Float, UInt8
from torch import Tensor

from pelton.kernels.moe.expert_product.triton import (
    ProductTiles,
    new_rows,
    routed_arguments,
    store_tile,
    tile_rows_of,
)
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product.reference import BLOCK
from pelton.kernels.moe.sort_by_expert import RoutedRows
from pelton.kernels.triton_runtime import IS_INTERPRETED, cdiv, tl, triton


@triton.jit
def _unpack_to_bfloat16(packed, scales):
    """As `unpack_mxfp4`, in pairs: three instructions an element, where the plain way has ten."""
    # A code's bits are put at those of a bfloat16's sign, lowest exponent and highest mantissa
    # bits, four bytes at a time; the first multiplication by 2^126 makes that its magnitude.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, s, m, t;
        mov.b32 m, 0x7E807E80;
        prmt.b32 a, $4, 0, 0x1404;
        prmt.b32 b, $4, 0, 0x3424;
        shl.b32 s, a, 4;
        and.b32 s, s, 0x80008000;
        shr.u32 t, a, 2;
        and.b32 t, t, 0x01C001C0;
        or.b32 t, t, s;
        mul.rn.bf16x2 t, t, m;
        mul.rn.bf16x2 $0, t, $5;
        shl.b32 s, b, 4;
        and.b32 s, s, 0x80008000;
        shr.u32 t, b, 2;
        and.b32 t, t, 0x01C001C0;
        or.b32 t, t, s;
        mul.rn.bf16x2 t, t, m;
        mul.rn.bf16x2 $1, t, $6;
        and.b32 s, a, 0x80008000;
        shr.u32 t, a, 6;
        and.b32 t, t, 0x01C001C0;
        or.b32 t, t, s;
        mul.rn.bf16x2 t, t, m;
        mul.rn.bf16x2 $2, t, $5;
        and.b32 s, b, 0x80008000;
        shr.u32 t, b, 6;
        and.b32 t, t, 0x01C001C0;
        or.b32 t, t, s;
        mul.rn.bf16x2 t, t, m;
        mul.rn.bf16x2 $3, t, $6;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,r,r,r",
        args=[packed, scales],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def unpack_mxfp4(packed, scales, dtype: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr):
    """uint8 [BLOCK_F, BLOCK_D / 2] and uint8 [BLOCK_F, BLOCK_D / 32] to two of `dtype`
    [BLOCK_F, BLOCK_D / 2]: the even elements, in the low halves of bytes, and the odd ones."""
    exponents = scales.to(tl.int32)
    # 2^-127 is below the normal numbers, and 255 means NaN.
    powers = tl.where(exponents == 0, 0x00400000, exponents << 23)
    powers = tl.where(exponents == 255, 0x7FC00000, powers).to(tl.float32, bitcast=True)
    if dtype == tl.bfloat16:
        powers = powers.to(tl.bfloat16)
    powers = tl.broadcast_to(powers[:, :, None], [BLOCK_F, BLOCK_D // 32, 16])
    powers = tl.reshape(powers, [BLOCK_F, BLOCK_D // 2])
    if dtype == tl.bfloat16:
        even, odd = _unpack_to_bfloat16(packed, powers)
    else:
        # A code's two exponent bits and its mantissa bit, put where those of a float32 are, make
        # the magnitude times 2^-126. That holds for 0.5 too, which is subnormal in both formats.
        packed = packed.to(tl.int32)
        low = ((packed & 0x07) << 22) | ((packed & 0x08) << 28)
        high = ((packed & 0x70) << 18) | ((packed & 0x80) << 24)
        even = (low.to(tl.float32, bitcast=True) * 8.507059173023462e37 * powers).to(dtype)  # 2^126
        odd = (high.to(tl.float32, bitcast=True) * 8.507059173023462e37 * powers).to(dtype)
    return even, odd


@triton.jit
def _await_product(acc):
    """`acc` itself, by no instruction: a use that makes the compiler wait for the product here.

    Otherwise Triton 3.6 lets the last product of a round run on into the next one, which unpacks
    into the registers that the product still reads its left operand from.
    """
    return tl.inline_asm_elementwise("", "=r,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _mxfp4_product_kernel(
    x_ptr,
    blocks_ptr,
    scales_ptr,
    bias_ptr,
    tiles_ptr,
    order_ptr,
    out_ptr,
    stride_xn,
    stride_be,
    stride_bf,
    stride_se,
    stride_sf,
    stride_biase,
    stride_on,
    top_k,
    in_features,
    out_features,
    alpha,
    limit,
    offset,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # The end of an unused entry is 0.
    if tl.load(tiles_ptr + tl.program_id(1) * 3 + 2) == 0:
        return
    expert, x_rows, out_rows, is_row = tile_rows_of(tiles_ptr, order_ptr, top_k, IS_GATED, BLOCK_T)
    features = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    is_feature = features < out_features
    rows = features.to(tl.int64)[:, None]
    block_row_ptr = blocks_ptr + expert * stride_be + rows * stride_bf
    scale_row_ptr = scales_ptr + expert * stride_se + rows * stride_sf
    column_ptr = x_ptr + x_rows[None, :] * stride_xn
    acc = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
    for start in range(0, in_features, BLOCK_D):
        places = start // 2 + tl.arange(0, BLOCK_D // 2)  # [BLOCK_D / 2], bytes of a row
        scale_places = start // 32 + tl.arange(0, BLOCK_D // 32)  # [BLOCK_D / 32]
        is_place = places < in_features // 2
        byte_mask = is_feature[:, None] & is_place[None, :]
        scale_mask = is_feature[:, None] & (scale_places < in_features // 32)[None, :]
        x_mask = is_place[:, None] & is_row[None, :]
        packed = tl.load(block_row_ptr + places[None, :], mask=byte_mask, other=0)
        scales = tl.load(scale_row_ptr + scale_places[None, :], mask=scale_mask, other=127)
        even_ptr = column_ptr + places[:, None]
        x_even = tl.load(even_ptr, mask=x_mask, other=0.0)  # [BLOCK_D / 2, BLOCK_T]
        x_odd = tl.load(even_ptr + in_features // 2, mask=x_mask, other=0.0)
        even, odd = unpack_mxfp4(packed, scales, x_even.dtype, BLOCK_F, BLOCK_D)
        acc = tl.dot(even, x_even, acc, input_precision="ieee")
        acc = tl.dot(odd, x_odd, acc, input_precision="ieee")
        if not IS_INTERPRETED:
            acc = _await_product(acc)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * stride_biase + features, mask=is_feature, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    store_tile(
        acc, out_ptr, stride_on, out_rows, is_row, out_features, alpha, limit, offset,
        IS_GATED, BLOCK_T, BLOCK_F,
    )  # fmt: skip


def tune(tile_rows: int, element_bytes: int) -> ProductTiles:
    """The step over inputs is the same for any height, and with it the order of a row's sum."""
    if element_bytes > 2:
        return ProductTiles(block_f=32, block_d=32, num_warps=4, num_stages=1)
    if tile_rows <= 32:
        return ProductTiles(block_f=64, block_d=64, num_warps=4, num_stages=3)
    return ProductTiles(block_f=128, block_d=64, num_warps=8, num_stages=3)


def mxfp4_product_triton(
    x: Float[Tensor, "n D"],
    routed: RoutedRows,
    blocks: UInt8[Tensor, "E F D/32 16"],
    scales: UInt8[Tensor, "E F D/32"],
    bias: Float[Tensor, "E F"] | None,
    gate: Gate | None = None,
) -> Float[Tensor, "N f"]:
    _, out_features, num_blocks = scales.shape
    out = new_rows(x, routed, out_features, gate)
    if routed.num_rows == 0:
        return out
    tiles = tune(routed.tile_rows, x.element_size())
    # Even inputs before odd ones, as the two halves of the packed bytes are unpacked.
    x = x.view(x.shape[0], -1, 2).transpose(1, 2).flatten(1)
    _mxfp4_product_kernel[(cdiv(out_features, tiles.block_f), routed.tiles.shape[0])](
        x_ptr=x,
        blocks_ptr=blocks,
        scales_ptr=scales,
        bias_ptr=x if bias is None else bias,
        stride_xn=x.stride(0),
        stride_be=blocks.stride(0),
        stride_bf=blocks.stride(1),
        stride_se=scales.stride(0),
        stride_sf=scales.stride(1),
        stride_biase=0 if bias is None else bias.stride(0),
        in_features=num_blocks * BLOCK,
        out_features=out_features,
        HAS_BIAS=bias is not None,
        IS_INTERPRETED=IS_INTERPRETED,
        **routed_arguments(routed, gate, out),
        BLOCK_F=tiles.block_f,
        BLOCK_D=tiles.block_d,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out
