# SPDX-License-Identifier: Apache-2.0
"""Drawing tokens: the kernels draw the very tokens that the reference and a CPU draw."""

from dataclasses import replace

import pytest
import torch

from draw_cases import DRAW_CASES, LARGE_DRAW_CASES, DrawCase, make_draw_inputs
from pelton.kernels.draw_tokens.op import DRAW_TOKENS, draw_tokens
from pelton.kernels.draw_tokens.reference import RandomRows, draw_tokens_reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in DRAW_CASES]
    + [(case, torch.float16) for case in DRAW_CASES if case.vocab_size <= 300],
    ids=str,
)
def test_draw_tokens(case, dtype, device, generator, interpretable) -> None:
    inputs = make_draw_inputs(case, device, dtype, generator)

    actual = DRAW_TOKENS.named("triton")(*inputs)

    assert actual.dtype == torch.int32
    assert torch.equal(actual, draw_tokens_reference(*inputs))


def test_rows_with_and_without_each_filter_share_a_batch(device, generator, interpretable) -> None:
    logits, highest_ids, rows = make_draw_inputs(
        DrawCase(4, 700, top_k=9, top_p=0.6, grid=0.5), device, torch.float32, generator
    )
    top_k = torch.tensor([9, 0, 9, 0], dtype=torch.int32, device=device)
    top_p = torch.tensor([0.6, 0.6, 1.0, 1.0], device=device)
    rows = replace(rows, top_k=top_k, top_p=top_p)

    together = DRAW_TOKENS.named("triton")(logits, highest_ids, rows)

    assert torch.equal(together, draw_tokens_reference(logits, highest_ids, rows))
    alone = [
        DRAW_TOKENS.named("triton")(logits, highest_ids, only(rows, index)).item()
        for index in range(4)
    ]
    assert alone == together.tolist()


def only(rows: RandomRows, index: int) -> RandomRows:
    """One of the rows, with nothing searched for that it does not ask for."""
    names = ("rows", "temperature", "uniforms", "top_k", "top_p", "min_p")
    one = {name: getattr(rows, name)[index : index + 1].clone() for name in names}
    return RandomRows(
        **one, has_top_k=bool(one["top_k"].item() > 0), has_top_p=bool(one["top_p"].item() < 1)
    )


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_rows_that_are_not_finite_get_an_id(bad, device, generator, interpretable) -> None:
    logits, highest_ids, rows = make_draw_inputs(
        DrawCase(3, 300, top_k=9, top_p=0.6), device, torch.float32, generator
    )
    expected = DRAW_TOKENS.named("triton")(logits, highest_ids, rows)
    logits[2] = bad

    actual = DRAW_TOKENS.named("triton")(logits, highest_ids, rows)

    assert 0 <= actual[1].item() < 300
    assert actual[[0, 2]].tolist() == expected[[0, 2]].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", LARGE_DRAW_CASES, ids=str)
def test_a_card_draws_what_a_cpu_draws(case, dtype, device, generator) -> None:
    logits, highest_ids, rows = make_draw_inputs(case, device, dtype, generator)

    actual = draw_tokens(logits, highest_ids, rows)

    assert torch.equal(actual, draw_tokens_reference(logits, highest_ids, rows))
    few = replace(only(rows, 0), has_top_k=case.top_k > 0)
    on_cpu = {name: getattr(few, name).cpu() for name in
              ("rows", "temperature", "uniforms", "top_k", "top_p", "min_p")}  # fmt: skip
    expected = draw_tokens(logits.cpu(), highest_ids.cpu(), replace(few, **on_cpu))
    assert draw_tokens(logits, highest_ids, few).tolist() == expected.tolist()
    assert actual[0].item() == expected.item()


def test_no_tensor_of_the_vocabulary_is_built(device, generator) -> None:
    inputs = make_draw_inputs(
        DrawCase(256, 128256, top_k=50, top_p=0.9), device, torch.bfloat16, generator
    )
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)

    draw_tokens(*inputs)

    assert torch.cuda.max_memory_allocated(device) - before < 8 * 2**20
