# SPDX-License-Identifier: Apache-2.0
"""The argument of a model's forward pass.

Tensors are views of static buffers that are refilled in place, so a CUDA graph replays the same
call that eager code runs. They are valid until the next batch is built.

Axes: T tokens in the step, R requests (rows), P blocks, S slots per block, B block table entries.
Rows are ordered decodes first; a decode row is one token, so token r belongs to decode row r.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRows:
    """The rows of a batch as attention over one KV group sees them.

    Rows [0, num_decodes) have one token each, so row r's token is token r. The new tokens' keys
    and values are in the cache already. Table entries and slots that no token sees are never read,
    or read and ignored.
    """

    block_tables: Int[Tensor, "R B"]
    query_starts: Int[Tensor, " R+1"]
    context_lens: Int[Tensor, " R"]
    """New tokens counted; 0 marks a padding row, whose result is zeros."""
    num_decodes: int
    max_query_len: int
    max_context_len: int
    """Host integers that bound the rows' lengths."""
    chunk_lens: tuple[tuple[int, int], ...] = ()
    """As `ForwardBatch.chunk_lens`."""

    @property
    def num_rows(self) -> int:
        return self.context_lens.shape[0]

    def parts(self, num_tokens: int) -> Iterator[tuple[slice, slice, int]]:
        """(rows, their tokens, the longest row's tokens) of the decodes and of the others; without
        those that have none. `num_tokens` are the step's."""
        first = self.num_decodes
        if first:
            yield slice(0, first), slice(0, first), 1
        if first < self.num_rows and first < num_tokens:
            yield slice(first, self.num_rows), slice(first, num_tokens), self.max_query_len

    def bounds(self, num_tokens: int) -> list[tuple[int, int]]:
        """(new tokens, context) of each row, where lengths have no values (on `meta`): the longest
        context for all, and the tokens that are not decodes spread evenly over the other rows."""
        rows = [(1, self.max_context_len)] * self.num_decodes
        num_others, num_left = self.num_rows - self.num_decodes, num_tokens - self.num_decodes
        for index in range(num_others):
            share = num_left * (index + 1) // num_others - num_left * index // num_others
            rows.append((share, self.max_context_len))
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupBatch:
    """One KV group's part of a batch."""

    cache: Float[Tensor, "P layers planes S G K"]
    """Keys at index 0 and values at 1, or latents at 0. One block is contiguous over all layers of
    the group. Block 0 is the null block: padding rows write there, nothing reads it."""
    block_tables: Int[Tensor, "R B"]
    slot_mapping: Int[Tensor, " T"]
    """Where each token's key and value go: block id * S + offset."""
    window: int
    """0: full attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    token_ids: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    query_starts: Int[Tensor, " R+1"]
    """Row r's tokens are [query_starts[r], query_starts[r + 1])."""
    context_lens: Int[Tensor, " R"]
    """Tokens of the request after this step: what the row's last token attends to."""
    groups: tuple[KVGroupBatch, ...]
    logit_rows: Int[Tensor, " N"]
    """Indices into T whose logits are wanted."""
    hidden_rows: Int[Tensor, " N"] | None = None
    """Indices into T whose hidden states the model returns, in this order: its last layer computes
    no others behind attention. None: all."""
    num_decodes: int
    max_query_len: int
    """Longest row, a host integer: sizes grids and padding."""
    max_context_len: int
    chunk_lens: tuple[tuple[int, int], ...] = ()
    """(tokens, context length) of each row behind the decodes, host integers, in a step with chunks
    of prompts. Empty in other steps, whose shapes follow from the number of rows alone."""

    def rows(self, group: KVGroupBatch) -> AttentionRows:
        """`group` is one of the batch's."""
        return AttentionRows(
            block_tables=group.block_tables,
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            num_decodes=self.num_decodes,
            max_query_len=self.max_query_len,
            max_context_len=self.max_context_len,
            chunk_lens=self.chunk_lens,
        )

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.context_lens.shape[0]
