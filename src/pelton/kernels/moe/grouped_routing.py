# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Which experts a token goes to when experts stand in groups: DeepSeek-V3's router.

With s = sigmoid(logits) and a bias b that only steers the choice: a group's score is the sum of
its two highest s + b; the token goes to the k highest s + b within the best groups, with weights
s, divided by their sum if they are normalised, times a constant. Ties go to the lower group or
expert (DeepSeek-V3 technical report, 2024, sections 2.1.2 and 3.4; node-limited routing).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta
from pelton.kernels.moe.routing import Choices
from pelton.kernels.triton_runtime import next_power_of_2, overlap_options, runs_triton, tl, triton
from pelton.perf.cost import OpCost, log_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRouting:
    top_k: int
    """Experts a token goes to."""
    num_groups: int = 1
    top_groups: int = 1
    """Groups that they may be in."""
    is_normalized: bool = True
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SigmoidTopK:
    """By `sigmoid_top_k`."""

    logits: Float[Tensor, "T E"]
    bias: Float[Tensor, " E"]
    rule: GroupedRouting

    def choose(self) -> Choices:
        return sigmoid_top_k(self.logits, self.bias, self.rule)


def sigmoid_top_k_reference(
    logits: Float[Tensor, "T E"], bias: Float[Tensor, " E"], rule: GroupedRouting
) -> Choices:
    scores = torch.sigmoid(logits.float())
    steered = scores + bias.float()
    if rule.num_groups > 1:
        groups = steered.view(steered.shape[0], rule.num_groups, -1)
        group_scores = groups.topk(2, dim=2).values.sum(dim=2)
        order = torch.sort(group_scores, dim=1, descending=True, stable=True).indices
        is_out = torch.ones_like(group_scores, dtype=torch.bool)
        is_out.scatter_(1, order[:, : rule.top_groups], False)
        steered = groups.masked_fill(is_out[:, :, None], float("-inf")).flatten(1)
    expert_ids = torch.sort(steered, dim=1, descending=True, stable=True).indices
    expert_ids = expert_ids[:, : rule.top_k].contiguous()
    weights = scores.gather(1, expert_ids)
    if rule.is_normalized:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return expert_ids.to(torch.int32), weights * rule.scale


@triton.jit
def _sigmoid_top_k_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    stride_lt,
    scale,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK_G)  # [BLOCK_G]
    members = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    places = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    ids = groups[:, None] * GROUP_SIZE + members[None, :]  # [BLOCK_G, BLOCK_M]
    is_expert = (groups < NUM_GROUPS)[:, None] & (members < GROUP_SIZE)[None, :]
    bias = tl.load(bias_ptr + ids, mask=is_expert, other=0.0).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    logits = tl.load(logits_ptr + token * stride_lt + ids, mask=is_expert, other=0.0)
    logits = logits.to(tl.float32)
    # A NaN has no order. Where it goes does not matter: the products carry it.
    scores = tl.sigmoid(tl.where(logits == logits, logits, 0.0))
    left = tl.where(is_expert, scores + bias, float("-inf"))
    if NUM_GROUPS > 1:
        best = tl.max(left, axis=1)  # [BLOCK_G]
        best_id = tl.min(tl.where(left == best[:, None], ids, NUM_GROUPS * GROUP_SIZE), axis=1)
        second = tl.max(tl.where(ids == best_id[:, None], float("-inf"), left), axis=1)
        group_scores = tl.where(groups < NUM_GROUPS, best + second, float("-inf"))
        is_in = tl.zeros([BLOCK_G], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            top = tl.max(group_scores, axis=0)
            group = tl.min(tl.where(group_scores == top, groups, BLOCK_G), axis=0)
            is_in = tl.where(groups == group, 1, is_in)
            group_scores = tl.where(groups == group, float("-inf"), group_scores)
        left = tl.where(is_in[:, None] == 1, left, float("-inf"))
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for place in tl.static_range(TOP_K):
        top = tl.max(tl.max(left, axis=1), axis=0)
        candidates = tl.where(left == top, ids, NUM_GROUPS * GROUP_SIZE - 1)
        expert = tl.min(tl.min(candidates, axis=1), axis=0)
        is_here = ids == expert
        weight = tl.sum(tl.sum(tl.where(is_here & is_expert, scores, 0.0), axis=1), axis=0)
        chosen = tl.where(places == place, expert, chosen)
        weights = tl.where(places == place, weight, weights)
        left = tl.where(is_here, float("-inf"), left)
    if IS_NORMALIZED:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    tl.store(ids_ptr + token * TOP_K + places, chosen, mask=places < TOP_K)
    tl.store(weights_ptr + token * TOP_K + places, weights * scale, mask=places < TOP_K)


def _sigmoid_top_k_triton(
    logits: Float[Tensor, "T E"], bias: Float[Tensor, " E"], rule: GroupedRouting
) -> Choices:
    num_tokens, num_experts = logits.shape
    shape = (num_tokens, rule.top_k)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return ids, weights
    group_size = num_experts // rule.num_groups
    _sigmoid_top_k_kernel[(num_tokens,)](
        logits_ptr=logits,
        bias_ptr=bias,
        ids_ptr=ids,
        weights_ptr=weights,
        stride_lt=logits.stride(0),
        scale=rule.scale,
        NUM_GROUPS=rule.num_groups,
        GROUP_SIZE=group_size,
        TOP_GROUPS=rule.top_groups,
        TOP_K=rule.top_k,
        IS_NORMALIZED=rule.is_normalized,
        BLOCK_G=next_power_of_2(rule.num_groups),
        BLOCK_M=next_power_of_2(group_size),
        BLOCK_K=next_power_of_2(rule.top_k),
        num_warps=1,
        **overlap_options(logits.device, num_tokens),
    )
    return ids, weights


def sigmoid_top_k_cost(num_tokens: int, num_experts: int, top_k: int, element_bytes: int) -> OpCost:
    """A sigmoid of four operations and one comparison a choice for each logit."""
    logits = num_tokens * num_experts
    moved = logits * element_bytes + 4 * num_experts + 8 * num_tokens * top_k
    return OpCost((4 + top_k) * logits, moved)


def _sigmoid_top_k_meta(
    logits: Float[Tensor, "T E"], bias: Float[Tensor, " E"], rule: GroupedRouting
) -> Choices:
    num_tokens, num_experts = logits.shape
    cost = sigmoid_top_k_cost(num_tokens, num_experts, rule.top_k, logits.element_size())
    log_cost("sigmoid_top_k", cost)
    shape = (num_tokens, rule.top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


SIGMOID_TOP_K: Dispatch[Callable[[Tensor, Tensor, GroupedRouting], Choices]] = Dispatch(
    "sigmoid_top_k",
    Implementation("meta", on_meta, _sigmoid_top_k_meta),
    Implementation("triton", runs_triton, _sigmoid_top_k_triton),
    Implementation("reference", anywhere, sigmoid_top_k_reference),
)


def sigmoid_top_k(
    logits: Float[Tensor, "T E"], bias: Float[Tensor, " E"], rule: GroupedRouting
) -> Choices:
    """`logits` may be strided over T. Each token's experts differ."""
    num_experts = logits.shape[1]
    assert num_experts % rule.num_groups == 0, (num_experts, rule)
    assert rule.top_k <= num_experts // rule.num_groups * rule.top_groups, (num_experts, rule)
    assert logits.stride(1) == bias.stride(0) == 1, (logits.stride(), bias.stride())
    return SIGMOID_TOP_K.select(logits.device, logits.dtype)(logits, bias, rule)
