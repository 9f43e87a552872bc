# SPDX-License-Identifier: Apache-2.0
"""The processes that are not workers stay small: what they import decides their memory."""

import subprocess
import sys

import pytest

HEAVY = (
    *("torch", "transformers", "triton", "matplotlib", "scipy", "pandas"),
    *("opentelemetry.sdk", "opentelemetry.exporter", "ray"),
)


@pytest.mark.parametrize(
    "module", ["pelton.serving.http.main", "pelton.serving.supervisor", "pelton.cli.main"]
)
def test_no_heavy_package_is_imported(module: str) -> None:
    code = f"import {module}, sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
