# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gate in front of an FP8 product: `silu_mul`, its result quantised.

Equal bit for bit to `silu_mul` followed by `quantize_fp8`: the gated numbers are rounded to the
number format of their inputs before their scales are found, and are not written themselves.
"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta
from pelton.kernels.fp8.quantize import (
    HIGHEST,
    SMALLEST_AMAX,
    allocate_fp8,
    quantize_fp8_reference,
    quantize_runs,
)
from pelton.kernels.silu_mul import silu_mul_reference
from pelton.kernels.triton_runtime import (
    IS_INTERPRETED,
    cdiv,
    next_power_of_2,
    overlap_options,
    runs_triton,
    tl,
    triton,
)
from pelton.perf.cost import OpCost, log_cost

SiluMulFP8 = Callable[[Tensor, int, float], tuple[Tensor, Tensor]]


def silu_mul_fp8_reference(
    gate_up: Float[Tensor, "T 2F"], group_size: int, bound: float
) -> tuple[Float[Tensor, "T F"], Float[Tensor, "T F/group"]]:
    return quantize_fp8_reference(silu_mul_reference(gate_up), group_size, bound)


@triton.jit(do_not_specialize=["stride_sg"])
def _silu_mul_fp8_kernel(
    gate_up_ptr,
    values_ptr,
    scales_ptr,
    stride_gt,
    stride_vt,
    stride_st,
    stride_sg,
    ffn_size,
    bound,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HIGHEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    CAST_TRUNCATES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * NUM_GROUPS + tl.arange(0, NUM_GROUPS)  # [NUM_GROUPS]
    dims = groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    mask = dims < ffn_size  # [NUM_GROUPS, GROUP_SIZE]
    row_ptr = gate_up_ptr + token * stride_gt
    gate = tl.load(row_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + ffn_size + dims, mask=mask, other=0.0).to(tl.float32)
    gated = (gate * tl.sigmoid(gate) * up).to(gate_up_ptr.dtype.element_ty).to(tl.float32)
    values, scales = quantize_runs(gated, bound, HIGHEST, SMALLEST_AMAX, CAST_TRUNCATES)
    tl.store(values_ptr + token * stride_vt + dims, values.to(tl.float8e4nv), mask=mask)
    is_group = groups * GROUP_SIZE < ffn_size
    tl.store(scales_ptr + token * stride_st + groups * stride_sg, scales, mask=is_group)


def tune(ffn_size: int, group_size: int) -> dict[str, int]:
    """A token's one scale takes one program; short runs are spread like `silu_mul`'s chunks."""
    if group_size >= ffn_size:
        block = next_power_of_2(ffn_size)
        return {"NUM_GROUPS": 1, "GROUP_SIZE": block, "num_warps": min(max(block // 256, 1), 16)}
    num_groups = min(max(1024 // group_size, 1), next_power_of_2(cdiv(ffn_size, group_size)))
    num_warps = min(max(num_groups * group_size // 256, 1), 4)
    return {"NUM_GROUPS": num_groups, "GROUP_SIZE": group_size, "num_warps": num_warps}


def _silu_mul_fp8_triton(
    gate_up: Float[Tensor, "T 2F"], group_size: int, bound: float
) -> tuple[Float[Tensor, "T F"], Float[Tensor, "T F/group"]]:
    num_tokens, ffn_size = gate_up.shape[0], gate_up.shape[1] // 2
    values, scales = allocate_fp8(gate_up[:, :ffn_size], group_size)
    if num_tokens == 0:
        return values, scales
    blocks = tune(ffn_size, group_size)
    grid = (num_tokens, cdiv(ffn_size, blocks["NUM_GROUPS"] * blocks["GROUP_SIZE"]))
    _silu_mul_fp8_kernel[grid](
        gate_up_ptr=gate_up,
        values_ptr=values,
        scales_ptr=scales,
        stride_gt=gate_up.stride(0),
        stride_vt=values.stride(0),
        stride_st=scales.stride(0),
        stride_sg=scales.stride(1),
        ffn_size=ffn_size,
        bound=bound,
        HIGHEST=HIGHEST,
        SMALLEST_AMAX=SMALLEST_AMAX,
        CAST_TRUNCATES=IS_INTERPRETED,
        **blocks,
        **overlap_options(gate_up.device, num_tokens),
    )
    return values, scales


def silu_mul_fp8_cost(
    num_tokens: int, ffn_size: int, group_size: int, element_bytes: int
) -> OpCost:
    elements = num_tokens * ffn_size
    scales = num_tokens * cdiv(ffn_size, group_size)
    return OpCost(8 * elements, elements * (2 * element_bytes + 1) + 4 * scales)


def _silu_mul_fp8_meta(
    gate_up: Float[Tensor, "T 2F"], group_size: int, bound: float
) -> tuple[Float[Tensor, "T F"], Float[Tensor, "T F/group"]]:
    num_tokens, ffn_size = gate_up.shape[0], gate_up.shape[1] // 2
    cost = silu_mul_fp8_cost(num_tokens, ffn_size, group_size, gate_up.element_size())
    log_cost("silu_mul_fp8", cost)
    return allocate_fp8(gate_up[:, :ffn_size], group_size)


SILU_MUL_FP8: Dispatch[SiluMulFP8] = Dispatch(
    "silu_mul_fp8",
    Implementation("meta", on_meta, _silu_mul_fp8_meta),
    Implementation("triton", runs_triton, _silu_mul_fp8_triton),
    Implementation("reference", anywhere, silu_mul_fp8_reference),
)


def silu_mul_fp8(
    gate_up: Float[Tensor, "T 2F"], group_size: int, bound: float
) -> tuple[Float[Tensor, "T F"], Float[Tensor, "T F/group"]]:
    """As `quantize_fp8(silu_mul(gate_up), group_size, bound)`, whose runs are a power of two long
    or the whole row. gate_up may be strided over T; the results are new memory."""
    assert gate_up.shape[1] % 2 == 0, gate_up.shape
    assert gate_up.stride(1) == 1, gate_up.stride()
    return SILU_MUL_FP8.select(gate_up.device, gate_up.dtype)(gate_up, group_size, bound)
