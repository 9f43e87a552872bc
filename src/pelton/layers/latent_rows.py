# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step run latent attention absorbed and which un-absorbed, for all layers at once.

A row that runs un-absorbed meets its keys in parts, each of them made from latents for all such
rows together: first the step's own tokens, then the prefixes that are in the cache, cut into parts
of `WORKSPACE_TOKENS`. So memory is bounded whatever the context. Everything here follows from
numbers that the host knows; steps that may be captured into a graph run absorbed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from pelton.core.batch import AttentionRows, ForwardBatch, KVGroupBatch
from pelton.kernels.dispatch import must_be_invariant
from pelton.kernels.mla.prefill import Spans

WORKSPACE_TOKENS = 8192
"""Keys and values of this many cached tokens exist at a time: 512 MiB in bfloat16 with DeepSeek's
128 heads of 128 + 128."""
MIN_UNABSORBED_TOKENS = 64
"""Half a tile of the un-absorbed kernel: below it, most of what it computes is padding, while the
absorbed one packs all heads' queries in one tile."""
_GATHER_MULTIPLE = 64

Ints = npt.NDArray[np.int64]
Pieces = list[tuple[int, int, int]]
"""(row, first position, tokens)"""


@dataclass(frozen=True, slots=True)
class AbsorbedRows:
    tokens: Int[Tensor, " t"] | None
    """Which of the step's they have; None: all."""
    rows: AttentionRows


@dataclass(frozen=True, slots=True)
class KeyPart:
    """Cached tokens to make keys and values of, and which queries see them."""

    blocks: Int[Tensor, " N"]
    offsets: Int[Tensor, " N"]
    """Within the block."""
    spans: Spans


@dataclass(frozen=True, slots=True)
class LatentRows:
    batch: ForwardBatch
    group: KVGroupBatch
    absorbed: AbsorbedRows | None
    """None: there are no such rows."""
    parts: tuple[KeyPart, ...]
    """Of the rows that run un-absorbed: their own tokens, then the prefixes that some have."""


def runs_unabsorbed(
    num_tokens: int, context_len: int, key_dim: int, value_dim: int, latent_rank: int
) -> bool:
    """Whether a row of `num_tokens` new tokens on a context of `context_len` with them takes fewer
    operations un-absorbed.

    With q new tokens behind a prefix of p, s pairs of a query and a key it sees, and for a head K
    and V numbers of its own key and value, R of the shared key and L of a latent, multiply-adds
    of a head are

        absorbed     s (2 L + R)      + q L (K + V)        W_k and W_v on each query and output
        un-absorbed  s (K + R + V)    + (p + q) L (K + V)  W_k and W_v on each latent

    so un-absorbed is the cheaper one if s (2 L - K - V) > p L (K + V): for DeepSeek-V3, always
    without a prefix, and from 171 tokens on behind any prefix.
    """
    prefix_len = context_len - num_tokens
    num_pairs = num_tokens * context_len - num_tokens * (num_tokens - 1) // 2
    saved = num_pairs * (2 * latent_rank - key_dim - value_dim)
    spent = prefix_len * latent_rank * (key_dim + value_dim)
    return num_tokens >= MIN_UNABSORBED_TOKENS and saved > spent


def split_rows(
    batch: ForwardBatch, group: KVGroupBatch, key_dim: int, value_dim: int, latent_rank: int
) -> LatentRows:
    """Once a step, before its layers. Without un-absorbed rows nothing is copied or launched. Where
    a token's bits must not depend on its chunk, all rows run absorbed."""
    if must_be_invariant():
        return LatentRows(batch, group, AbsorbedRows(None, batch.rows(group)), ())
    first_row = batch.num_decodes
    prefixes = {
        row: context_len - num_tokens
        for row, (num_tokens, context_len) in enumerate(batch.chunk_lens, first_row)
        if runs_unabsorbed(num_tokens, context_len, key_dim, value_dim, latent_rank)
    }
    if not prefixes:
        return LatentRows(batch, group, AbsorbedRows(None, batch.rows(group)), ())
    query_lens = [1] * first_row + [num_tokens for num_tokens, _ in batch.chunk_lens]
    assert len(query_lens) == batch.num_rows, (query_lens, batch.num_rows)
    starts = list(accumulate(query_lens, initial=0))
    rest = [row for row in range(batch.num_rows) if row not in prefixes]
    absorbed = _absorbed(batch, group, rest, starts, query_lens) if rest else None

    own = [(row, prefix_len, query_lens[row]) for row, prefix_len in prefixes.items()]
    pieces = [own, *cut_prefixes(prefixes, WORKSPACE_TOKENS)]
    places = [_places(part, group.cache.shape[3]) for part in pieces]
    spans = [_spans(part, starts, query_lens) for part in pieces]
    all_places = np.concatenate(places, axis=1)
    sent = _upload([*all_places, np.concatenate(spans)], batch.positions.device)
    blocks = group.block_tables[sent[0], sent[1]].long()
    sizes = [part.shape[1] for part in places]
    split = zip(
        torch.split(blocks, sizes),
        torch.split(sent[2].long(), sizes),
        spans,
        torch.split(sent[3], [len(part) for part in spans]),
        strict=True,
    )
    parts = tuple(
        KeyPart(part_blocks, part_offsets, Spans(tuple(map(tuple, host.tolist())), on_device))
        for part_blocks, part_offsets, host, on_device in split
    )
    return LatentRows(batch, group, absorbed, parts)


def cut_prefixes(prefixes: Mapping[int, int], limit: int) -> list[Pieces]:
    """The tokens of each row, in parts of at most `limit` over all rows."""
    parts: list[Pieces] = []
    room = 0
    for row, length in prefixes.items():
        first = 0
        while first < length:
            if not room:
                parts.append([])
                room = limit
            count = min(length - first, room)
            parts[-1].append((row, first, count))
            first += count
            room -= count
    return parts


def _absorbed(
    batch: ForwardBatch,
    group: KVGroupBatch,
    rows: list[int],
    starts: list[int],
    query_lens: list[int],
) -> AbsorbedRows:
    """Of `rows`, with all decodes among them and in front."""
    lens = [query_lens[row] for row in rows]
    tokens = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
    arrays = [tokens, np.array(rows), np.cumsum([0, *lens])]
    sent_tokens, sent_rows, query_starts = _upload(arrays, batch.positions.device)
    all_rows = batch.rows(group)
    absorbed = replace(
        all_rows,
        block_tables=all_rows.block_tables.index_select(0, sent_rows),
        query_starts=query_starts,
        context_lens=all_rows.context_lens.index_select(0, sent_rows),
        max_query_len=max(lens),
        chunk_lens=(),
    )
    return AbsorbedRows(sent_tokens.long(), absorbed)


def _places(part: Pieces, block_size: int) -> Ints:
    """[3, N]: row, block table entry and offset of each token, and of a few more that nobody sees:
    a CPU compiles a product for each number of rows, which so is one of few."""
    rows = np.repeat([row for row, _, _ in part], [count for _, _, count in part])
    positions = np.concatenate([np.arange(first, first + count) for _, first, count in part])
    entries, offsets = np.divmod(positions, block_size)
    places = np.stack((rows, entries, offsets))
    return np.pad(places, ((0, 0), (0, -len(rows) % _GATHER_MULTIPLE)))


def _spans(part: Pieces, starts: list[int], query_lens: list[int]) -> Ints:
    """[n, 4]; long rows first."""
    first_keys = accumulate((count for _, _, count in part), initial=0)
    spans = [
        (starts[row], query_lens[row], first_key, count)
        for (row, _, count), first_key in zip(part, first_keys, strict=False)
    ]
    return np.array(sorted(spans, key=lambda span: -span[1]))


def _upload(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """As int32, by one copy that nothing waits for. Each starts at a multiple of 16 bytes: what
    does not compiles a kernel of its own."""
    padded = [np.pad(array.ravel(), (0, -array.size % 4)) for array in arrays]
    host = torch.from_numpy(np.concatenate(padded).astype(np.int32))
    if device.type == "cuda":
        host = host.pin_memory()
    sent = torch.split(host.to(device, non_blocking=True), [array.size for array in padded])
    return [part[: array.size].view(array.shape) for part, array in zip(sent, arrays, strict=True)]
