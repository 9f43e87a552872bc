# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Sets the logits of tokens that a packed bit mask does not allow to minus infinity, in place.

Bit i % 32 of word i // 32 of a mask is token i's. A NaN stays one, so that a model that is broken
shows as broken with a mask as without.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta
from pelton.kernels.triton_runtime import runs_triton, tl, triton
from pelton.perf.cost import OpCost, log_cost

ApplyTokenMask = Callable[[Tensor, Tensor, Tensor], None]


def apply_token_mask_reference(
    logits: Float[Tensor, "N V"], rows: Int[Tensor, " n"], masks: Int[Tensor, "n words"]
) -> None:
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits = (masks[:, :, None] >> shifts) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]] != 0
    chosen = logits.index_select(0, rows)
    chosen.masked_fill_(~(is_allowed | chosen.isnan()), float("-inf"))
    logits.index_copy_(0, rows, chosen)


@triton.jit
def _apply_token_mask_kernel(
    logits_ptr,
    rows_ptr,
    masks_ptr,
    stride_ln,
    stride_mn,
    vocab_size,
    BLOCK_V: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    ids = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    is_token = ids < vocab_size
    words = tl.load(masks_ptr + index * stride_mn + ids // 32, mask=is_token, other=0)
    is_allowed = ((words >> (ids % 32)) & 1) != 0
    logit_ptrs = logits_ptr + row * stride_ln + ids
    # Only what may be overwritten is read: a mask of mostly ones costs little.
    is_banned = is_token & (is_allowed == 0)
    logits = tl.load(logit_ptrs, mask=is_banned, other=0.0)
    tl.store(logit_ptrs, float("-inf"), mask=is_banned & (logits == logits))


def _apply_token_mask_triton(
    logits: Float[Tensor, "N V"], rows: Int[Tensor, " n"], masks: Int[Tensor, "n words"]
) -> None:
    num_rows, vocab_size = rows.shape[0], logits.shape[1]
    if num_rows == 0:
        return
    block = 4096
    _apply_token_mask_kernel[(num_rows, triton.cdiv(vocab_size, block))](
        logits_ptr=logits,
        rows_ptr=rows,
        masks_ptr=masks,
        stride_ln=logits.stride(0),
        stride_mn=masks.stride(0),
        vocab_size=vocab_size,
        BLOCK_V=block,
        num_warps=8,
    )


def apply_token_mask_cost(num_rows: int, vocab_size: int, element_bytes: int) -> OpCost:
    """Of masks that allow next to nothing, as most do: every logit is read and written."""
    elements = num_rows * vocab_size
    words = num_rows * -(-vocab_size // 32)
    return OpCost(elements, 2 * elements * element_bytes + 4 * words + 8 * num_rows)


def _apply_token_mask_meta(
    logits: Float[Tensor, "N V"], rows: Int[Tensor, " n"], masks: Int[Tensor, "n words"]
) -> None:
    cost = apply_token_mask_cost(rows.shape[0], logits.shape[1], logits.element_size())
    log_cost("apply_token_mask", cost)


APPLY_TOKEN_MASK: Dispatch[ApplyTokenMask] = Dispatch(
    "apply_token_mask",
    Implementation("meta", on_meta, _apply_token_mask_meta),
    Implementation("triton", runs_triton, _apply_token_mask_triton),
    Implementation("reference", anywhere, apply_token_mask_reference),
)


def apply_token_mask(
    logits: Float[Tensor, "N V"], rows: Int[Tensor, " n"], masks: Int[Tensor, "n words"]
) -> None:
    """`masks[i]` (int32) is that of `logits[rows[i]]`; rows (int64) are distinct. Rows of logits
    may be strided."""
    assert logits.stride(1) == 1, logits.stride()
    assert masks.stride(1) == 1, masks.stride()
    assert masks.shape == (rows.shape[0], -(-logits.shape[1] // 32)), (masks.shape, logits.shape)
    assert masks.dtype == torch.int32, masks.dtype
    APPLY_TOKEN_MASK.select(logits.device, logits.dtype)(logits, rows, masks)
