# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Matrix product with a weight stored row by row: y = x W^T + b.

The library's product wins from two tokens on. One token is a matrix-vector product, bound by
reading the weight once, where a plain kernel comes nearer to the memory's rate; on Hopper most take
that of `hopper_vector`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta
from pelton.kernels.hopper_vector import FEW_ROWS, launch_hopper_vector, suits_hopper_vector
from pelton.kernels.invariant_product import invariant_linear
from pelton.kernels.triton_runtime import (
    cdiv,
    next_power_of_2,
    overlap_options,
    runs_triton,
    tl,
    triton,
)
from pelton.kernels.tuning import tunable
from pelton.perf.cost import log_cost, matmul_cost


def linear_reference(
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "T F"]:
    product = x.float() @ weight.float().T
    if bias is not None:
        product = product + bias.float()
    return product.to(dtype or x.dtype)


@triton.jit
def _vector_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    stride_wf,
    in_features,
    out_features,
    HAS_BIAS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    features = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    is_feature = features < out_features
    row_ptr = weight_ptr + features.to(tl.int64)[:, None] * stride_wf
    acc = tl.zeros([BLOCK_F, BLOCK_D], tl.float32)
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    # Before x exists, the bias and the first piece of the weights are on their way, or all pieces.
    bias = tl.zeros([BLOCK_F], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + features, mask=is_feature, other=0.0).to(tl.float32)
    weights = ()
    # PIECES: of a whole row; 0, and it is a loop.
    for piece in tl.static_range(PIECES or 1):
        inputs = piece * BLOCK_D + dims
        mask = is_feature[:, None] & (inputs < in_features)[None, :]
        weights = weights + (tl.load(row_ptr + inputs[None, :], mask=mask, other=0.0),)  # type: ignore[assignment] # noqa: RUF005
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    if PIECES:
        xs = ()
        for piece in tl.static_range(PIECES):
            inputs = piece * BLOCK_D + dims
            xs = xs + (tl.load(x_ptr + inputs, mask=inputs < in_features, other=0.0),)  # type: ignore[assignment] # noqa: RUF005
        for piece in tl.static_range(PIECES):
            acc += weights[piece].to(tl.float32) * xs[piece].to(tl.float32)[None, :]
    else:
        weight = weights[0]  # type: ignore[misc]
        for start in range(0, in_features, BLOCK_D):
            # A piece ahead.
            ahead = start + BLOCK_D + dims
            mask = is_feature[:, None] & (ahead < in_features)[None, :]
            next_weight = tl.load(row_ptr + ahead[None, :], mask=mask, other=0.0)
            x = tl.load(x_ptr + start + dims, mask=start + dims < in_features, other=0.0)
            acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
            weight = next_weight
    out = tl.sum(acc, axis=1) + bias
    tl.store(out_ptr + features, out, mask=is_feature)


@dataclass(frozen=True, slots=True)
class VectorTiles:
    block_f: int
    block_d: int
    num_warps: int
    is_whole: bool
    """All pieces of a program's rows are asked for at once, before x exists."""


@tunable("vector_linear", has_rows=False)
def tune_vector(in_features: int, out_features: int) -> VectorTiles:
    """Few rows a program, so that even a small weight is spread over the whole card, in pieces
    of which a program holds one and has the next in flight. Short rows are held whole, so that
    they come while the kernels in front still run; but for a head's, most of whose programs start
    when others have ended. A router has so few rows that each is a program's."""
    if out_features <= FEW_ROWS:
        block_d = min(next_power_of_2(in_features), 4096)
        return VectorTiles(1, block_d, max(block_d // 512, 1), is_whole=in_features <= 4 * block_d)
    block_d = min(next_power_of_2(in_features), 1024)
    is_whole = in_features <= 4 * block_d and out_features <= 32768
    return VectorTiles(4, block_d, max(block_d // 256, 1), is_whole)


def vector_linear(
    x: Float[Tensor, "1 D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "1 F"]:
    """For numbers of two bytes; the last axes are contiguous."""
    assert x.shape[0] == 1, x.shape
    out_features, in_features = weight.shape
    out = torch.empty((1, out_features), dtype=dtype, device=x.device)
    if suits_hopper_vector(x, weight, bias):
        launch_hopper_vector(x, weight, bias, out)
        return out
    tiles = tune_vector(in_features, out_features)
    _vector_linear_kernel[(cdiv(out_features, tiles.block_f),)](
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=weight if bias is None else bias,
        out_ptr=out,
        stride_wf=weight.stride(0),
        in_features=in_features,
        out_features=out_features,
        HAS_BIAS=bias is not None,
        BLOCK_F=tiles.block_f,
        BLOCK_D=tiles.block_d,
        PIECES=cdiv(in_features, tiles.block_d) if tiles.is_whole else 0,
        num_warps=tiles.num_warps,
        **overlap_options(x.device, 1),
    )
    return out


def _linear_triton(
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "T F"]:
    if x.shape[0] == 1 and weight.stride(1) == 1 and x.element_size() == 2:
        return vector_linear(x, weight, bias, dtype)
    if dtype is not x.dtype and x.is_cuda:
        product = torch.mm(x, weight.t(), out_dtype=dtype)
        return product if bias is None else product.add_(bias)
    return _linear_library(x, weight, bias, dtype)


def _linear_library(
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "T F"]:
    return functional.linear(x, weight, bias).to(dtype)


def _linear_meta(
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "T F"]:
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    sizes = x.element_size(), dtype.itemsize
    log_cost("linear", matmul_cost(num_tokens, in_features, out_features, *sizes))
    return x.new_empty((num_tokens, out_features), dtype=dtype)


LINEAR: Dispatch[Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor]] = Dispatch(
    "linear",
    Implementation("meta", on_meta, _linear_meta),
    Implementation("triton", runs_triton, _linear_triton, is_invariant=False),
    Implementation("invariant", runs_triton, invariant_linear),
    Implementation("torch", anywhere, _linear_library),
    Implementation("reference", anywhere, linear_reference),
)


def linear(
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "T F"]:
    """New memory in `dtype`: x's (None), or float32, which a GPU does not round before. The last
    axis of both inputs is contiguous."""
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    return LINEAR.select(x.device, x.dtype)(x, weight, bias, dtype or x.dtype)
