# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Product of FP8 activations with an FP8 weight: y = (x s_x) (W s_w)^T + b, summed in float32.

Two layouts of scales. Blocks: x has a scale for each 128 inputs of a token, W one for each block
of 128 outputs x 128 inputs; the sum over 128 inputs is taken by the matrix units, scaled, and
added in full float32, because those units keep fewer bits of a long sum (DeepSeek-V3 technical
report, 2024, section 3.3.2). Rows: one scale a token and one a row of W, applied at the end.

One token, and very few, have a kernel of their own, in `vector_linear`.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta
from pelton.kernels.fp8.invariant_linear import fp8_invariant_linear
from pelton.kernels.fp8.scales import BLOCK_SIZE, FP8Operands, expand
from pelton.kernels.fp8.vector_linear import fp8_vector_linear, suits_plain_units
from pelton.kernels.triton_runtime import (
    IS_INTERPRETED,
    cdiv,
    next_power_of_2,
    num_multiprocessors,
    runs_triton,
    tl,
    triton,
)
from pelton.kernels.tuning import tunable
from pelton.perf.cost import OpCost, log_cost

MAX_FEW_TOKENS = 64
"""Up to here the product is bound by reading the weight, and the kernel below reads it in small
tiles that fill the card; above, the library's product has the better schedule."""
MAX_FEW_TOKENS_DEEP = 8
"""The same for more than 4,096 inputs, over which the library splits the sum."""

FP8Linear = Callable[[FP8Operands], Tensor]


def fp8_linear_reference(operands: FP8Operands) -> Float[Tensor, "T F"]:
    x = expand(operands.x.float(), operands.x_scales)
    product = x @ expand(operands.weight.float(), operands.weight_scales).T
    if operands.bias is not None:
        product = product + operands.bias.float()
    return product.to(operands.dtype)


@triton.jit(do_not_specialize=["num_tokens", "stride_xsg"])
def _fp8_linear_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    stride_xt,
    stride_xst,
    stride_xsg,
    stride_wf,
    stride_wsf,
    stride_wsg,
    stride_ot,
    num_tokens,
    in_features,
    out_features,
    HAS_BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Neighbouring programs read the same rows of the weight.
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    features = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    is_token, is_feature = tokens < num_tokens, features < out_features
    x_row_ptr = x_ptr + tokens.to(tl.int64)[:, None] * stride_xt
    weight_row_ptr = weight_ptr + features.to(tl.int64)[None, :] * stride_wf
    if HAS_BLOCKS:
        # The features of a program lie in one block of rows.
        x_scale_ptr = x_scales_ptr + tokens * stride_xst
        weight_scale_ptr = weight_scales_ptr + tl.program_id(1) * BLOCK_F // BLOCK_D * stride_wsf
        x_scales = tl.load(x_scale_ptr, mask=is_token, other=0.0)  # [BLOCK_T]
        weight_scale = tl.load(weight_scale_ptr)
    acc = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    for block in range(0, tl.cdiv(in_features, BLOCK_D)):
        dims = block * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
        is_dim = dims < in_features
        x_mask = is_token[:, None] & is_dim[None, :]
        weight_mask = is_dim[:, None] & is_feature[None, :]
        x = tl.load(x_row_ptr + dims[None, :], mask=x_mask, other=0.0)  # [BLOCK_T, BLOCK_D]
        weight = tl.load(weight_row_ptr + dims[:, None], mask=weight_mask, other=0.0)
        partial = tl.dot(x, weight)  # [BLOCK_T, BLOCK_F]
        if HAS_BLOCKS:
            partial = partial * (x_scales * weight_scale)[:, None]
            # A block ahead, and not used before: the compiler does not fetch them early by itself.
            following = block + 1
            is_left = following * BLOCK_D < in_features
            x_scales = tl.load(
                x_scale_ptr + following * stride_xsg, mask=is_token & is_left, other=0.0
            )
            weight_scale = tl.load(
                weight_scale_ptr + following * stride_wsg, mask=is_left, other=0.0
            )
        acc += partial
    if not HAS_BLOCKS:
        x_scales = tl.load(x_scales_ptr + tokens * stride_xst, mask=is_token, other=0.0)
        weight_scales = tl.load(
            weight_scales_ptr + features * stride_wsf, mask=is_feature, other=0.0
        )
        acc = acc * x_scales[:, None] * weight_scales[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + features, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    out_tile_ptr = out_ptr + tokens.to(tl.int64)[:, None] * stride_ot + features[None, :]
    tl.store(out_tile_ptr, acc, mask=is_token[:, None] & is_feature[None, :])


@tunable("fp8_linear")
def tune(num_tokens: int, out_features: int, in_features: int) -> dict[str, int]:
    """Few tokens: narrow tiles of the weight, so that even a small one is spread over the card."""
    if num_tokens <= MAX_FEW_TOKENS:
        block_t = max(next_power_of_2(num_tokens), 16)
        return {"BLOCK_T": block_t, "BLOCK_F": 32, "num_warps": 4, "num_stages": 5}
    return {"BLOCK_T": 128, "BLOCK_F": 128, "num_warps": 8, "num_stages": 3}


def fp8_linear_triton(operands: FP8Operands) -> Float[Tensor, "T F"]:
    num_tokens, out_features, in_features = operands.shape
    if num_tokens == 0:
        return operands.make_out()
    if suits_plain_units(num_tokens, out_features, num_multiprocessors(operands.x.device)):
        return fp8_vector_linear(operands)
    out = operands.make_out()
    blocks = tune(num_tokens, out_features, in_features)
    grid = (cdiv(num_tokens, blocks["BLOCK_T"]), cdiv(out_features, blocks["BLOCK_F"]))
    _fp8_linear_kernel[grid](
        **operands.kernel_arguments(out),
        BLOCK_D=BLOCK_SIZE,
        **blocks,
    )
    return out


def _fp8_linear_library(operands: FP8Operands) -> Float[Tensor, "T F"]:
    """The library's products on a card, where they take the shapes."""
    num_tokens, out_features, in_features = operands.shape
    is_few = num_tokens <= (MAX_FEW_TOKENS if in_features <= 4096 else MAX_FEW_TOKENS_DEEP)
    # A row of block scales must be a multiple of four, or some releases want it padded.
    is_odd = in_features % (4 * BLOCK_SIZE) or out_features % BLOCK_SIZE
    if is_few or is_odd or operands.dtype is not torch.bfloat16 or IS_INTERPRETED:
        return fp8_linear_triton(operands)
    x, x_scales = operands.x, operands.x_scales
    if num_tokens % 4:  # the library takes no other number of rows beside block scales
        x = functional.pad(x.view(torch.uint8), (0, 0, 0, -num_tokens % 4)).view(x.dtype)
        x_scales = functional.pad(x_scales.t(), (0, -num_tokens % 4)).t()
    out = torch._scaled_mm(
        x, operands.weight.t(), scale_a=x_scales, scale_b=operands.weight_scales.t(),
        out_dtype=operands.dtype,
    )[:num_tokens]  # fmt: skip
    return out if operands.bias is None else out.add_(operands.bias)


def fp8_linear_cost(
    num_tokens: int, in_features: int, out_features: int, num_scales: int, element_bytes: int
) -> OpCost:
    """`num_scales`: float32 scales of both sides; `element_bytes` of the result."""
    read = num_tokens * in_features + in_features * out_features + 4 * num_scales
    written = num_tokens * out_features * element_bytes
    return OpCost(2 * num_tokens * in_features * out_features, read + written)


def _fp8_linear_meta(operands: FP8Operands) -> Float[Tensor, "T F"]:
    num_scales = operands.x_scales.numel() + operands.weight_scales.numel()
    num_tokens, out_features, in_features = operands.shape
    cost = fp8_linear_cost(
        num_tokens, in_features, out_features, num_scales, operands.dtype.itemsize
    )
    log_cost("fp8_linear", cost)
    return operands.make_out()


FP8_LINEAR: Dispatch[FP8Linear] = Dispatch(
    "fp8_linear",
    Implementation("meta", on_meta, _fp8_linear_meta),
    Implementation("library", runs_triton, _fp8_linear_library, is_invariant=False),
    Implementation("triton", runs_triton, fp8_linear_triton, is_invariant=False),
    Implementation("invariant", runs_triton, fp8_invariant_linear),
    Implementation("reference", anywhere, fp8_linear_reference),
)


def fp8_linear(
    x: Float[Tensor, "T D"],
    x_scales: Float[Tensor, "T D/128"],
    weight: Float[Tensor, "F D"],
    weight_scales: Float[Tensor, "F/128 D/128"],
    bias: Float[Tensor, " F"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "T F"]:
    """The result, of `dtype`, is new memory. `x` and `x_scales` are `quantize_fp8`'s.

    `weight_scales` is [ceil(F / 128), ceil(D / 128)] beside runs of 128 activations, or [F, 1]
    beside one run a token.
    """
    assert x.dtype == weight.dtype == torch.float8_e4m3fn, (x.dtype, weight.dtype)
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.stride(1) == weight.stride(1) == 1, (x.stride(), weight.stride())
    assert x_scales.shape[1] == weight_scales.shape[1], (x_scales.shape, weight_scales.shape)
    operands = FP8Operands(x, x_scales, weight, weight_scales, bias, dtype)
    return FP8_LINEAR.select(x.device, dtype)(operands)
