# SPDX-License-Identifier: Apache-2.0
"""Absorbed latent attention on a CPU: a row's latents are gathered and attended by torch's kernel.

All heads share the latents, so the heads of a row's tokens stand side by side as queries of one
head, and latents are read once a row.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pelton.core.batch import AttentionRows


def latent_attention_cpu(
    q_latent: Float[Tensor, "T H L"],
    q_rope: Float[Tensor, "T H R"],
    cache_layer: Float[Tensor, "P S L+R"],
    rows: AttentionRows,
    scale: float,
) -> Float[Tensor, "T H L"]:
    out = torch.zeros(q_latent.shape, dtype=q_latent.dtype)
    queries = torch.cat((q_latent, q_rope), dim=2)
    num_heads, latent_rank = q_latent.shape[1:]
    block_size, starts = cache_layer.shape[1], rows.query_starts.tolist()
    for row, context_len in enumerate(rows.context_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if context_len == 0 or start == end:
            continue
        table = rows.block_tables[row, : -(-context_len // block_size)].long()
        entries = cache_layer[table].view(-1, cache_layer.shape[2])[:context_len]
        mask = None
        if end - start > 1:
            own = torch.arange(context_len - (end - start), context_len)
            is_hidden = torch.arange(context_len) > own[:, None]
            mask = torch.zeros(is_hidden.shape, dtype=out.dtype)
            mask = mask.masked_fill_(is_hidden, float("-inf")).repeat_interleave(num_heads, dim=0)
        attended = scaled_dot_product_attention(
            queries[start:end].view(1, 1, -1, queries.shape[2]),
            entries[None, None],
            entries[None, None, :, :latent_rank],
            attn_mask=mask,
            scale=scale,
        )
        out[start:end] = attended.view(end - start, num_heads, latent_rank)
    return out
