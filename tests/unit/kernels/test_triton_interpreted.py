# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels' grid under Triton's interpreter, in a process of its own.

The interpreter is chosen when Triton is first imported, so it cannot share this process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("file", "least"),
    [
        ("test_kernels.py", 60),
        ("test_moe_kernels.py", 50),
        ("test_fp8_kernels.py", 90),
        ("test_fp8_kv_kernels.py", 60),
        ("test_mla_kernels.py", 30),
        ("test_invariant_kernels.py", 40),
        ("test_deterministic.py", 3),
        ("test_draw_tokens.py", 28),
    ],
    ids=str,
)
def test_kernels_match_references_under_the_interpreter(file: str, least: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]

    run = subprocess.run(
        [*command, f"tests/gpu/{file}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert run.returncode == 0, run.stdout[-4000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= least
