# SPDX-License-Identifier: Apache-2.0
import threading

import pytest
import torch

from pelton.kernels.dispatch import (
    Dispatch,
    Implementation,
    anywhere,
    batch_invariant,
    forced_implementation,
    must_be_invariant,
    on_meta,
)

CPU = torch.device("cpu")


def make_table() -> Dispatch:
    return Dispatch(
        "probe",
        Implementation("meta", on_meta, lambda: "meta"),
        Implementation("half", lambda device, dtype: dtype is torch.float16, lambda: "half"),
        Implementation("reference", anywhere, lambda: "reference"),
    )


def test_first_match_wins() -> None:
    table = make_table()

    assert table.select(CPU, torch.float16)() == "half"
    assert table.select(CPU, torch.float32)() == "reference"
    assert table.select(torch.device("meta"), torch.float16)() == "meta"


def test_named_ignores_requirements_and_refuses_unknown_names() -> None:
    table = make_table()

    assert table.named("half")() == "half"
    with pytest.raises(ValueError, match=r"probe has no implementation 'fast', only meta, half"):
        table.named("fast")


def test_forcing_holds_inside_its_block_only() -> None:
    table = make_table()
    table.select(CPU, torch.float16)

    with forced_implementation("reference", "probe"):
        assert table.select(CPU, torch.float16)() == "reference"

    assert table.select(CPU, torch.float16)() == "half"


def test_forcing_an_unknown_name_changes_nothing() -> None:
    table = make_table()

    with pytest.raises(ValueError, match="no implementation"), forced_implementation("x", "probe"):
        pass

    assert table.select(CPU, torch.float16)() == "half"


def test_table_without_a_match_names_what_was_asked() -> None:
    table = Dispatch("probe", Implementation("meta", on_meta, lambda: None))

    with pytest.raises(ValueError, match=r"probe has no implementation for torch.float32 on cpu"):
        table.select(CPU, torch.float32)


def test_within_batch_invariant_only_such_implementations_are_offered() -> None:
    table = Dispatch(
        "probe",
        Implementation("library", anywhere, lambda: "library", is_invariant=False),
        Implementation("triton", anywhere, lambda: "triton"),
        Implementation("reference", anywhere, lambda: "reference"),
    )

    with batch_invariant():
        assert table.select(CPU, torch.float32)() == "triton"
        with batch_invariant(wanted=False):
            assert table.select(CPU, torch.float32)() == "library"

    assert table.select(CPU, torch.float32)() == "library"


def test_the_mode_of_one_thread_is_not_anothers() -> None:
    found = []

    with batch_invariant():
        thread = threading.Thread(target=lambda: found.append(must_be_invariant()))
        thread.start()
        thread.join()
        found.append(must_be_invariant())

    assert found == [False, True]
