# SPDX-License-Identifier: Apache-2.0
"""A table changes some settings of a kernel's rule, for the shapes it has and no others."""

import json
from dataclasses import dataclass

import pytest

from pelton.kernels import tuning
from pelton.kernels.fp8.linear import tune as tune_fp8_linear
from pelton.kernels.hopper_vector import tune_hopper_vector
from pelton.kernels.linear import tune_vector
from pelton.kernels.mla.triton import tune as tune_latent
from pelton.kernels.moe.fp8_product import tune as tune_fp8_experts
from pelton.kernels.paged_attention.triton_decode import tune_decode
from pelton.kernels.tuning import TABLE, tunable

TUNABLES = (
    *(tune_fp8_linear, tune_vector, tune_hopper_vector, tune_latent, tune_fp8_experts),
    tune_decode,
)


@dataclass(frozen=True)
class Tiles:
    height: int
    width: int = 7


@pytest.fixture
def _table(monkeypatch) -> None:
    table = {"dicts": {"8,100": {"width": 3}}, "classes": {"8,100": {"width": 3}}}
    monkeypatch.setattr(tuning, "read_table", lambda: table)


@pytest.mark.usefixtures("_table")
def test_the_table_changes_its_shapes_only() -> None:
    dicts = tunable("dicts")(lambda rows, size: {"height": rows, "width": 7})
    classes = tunable("classes")(lambda rows, size: Tiles(rows))

    for rows, size, width in ((5, 100, 3), (8, 100, 3), (9, 100, 7), (4, 100, 7), (8, 101, 7)):
        assert dicts(rows, size) == {"height": rows, "width": width}
        assert classes(rows, size) == Tiles(rows, width)


@pytest.mark.usefixtures("_table")
def test_what_is_tried_goes_before_the_table_and_ends() -> None:
    rule = tunable("dicts")(lambda rows, size: {"height": rows, "width": 7})
    assert rule(8, 100)["width"] == 3

    with rule.trying({"height": 1}) as shapes:
        assert rule(8, 100) == {"height": 1, "width": 7}
        rule(3, 5)

    assert shapes == {"8,100", "4,5"}
    assert rule(8, 100) == {"height": 8, "width": 3}


def test_shapes_without_rows_are_exact() -> None:
    rule = tunable("sizes", has_rows=False)(lambda size: {"width": size})

    with rule.trying({}) as shapes:
        rule(100)

    assert shapes == {"100"}


def test_the_checked_in_table_changes_settings_that_rules_have() -> None:
    tables = json.loads(TABLE.read_text())
    rules = {rule.name: rule for rule in TUNABLES}

    for table in tables.values():
        for name, shapes in table.items():
            for shape, settings in shapes.items():
                with rules[name].trying(settings):
                    rules[name](*map(int, shape.split(",")))
