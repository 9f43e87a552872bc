# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from itertools import pairwise

import pytest

from pelton.core.config import SpeculativeConfig
from pelton.core.step import StepPlan
from pelton.engine.step_padding import (
    GraphSize,
    StepPadding,
    pad_for_graphs,
    token_ladder,
    uniform_size,
)


@pytest.mark.parametrize("max_tokens", [1, 7, 16, 17, 512, 2048, 3000])
def test_ladder_is_short_and_wastes_little(max_tokens: int) -> None:
    ladder = token_ladder(max_tokens)

    assert ladder[-1] == max_tokens
    assert len(ladder) <= 5 + 4 * max_tokens.bit_length()
    for below, above in pairwise(ladder):
        assert below < above
        assert above <= max(2 * below, 16) if below < 16 else above <= 1.25 * below


def test_usual_lengths_are_steps() -> None:
    assert {1, 16, 32, 64, 128, 256, 512, 1024, 2048} <= set(token_ladder(2048))


def make_plan(num_decodes: int, num_drafting: int = 0, num_prompts: int = 0) -> StepPlan:
    lengths = [1] * num_decodes + [3] * num_drafting + [5] * num_prompts
    drafts = {num_decodes + index: [7, 8] for index in range(num_drafting)}
    rows = list(range(len(lengths)))
    samples = [True] * len(rows)
    return StepPlan(0, [], [], rows, [0] * len(rows), lengths, samples, num_decodes, drafts=drafts)


def make_mixed(num_decodes: int, *prompts: tuple[int, int]) -> StepPlan:
    """`prompts` are (new tokens, tokens before them)."""
    lengths = [1] * num_decodes + [new for new, _ in prompts]
    starts = [9] * num_decodes + [start for _, start in prompts]
    rows = list(range(len(lengths)))
    return StepPlan(0, [], [], rows, starts, lengths, [True] * len(rows), num_decodes)


def padding_of(speculative: str, max_rows: int = 64, max_tokens: int = 8192) -> StepPadding:
    return pad_for_graphs(max_rows, max_tokens, SpeculativeConfig(speculative=speculative))


def test_steps_with_drafts_have_room_for_the_most_drafts() -> None:
    padding = padding_of("ngram:4")

    assert padding.row_len(make_plan(3, 5)) == 5
    assert padding.rows(8, 5) == 8
    assert padding.rows(9, 5) == 16
    assert padding.row_len(make_plan(8)) == 1
    assert padding.row_len(make_plan(3, 5, 1)) == 0
    assert padding.row_len(make_plan(3, 0, 1)) == 0


def test_where_the_executor_drafts_every_step_without_prompts_has_one_row_length() -> None:
    padding = padding_of("mtp:2")

    assert padding.row_len(make_plan(8)) == padding.row_len(make_plan(0, 8)) == 3
    assert {size.row_len for size in padding.graph_sizes} == {3}


@pytest.mark.parametrize("speculative", ["off", "ngram:3", "mtp:3"])
@pytest.mark.parametrize("max_tokens", [1, 3, 4, 60, 200, 8192])
def test_every_step_without_prompts_that_fits_the_budget_has_a_graph(
    speculative: str, max_tokens: int
) -> None:
    max_rows = min(64, max_tokens)
    padding = padding_of(speculative, max_rows, max_tokens)

    for num_rows in range(1, max_rows + 1):
        plans = [make_plan(num_rows)]
        if speculative != "off":
            plans.append(make_plan(0, num_rows))
        for plan in plans:
            row_len = padding.row_len(plan)
            if row_len:
                size = padding.size(plan)
                assert size in padding.graph_sizes
                assert size == uniform_size(padding.rows(num_rows, row_len), row_len)
                assert size.num_tokens <= max_tokens
            else:
                assert num_rows * 4 > max_tokens


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        (make_mixed(0, (1, 0)), GraphSize(8, 0, 0, 32)),
        (make_mixed(0, (32, 0)), GraphSize(8, 0, 0, 32)),
        (make_mixed(0, (30, 0), (3, 7)), GraphSize(8, 0, 0, 128)),
        (make_mixed(1, (300, 0)), GraphSize(16, 0, 8, 520)),
        (make_mixed(1, (300, 0), (8, 0)), GraphSize(16, 0, 8, 520)),
        (make_mixed(8, *[(4, 0)] * 8), GraphSize(16, 0, 8, 40)),
        (make_mixed(9, (4, 0)), GraphSize(40, 0, 32, 64)),
        (make_mixed(63, (1000, 0), (24, 0)), GraphSize(71, 0, 63, 1087)),
        (make_mixed(63, (1000, 0), (25, 0)), None),
        (make_mixed(63, (250, 0)), GraphSize(71, 0, 63, 319)),
        (make_mixed(33, (257, 0)), GraphSize(71, 0, 63, 575)),
        (make_mixed(30, (257, 0)), GraphSize(40, 0, 32, 544)),
        (make_mixed(0, (511, 0)), GraphSize(8, 0, 0, 512)),
        (make_mixed(9, (513, 0)), None),
        (make_mixed(0, (1, 16_383)), GraphSize(8, 0, 0, 32)),
        (make_mixed(0, (1, 16_384)), None),
        (make_mixed(0, (100, 10_000)), GraphSize(8, 0, 0, 128)),
        (make_mixed(0, (100, 11_000)), None),
        (make_mixed(0, *[(4, 0)] * 9), None),
        (make_mixed(0, (1025, 0)), None),
        (replace(make_mixed(2, (5, 0)), prompt_logprob_rows=[2]), None),
        (make_plan(2, 3, 1), None),
    ],
)
def test_small_steps_with_prompts_have_a_graph(plan: StepPlan, size: GraphSize | None) -> None:
    assert padding_of("ngram:2").size(plan) == size
    assert padding_of("mtp:2").size(plan) is None


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1, 64), (2, 64), (9, 200), (300, 31)])
def test_sizes_of_steps_with_prompts_keep_to_the_budget(max_rows: int, max_tokens: int) -> None:
    padding = padding_of("off", max_rows, max_tokens)

    for size in padding.mixed_sizes:
        assert size.num_tokens <= max_tokens
        assert size.num_decodes < max_rows
        assert size.num_rows - size.num_decodes == min(8, max_rows)
    assert bool(padding.mixed_sizes) == (max_tokens >= 32)
