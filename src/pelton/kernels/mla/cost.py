# SPDX-License-Identifier: Apache-2.0
"""The cost of absorbed latent attention, from each row's lengths."""

from collections.abc import Iterable

from pelton.perf.cost import OpCost


def latent_attention_cost(
    rows: Iterable[tuple[int, int]],
    num_heads: int,
    latent_rank: int,
    rope_dim: int,
    element_bytes: int,
) -> OpCost:
    """`rows` are (new tokens, context length with them) pairs. Latents are read once a row; the
    products count only the visible half of the causal square."""
    flops = elements = 0
    for num_tokens, context_len in rows:
        seen = num_tokens * context_len - num_tokens * (num_tokens - 1) // 2
        flops += 2 * seen * num_heads * (2 * latent_rank + rope_dim)
        elements += num_tokens * num_heads * (2 * latent_rank + rope_dim)
        elements += context_len * (latent_rank + rope_dim)
    return OpCost(flops, elements * element_bytes)
