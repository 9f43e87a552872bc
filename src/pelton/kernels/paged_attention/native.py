# SPDX-License-Identifier: Apache-2.0
"""Paged attention on a CPU: decode rows by a kernel of our own, prefill rows by torch's.

A prefill row's keys and values are gathered from its blocks for torch's fused attention; what is
gathered depends on the step alone, so its layers share it. From a cache in FP8, which our kernel
does not read, all rows are gathered and converted.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pelton.core.batch import AttentionRows
from pelton.kernels.memo import Memo
from pelton.kernels.native.decode_attention import decode_attention


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    tokens: slice
    index: Int[Tensor, " 2*C"]
    mask: Float[Tensor, "Q C"] | None
    """None: plain causal attention, the row's tokens are its whole context."""


_PREFILLS: Memo[tuple[_PrefillRow, ...]] = Memo()


def paged_attention_native(
    q: Float[Tensor, "T H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    rows: AttentionRows,
    scale: float,
    window: int,
    sinks: Float[Tensor, " H"] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Float[Tensor, "T H K"]:
    num_rows = rows.num_rows
    out = torch.empty(q.shape, dtype=q.dtype)
    num_decodes = 0 if cache_layer.dtype is torch.float8_e4m3fn else rows.num_decodes
    if num_decodes:
        decode_attention(
            q[:num_decodes], cache_layer, rows.block_tables, rows.context_lens[:num_decodes],
            rows.max_context_len, scale, window, sinks, out,
        )  # fmt: skip
    if num_decodes == num_rows:
        return out
    memory = _cache_rows(cache_layer)
    block_stride = cache_layer.stride(0) // memory.shape[1]
    planner = _Planner(cache_layer.shape[2], block_stride, window, q.dtype)
    prefills = _PREFILLS.get(
        (rows.block_tables, rows.context_lens, rows.query_starts),
        (planner, num_decodes, num_rows),
        lambda: planner.plan(rows, num_decodes),
    )
    num_computed = num_decodes
    for prefill in prefills:
        attended = _attend_prefill(
            q[prefill.tokens], memory, prefill, cache_layer.shape[3], scale * k_scale, sinks
        )
        out[prefill.tokens] = attended if v_scale == 1.0 else attended * v_scale
        num_computed += prefill.tokens.stop - prefill.tokens.start
    if num_computed < len(q):
        _clear_padding(out, rows, num_decodes)
    return out


def _clear_padding(out: Float[Tensor, "T H K"], rows: AttentionRows, num_decodes: int) -> None:
    starts = rows.query_starts.tolist()
    for row in range(num_decodes, rows.num_rows):
        if not rows.context_lens[row]:
            out[starts[row] : starts[row + 1]] = 0.0
    out[starts[-1] :] = 0.0


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
    gathered = memory.index_select(0, prefill.index).to(q.dtype)
    gathered = gathered.view(2, -1, num_kv_heads, 1, head_dim)
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

    def plan(self, rows: AttentionRows, num_decodes: int) -> tuple[_PrefillRow, ...]:
        starts, lengths = rows.query_starts.tolist(), rows.context_lens.tolist()
        return tuple(
            self._prefill_row(starts[row], starts[row + 1], length, rows.block_tables[row])
            for row, length in enumerate(lengths)
            if row >= num_decodes and length and starts[row + 1] > starts[row]
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
            own = torch.arange(first_position, context_len)[:, None]
            is_hidden = seen > own
            if self.window:
                is_hidden |= seen <= own - self.window
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


def _cache_rows(cache_layer: Float[Tensor, "P 2 S G K"]) -> Float[Tensor, "N G*K"]:
    """The layer's memory as rows of one token's keys or values, other layers' rows between them.

    Block p's keys start at row p * stride(0) / (G * K), its values S rows later.
    """
    num_blocks, _, block_size, num_kv_heads, head_dim = cache_layer.shape
    size = num_kv_heads * head_dim
    block_stride, *inner = cache_layer.stride()
    assert inner == [block_size * size, size, head_dim, 1], inner
    num_rows = (num_blocks - 1) * (block_stride // size) + 2 * block_size
    return cache_layer.as_strided((num_rows, size), (size, 1))
