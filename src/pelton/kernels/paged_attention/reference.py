# SPDX-License-Identifier: Apache-2.0
"""Causal attention of each row's new tokens over the row's keys and values in the paged cache.

out = softmax(scale * q k^T + mask) v, head by head (Vaswani et al., 2017, equation 1), where
H / G query heads share a KV head. A row of n new tokens and context length c has its tokens at
positions c - n ... c - 1; the token at position p sees positions (p - window, p].

A sink is a learned logit of a head, beside those of the keys: it takes its share of the softmax
and has no value, so a head may attend to nothing (Xiao et al., "Efficient Streaming Language
Models with Attention Sinks", 2023; in this form Agarwal et al., "gpt-oss-120b & gpt-oss-20b Model
Card", 2025, section 2).

A cache in FP8 holds keys over k_scale and values over v_scale.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.core.batch import AttentionRows


def paged_attention_reference(
    q: Float[Tensor, "T H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    rows: AttentionRows,
    scale: float,
    window: int,
    sinks: Float[Tensor, " H"] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Float[Tensor, "T H K"]:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, lengths = rows.query_starts.tolist(), rows.context_lens.tolist()
    for row, context_len in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if context_len == 0 or start == end:
            continue
        first_position = context_len - (end - start)
        # Nothing before `low` is seen by any of the row's tokens; its block may be freed.
        low = max(0, first_position - window + 1) if window else 0
        k_CGK, v_CGK = _gather_context(cache_layer, rows.block_tables[row], low, context_len)
        k_CGK, v_CGK = k_CGK * k_scale, v_CGK * v_scale
        out[start:end] = _attend(
            q[start:end], k_CGK, v_CGK, first_position, low, scale, window, sinks
        )
    return out


def _gather_context(
    cache_layer: Float[Tensor, "P 2 S G K"], block_table: Int[Tensor, " B"], low: int, high: int
) -> tuple[Float[Tensor, "C G K"], Float[Tensor, "C G K"]]:
    """Keys and values of positions [low, high), in float32."""
    block_size = cache_layer.shape[2]
    positions = torch.arange(low, high, device=cache_layer.device)
    block_ids = block_table.long()[positions // block_size]
    offsets = positions % block_size
    return cache_layer[block_ids, 0, offsets].float(), cache_layer[block_ids, 1, offsets].float()


def _attend(
    q_THK: Float[Tensor, "T H K"],
    k_CGK: Float[Tensor, "C G K"],
    v_CGK: Float[Tensor, "C G K"],
    first_position: int,
    low: int,
    scale: float,
    window: int,
    sinks: Float[Tensor, " H"] | None,
) -> Float[Tensor, "T H K"]:
    num_tokens, num_heads, _ = q_THK.shape
    group_size = num_heads // k_CGK.shape[1]
    k_HKC = k_CGK.repeat_interleave(group_size, dim=1).permute(1, 2, 0)
    v_HCK = v_CGK.repeat_interleave(group_size, dim=1).permute(1, 0, 2)
    scores_HTC = q_THK.float().transpose(0, 1) @ k_HKC * scale
    query_positions = torch.arange(first_position, first_position + num_tokens, device=q_THK.device)
    key_positions = torch.arange(low, low + k_CGK.shape[0], device=q_THK.device)
    distance_TC = query_positions[:, None] - key_positions[None, :]
    is_visible = distance_TC >= 0
    if window:
        is_visible &= distance_TC < window
    scores_HTC = scores_HTC.masked_fill(~is_visible, float("-inf"))
    if sinks is not None:
        sink_HT1 = sinks.float()[:, None, None].expand(-1, num_tokens, 1)
        scores_HTC = torch.cat((scores_HTC, sink_HT1), dim=-1)
    probabilities_HTC = torch.softmax(scores_HTC, dim=-1)[:, :, : v_HCK.shape[1]]
    out_HTK = probabilities_HTC @ v_HCK
    return out_HTK.transpose(0, 1).to(q_THK.dtype)
