# SPDX-License-Identifier: Apache-2.0
"""The executor on its own: static inputs, padding, failures, and what reuse must not carry over."""

import numpy as np
import pytest
import torch
from engine_harness import make_geometry
from torch import Tensor

from pelton.core.batch import ForwardBatch
from pelton.core.request import SamplingParams
from pelton.core.step import Admission, BlockUpdate, StepPlan, StepResult
from pelton.engine.input_builder import InputBuilder
from pelton.engine.kv.pool import KVPool
from pelton.engine.model_runner import ModelRunner
from pelton.engine.pending_step import DraftDownload, LaunchedStep
from pelton.engine.slot_table import SlotTable
from pelton.engine.step_padding import GraphSize, StepPadding
from pelton.models.language_model import LanguageModel

CPU = torch.device("cpu")
VOCAB = 32
NAN_TOKEN = 31
GREEDY = SamplingParams(temperature=0.0)


class CountingModel(LanguageModel):
    """Predicts token + 1, and NaN after NAN_TOKEN; remembers its batches' values."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[dict[str, object]] = []
        self.num_logit_rows: list[int] = []

    def __call__(self, batch: ForwardBatch) -> Tensor:
        names = ("token_ids", "positions", "query_starts", "context_lens", "logit_rows")
        seen: dict[str, object] = {name: getattr(batch, name).tolist() for name in names}
        seen |= {f"slots{i}": group.slot_mapping.tolist() for i, group in enumerate(batch.groups)}
        seen |= {f"tables{i}": group.block_tables.tolist() for i, group in enumerate(batch.groups)}
        seen |= {"bounds": (batch.num_decodes, batch.max_query_len, batch.max_context_len)}
        self.batches.append(seen)
        token_ids = batch.token_ids
        if batch.hidden_rows is not None:
            token_ids = token_ids[batch.hidden_rows]
        return token_ids[:, None].float()

    def logits(self, hidden_states: Tensor) -> Tensor:
        self.num_logit_rows.append(len(hidden_states))
        logits = torch.zeros(len(hidden_states), VOCAB)
        tokens = hidden_states[:, 0].long()
        logits[torch.arange(len(tokens)), (tokens + 1) % VOCAB] = 1.0
        logits[tokens == NAN_TOKEN] = float("nan")
        return logits


def make_runner(model: LanguageModel, windows: tuple[int, ...] = (0,), **sizes: int) -> ModelRunner:
    geometry = make_geometry(windows, vocab_size=VOCAB)
    pool = KVPool(
        geometry,
        num_blocks=[40] * len(geometry.kv_groups),
        block_size=4,
        dtype=torch.float32,
        device=CPU,
    )
    limits = {"max_num_requests": 6, "max_num_tokens": 24, "max_model_len": 20, **sizes}
    return ModelRunner(model, geometry, pool, block_size=4, device=CPU, **limits)


def admit(slot: int, tokens: list[int], params: SamplingParams = GREEDY) -> Admission:
    return Admission(slot, tokens, len(tokens), params, slot, ())


def blocks(slot: int, *ids: int, group: int = 0) -> list[BlockUpdate]:
    return [BlockUpdate(group, slot, entry, block) for entry, block in enumerate(ids)]


def prefill(runner: ModelRunner, prompts: dict[int, list[int]], **sampling: object) -> StepResult:
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    plan = StepPlan(
        0,
        [admit(slot, tokens, params) for slot, tokens in prompts.items()],
        [u for slot in prompts for u in blocks(slot, *range(6 * slot + 1, 6 * slot + 6))],
        list(prompts),
        [0] * len(prompts),
        [len(tokens) for tokens in prompts.values()],
        [True] * len(prompts),
        0,
        list(range(len(prompts))) if params.prompt_logprobs is not None else [],
    )
    return runner.launch(plan).wait()


def decode(runner: ModelRunner, slots: list[int], starts: list[int]) -> StepResult:
    ones, yes = [1] * len(slots), [True] * len(slots)
    return runner.launch(StepPlan(1, [], [], slots, starts, ones, yes, len(slots))).wait()


def test_mixed_step_is_laid_out_by_rows() -> None:
    model = CountingModel()
    runner = make_runner(model, windows=(0, 8))
    prefill(runner, {2: [5, 6]})
    updates = blocks(1, 20, 21) + blocks(1, 30, 31, group=1) + blocks(2, 25, group=1)

    plan = StepPlan(1, [admit(1, [10, 11, 12, 13, 14, 15, 16])], updates,
                    [2, 1], [2, 1], [1, 5], [True, False], 1)  # fmt: skip
    result = runner.launch(plan).wait()

    assert model.batches[-1] == {
        "token_ids": [7, 11, 12, 13, 14, 15],
        "positions": [2, 1, 2, 3, 4, 5],
        "query_starts": [0, 1, 6],
        "context_lens": [3, 6],
        "logit_rows": [0],
        "slots0": [13 * 4 + 2, 81, 82, 83, 84, 85],
        "slots1": [25 * 4 + 2, 121, 122, 123, 124, 125],
        "tables0": [[13, 14, 15, 16, 17], [20, 21, 0, 0, 0]],
        "tables1": [[25, 0, 0, 0, 0], [30, 31, 0, 0, 0]],
        "bounds": (1, 5, 6),
    }
    assert result.sampled == [[8], []]
    assert (result.step_id, result.failed_rows) == (1, {})


def test_sampled_tokens_feed_the_next_step_without_the_host() -> None:
    runner = make_runner(CountingModel())
    prefill(runner, {0: [3], 4: [9, 10]})

    steps = [decode(runner, [4, 0], [2 + step, 1 + step]).sampled for step in range(3)]

    assert steps == [[[12], [5]], [[13], [6]], [[14], [7]]]


def test_a_token_may_be_sampled_at_the_very_end_of_the_context() -> None:
    runner = make_runner(CountingModel(), max_model_len=20)
    prefill(runner, {0: list(range(19)), 1: [1]})

    assert decode(runner, [0], [19]).sampled == [[20]]
    assert decode(runner, [1], [1]).sampled == [[3]]


def test_rows_that_are_not_finite_fail_alone() -> None:
    result = prefill(make_runner(CountingModel()), {0: [4], 1: [6, NAN_TOKEN], 3: [8]})

    assert result.failed_rows == {1: "The model's logits for position 2 are not finite."}
    assert [result.sampled[0], result.sampled[2]] == [[5], [9]]


def test_a_step_that_samples_nothing_computes_no_logits() -> None:
    model = CountingModel()
    runner = make_runner(model)

    plan = StepPlan(0, [admit(0, [1, 2, 3, 4])], blocks(0, 1), [0], [0], [2], [False], 0)
    result = runner.launch(plan).wait()

    assert result.sampled == [[]]
    assert sum(model.num_logit_rows) == 0


@pytest.mark.parametrize(
    ("counts", "logprobs", "all_hidden_states", "expected"),
    [
        ([3, 2], False, False, [2, 4]),
        ([3, 1], True, False, None),
        ([3, 2], False, True, None),
        ([1, 1], False, False, None),
    ],
)
def test_hidden_states_are_asked_for_where_they_are_read(
    counts: list[int], logprobs: bool, all_hidden_states: bool, expected: list[int] | None
) -> None:
    geometry = make_geometry((0,), vocab_size=VOCAB)
    pool = KVPool(geometry, num_blocks=[8], block_size=4, dtype=torch.float32, device=CPU)
    slots = SlotTable(6, 20, 4, 1, CPU)
    builder = InputBuilder(
        geometry, pool, slots, max_num_rows=6, max_num_tokens=16, device=CPU,
        all_hidden_states=all_hidden_states,
    )  # fmt: skip
    prompts = [admit(index, [7, 8, 9][:count]) for index, count in enumerate(counts)]
    plan = StepPlan(0, prompts, blocks(0, 1) + blocks(1, 2), [0, 1], [0, 0], counts,
                    [True, True], 0, [0] if logprobs else [])  # fmt: skip
    slots.apply(plan)

    rows = builder.build(plan).batch.hidden_rows

    assert (None if rows is None else rows.tolist()) == expected


def test_a_plan_without_rows_has_an_empty_result() -> None:
    result = make_runner(CountingModel()).launch(StepPlan(7, [], [], [], [], [], [], 0)).wait()

    assert (result.step_id, result.sampled) == (7, [])


@pytest.mark.parametrize(("samples", "waits"), [([True, True], False), ([True, False], True)])
def test_where_a_prompt_goes_on_a_step_ends_with_its_drafts(
    samples: list[bool], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's keys and values are then written, too."""
    settled: list[DraftDownload] = []
    settle = DraftDownload.settle
    monkeypatch.setattr(DraftDownload, "settle", lambda d: settled.append(d) or settle(d))
    plan = StepPlan(1, [], [], [0, 1], [4, 4], [3, 3], samples, 0)
    rows = np.flatnonzero(samples).astype(np.int32)
    ones = torch.ones(len(rows), dtype=torch.int32)
    step = LaunchedStep(plan, rows, ones, ones, None, np.full(len(rows), -1, np.int32), [], {})
    step.expect_drafts(rows.tolist(), torch.full((len(rows), 2), 7, dtype=torch.int32))
    result = step.wait()
    assert bool(settled) == waits
    assert {row: list(drafts) for row, drafts in result.drafts.items()} == {
        row: [7, 7] for row in rows.tolist()
    }


def test_a_slot_taken_again_keeps_nothing_of_its_last_request() -> None:
    runner = make_runner(CountingModel())
    prefill(runner, {0: [5, 6]}, logit_bias={20: 100.0}, presence_penalty=2.0, logprobs=2)

    result = prefill(runner, {0: [8]})

    assert result.sampled == [[9]]
    assert result.logprobs == {}


def test_prompt_logprobs_cover_the_chunk_and_stop_at_the_prompt() -> None:
    runner = make_runner(CountingModel())
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    first = StepPlan(
        0, [admit(0, [1, 2, 9, 3], params)], blocks(0, 1), [0], [0], [3], [False], 0, [0]
    )
    last = StepPlan(1, [], [], [0], [3], [1], [True], 0, [0])

    chunk = runner.launch(first).wait().prompt_logprobs[0]
    rest = runner.launch(last).wait().prompt_logprobs

    assert [entry.token_id for entry in chunk] == [2, 9, 3]
    assert [entry.rank for entry in chunk] == [1, 2, 2]
    assert [entry.top[0][0] for entry in chunk] == [2, 3, 10]
    assert rest.get(0, []) == []


def test_logprobs_only_for_rows_that_asked_and_as_many_as_asked() -> None:
    runner = make_runner(CountingModel())
    asks = [None, 0, 3]
    plan = StepPlan(
        0,
        [
            admit(slot, [slot + 1], SamplingParams(temperature=0.0, logprobs=count))
            for slot, count in enumerate(asks)
        ],
        [u for slot in range(3) for u in blocks(slot, slot + 1)],
        [0, 1, 2], [0, 0, 0], [1, 1, 1], [True] * 3, 0,
    )  # fmt: skip

    logprobs = runner.launch(plan).wait().logprobs

    assert {row: [len(entry.top) for entry in entries] for row, entries in logprobs.items()} == {
        1: [0],
        2: [3],
    }


@pytest.mark.usefixtures("poisoned_memory")
def test_padding_rows_are_empty_and_write_to_the_null_block() -> None:
    geometry = make_geometry((0,), vocab_size=VOCAB)
    pool = KVPool(
        geometry,
        num_blocks=[8] * len(geometry.kv_groups),
        block_size=4,
        dtype=torch.float32,
        device=CPU,
    )
    slots = SlotTable(6, 20, 4, 1, CPU)
    builder = InputBuilder(
        geometry,
        pool,
        slots,
        max_num_rows=6,
        max_num_tokens=6,
        device=CPU,
        padding=StepPadding(decode_rows=lambda num_rows: 4),
    )
    plan = StepPlan(0, [admit(3, [7, 8])], blocks(3, 5), [3], [1], [1], [True], 1)
    slots.apply(plan)

    inputs = builder.build(plan)

    batch = inputs.batch
    assert batch.token_ids.tolist()[0] == 8
    assert batch.context_lens.tolist() == [2, 0, 0, 0]
    assert batch.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert batch.groups[0].slot_mapping.tolist() == [21, 0, 0, 0]
    assert (batch.num_decodes, batch.max_query_len) == (4, 1)
    trash = slots.tokens.numel() - 1
    assert inputs.targets.tolist() == [3 * slots.token_stride + 2, trash, trash, trash]
    assert inputs.sample_rows.tolist() == [0]
    assert (batch.token_ids >= 0).all()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("counts", [[3, 1], [2]])
def test_a_padded_step_with_prompts_has_its_padding_among_decodes_and_behind(counts) -> None:
    geometry = make_geometry((0,), vocab_size=VOCAB)
    pool = KVPool(geometry, num_blocks=[8], block_size=4, dtype=torch.float32, device=CPU)
    slots = SlotTable(6, 20, 4, 1, CPU)
    sizes = (GraphSize(5, 0, 2, 8),)
    builder = InputBuilder(
        geometry, pool, slots, max_num_rows=3, max_num_tokens=8, device=CPU,
        padding=StepPadding(mixed_sizes=sizes, graph_sizes=sizes),
    )  # fmt: skip
    prompts = [admit(4 + index, [9, 10, 11][:count]) for index, count in enumerate(counts)]
    updates = blocks(3, 5) + blocks(4, 6) + blocks(5, 7)
    rows, samples = [3, 4, 5][: 1 + len(counts)], [True, False, True][: 1 + len(counts)]
    plan = StepPlan(0, [admit(3, [7, 8]), *prompts], updates, rows, [1] + [0] * len(counts),
                    [1, *counts], samples, 1)  # fmt: skip
    slots.apply(plan)

    inputs = builder.build(plan)

    batch, num_new = inputs.batch, sum(counts)
    padding = [0] * (6 - num_new)
    assert inputs.size == sizes[0]
    assert (batch.num_decodes, batch.max_query_len, batch.chunk_lens) == (2, 6, ())
    assert batch.context_lens.tolist() == [2, 0, *counts, *[0] * (3 - len(counts))]
    starts = [0, 1, 2, 2 + counts[0], 2 + num_new]
    assert batch.query_starts.tolist() == (starts + [2 + num_new] * 5)[:6]
    assert batch.token_ids.tolist()[0] == 8
    assert batch.token_ids.tolist()[2 : 2 + num_new] == [9, 10, 11, 9][:num_new]
    assert ((batch.token_ids >= 0) & (batch.token_ids < VOCAB)).all()
    assert batch.positions.tolist() == [1, 0, *[0, 1, 2, 0][:num_new], *padding]
    places = [24, 25, 26, 28][:num_new]
    assert batch.groups[0].slot_mapping.tolist() == [21, 0, *places, *padding]
    assert batch.groups[0].block_tables[1].tolist() == [0] * 5
    trash = slots.tokens.numel() - 1
    assert inputs.sample_rows.tolist() == [row for row, is_one in enumerate(samples) if is_one]
    num_sampled = len(inputs.sample_rows)
    logits = [0, 1 + num_new][:num_sampled] if num_sampled == 2 else [0]
    assert batch.logit_rows.tolist() == logits + [7] * (5 - num_sampled)
    assert inputs.targets.tolist()[num_sampled:] == [trash] * (5 - num_sampled)
    assert inputs.targets.tolist()[0] == 3 * slots.token_stride + 2


@pytest.mark.usefixtures("poisoned_memory")
def test_padding_tokens_belong_to_no_row() -> None:
    geometry = make_geometry((0,), vocab_size=VOCAB)
    pool = KVPool(geometry, num_blocks=[8], block_size=4, dtype=torch.float32, device=CPU)
    slots = SlotTable(6, 20, 4, 1, CPU)
    builder = InputBuilder(
        geometry,
        pool,
        slots,
        max_num_rows=6,
        max_num_tokens=16,
        device=CPU,
        padding=StepPadding(tokens=lambda count: {1: 2, 3: 8}[count]),
    )
    plan = StepPlan(0, [admit(3, [7, 8, 9])], blocks(3, 5), [3], [0], [3], [True], 0)
    slots.apply(plan)

    inputs = builder.build(plan)

    batch = inputs.batch
    assert batch.query_starts.tolist() == [0, 3]
    assert batch.token_ids.tolist()[:3] == [7, 8, 9]
    assert ((batch.token_ids >= 0) & (batch.token_ids < VOCAB)).all()
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert batch.groups[0].slot_mapping.tolist() == [20, 21, 22, 0, 0, 0, 0, 0]
    assert batch.logit_rows.tolist() == [2, 7]
    trash = slots.tokens.numel() - 1
    assert inputs.targets.tolist() == [3 * slots.token_stride + 3, trash]
    assert inputs.sample_rows.tolist() == [0]


def test_inputs_stay_at_their_addresses() -> None:
    runner = make_runner(CountingModel())
    prefill(runner, {0: [1], 1: [2]})
    first = runner.input_builder.build(StepPlan(1, [], [], [0, 1], [1, 1], [1, 1], [True] * 2, 2))
    addresses = [t.data_ptr() for t in (first.batch.positions, first.batch.token_ids)]

    second = runner.input_builder.build(StepPlan(2, [], [], [0, 1], [2, 2], [1, 1], [True] * 2, 2))

    assert [t.data_ptr() for t in (second.batch.positions, second.batch.token_ids)] == addresses
    assert second.batch.positions.tolist() == [2, 2]


def test_block_entries_set_twice_keep_the_last_value() -> None:
    slots = SlotTable(2, 16, 4, 1, CPU)

    slots.apply(StepPlan(0, [], [*blocks(1, 3, 4), BlockUpdate(0, 1, 0, 9)], [], [], [], [], 0))

    assert slots.block_tables[0].tolist() == [[0] * 4, [9, 4, 0, 0], [0] * 4]
    assert np.array_equal(slots.host_block_tables[0], slots.block_tables[0].numpy())


def test_pool_blocks_are_contiguous_over_their_layers() -> None:
    geometry = make_geometry((0, 8))
    pool = KVPool(
        geometry,
        num_blocks=[3] * len(geometry.kv_groups),
        block_size=4,
        dtype=torch.bfloat16,
        device=CPU,
    )

    assert [tuple(cache.shape) for cache in pool.caches] == [(3, 1, 2, 4, 1, 1)] * 2
    assert all(cache[1].is_contiguous() for cache in pool.caches)
    assert pool.num_bytes == 2 * 3 * geometry.kv_groups[0].block_bytes(4, 2)
