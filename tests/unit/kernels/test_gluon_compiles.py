# SPDX-License-Identifier: Apache-2.0
"""Gluon kernels compile for Hopper, as `tests/hopper_compiler.py` says, where there is no GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
MAX_SPILLED_BYTES = 176
"""Of a thread: what a few numbers that outlive a loop take."""


@pytest.mark.parametrize(
    ("case", "num_kernels"),
    [
        *[("prefill", 2), ("fp8-attention", 4), ("latent-attention", 2), ("mxfp4-products", 14)],
        *[("fp8-experts", 2), ("fp8-linear", 2), ("fp8-blocks", 4), ("product", 3), ("vector", 3)],
    ],
)
def test_kernels_compile_and_their_products_overlap(case: str, num_kernels: int) -> None:
    script = f"""
import torch
torch.cuda.is_available = lambda: True
from hopper_compiler import compile_case
compile_case({case!r})
"""
    folders = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=250,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill stores", done.stdout)]
    assert len(spills) == num_kernels, done.stdout
    assert max(spills) <= MAX_SPILLED_BYTES
    # "wgmma.mma_async instructions are serialized due to ..."
    assert "serialized" not in done.stdout
