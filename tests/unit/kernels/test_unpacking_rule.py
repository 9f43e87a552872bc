# SPDX-License-Identifier: Apache-2.0
"""Which prompts over an FP8 cache are unpacked for Hopper's kernel, and heads at a time."""

import pytest
import torch

from pelton.core.batch import AttentionRows
from pelton.kernels.paged_attention import hopper_prefill, unpack_fp8

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_prefill, "runs_hopper", lambda _: True)
    monkeypatch.setattr(unpack_fp8, "num_multiprocessors", lambda _: 132)


def heads(
    lens: tuple[tuple[int, int], ...],
    *,
    window: int = 0,
    cache_dtype: torch.dtype = FP8,
    num_kv_heads: int = 8,
) -> int:
    """Of an 8B model."""
    q = torch.empty(1, 32, 128, dtype=torch.bfloat16)
    cache = torch.empty(2, 2, 16, num_kv_heads, 128, dtype=cache_dtype)
    rows = AttentionRows(
        block_tables=torch.zeros(len(lens), 1, dtype=torch.int32),
        query_starts=torch.zeros(len(lens) + 1, dtype=torch.int32),
        context_lens=torch.zeros(len(lens), dtype=torch.int32),
        num_decodes=0,
        max_query_len=1,
        max_context_len=1,
        chunk_lens=lens,
    )
    return unpack_fp8.heads_at_a_time(q, cache, rows, window)


def test_prompts_are_unpacked() -> None:
    assert heads(((1000, 1000),) * 8) == 8
    assert heads(((8192, 8192),)) == 8
    assert heads(((512, 20_000),)) == 8
    assert heads(((2048, 32_768),)) == 8


def test_what_is_small_has_a_window_or_is_no_fp8_is_not() -> None:
    assert heads(((1000, 1000),)) == 0
    assert heads(((1000, 1000),) * 8, window=128) == 0
    assert heads(((1000, 1000),) * 8, cache_dtype=torch.bfloat16) == 0
    assert heads(()) == 0


def test_rows_of_few_tokens_behind_long_contexts_are_not() -> None:
    assert heads(((5, 90_000),) * 30) == 0
    assert heads(((50, 30_000),) * 30) == 0


def test_a_long_row_does_not_count_for_others() -> None:
    assert heads((*((512, 512),) * 16, (512, 20_000))) == 8


@pytest.mark.parametrize(("context_len", "expected"), [(32_769, 4), (65_536, 4), (131_072, 2)])
def test_of_long_contexts_equal_parts_of_the_heads_are(context_len, expected) -> None:
    assert heads(((4096, context_len),)) == expected


def test_parts_that_leave_the_card_idle_are_not() -> None:
    assert heads(((512, 131_072),)) == 0
    assert heads(((4096, 400_000),)) == 0
