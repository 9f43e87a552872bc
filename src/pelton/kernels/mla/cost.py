# SPDX-License-Identifier: Apache-2.0
"""The costs of latent attention, absorbed and not, from lengths."""

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


def latent_prefill_cost(
    spans: Iterable[tuple[int, int]],
    num_heads: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    element_bytes: int,
    out_bytes: int,
    *,
    is_causal: bool,
    continues: bool,
) -> OpCost:
    """`spans` are (queries, keys) pairs; `out_bytes` are those of one number of the result."""
    flops = elements = results = 0
    for num_queries, num_keys in spans:
        hidden = num_queries * (num_queries - 1) // 2 if is_causal else 0
        seen = num_queries * num_keys - hidden
        flops += 2 * seen * num_heads * (nope_dim + rope_dim + value_dim)
        elements += num_queries * num_heads * (nope_dim + rope_dim)
        elements += num_keys * (num_heads * (nope_dim + value_dim) + rope_dim)
        results += num_queries * num_heads
    results *= 2 if continues else 1
    return OpCost(flops, elements * element_bytes + results * (value_dim * out_bytes + 4))
