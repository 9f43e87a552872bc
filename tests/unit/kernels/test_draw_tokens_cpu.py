# SPDX-License-Identifier: Apache-2.0
"""Drawing tokens: the specification beside scalar loops, its distribution, and the CPU's kernel."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draw_cases import DRAW_CASES, DrawCase, make_draw_inputs
from pelton.kernels.draw_tokens.op import DRAW_TOKENS, draw_tokens
from pelton.kernels.draw_tokens.reference import (
    FARTHEST,
    RandomRows,
    draw_tokens_reference,
    weights_of,
)

CPU = torch.device("cpu")
NAMES = ("native", "reference")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def spread(rows: RandomRows, uniforms: Tensor) -> RandomRows:
    """One row's filters for each of the numbers."""
    count = len(uniforms)
    return replace(
        rows,
        rows=torch.arange(count),
        uniforms=uniforms,
        temperature=rows.temperature[:1].repeat(count),
        top_k=rows.top_k[:1].repeat(count),
        top_p=rows.top_p[:1].repeat(count),
        min_p=rows.min_p[:1].repeat(count),
    )


def test_weights_are_powers_of_two_of_the_distance() -> None:
    distances = torch.cat((torch.arange(2**18 + 1), torch.arange(0, FARTHEST, 997))).int()

    weights = weights_of(distances)

    exact = torch.exp2(40 - distances.double() / 2**18)
    assert ((weights - exact).abs() <= exact * 4e-7 + 1).all()
    assert weights_of(torch.tensor([0, 2**18, FARTHEST], dtype=torch.int32)).tolist() == [
        2**40, 2**39, 0
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", DRAW_CASES, ids=str)
def test_histograms_find_what_a_sort_finds(case, dtype, generator) -> None:
    inputs = make_draw_inputs(case, CPU, dtype, generator)

    actual = DRAW_TOKENS.named("native")(*inputs)

    assert actual.dtype == torch.int32
    assert torch.equal(actual, draw_tokens_reference(*inputs))


def kept_by_loops(logits: Tensor, rows: RandomRows) -> dict[int, float]:
    """Token ids with their weights, in the vocabulary's order."""
    highest, temperature = logits.max().item(), rows.temperature[0].item()
    top_k, top_p, min_p = (
        column[0].item() for column in (rows.top_k, rows.top_p.double(), rows.min_p.double())
    )
    weights = [math.exp((value - highest) / temperature) for value in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = [token for token in order[: top_k or None] if weights[token] > 0]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if top_p < 1 and kept and mass >= top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    return {token: weights[token] for token in sorted(kept) if weights[token] >= min_p}


CHI_SQUARE_CASES = [
    DrawCase(1, 60, spread=1.0),
    DrawCase(1, 60, temperature=0.6, top_p=0.9),
    DrawCase(1, 60, top_k=12, top_p=0.8, grid=0.5),
    DrawCase(1, 60, temperature=1.5, min_p=0.05),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CHI_SQUARE_CASES, ids=str)
def test_draws_pass_a_chi_square_test(case, name, generator) -> None:
    num_draws = 20_000
    logits, highest_ids, rows = make_draw_inputs(case, CPU, torch.float32, generator)
    uniforms = torch.randint(0, 2**24, (num_draws,), generator=generator) / 2**24
    logits, highest_ids = logits[1].repeat(num_draws, 1), highest_ids[1:].repeat(num_draws)

    drawn = DRAW_TOKENS.named(name)(logits, highest_ids, spread(rows, uniforms))

    kept = kept_by_loops(logits[0], rows)
    counts = torch.bincount(drawn, minlength=case.vocab_size).double()
    assert set(counts.nonzero()[:, 0].tolist()) <= set(kept)
    expected = torch.tensor(list(kept.values())).double()
    expected *= num_draws / expected.sum()
    observed = counts[list(kept)]
    # Cells of fewer than five are counted as one.
    is_large = expected >= 5
    pooled = torch.stack((observed[~is_large].sum(), expected[~is_large].sum()))
    cells = torch.cat((torch.stack((observed, expected))[:, is_large], pooled[:, None]), dim=1)
    cells = cells[:, cells[1] > 0]
    statistic = ((cells[0] - cells[1]) ** 2 / cells[1]).sum().item()
    freedom = cells.shape[1] - 1
    # Four standard deviations above a chi-square variable's mean.
    assert statistic < freedom + 4 * math.sqrt(2 * freedom), (statistic, freedom)


@pytest.mark.parametrize("name", NAMES)
def test_equal_distances_keep_the_lowest_ids(name) -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, 3.0, 5.0, 3.0, 3.0]])
    rows = RandomRows(
        rows=torch.zeros(1, dtype=torch.int64),
        temperature=torch.ones(1),
        uniforms=torch.zeros(1),
        top_k=torch.tensor([4], dtype=torch.int32),
        top_p=torch.ones(1),
        min_p=torch.zeros(1),
        has_top_k=True,
        has_top_p=False,
    )
    uniforms = (torch.arange(64) + 0.5) / 64
    many, highest_ids = logits.repeat(64, 1), torch.ones(64, dtype=torch.int32)

    drawn = DRAW_TOKENS.named(name)(many, highest_ids, spread(rows, uniforms))

    assert drawn.unique_consecutive().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("name", NAMES)
def test_the_ends_of_the_uniform_range_draw_the_first_and_the_last_kept(name) -> None:
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 2.0, -math.inf]])
    rows = RandomRows(
        rows=torch.zeros(1, dtype=torch.int64),
        temperature=torch.ones(1),
        uniforms=torch.zeros(1),
        top_k=torch.zeros(1, dtype=torch.int32),
        top_p=torch.ones(1),
        min_p=torch.zeros(1),
        has_top_k=False,
        has_top_p=False,
    )
    uniforms = torch.tensor([0.0, 1 - 2**-24])
    highest_ids = torch.tensor([3, 3], dtype=torch.int32)

    drawn = DRAW_TOKENS.named(name)(logits.repeat(2, 1), highest_ids, spread(rows, uniforms))

    assert drawn.tolist() == [1, 3]


def test_a_row_of_nothing_but_bans_gets_an_id(generator) -> None:
    logits, highest_ids, rows = make_draw_inputs(
        DrawCase(2, 30, top_k=3, top_p=0.5), CPU, torch.float32, generator
    )
    logits[1] = -math.inf

    for name in NAMES:
        drawn = DRAW_TOKENS.named(name)(logits, highest_ids, rows)
        assert ((drawn >= 0) & (drawn < 30)).all()


def test_a_row_does_not_depend_on_the_others(generator) -> None:
    logits, highest_ids, rows = make_draw_inputs(
        DrawCase(6, 400, top_k=30, top_p=0.9, grid=0.25), CPU, torch.float32, generator
    )
    together = draw_tokens(logits, highest_ids, rows)
    for index in range(6):
        one = spread(rows, rows.uniforms[index : index + 1])
        one = replace(one, rows=rows.rows[index : index + 1])
        assert draw_tokens(logits, highest_ids, one).item() == together[index].item()
