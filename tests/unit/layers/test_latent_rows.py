# SPDX-License-Identifier: Apache-2.0
"""Which rows run latent attention un-absorbed, and where they find their keys."""

import pytest
import torch

from pelton.core.batch import ForwardBatch, KVGroupBatch
from pelton.kernels.head_product import head_product_cost
from pelton.kernels.mla.cost import latent_attention_cost, latent_prefill_cost
from pelton.layers import latent_rows
from pelton.layers.latent_rows import (
    MIN_UNABSORBED_TOKENS,
    LatentRows,
    cut_prefixes,
    runs_unabsorbed,
    split_rows,
)
from pelton.perf.cost import matmul_cost

K, R, V, L, HEADS = 128, 64, 128, 512, 128
BLOCK_SIZE, BLOCKS = 4, 60


@pytest.mark.parametrize("prefix", [0, 1, 50, 400, 5000, 150000])
@pytest.mark.parametrize("num_tokens", [64, 100, 150, 170, 171, 400, 8192])
def test_the_rule_takes_the_form_of_fewer_operations(num_tokens: int, prefix: int) -> None:
    row = (num_tokens, prefix + num_tokens)
    absorbed = (
        latent_attention_cost([row], HEADS, L, R, 2).flops
        + head_product_cost(num_tokens, HEADS, K, L, 2).flops
        + head_product_cost(num_tokens, HEADS, L, V, 2).flops
    )
    unabsorbed = (
        latent_prefill_cost(
            [(num_tokens, num_tokens)], HEADS, K, R, V, 2, 2, is_causal=True, continues=False
        ).flops
        + latent_prefill_cost(
            [(num_tokens, prefix)], HEADS, K, R, V, 2, 2, is_causal=False, continues=True
        ).flops
        + matmul_cost(prefix + num_tokens, L, HEADS * (K + V), 2, 2).flops
    )

    assert runs_unabsorbed(*row, K, V, L) == (unabsorbed < absorbed)


def test_decodes_drafts_and_short_chunks_stay_absorbed() -> None:
    assert not any(runs_unabsorbed(n, n, K, V, L) for n in range(1, MIN_UNABSORBED_TOKENS))
    assert runs_unabsorbed(MIN_UNABSORBED_TOKENS, MIN_UNABSORBED_TOKENS, K, V, L)
    assert not runs_unabsorbed(4, 100_000, K, V, L)


def test_prefixes_are_cut_to_the_workspace() -> None:
    parts = cut_prefixes({3: 5, 4: 0, 7: 12, 9: 3}, 8)

    assert parts == [[(3, 0, 5), (7, 0, 3)], [(7, 3, 8)], [(7, 11, 1), (9, 0, 3)]]


def make_batch(num_decodes: int, chunk_lens: list[tuple[int, int]]) -> ForwardBatch:
    num_rows = num_decodes + len(chunk_lens)
    tables = torch.arange(num_rows * BLOCKS, dtype=torch.int32).view(num_rows, BLOCKS).flip(1)
    lens = [1] * num_decodes + [new for new, _ in chunk_lens]
    num_tokens = sum(lens) + 2  # and padding

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    group = KVGroupBatch(
        cache=torch.zeros(num_rows * BLOCKS, 1, 1, BLOCK_SIZE, 1, 3),
        block_tables=tables,
        slot_mapping=zeros(num_tokens),
        window=0,
    )
    return ForwardBatch(
        token_ids=zeros(num_tokens),
        positions=zeros(num_tokens),
        query_starts=torch.tensor([0, *lens]).cumsum(0).int(),
        context_lens=torch.tensor([9] * num_decodes + [context for _, context in chunk_lens]),
        groups=(group,),
        logit_rows=zeros(1),
        num_decodes=num_decodes,
        max_query_len=max(lens),
        max_context_len=200,
        chunk_lens=tuple(chunk_lens),
    )


def split(batch: ForwardBatch) -> LatentRows:
    return split_rows(batch, batch.groups[0], K, V, L)


def keys_seen(rows: LatentRows) -> dict[int, list[tuple[int, int]]]:
    """(block, offset) of every key that the queries from a token on see, in the parts' order."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for part in rows.parts:
        places = list(zip(part.blocks.tolist(), part.offsets.tolist(), strict=True))
        assert part.spans.device.tolist() == [list(span) for span in part.spans.host]
        for first_query, _, first_key, num_keys in part.spans.host:
            seen.setdefault(first_query, []).extend(places[first_key : first_key + num_keys])
    return seen


@pytest.mark.parametrize("workspace", [3, 10, 8192])
def test_rows_of_a_mixed_step_see_their_own_tokens_and_prefixes(workspace, monkeypatch) -> None:
    monkeypatch.setattr(latent_rows, "WORKSPACE_TOKENS", workspace)
    batch = make_batch(2, [(4, 40), (70, 80), (9, 9), (100, 100), (65, 74), (3, 30)])

    rows = split(batch)

    assert [span[:2] for span in rows.parts[0].spans.host] == [(85, 100), (6, 70), (185, 65)]
    tables = batch.groups[0].block_tables
    for first_query, row, prefix, count in ((6, 3, 10, 70), (85, 5, 0, 100), (185, 6, 9, 65)):
        positions = [*range(prefix, prefix + count), *range(prefix)]
        expected = [(int(tables[row, p // BLOCK_SIZE]), p % BLOCK_SIZE) for p in positions]
        assert keys_seen(rows)[first_query] == expected
    sizes = [sum(span[3] for span in part.spans.host) for part in rows.parts[1:]]
    assert sum(sizes) == 10 + 9
    assert max(sizes) <= workspace
    absorbed = rows.absorbed
    assert absorbed is not None
    assert absorbed.tokens.tolist() == [0, 1, 2, 3, 4, 5, *range(76, 85), 250, 251, 252]
    assert absorbed.rows.query_starts.tolist() == [0, 1, 2, 6, 15, 18]
    assert absorbed.rows.context_lens.tolist() == [9, 9, 40, 9, 30]
    assert torch.equal(absorbed.rows.block_tables, tables[[0, 1, 2, 4, 7]])
    assert (absorbed.rows.num_decodes, absorbed.rows.max_query_len) == (2, 9)


def test_steps_without_long_rows_take_the_batch_as_it_is() -> None:
    for batch in (make_batch(3, []), make_batch(1, [(4, 40), (10, 10)])):
        rows = split(batch)

        assert rows.parts == ()
        assert rows.absorbed.tokens is None
        assert rows.absorbed.rows.query_starts is batch.query_starts


def test_steps_of_long_rows_alone_have_no_absorbed_part() -> None:
    assert split(make_batch(0, [(64, 64), (64, 64)])).absorbed is None
