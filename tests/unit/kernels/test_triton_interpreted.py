# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels' grid under Triton's interpreter, in a process of its own.

The interpreter is chosen when Triton is first imported, so it cannot share this process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_kernels_match_references_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]

    run = subprocess.run(
        [*command, "tests/gpu/test_kernels.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert run.returncode == 0, run.stdout[-4000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 60
