# SPDX-License-Identifier: Apache-2.0
"""Rules of the house that no other tool checks."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "pelton"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

WITHOUT_TORCH = [
    "pelton",
    "pelton.core.request",
    "pelton.core.config",
    "pelton.core.step",
    "pelton.core.ports",
    "pelton.core.geometry",
    "pelton.perf.roofline",
    "pelton.engine.request_state",
    "pelton.engine.scheduler",
    "pelton.engine.engine",
    "pelton.engine.resolve",
    "pelton.engine.kv.blocks",
    "pelton.engine.kv.prefix_index",
    "pelton.models.llama_config",
    "pelton.models.gpt_oss_config",
    "pelton.serving.tokenizer",
    "pelton.serving.worker_client",
    "pelton.serving.supervisor",
    "pelton.serving.router.router",
    "pelton.serving.http.app",
    "pelton.bench.scenarios",
    "pelton.cli.main",
]


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_module_runs_without_torch(module: str) -> None:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def _names_in_one_request_page() -> list[str]:
    page = (ROOT / "docs" / "one_request.md").read_text()
    return sorted(set(re.findall(r"`([a-z_]+/[\w/.:]*)`", page)))


@pytest.mark.parametrize("name", _names_in_one_request_page())
def test_one_request_page_names_what_exists(name: str) -> None:
    file_name, _, symbol = name.partition(":")
    path = PACKAGE / file_name

    assert path.exists()
    if symbol:
        assert _has_symbol(ast.parse(path.read_text()), symbol.split("."))


def _has_symbol(tree: ast.AST, parts: list[str]) -> bool:
    for node in ast.iter_child_nodes(tree):
        is_definition = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if is_definition and node.name == parts[0]:
            return len(parts) == 1 or _has_symbol(node, parts[1:])
    return False


def _tests_in_failures_page() -> list[tuple[str, str]]:
    page = (ROOT / "docs" / "failures.md").read_text()
    return sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)))


@pytest.mark.parametrize(("file_name", "test"), _tests_in_failures_page())
def test_failures_page_names_tests_that_exist(file_name: str, test: str) -> None:
    (path,) = [path for path in TESTS if path.name == file_name]

    assert _has_symbol(ast.parse(path.read_text()), [test])


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_carries_its_licence_tag(path: Path) -> None:
    text = path.read_text()

    assert not text or text.startswith("# SPDX-License-Identifier: Apache-2.0\n")


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tolerances_come_from_the_one_table(path: Path) -> None:
    literal = re.compile(r"\b(atol|rtol|abs|rel)=\s*\d*\.?\d+e-\d+")

    assert not literal.search(path.read_text()) or path.name == "tolerance.py"


def test_no_two_test_modules_share_a_name() -> None:
    """pytest imports them by it, and `tests` are no packages."""
    names = [path.name for path in TESTS if path.name not in ("conftest.py", "__init__.py")]
    assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]
