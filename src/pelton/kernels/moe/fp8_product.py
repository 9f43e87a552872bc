# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The experts' products with FP8 activations and FP8 weights in blocks of 128 x 128.

As `expert_product`, with a scale for each 128 inputs of a row and each block of an expert's
weight. The sum over 128 inputs is taken by the matrix units, scaled and added in full float32
(DeepSeek-V3 technical report, 2024, section 3.3.2). Gate and up rows are interleaved, and so are
the rows of their blocks' scales: row f of gate_up has those of row f // 256 * 2 + f % 2.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta
from pelton.kernels.fp8.scales import BLOCK_SIZE, expand
from pelton.kernels.moe.expert_product.cost import num_distinct_experts
from pelton.kernels.moe.expert_product.reference import expert_product_reference
from pelton.kernels.moe.expert_product.triton import (
    new_rows,
    routed_arguments,
    store_tile,
    tile_rows_of,
)
from pelton.kernels.moe.fp8_tall import launch_tall_product, suits_tall_product
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.sort_by_expert import RoutedRows
from pelton.kernels.triton_runtime import cdiv, runs_triton, tl, triton
from pelton.kernels.tuning import tunable
from pelton.perf.cost import OpCost, log_cost

FP8Product = Callable[
    [Tensor, Tensor, RoutedRows, Tensor, Tensor, torch.dtype, Gate | None], Tensor
]


def dequantize_experts(
    weight: Float[Tensor, "E F D"], scales: Float[Tensor, "E a b"], is_interleaved: bool
) -> Float[Tensor, "E F D"]:
    """float32. Interleaved: rows of two weights take turns, and so do rows of their scales."""
    rows = torch.arange(weight.shape[1], device=weight.device)
    blocks = rows // BLOCK_SIZE
    if is_interleaved:
        blocks = rows // (2 * BLOCK_SIZE) * 2 + rows % 2
    columns = torch.arange(weight.shape[2], device=weight.device) // BLOCK_SIZE
    return weight.float() * scales[:, blocks][:, :, columns]


def fp8_expert_product_reference(
    x: Float[Tensor, "n D"],
    x_scales: Float[Tensor, "n D/128"],
    routed: RoutedRows,
    weight: Float[Tensor, "E F D"],
    scales: Float[Tensor, "E a b"],
    dtype: torch.dtype,
    gate: Gate | None = None,
) -> Float[Tensor, "N f"]:
    """The first product with a gate, the second without."""
    values = dequantize_experts(weight, scales, is_interleaved=gate is not None)
    x = expand(x.float(), x_scales)
    return expert_product_reference(x, routed, values, None, gate).to(dtype)


@triton.jit(do_not_specialize=["stride_xsg"])
def _fp8_product_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    tiles_ptr,
    order_ptr,
    out_ptr,
    stride_xn,
    stride_xsn,
    stride_xsg,
    stride_we,
    stride_wf,
    stride_se,
    stride_sf,
    stride_sg,
    stride_on,
    top_k,
    in_features,
    out_features,
    alpha,
    limit,
    offset,
    IS_GATED: tl.constexpr,
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
    row_ptr = weight_ptr + expert * stride_we + features.to(tl.int64)[:, None] * stride_wf
    column_ptr = x_ptr + x_rows[None, :] * stride_xn
    block_rows = features // BLOCK_D
    if IS_GATED:
        block_rows = features // (2 * BLOCK_D) * 2 + features % 2
    scale_row_ptr = scales_ptr + expert * stride_se + block_rows * stride_sf
    x_scale_ptr = x_scales_ptr + x_rows * stride_xsn
    acc = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
    for block in range(0, tl.cdiv(in_features, BLOCK_D)):
        dims = block * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
        is_dim = dims < in_features
        w_mask = is_feature[:, None] & is_dim[None, :]
        x_mask = is_dim[:, None] & is_row[None, :]
        weight = tl.load(row_ptr + dims[None, :], mask=w_mask, other=0.0)  # [BLOCK_F, BLOCK_D]
        x = tl.load(column_ptr + dims[:, None], mask=x_mask, other=0.0)  # [BLOCK_D, BLOCK_T]
        w_scale = tl.load(scale_row_ptr + block * stride_sg, mask=is_feature, other=0.0)
        x_scale = tl.load(x_scale_ptr + block * stride_xsg, mask=is_row, other=0.0)
        acc += tl.dot(weight, x) * (w_scale[:, None] * x_scale[None, :])
    store_tile(
        acc, out_ptr, stride_on, out_rows, is_row, out_features, alpha, limit, offset,
        IS_GATED, BLOCK_T, BLOCK_F,
    )  # fmt: skip


@tunable("fp8_experts")
def tune(tile_rows: int) -> dict[str, int]:
    """Narrow tiles of features: one expert already spreads over the card, and the scaled sums of a
    tile stay in the registers of four warps."""
    return {"BLOCK_F": 64, "num_warps": 4, "num_stages": 4 if tile_rows <= 32 else 3}


def _fp8_expert_product_triton(
    x: Float[Tensor, "n D"],
    x_scales: Float[Tensor, "n D/128"],
    routed: RoutedRows,
    weight: Float[Tensor, "E F D"],
    scales: Float[Tensor, "E a b"],
    dtype: torch.dtype,
    gate: Gate | None = None,
) -> Float[Tensor, "N f"]:
    """Tiles of many rows on Hopper by a kernel of their own."""
    out = new_rows(x, routed, weight.shape[1], gate, dtype)
    if routed.num_rows == 0:
        return out
    launch = launch_product
    if suits_tall_product(x, routed, weight, dtype):
        launch = launch_tall_product
    launch(x, x_scales, routed, weight, scales, gate, out)
    return out


def launch_product(
    x: Float[Tensor, "n D"],
    x_scales: Float[Tensor, "n D/128"],
    routed: RoutedRows,
    weight: Float[Tensor, "E F D"],
    scales: Float[Tensor, "E a b"],
    gate: Gate | None,
    out: Float[Tensor, "N f"],
) -> None:
    """Writes all of `out`, which is `new_rows`'s, for tiles of any height."""
    _, out_features, in_features = weight.shape
    blocks = tune(routed.tile_rows)
    _fp8_product_kernel[(cdiv(out_features, blocks["BLOCK_F"]), routed.tiles.shape[0])](
        x_ptr=x,
        x_scales_ptr=x_scales,
        weight_ptr=weight,
        scales_ptr=scales,
        stride_xn=x.stride(0),
        stride_xsn=x_scales.stride(0),
        stride_xsg=x_scales.stride(1),
        stride_we=weight.stride(0),
        stride_wf=weight.stride(1),
        stride_se=scales.stride(0),
        stride_sf=scales.stride(1),
        stride_sg=scales.stride(2),
        in_features=in_features,
        out_features=out_features,
        **routed_arguments(routed, gate, out),
        BLOCK_D=BLOCK_SIZE,
        **blocks,
    )


def fp8_product_cost(
    rows_read: int,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    in_features: int,
    out_features: int,
    out_bytes: int,
) -> OpCost:
    """Each row and each weight of an expert that has a row, routing counted as uniform, is read
    once; `out_bytes` are those of all results."""
    num_rows = num_tokens * top_k
    used = num_distinct_experts(num_tokens, top_k, num_experts)
    weights = used * (in_features * out_features + 4 * cdiv(in_features, BLOCK_SIZE)
                      * cdiv(out_features, BLOCK_SIZE))  # fmt: skip
    read = rows_read * (in_features + 4 * cdiv(in_features, BLOCK_SIZE))
    return OpCost(2 * num_rows * in_features * out_features, int(read + weights) + out_bytes)


def _fp8_expert_product_meta(
    x: Float[Tensor, "n D"],
    x_scales: Float[Tensor, "n D/128"],
    routed: RoutedRows,
    weight: Float[Tensor, "E F D"],
    scales: Float[Tensor, "E a b"],
    dtype: torch.dtype,
    gate: Gate | None = None,
) -> Float[Tensor, "N f"]:
    num_experts, out_features, in_features = weight.shape
    out = new_rows(x, routed, out_features, gate, dtype)
    num_tokens = routed.num_rows // routed.top_k
    cost = fp8_product_cost(
        x.shape[0], num_tokens, routed.top_k, num_experts, in_features, out_features, out.nbytes
    )
    log_cost("fp8_gate_up_product" if gate else "fp8_down_product", cost)
    return out


_IMPLEMENTATIONS: tuple[Implementation[FP8Product], ...] = (
    Implementation("meta", on_meta, _fp8_expert_product_meta),
    Implementation("triton", runs_triton, _fp8_expert_product_triton),
    Implementation("reference", anywhere, fp8_expert_product_reference),
)
FP8_GATE_UP_PRODUCT: Dispatch[FP8Product] = Dispatch("fp8_gate_up_product", *_IMPLEMENTATIONS)
FP8_DOWN_PRODUCT: Dispatch[FP8Product] = Dispatch("fp8_down_product", *_IMPLEMENTATIONS)


def fp8_gate_up_product(
    x: Float[Tensor, "T D"],
    x_scales: Float[Tensor, "T D/128"],
    routed: RoutedRows,
    weight: Float[Tensor, "E 2F D"],
    scales: Float[Tensor, "E a b"],
    gate: Gate,
    dtype: torch.dtype,
) -> Float[Tensor, "N F"]:
    """Gated hidden states in `dtype`, rows sorted by expert; new memory. `x` and `x_scales` are
    `quantize_fp8`'s."""
    assert x.shape[1] == weight.shape[2], (x.shape, weight.shape)
    assert x.stride(1) == weight.stride(2) == 1, (x.stride(), weight.stride())
    run = FP8_GATE_UP_PRODUCT.select(x.device, dtype)
    return run(x, x_scales, routed, weight, scales, dtype, gate)


def fp8_down_product(
    hidden: Float[Tensor, "N F"],
    hidden_scales: Float[Tensor, "N F/128"],
    routed: RoutedRows,
    weight: Float[Tensor, "E D F"],
    scales: Float[Tensor, "E a b"],
    dtype: torch.dtype,
) -> Float[Tensor, "N D"]:
    """Takes rows sorted by expert, gives them in routed order: token t's choice j at t * k + j."""
    assert hidden.shape == (routed.num_rows, weight.shape[2]), (hidden.shape, weight.shape)
    assert hidden.stride(1) == weight.stride(2) == 1, (hidden.stride(), weight.stride())
    run = FP8_DOWN_PRODUCT.select(hidden.device, dtype)
    return run(hidden, hidden_scales, routed, weight, scales, dtype, None)
