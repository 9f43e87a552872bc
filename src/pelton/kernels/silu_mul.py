# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gate of a SwiGLU feed-forward layer (Shazeer, "GLU Variants Improve Transformer", 2020).

out = silu(gate) * up with silu(g) = g / (1 + exp(-g)), where gate_up holds gate then up.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta, runs_native
from pelton.kernels.triton_runtime import (
    cdiv,
    next_power_of_2,
    overlap_options,
    runs_triton,
    tl,
    triton,
)
from pelton.perf.cost import OpCost, log_cost


def silu_mul_reference(
    gate_up: Float[Tensor, "T 2F"], dtype: torch.dtype | None = None
) -> Float[Tensor, "T F"]:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(dtype or gate_up.dtype)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    stride_gt,
    stride_ot,
    ffn_size,
    BLOCK_F: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    mask = offsets < ffn_size
    row_ptr = gate_up_ptr + token * stride_gt
    gate = tl.load(row_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + ffn_size + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * stride_ot + offsets, gate * tl.sigmoid(gate) * up, mask=mask)


def tune(ffn_size: int) -> dict[str, int]:
    """Chunks small enough that a few tokens already fill the card."""
    block = min(next_power_of_2(ffn_size), 1024)
    return {"BLOCK_F": block, "num_warps": min(max(block // 256, 1), 4)}


def _silu_mul_triton(gate_up: Float[Tensor, "T 2F"], dtype: torch.dtype) -> Float[Tensor, "T F"]:
    num_tokens, ffn_size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, ffn_size), dtype=dtype, device=gate_up.device)
    if num_tokens == 0:
        return out
    blocks = tune(ffn_size)
    _silu_mul_kernel[(num_tokens, cdiv(ffn_size, blocks["BLOCK_F"]))](
        gate_up_ptr=gate_up,
        out_ptr=out,
        stride_gt=gate_up.stride(0),
        stride_ot=out.stride(0),
        ffn_size=ffn_size,
        **blocks,
        **overlap_options(gate_up.device, num_tokens),
    )
    return out


def silu_mul_cost(
    num_tokens: int, ffn_size: int, element_bytes: int, out_element_bytes: int
) -> OpCost:
    elements = num_tokens * ffn_size
    return OpCost(5 * elements, elements * (2 * element_bytes + out_element_bytes))


def _silu_mul_meta(gate_up: Float[Tensor, "T 2F"], dtype: torch.dtype) -> Float[Tensor, "T F"]:
    num_tokens, ffn_size = gate_up.shape[0], gate_up.shape[1] // 2
    element_bytes = gate_up.element_size()
    log_cost("silu_mul", silu_mul_cost(num_tokens, ffn_size, element_bytes, dtype.itemsize))
    return gate_up.new_empty((num_tokens, ffn_size), dtype=dtype)


SILU_MUL: Dispatch[Callable[[Tensor, torch.dtype], Tensor]] = Dispatch(
    "silu_mul",
    Implementation("meta", on_meta, _silu_mul_meta),
    Implementation("triton", runs_triton, _silu_mul_triton),
    Implementation("native", runs_native, "pelton.kernels.native.silu_mul:silu_mul"),
    Implementation("reference", anywhere, silu_mul_reference),
)


def silu_mul(
    gate_up: Float[Tensor, "T 2F"], dtype: torch.dtype | None = None
) -> Float[Tensor, "T F"]:
    """gate_up may be strided over T; the result is new memory in `dtype` (None: gate_up's)."""
    assert gate_up.shape[1] % 2 == 0, gate_up.shape
    assert gate_up.stride(1) == 1, gate_up.stride()
    return SILU_MUL.select(gate_up.device, gate_up.dtype)(gate_up, dtype or gate_up.dtype)
