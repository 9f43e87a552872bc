# SPDX-License-Identifier: Apache-2.0
"""Paged attention on a CPU: keys and values are gathered, then torch's fused attention runs.

The query heads of a KV head stand side by side as query positions, so keys and values are read
once a group. Decode rows are gathered and attended together, a few MiB at a time, so that what
was gathered is still in the processor's cache; each prefill row goes alone. Positions that pad a
decode row to its neighbours' length are gathered from the row's own first token and masked: no
unused memory is read, so nothing that lies in it can reach a result.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pelton.kernels.memo import Memo
from pelton.kernels.paged_attention.reference import paged_attention_reference
from pelton.kernels.rope_write_kv_cpu import cache_rows

_GATHER_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    rows: slice
    index: Int[Tensor, " 2*n*C"]
    """Rows of the cache memory: keys of all rows, then values."""
    mask: Float[Tensor, "n 1 1 C"]
    """0 where a position is seen, -inf elsewhere; 0 throughout for padding rows."""
    padding: Int[Tensor, "n 1 1"] | None
    """True for padding rows, where there are any."""


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    tokens: slice
    index: Int[Tensor, " 2*C"]
    mask: Float[Tensor, "Q C"] | None
    """None: plain causal attention, the row's tokens are its whole context."""


@dataclass(frozen=True, slots=True)
class _Plan:
    decodes: tuple[_DecodeRows, ...]
    prefills: tuple[_PrefillRow, ...]
    covers_all: bool
    """Whether every token belongs to a row that is computed."""


_PLANS: Memo[_Plan] = Memo()


def paged_attention_cpu(
    q: Float[Tensor, "T H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    block_tables: Int[Tensor, "R B"],
    query_starts: Int[Tensor, " R+1"],
    context_lens: Int[Tensor, " R"],
    num_decodes: int,
    max_query_len: int,
    max_context_len: int,
    scale: float,
    window: int,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "T H K"]:
    memory = cache_rows(cache_layer)
    if memory is None:
        return paged_attention_reference(
            q, cache_layer, block_tables, query_starts, context_lens, num_decodes,
            max_query_len, max_context_len, scale, window, sinks,
        )  # fmt: skip
    block_stride = cache_layer.stride(0) // memory.shape[1]
    planner = _Planner(
        cache_layer.shape[2], block_stride, window, q.dtype, memory.shape[1] * q.element_size()
    )
    num_rows = context_lens.shape[0]
    inputs: tuple[Tensor, ...] = (block_tables, context_lens)
    if num_decodes < num_rows:
        inputs += (query_starts,)
    plan = _PLANS.get(
        inputs,
        (planner, num_decodes, num_rows),
        lambda: planner.plan(block_tables, query_starts, context_lens, num_decodes),
    )
    num_kv_heads = cache_layer.shape[3]
    if plan.covers_all and len(plan.decodes) == 1 and not plan.prefills:
        return _attend_decodes(q, memory, plan.decodes[0], num_kv_heads, scale, sinks)
    out = torch.empty_like(q) if plan.covers_all else torch.zeros_like(q)
    for decodes in plan.decodes:
        out[decodes.rows] = _attend_decodes(
            q[decodes.rows], memory, decodes, num_kv_heads, scale, sinks
        )
    for prefill in plan.prefills:
        out[prefill.tokens] = _attend_prefill(
            q[prefill.tokens], memory, prefill, num_kv_heads, scale, sinks
        )
    return out


def _attend_decodes(
    q: Float[Tensor, "n H K"],
    memory: Float[Tensor, "N G*K"],
    decodes: _DecodeRows,
    num_kv_heads: int,
    scale: float,
    sinks: Float[Tensor, " H"] | None,
) -> Float[Tensor, "n H K"]:
    num_rows, num_heads, head_dim = q.shape
    gathered = memory.index_select(0, decodes.index)
    keys, values = gathered.view(2, num_rows, -1, num_kv_heads, head_dim).transpose(2, 3).unbind()
    q = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if sinks is None:
        out = scaled_dot_product_attention(q, keys, values, attn_mask=decodes.mask, scale=scale)
    else:
        by_group = sinks.view(1, num_kv_heads, num_heads // num_kv_heads)
        out = _attend_with_sinks(q, keys, values, decodes.mask, False, scale, by_group)
    out = out.reshape(num_rows, num_heads, head_dim)
    return out if decodes.padding is None else out.masked_fill_(decodes.padding, 0.0)


def _attend_prefill(
    q: Float[Tensor, "Q H K"],
    memory: Float[Tensor, "N G*K"],
    prefill: _PrefillRow,
    num_kv_heads: int,
    scale: float,
    sinks: Float[Tensor, " H"] | None,
) -> Float[Tensor, "Q H K"]:
    num_tokens, num_heads, head_dim = q.shape
    group_size = num_heads // num_kv_heads
    gathered = memory.index_select(0, prefill.index).view(2, -1, num_kv_heads, 1, head_dim)
    gathered = gathered.expand(-1, -1, -1, group_size, -1).permute(0, 2, 3, 1, 4)
    keys, values = gathered.unbind()  # [G, H / G, C, K]
    q = q.view(num_tokens, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    is_causal = prefill.mask is None
    if sinks is None:
        out = scaled_dot_product_attention(
            q, keys, values, attn_mask=prefill.mask, is_causal=is_causal, scale=scale
        )
    else:
        by_head = sinks.view(num_kv_heads, group_size, 1)
        out = _attend_with_sinks(q, keys, values, prefill.mask, is_causal, scale, by_head)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def _attend_with_sinks(
    q: Float[Tensor, "A B Q K"],
    keys: Float[Tensor, "A B C K"],
    values: Float[Tensor, "A B C K"],
    mask: Float[Tensor, "*axes C"] | None,
    is_causal: bool,
    scale: float,
    sinks: Float[Tensor, "*axes"],
) -> Float[Tensor, "A B Q K"]:
    """`sinks` broadcasts to [A, B, Q]. A softmax with one logit more is the one without, times
    the share that the others have: 1 / (1 + exp(sink - lse)) with their log-sum-exp."""
    out, lse = _attention_with_lse(q, keys, values, 0.0, is_causal, attn_mask=mask, scale=scale)
    share = torch.sigmoid(lse - sinks.float())
    shared: Tensor = out * share[..., None]
    return shared.to(q.dtype)


_attention_with_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, slots=True)
class _Planner:
    block_size: int
    block_stride: int
    """Rows of cache memory from a block to the next."""
    window: int
    dtype: torch.dtype
    row_bytes: int

    def plan(
        self,
        block_tables: Int[Tensor, "R B"],
        query_starts: Int[Tensor, " R+1"],
        context_lens: Int[Tensor, " R"],
        num_decodes: int,
    ) -> _Plan:
        starts, lengths = query_starts.tolist(), context_lens.tolist()
        decodes = tuple(
            self._decode_rows(rows, block_tables[rows], context_lens[rows])
            for rows in self._decode_chunks(lengths[:num_decodes])
        )
        prefills = tuple(
            self._prefill_row(starts[row], starts[row + 1], length, block_tables[row])
            for row, length in enumerate(lengths)
            if row >= num_decodes and length and starts[row + 1] > starts[row]
        )
        num_computed = num_decodes + sum(row.tokens.stop - row.tokens.start for row in prefills)
        return _Plan(decodes, prefills, num_computed == starts[-1])

    def _decode_chunks(self, lengths: list[int]) -> list[slice]:
        """Neighbouring rows whose keys and values, padded to one length, fit the budget."""
        chunks, start, longest = [], 0, 0
        for row, length in enumerate(lengths):
            new_longest = max(longest, length)
            size = 2 * (row + 1 - start) * self._seen(new_longest) * self.row_bytes
            if row > start and size > _GATHER_BYTES:
                chunks.append(slice(start, row))
                start, new_longest = row, length
            longest = new_longest
        if lengths:
            chunks.append(slice(start, len(lengths)))
        return chunks

    def _seen(self, length: int) -> int:
        return min(length, self.window) if self.window else length

    def _decode_rows(
        self, rows: slice, block_tables: Int[Tensor, "n B"], context_lens: Int[Tensor, " n"]
    ) -> _DecodeRows:
        num_seen = max(self._seen(int(context_lens.max())), 1)
        ends = context_lens.long()[:, None]
        first = (ends - self.window).clamp_(min=0) if self.window else torch.zeros_like(ends)
        positions = first + torch.arange(num_seen)
        is_seen = positions < ends
        is_padding = ends == 0
        # Where the context ends before its neighbours' does, its own first seen token stands in.
        keys = self._memory_rows(block_tables, torch.where(is_seen, positions, first))
        mask = torch.zeros(is_seen.shape, dtype=self.dtype)
        mask.masked_fill_(~(is_seen | is_padding), float("-inf"))
        return _DecodeRows(
            rows,
            torch.cat((keys.flatten(), keys.flatten() + self.block_size)),
            mask[:, None, None, :],
            is_padding[:, :, None] if bool(is_padding.any()) else None,
        )

    def _prefill_row(
        self, start: int, end: int, context_len: int, block_table: Int[Tensor, " B"]
    ) -> _PrefillRow:
        first_position = context_len - (end - start)
        low = max(0, first_position - self.window + 1) if self.window else 0
        seen = torch.arange(low, context_len)
        keys = self._memory_rows(block_table[None], seen[None])[0]
        mask = None
        if first_position > 0 or (self.window and context_len > self.window):
            distance = torch.arange(first_position, context_len)[:, None] - seen
            is_hidden = distance < 0
            if self.window:
                is_hidden |= distance >= self.window
            mask = torch.zeros(is_hidden.shape, dtype=self.dtype)
            mask.masked_fill_(is_hidden, float("-inf"))
        return _PrefillRow(slice(start, end), torch.cat((keys, keys + self.block_size)), mask)

    def _memory_rows(
        self, block_tables: Int[Tensor, "n B"], positions: Int[Tensor, "n C"]
    ) -> Int[Tensor, "n C"]:
        """Where the keys of `positions` lie; their values lie `block_size` rows further."""
        entries = torch.div(positions, self.block_size, rounding_mode="floor")
        blocks = block_tables.long().gather(1, entries)
        return blocks * self.block_stride + positions % self.block_size
