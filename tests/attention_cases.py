# SPDX-License-Identifier: Apache-2.0
"""Shapes for paged attention that touch every mask, and inputs for them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pelton.core.batch import AttentionRows
from pelton.kernels.rope_write_kv import stored_reference


@dataclass(frozen=True)
class AttentionCase:
    """`rows` are (new tokens, context length); the first `num_decodes` have one new token."""

    rows: tuple[tuple[int, int], ...]
    num_decodes: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    window: int = 0
    has_sinks: bool = False

    def __str__(self) -> str:
        rows = "_".join(f"{new}of{context}" for new, context in self.rows[:3])
        return (
            f"R{len(self.rows)}-{rows}-H{self.num_heads}-G{self.num_kv_heads}"
            f"-K{self.head_dim}-S{self.block_size}-W{self.window}"
            + ("-sinks" if self.has_sinks else "")
        )


@dataclass
class AttentionInputs:
    q: Tensor
    cache_layer: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    num_decodes: int
    max_query_len: int
    max_context_len: int
    scale: float
    window: int
    sinks: Tensor | None
    chunk_lens: tuple[tuple[int, int], ...]

    def arguments(self, dtype: torch.dtype | None = None) -> tuple[object, ...]:
        """In the order of `paged_attention`; floating tensors in `dtype` if one is given."""
        q, cache = self.q, self.cache_layer
        if dtype is not None:
            q, cache = q.to(dtype), cache.to(dtype)
        rows = AttentionRows(
            block_tables=self.block_tables,
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            num_decodes=self.num_decodes,
            max_query_len=self.max_query_len,
            max_context_len=self.max_context_len,
            chunk_lens=self.chunk_lens,
        )
        return (
            q,
            cache,
            rows,
            self.scale,
            self.window,
            self.sinks,
        )


def make_attention_inputs(
    case: AttentionCase, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> AttentionInputs:
    """Queries sliced from a wider buffer, a middle layer of a pool, shuffled blocks; every slot
    that no token may see holds NaN, and so do blocks of entries behind a window."""
    first_seen_of = [
        max(0, context - new - case.window + 1) if case.window else 0 for new, context in case.rows
    ]
    entries_of = [
        range(first_seen // case.block_size, -(-context // case.block_size))
        for first_seen, (_, context) in zip(first_seen_of, case.rows, strict=True)
    ]
    width = max((entries.stop for entries in entries_of), default=0) + 1
    num_blocks = sum(map(len, entries_of)) + 2
    shape = (num_blocks, 3, 2, case.block_size, case.num_kv_heads, case.head_dim)
    cache = torch.full(shape, float("nan"), dtype=dtype)
    order = (torch.randperm(num_blocks - 2, generator=generator) + 1).tolist()
    tables = torch.full((len(case.rows), width), num_blocks - 1, dtype=torch.int32)
    for row, (_, context) in enumerate(case.rows):
        for entry in entries_of[row]:
            block = order.pop()
            tables[row, entry] = block
            start = entry * case.block_size
            seen = slice(max(first_seen_of[row] - start, 0), min(context - start, case.block_size))
            count = seen.stop - seen.start
            values = torch.randn(2, count, case.num_kv_heads, case.head_dim, generator=generator)
            cache[block, 1, :, seen] = values.to(dtype)
    query_lens = [new for new, _ in case.rows]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    num_tokens = sum(query_lens)
    wide = torch.randn(
        num_tokens, case.num_heads + 2 * case.num_kv_heads, case.head_dim, generator=generator
    )
    return AttentionInputs(
        q=wide.to(device, dtype)[:, : case.num_heads],
        cache_layer=cache.to(device)[:, 1],
        block_tables=tables.to(device),
        query_starts=starts.to(device),
        context_lens=torch.tensor([c for _, c in case.rows], dtype=torch.int32).to(device),
        num_decodes=case.num_decodes,
        max_query_len=max(query_lens, default=0),
        max_context_len=max((c for _, c in case.rows), default=0),
        scale=case.head_dim**-0.5,
        window=case.window,
        sinks=_make_sinks(case, generator).to(device, dtype) if case.has_sinks else None,
        chunk_lens=case.rows[case.num_decodes :],
    )


def with_fp8_cache(inputs: AttentionInputs, k_scale: float, v_scale: float) -> AttentionInputs:
    """The same keys and values in e4m3, poison included."""
    keys, values = inputs.cache_layer.unbind(1)
    fp8 = torch.float8_e4m3fn
    pool = torch.empty((keys.shape[0], 3, *inputs.cache_layer.shape[1:]), dtype=fp8)
    cache_layer = pool.to(keys.device)[:, 1]
    cache_layer[:, 0] = stored_reference(keys, fp8, k_scale)
    cache_layer[:, 1] = stored_reference(values, fp8, v_scale)
    return replace(inputs, cache_layer=cache_layer)


def _make_sinks(case: AttentionCase, generator: torch.Generator) -> Tensor:
    """From far below the keys' logits to far above them."""
    return 3 * torch.randn(case.num_heads, generator=generator)


ATTENTION_CASES = [
    AttentionCase(rows=((1, 1),), num_decodes=1),
    AttentionCase(rows=((1, 15), (1, 16), (1, 17)), num_decodes=3),
    AttentionCase(rows=((1, 63), (1, 64), (1, 65)), num_decodes=3),
    AttentionCase(rows=((1, 127), (1, 128), (1, 129)), num_decodes=3, num_heads=2),
    AttentionCase(rows=((1, 97), (1, 0), (1, 3)), num_decodes=3),
    AttentionCase(rows=((1, 101), (1, 40)), num_decodes=2, window=32),
    AttentionCase(rows=((1, 101), (1, 31)), num_decodes=2, window=33),
    AttentionCase(rows=((1, 67),) * 17, num_decodes=17),
    AttentionCase(rows=((1, 70), (1, 33)), num_decodes=2, num_heads=9, num_kv_heads=3, head_dim=64),
    AttentionCase(rows=((1, 50),), num_decodes=1, num_heads=8, num_kv_heads=1, head_dim=24),
    AttentionCase(rows=((1, 70),), num_decodes=1, block_size=32),
    AttentionCase(rows=((1, 70),), num_decodes=1, block_size=128),
    AttentionCase(rows=((1, 1),), num_decodes=0),
    AttentionCase(rows=((15, 15), (16, 16), (17, 17)), num_decodes=0),
    AttentionCase(rows=((31, 63), (1, 64), (33, 65)), num_decodes=0),
    AttentionCase(rows=((67, 67), (13, 101)), num_decodes=0),
    AttentionCase(rows=((67, 67), (13, 101)), num_decodes=0, window=29),
    AttentionCase(rows=((40, 40), (7, 90)), num_decodes=0, window=1),
    AttentionCase(rows=((29, 53),), num_decodes=0, num_heads=9, num_kv_heads=3, head_dim=64),
    AttentionCase(rows=((11, 23),), num_decodes=0, num_heads=8, num_kv_heads=1, head_dim=24),
    AttentionCase(rows=((37, 41),), num_decodes=0, num_heads=2, block_size=64),
    AttentionCase(rows=((1, 71), (1, 16), (23, 23), (5, 88)), num_decodes=2),
    AttentionCase(rows=((1, 71), (3, 0), (5, 88), (3, 0)), num_decodes=1),
    AttentionCase(rows=((1, 71), (1, 16), (23, 23), (5, 88)), num_decodes=2, window=20),
    AttentionCase(rows=((1, 71), (1, 0), (23, 23), (5, 88)), num_decodes=2, has_sinks=True),
    AttentionCase(rows=((1, 67),) * 17, num_decodes=17, window=31, has_sinks=True),
    # Windows of several tiles, which are split: on a card, and in the interpreter.
    AttentionCase(
        rows=((1, 0), (1, 299), (1, 300), (1, 301), (1, 900)),
        num_decodes=5,
        head_dim=64,
        window=300,
        has_sinks=True,
    ),
    AttentionCase(rows=((1, 0), (1, 200)), num_decodes=2, head_dim=128, window=70, has_sinks=True),
    AttentionCase(
        rows=((1, 90), (19, 53)),
        num_decodes=1,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        window=17,
        has_sinks=True,
    ),
]

LARGE_ATTENTION_CASES = [
    *(
        AttentionCase(
            rows=tuple((1, 11 * row) for row in range(num_rows)),
            num_decodes=num_rows,
            num_heads=num_heads,
            num_kv_heads=8,
            head_dim=64,
            block_size=block_size,
            window=window,
            has_sinks=True,
        )
        for num_rows, num_heads, window, block_size in (
            (33, 64, 0, 16),
            (70, 64, 128, 16),
            (150, 8, 0, 32),
            (300, 128, 300, 64),
        )
    ),
    AttentionCase(rows=((1, 4099),), num_decodes=1, num_heads=32, num_kv_heads=8, head_dim=128),
    # Padding rows of a step with drafts.
    AttentionCase(
        rows=((4, 0), (4, 300), (70, 0), (4, 5), (1, 0)),
        num_decodes=0,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
    AttentionCase(
        rows=tuple((1, 1 + 37 * row) for row in range(48)),
        num_decodes=48,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
    AttentionCase(
        rows=tuple((1, 1 + 3 * row) for row in range(200)),
        num_decodes=200,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
    AttentionCase(
        rows=((1, 300), (1, 17), (1021, 1021), (129, 2053)),
        num_decodes=2,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
    AttentionCase(
        rows=((1, 300), (517, 517), (64, 1400)),
        num_decodes=1,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        window=257,
    ),
    AttentionCase(
        rows=((1, 2000), (1, 60), (517, 517), (64, 1400)),
        num_decodes=2,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        window=128,
        has_sinks=True,
    ),
    AttentionCase(rows=((128, 128), (1, 128), (130, 130)), num_decodes=0, head_dim=128),
    AttentionCase(
        rows=((1, 1), (700, 1333), (5, 5)), num_decodes=0, num_heads=5, num_kv_heads=5, head_dim=64
    ),
    AttentionCase(
        rows=((1, 600), (77, 500), (300, 300)),
        num_decodes=1,
        num_heads=48,
        num_kv_heads=1,
        head_dim=128,
        block_size=64,
    ),
    AttentionCase(
        rows=((257, 4000), (2, 900)),
        num_decodes=0,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        block_size=128,
    ),
    AttentionCase(
        rows=tuple((3 + 41 * row, 60 + 55 * row) for row in range(23)),
        num_decodes=0,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=32,
    ),
]
