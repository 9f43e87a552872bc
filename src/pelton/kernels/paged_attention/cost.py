# SPDX-License-Identifier: Apache-2.0
"""The cost of attention over a paged cache, from each row's lengths."""

from collections.abc import Iterable

from pelton.perf.cost import OpCost


def paged_attention_cost(
    rows: Iterable[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
    kv_element_bytes: int,
    window: int = 0,
) -> OpCost:
    """`rows` are (new tokens, context length with them) pairs. Keys and values are read once a
    row and KV head; the products count only the visible half of the causal square."""
    flops = num_bytes = 0
    for num_tokens, context_len in rows:
        first = context_len - num_tokens
        seen = _visible_pairs(first, context_len, window)
        flops += 4 * seen * num_heads * head_dim
        low = max(0, first - window + 1) if window else 0
        num_bytes += 2 * num_tokens * num_heads * head_dim * element_bytes
        num_bytes += 2 * (context_len - low) * num_kv_heads * head_dim * kv_element_bytes
    return OpCost(flops, num_bytes)


def _visible_pairs(first: int, end: int, window: int) -> int:
    """Sum over positions p in [first, end) of how many positions p sees."""
    full = (first + 1 + end) * (end - first) // 2
    if not window:
        return full
    # Positions from `window` on see `window` tokens instead of p + 1.
    over = max(first, window)
    cut = max(0, end - over)
    return full - (over + 1 + end) * cut // 2 + window * cut if cut else full
