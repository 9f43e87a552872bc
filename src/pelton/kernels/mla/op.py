# SPDX-License-Identifier: Apache-2.0
"""The public function for absorbed latent attention over the paged cache."""

from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_cpu, on_meta
from pelton.kernels.mla.cost import latent_attention_cost
from pelton.kernels.mla.cpu import latent_attention_cpu
from pelton.kernels.mla.reference import latent_attention_reference
from pelton.kernels.mla.triton import latent_attention_rows
from pelton.kernels.triton_runtime import runs_triton
from pelton.perf.cost import log_cost


class LatentAttention(Protocol):
    def __call__(
        self,
        q_latent: Float[Tensor, "T H L"],
        q_rope: Float[Tensor, "T H R"],
        cache_layer: Float[Tensor, "P S L+R"],
        block_tables: Int[Tensor, "R B"],
        query_starts: Int[Tensor, " R+1"],
        context_lens: Int[Tensor, " R"],
        num_decodes: int,
        max_query_len: int,
        max_context_len: int,
        scale: float,
    ) -> Float[Tensor, "T H L"]: ...


def _latent_attention_meta(
    q_latent: Float[Tensor, "T H L"],
    q_rope: Float[Tensor, "T H R"],
    cache_layer: Float[Tensor, "P S L+R"],
    block_tables: Int[Tensor, "R B"],
    query_starts: Int[Tensor, " R+1"],
    context_lens: Int[Tensor, " R"],
    num_decodes: int,
    max_query_len: int,
    max_context_len: int,
    scale: float,
) -> Float[Tensor, "T H L"]:
    """Lengths on `meta` have no values: every row counts with the longest context, and the
    tokens that are not decodes are spread evenly over the other rows."""
    num_tokens, num_heads, latent_rank = q_latent.shape
    num_prefills = context_lens.shape[0] - num_decodes
    rows = [(1, max_context_len)] * num_decodes
    for index in range(num_prefills):
        share = (num_tokens - num_decodes) * (index + 1) // num_prefills
        share -= (num_tokens - num_decodes) * index // num_prefills
        rows.append((share, max_context_len))
    cost = latent_attention_cost(
        rows, num_heads, latent_rank, q_rope.shape[2], q_latent.element_size()
    )
    log_cost("latent_attention", cost)
    return q_latent.new_empty(q_latent.shape)


def _latent_attention_triton(
    q_latent: Float[Tensor, "T H L"],
    q_rope: Float[Tensor, "T H R"],
    cache_layer: Float[Tensor, "P S L+R"],
    block_tables: Int[Tensor, "R B"],
    query_starts: Int[Tensor, " R+1"],
    context_lens: Int[Tensor, " R"],
    num_decodes: int,
    max_query_len: int,
    max_context_len: int,
    scale: float,
) -> Float[Tensor, "T H L"]:
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    num_rows, num_tokens = context_lens.shape[0], q_latent.shape[0]
    parts = (
        (slice(0, num_decodes), slice(0, num_decodes), 1),
        (slice(num_decodes, num_rows), slice(num_decodes, num_tokens), max_query_len),
    )
    for rows, tokens, query_len in parts:
        if rows.start < rows.stop and tokens.start < tokens.stop:
            latent_attention_rows(
                q_latent, q_rope, cache_layer, block_tables, query_starts, context_lens,
                rows, tokens, query_len, scale, out,
            )  # fmt: skip
    return out


LATENT_ATTENTION: Dispatch[LatentAttention] = Dispatch(
    "latent_attention",
    Implementation("meta", on_meta, _latent_attention_meta),
    Implementation("triton", runs_triton, _latent_attention_triton),
    Implementation("cpu", on_cpu, latent_attention_cpu),
    Implementation("reference", anywhere, latent_attention_reference),
)


def latent_attention(
    q_latent: Float[Tensor, "T H L"],
    q_rope: Float[Tensor, "T H R"],
    cache_layer: Float[Tensor, "P S L+R"],
    block_tables: Int[Tensor, "R B"],
    query_starts: Int[Tensor, " R+1"],
    context_lens: Int[Tensor, " R"],
    num_decodes: int,
    max_query_len: int,
    max_context_len: int,
    scale: float,
) -> Float[Tensor, "T H L"]:
    """For each head of every new token: the sum of latents its scores weigh; new memory.

    The entries of the new tokens are in the cache already. Rows, lengths and padding rows are
    those of `paged_attention`; rows [0, num_decodes) have one token each.
    """
    assert q_latent.shape[2] + q_rope.shape[2] == cache_layer.shape[2], (
        q_latent.shape, q_rope.shape, cache_layer.shape,
    )  # fmt: skip
    assert q_latent.stride(2) == q_rope.stride(2) == cache_layer.stride(2) == 1
    run = LATENT_ATTENTION.select(q_latent.device, q_latent.dtype)
    return run(
        q_latent, q_rope, cache_layer, block_tables, query_starts, context_lens, num_decodes,
        max_query_len, max_context_len, scale,
    )  # fmt: skip
