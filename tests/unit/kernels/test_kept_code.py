# SPDX-License-Identifier: Apache-2.0
"""Compiled code on disk: nothing that is wrong with it keeps a process from computing."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching

from pelton.kernels.native import kept_code, runtime, sum_words
from pelton.kernels.native.kept_code import keep_code


def add_one(x):
    return x + 1


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    kept_code._warn_once.cache_clear()
    return tmp_path


def run() -> int:
    """How often code was found, for a process that starts."""
    compiled: Any = keep_code(numba.njit(add_one), add_one)
    assert compiled(41) == 42
    return sum(compiled.stats.cache_hits.values())


def find_file(directory: Path) -> Path:
    (path,) = directory.rglob("*.code")
    return path


def test_code_is_compiled_once(directory: Path) -> None:
    assert [run(), run()] == [0, 1]
    assert len([path for path in directory.rglob("*") if path.is_file()]) == 1


@pytest.mark.parametrize(
    "damage",
    [lambda code: b"", lambda code: code[:100], lambda code: code[:-1] + bytes([code[-1] ^ 1])],
    ids=["empty", "cut", "one bit"],
)
def test_damaged_code_is_compiled_anew(
    damage: Callable[[bytes], bytes], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run()
    path = find_file(directory)
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert [run(), run()] == [0, 1]
    assert caplog.text.count("kept_code_damaged") == 1


def test_code_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    monkeypatch.setattr(kept_code, "_find_sources", lambda: b"other")
    assert [run(), run()] == [0, 1]


def test_a_full_disk_costs_no_more_than_time(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write_bytes(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with caplog.at_level(logging.WARNING):
        assert [run(), run()] == [0, 0]
    assert caplog.text.count("No space left on device") == 1
    assert not [path for path in directory.rglob("*") if path.is_file()]


def test_no_directory_costs_no_more_than_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    with caplog.at_level(logging.WARNING):
        assert [run(), run()] == [0, 0]
    assert "NUMBA_CACHE_DIR" in caplog.text


def test_all_that_is_compiled_is_kept_so() -> None:
    kernel = runtime.kernel(lambda arguments: None)
    kernel(1, 1)
    codes = kernel._compiled, runtime.compiled(add_one), runtime.exact(add_one)
    for code in (*codes, sum_words._sum_blocks, sum_words._copy_blocks):
        assert isinstance(code._cache, kept_code._KeptCode)
