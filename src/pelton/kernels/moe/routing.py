# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Which experts a token goes to, and with what weight: softmax over the highest logits.

The k highest of a token's E logits are chosen, ties to the lower expert; their weights are the
softmax over those k alone (Shazeer et al., "Outrageously Large Neural Networks", 2017, equations
3 to 5, without the noise).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta
from pelton.kernels.triton_runtime import (
    cdiv,
    next_power_of_2,
    overlap_options,
    runs_triton,
    tl,
    triton,
)
from pelton.perf.cost import OpCost, log_cost

Choices = tuple[Int[Tensor, "T k"], Float[Tensor, "T k"]]
"""Expert ids (int32), the likeliest first, and their weights (float32)."""


class Routing(Protocol):
    """What a router makes of a step's tokens."""

    def choose(self) -> Choices: ...


@dataclass(frozen=True, slots=True)
class SoftmaxTopK:
    """By `softmax_top_k`, or by the products themselves."""

    logits: Float[Tensor, "T E"]
    top_k: int

    def choose(self) -> Choices:
        return softmax_top_k(self.logits, self.top_k)


def softmax_top_k_reference(logits: Float[Tensor, "T E"], top_k: int) -> Choices:
    values, expert_ids = torch.sort(logits.float(), dim=1, descending=True, stable=True)
    weights = torch.softmax(values[:, :top_k], dim=1)
    return expert_ids[:, :top_k].to(torch.int32).contiguous(), weights


@triton.jit(do_not_specialize=["num_tokens"])
def _softmax_top_k_kernel(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    stride_lt,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    experts = tl.arange(0, BLOCK_E)  # [BLOCK_E]
    places = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    is_token = tokens < num_tokens
    is_expert = (experts < NUM_EXPERTS)[None, :]
    tile_ptr = logits_ptr + tokens.to(tl.int64)[:, None] * stride_lt + experts[None, :]
    left = tl.load(tile_ptr, mask=is_token[:, None] & is_expert, other=0.0).to(tl.float32)
    # A NaN has no order. Where it goes does not matter: the products carry it.
    left = tl.where(left == left, left, 0.0)
    highest = tl.max(tl.where(is_expert, left, float("-inf")), axis=1)
    # Of experts none is as low as those that are taken, which is float32's lowest number at least.
    left = tl.where(is_expert, tl.maximum(left, -3.4028234663852886e38), float("-inf"))
    # The sum is in the order of the choices, as in `hopper_one`.
    total = tl.zeros([BLOCK_T], tl.float32)
    shares = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    ids = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for place in tl.static_range(TOP_K):
        share = tl.exp(tl.max(left, axis=1) - highest)
        total += share
        best = tl.argmax(left, axis=1)
        is_here = (places == place)[None, :]
        shares = tl.where(is_here, share[:, None], shares)
        ids = tl.where(is_here, best[:, None], ids)
        left = tl.where(experts[None, :] == best[:, None], float("-inf"), left)
    weights = shares / total[:, None]
    out = tokens[:, None] * TOP_K + places[None, :]
    out_mask = is_token[:, None] & (places < TOP_K)[None, :]
    tl.store(ids_ptr + out, ids, mask=out_mask)
    tl.store(weights_ptr + out, weights, mask=out_mask)


def tune(num_tokens: int) -> dict[str, int]:
    """A token for each warp: its logits fit a warp's registers."""
    return {"BLOCK_T": 1 if num_tokens < 64 else 4, "num_warps": 1 if num_tokens < 64 else 4}


def _softmax_top_k_triton(logits: Float[Tensor, "T E"], top_k: int) -> Choices:
    num_tokens, num_experts = logits.shape
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return ids, weights
    blocks = tune(num_tokens)
    _softmax_top_k_kernel[(cdiv(num_tokens, blocks["BLOCK_T"]),)](
        logits_ptr=logits,
        ids_ptr=ids,
        weights_ptr=weights,
        stride_lt=logits.stride(0),
        num_tokens=num_tokens,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_K=next_power_of_2(top_k),
        **blocks,
        **overlap_options(logits.device, num_tokens),
    )
    return ids, weights


def softmax_top_k_cost(num_tokens: int, num_experts: int, top_k: int, element_bytes: int) -> OpCost:
    """Each logit is compared once a choice; the chosen ones get four operations of a softmax."""
    logits, chosen = num_tokens * num_experts, num_tokens * top_k
    return OpCost(top_k * logits + 4 * chosen, logits * element_bytes + 8 * chosen)


def _softmax_top_k_meta(logits: Float[Tensor, "T E"], top_k: int) -> Choices:
    num_tokens, num_experts = logits.shape
    cost = softmax_top_k_cost(num_tokens, num_experts, top_k, logits.element_size())
    log_cost("softmax_top_k", cost)
    shape = (num_tokens, top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


SOFTMAX_TOP_K: Dispatch[Callable[[Tensor, int], Choices]] = Dispatch(
    "softmax_top_k",
    Implementation("meta", on_meta, _softmax_top_k_meta),
    Implementation("triton", runs_triton, _softmax_top_k_triton),
    Implementation("reference", anywhere, softmax_top_k_reference),
)


def softmax_top_k(logits: Float[Tensor, "T E"], top_k: int) -> Choices:
    """`logits` may be strided over T. Each token's experts differ; its weights add up to 1."""
    assert 1 <= top_k <= logits.shape[1], (top_k, logits.shape)
    assert logits.stride(1) == 1, logits.stride()
    return SOFTMAX_TOP_K.select(logits.device, logits.dtype)(logits, top_k)
