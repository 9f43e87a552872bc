# SPDX-License-Identifier: Apache-2.0
"""Costs beside times: what belongs to what, in the table and in the picture."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pelton.bench.roofline import draw_rows, make_rows, table_lines
from pelton.engine.step_cost import make_batch, step_costs
from pelton.engine.step_timing import StepTimes, split_by_markers, time_step
from pelton.models.build import default_dtype
from pelton.models.geometries import GEOMETRIES
from pelton.models.random_weights import make_random_model
from pelton.models.registry import find_architecture
from pelton.perf.cost import CostLog, OpCost
from pelton.perf.hardware import H100_SXM
from pelton.quantization.plain import PlainWeight

CPU = torch.device("cpu")
TINY = {
    "llama-3.1-8b": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
                     "num_key_value_heads": 2, "num_hidden_layers": 2},
    "gpt-oss-20b": {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2,
                    "num_local_experts": 8},
    "deepseek-v3": {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128,
                    "num_attention_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1,
                    "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
                    "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 16,
                    "quantization_config": None},
}  # fmt: skip


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("name", TINY)
def test_every_timed_op_of_a_step_has_its_cost(name: str, num_drafts: int) -> None:
    """The same ops, in the same order, as the run on `meta` that counts their costs."""
    raw = {**GEOMETRIES[name], **TINY[name], "vocab_size": 512, "max_position_embeddings": 256}
    has_mtp = bool(num_drafts) and name == "deepseek-v3"
    model, geometry = make_random_model(name, raw, CPU, torch.float32, has_mtp=has_mtp)
    model.pack(PlainWeight)
    sizes = {"block_size": 16, "kv_dtype": torch.float32, "is_prompt": not num_drafts}
    batch, next_batch = (
        make_batch(geometry, 3, count, 100, device=CPU, **sizes)  # type: ignore[arg-type]
        for count in (1 + num_drafts, 1)
    )
    for group in (*batch.groups, *next_batch.groups):
        group.cache.normal_()

    times = time_step(model, batch, next_batch, num_drafts, repeats=2)

    architecture = find_architecture(raw)
    config = architecture.config_from_hf(raw)
    if has_mtp:
        config = architecture.with_mtp(config)  # type: ignore[misc]
    with torch.device("meta"), default_dtype(torch.float32):
        outline = architecture.build(config)
        outline.pack(PlainWeight)
    log = step_costs(
        outline, geometry, num_rows=3, new_tokens=1, context_len=100, block_size=16,
        kv_dtype=torch.float32, num_drafts=num_drafts,
    )  # fmt: skip
    assert [op for op, _ in times.ops] == [op for op, _ in log.entries]
    assert all(seconds > 0 for _, seconds in times.ops)
    rows = make_rows(log, H100_SXM, times)
    assert sum(row.num_calls for row in rows) == len(log.entries)
    measured = sum(row.measured_s or 0.0 for row in rows)
    assert measured + times.rest_s == pytest.approx(times.total_s)


def test_kernels_between_two_markers_are_one_ops() -> None:
    marker = "void at::cuda::(anonymous namespace)::spin_kernel(long)"
    kernels = [
        ("embedding", 1.0), (marker, 9.0), ("a", 2.0), ("b", 3.0), (marker, 9.0), ("add", 4.0),
        (marker, 9.0), (marker, 9.0), (marker, 9.0), ("c", 5.0), (marker, 9.0), ("copy", 6.0),
    ]  # fmt: skip

    times = split_by_markers(["x", "none", "y"], kernels)

    assert times == StepTimes([("x", 5.0), ("none", 0.0), ("y", 5.0)], rest_s=11.0)
    with pytest.raises(AssertionError, match="6 markers around 2 ops"):
        split_by_markers(["x", "y"], kernels)


LOG = CostLog([("a", OpCost(0, 3350)), ("b", OpCost(10**9, 1)), ("a", OpCost(0, 3350))])


def test_calls_of_one_cost_are_one_row_and_the_longest_comes_first() -> None:
    times = StepTimes([("a", 2e-9), ("b", 2e-6), ("a", 3e-9)], rest_s=1e-9)

    first, second = make_rows(LOG, H100_SXM, times)

    assert (first.op, first.num_calls, first.is_memory_bound) == ("b", 1, False)
    assert (second.op, second.num_calls, second.is_memory_bound) == ("a", 2, True)
    assert second.measured_s == pytest.approx(5e-9)
    assert second.floor_s == pytest.approx(2e-9)
    lines = list(table_lines([first, second], 1, times))
    assert lines[2].split()[-2:] == ["40.0%", "0.2%"]
    assert lines[3].startswith("everything else")


def test_a_cost_that_nothing_was_timed_for_says_so() -> None:
    times = StepTimes([("b", 2e-6)], rest_s=0.0)

    rows = make_rows(LOG, H100_SXM, times)

    line = next(line for line in table_lines(rows, 1, times) if line.startswith("a "))
    assert line.split()[-3:] == ["-", "-", "-"]
    with pytest.raises(AssertionError, match="timed but not costed: z"):
        make_rows(LOG, H100_SXM, replace(times, ops=[("z", 1.0)]))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_written(suffix: str, tmp_path: Path) -> None:
    times = StepTimes([("a", 2e-9), ("b", 2e-6), ("a", 3e-9)], rest_s=1e-9)
    path = tmp_path / f"step.{suffix}"

    draw_rows(make_rows(LOG, H100_SXM, times), times, "a step", path)

    start = path.read_bytes()[:200]
    assert b"PNG" in start if suffix == "png" else b"<?xml" in start
