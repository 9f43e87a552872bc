# SPDX-License-Identifier: Apache-2.0
"""Absorbed multi-head latent attention over the paged cache of latents.

A cached token is (c, r): its latent c of L numbers and a rotated key r of R numbers, shared by all
heads. A head's key is W_k c and its value W_v c; so with the query taken into the latent's space,
q_latent = W_k^T q, the scores are scale * (q_latent . c + q_rope . r), and the weighted sum of
values is W_v times that of latents (DeepSeek-V2, 2024, section 2.1.2): no key or value of a head
is ever made. The result is the sum of latents; W_v is applied by who calls.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.core.batch import AttentionRows


def latent_attention_reference(
    q_latent: Float[Tensor, "T H L"],
    q_rope: Float[Tensor, "T H R"],
    cache_layer: Float[Tensor, "P S L+R"],
    rows: AttentionRows,
    scale: float,
) -> Float[Tensor, "T H L"]:
    latent_rank = q_latent.shape[2]
    out = torch.zeros(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    starts = rows.query_starts.tolist()
    for row, context_len in enumerate(rows.context_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        num_tokens = tokens.stop - tokens.start
        if context_len == 0 or num_tokens == 0:
            continue
        positions = torch.arange(context_len, device=q_latent.device)
        block_ids = rows.block_tables[row].long()[positions // cache_layer.shape[1]]
        entries_CK = cache_layer[block_ids, positions % cache_layer.shape[1]].float()
        q_THK = torch.cat((q_latent[tokens], q_rope[tokens]), dim=2).float()
        scores_THC = torch.einsum("thk,ck->thc", q_THK, entries_CK) * scale
        own_positions = positions[context_len - num_tokens :]
        is_hidden_TC = positions[None, :] > own_positions[:, None]
        scores_THC = scores_THC.masked_fill(is_hidden_TC[:, None, :], float("-inf"))
        weights_THC = torch.softmax(scores_THC, dim=2)
        out[tokens] = (weights_THC @ entries_CK[:, :latent_rank]).to(out.dtype)
    return out
