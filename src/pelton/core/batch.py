# SPDX-License-Identifier: Apache-2.0
"""The argument of a model's forward pass.

Tensors are views of static buffers that are refilled in place, so a CUDA graph replays the same
call that eager code runs. They are valid until the next batch is built.

Axes: T tokens in the step, R requests (rows), P blocks, S slots per block, B block table entries.
Rows are ordered decodes first; a decode row is one token, so token r belongs to decode row r.
"""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


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
    num_decodes: int
    max_query_len: int
    """Longest row, a host integer: sizes grids and padding."""
    max_context_len: int
    chunk_lens: tuple[tuple[int, int], ...] = ()
    """(tokens, context length) of each row behind the decodes, host integers, in a step with chunks
    of prompts. Empty in other steps, whose shapes follow from the number of rows alone."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.context_lens.shape[0]
