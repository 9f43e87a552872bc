# SPDX-License-Identifier: Apache-2.0
"""What only the CPU implementations do: share what a step derives, and gather in pieces."""

import pytest
import torch

from attention_cases import ATTENTION_CASES, AttentionCase, make_attention_inputs
from pelton.kernels.memo import Memo
from pelton.kernels.paged_attention import cpu
from pelton.kernels.paged_attention.cpu import paged_attention_cpu
from pelton.kernels.paged_attention.reference import paged_attention_reference
from pelton.kernels.rope_write_kv import rope_write_kv_reference
from pelton.kernels.rope_write_kv_cpu import rope_write_kv_cpu
from tolerance import assert_matches

CPU = torch.device("cpu")


def test_memo_derives_again_when_a_value_or_a_setting_changes() -> None:
    memo: Memo[int] = Memo()
    calls = []

    def derive() -> int:
        calls.append(None)
        return len(calls)

    numbers = torch.tensor([1, 2])
    assert [memo.get((numbers,), "a", derive) for _ in range(2)] == [1, 1]
    numbers[1] = 3  # in place: the memo must have kept the values, not the tensor
    assert memo.get((numbers,), "a", derive) == 2
    assert memo.get((numbers,), "b", derive) == 3
    assert memo.get((numbers[:1],), "b", derive) == 4
    assert memo.get((numbers[:1],), "b", derive, constant=numbers) == 5
    assert memo.get((numbers[:1],), "b", derive, constant=numbers.clone()) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_gathered_in_small_pieces(case: AttentionCase, dtype, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "_GATHER_BYTES", 20_000)
    generator = torch.Generator().manual_seed(1)
    inputs = make_attention_inputs(case, CPU, dtype, generator)

    out = paged_attention_cpu(*inputs.arguments())

    reference = paged_attention_reference(*inputs.arguments(torch.float32))
    assert_matches(out, reference, dtype)


def test_chunks_hold_the_budget_and_every_row_once() -> None:
    planner = cpu._Planner(4, 8, 0, torch.float32, row_bytes=cpu._GATHER_BYTES // 100)

    chunks = planner._decode_chunks([10, 10, 40, 60, 1, 1, 1, 30])

    assert [(part.start, part.stop) for part in chunks] == [(0, 2), (2, 3), (3, 4), (4, 7), (7, 8)]


@pytest.mark.parametrize("are_joined", [False, True])
def test_layers_of_a_step_share_angles_but_no_results(are_joined: bool) -> None:
    """Two layers, then another step in the same buffers."""
    positions, slots = torch.tensor([5, 0, 9]), torch.tensor([3, 8, 6])
    cos_sin = torch.randn(16, 8)
    pool = torch.zeros(4, 2, 2, 4, 2, 8)
    expected_pool = pool.clone()
    for step in range(2):
        for layer in range(2):
            qkv = torch.randn(3, 8, 8)
            q, k, v = qkv.split((4, 2, 2), dim=1)
            if not are_joined:
                q, k = q.clone(), k.clone()
            out = rope_write_kv_cpu(q, k, v, positions, cos_sin, pool[:, layer], slots)
            wanted = rope_write_kv_reference(
                q, k, v, positions, cos_sin, expected_pool[:, layer], slots
            )
            assert_matches(out, wanted, torch.float32)
            torch.testing.assert_close(pool, expected_pool)
        positions += 1 + step
        slots += 4
