# SPDX-License-Identifier: Apache-2.0
"""A small run of `benchmarks/bench_storm.py`, which says itself what it checks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_storm.py"
OPTIONS = ("--requests", "60", "--kinds", "6", "--prefill", "1", "--decode", "2")
BLOWS = ("--blow-every-s", "1", "--blows", "2", "--seed", "76")


@pytest.mark.slow
def test_a_storm_over_roles_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), *OPTIONS, *BLOWS, "--log", str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + (tmp_path / "log").read_text()[-4000:]
    found = json.loads(done.stdout)
    assert found["blows"] == {"killed": 1, "frozen": 1}
    assert found["ends"]["right"] > 30
    assert found["ends"]["left"] > 0
