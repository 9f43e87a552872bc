# SPDX-License-Identifier: Apache-2.0
"""Inputs for latent attention."""

import torch

from pelton.core.batch import AttentionRows


def make_latent_inputs(case, device, dtype, generator):
    """A middle layer of a pool, shuffled blocks; every slot that no token may see holds NaN.

    case: (rows of (new tokens, context), decodes, heads, latent, rope, block size)."""
    rows, num_decodes, num_heads, latent, rope, block_size = case
    counts = [-(-context // block_size) for _, context in rows]
    num_blocks = sum(counts) + 2
    cache = torch.full((num_blocks, 3, block_size, latent + rope), float("nan"), dtype=dtype)
    order = (torch.randperm(num_blocks - 2, generator=generator) + 1).tolist()
    tables = torch.full((len(rows), max(counts) + 1), num_blocks - 1, dtype=torch.int32)
    for row, (_, context) in enumerate(rows):
        for entry in range(counts[row]):
            tables[row, entry] = order.pop()
            seen = min(context - entry * block_size, block_size)
            values = torch.randn(seen, latent + rope, generator=generator)
            cache[tables[row, entry], 1, :seen] = values.to(dtype)
    lengths = [new for new, _ in rows]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    # Laid out head by head, as the product before gives it.
    q = torch.randn(num_heads, sum(lengths), latent, generator=generator)
    q_rope = torch.randn(sum(lengths), num_heads, rope + 16, generator=generator)
    return (
        q.to(device, dtype).transpose(0, 1),
        q_rope.to(device, dtype)[:, :, :rope],
        cache.to(device)[:, 1],
        AttentionRows(
            block_tables=tables.to(device),
            query_starts=starts.to(device),
            context_lens=torch.tensor([c for _, c in rows], dtype=torch.int32).to(device),
            num_decodes=num_decodes,
            max_query_len=max(lengths),
            max_context_len=max(context for _, context in rows),
        ),
        (latent + rope) ** -0.5,
    )
