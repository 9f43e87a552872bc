# SPDX-License-Identifier: Apache-2.0
"""Commands under limits of the system: one sentence and exit code 2, or a server that serves."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from server_process import running_server, serve_command

MODEL = "stand-in:smollm2?step_ms=1"


def run_limited(limit: str, *command: str) -> subprocess.CompletedProcess[str]:
    script = f"ulimit {limit} && exec {shlex.join(command)}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=100)


def errors_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert "Traceback" not in done.stderr, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("limit", [16, 20, 64, 127])
def test_too_few_open_files_are_one_sentence(limit: int) -> None:
    done = run_limited(f"-n {limit}", *serve_command(MODEL, "--port", "0"))
    assert done.returncode == 2
    assert errors_of(done) == [
        f"error: This process may open {limit} files at once and needs 128, and more for many"
        " clients; raise the limit, for example with 'ulimit -n 4096'."
    ]


def test_too_few_open_files_for_a_measurement_are_one_sentence(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "pelton.cli.main", "bench", MODEL, "--out", str(tmp_path))
    done = run_limited("-n 20", *command)
    assert done.returncode == 2
    [error] = errors_of(done)
    assert "20 files" in error


def test_a_low_soft_limit_of_open_files_is_raised() -> None:
    with running_server(MODEL, prefix=("bash", "-c", 'ulimit -Sn 32; exec "$@"', "-")) as server:
        limits = Path(f"/proc/{server.frontend.pid}/limits").read_text()
        soft, hard = re.findall(r"Max open files +(\d+) +(\d+)", limits)[0]
        assert int(soft) == int(hard) > 32
        with httpx.Client(base_url=server.url) as client:
            assert client.get("/ready").status_code == 200


@pytest.mark.parametrize("command", ["serve", "bench"])
def test_memory_that_the_system_refuses_is_one_sentence(command: str, tmp_path: Path) -> None:
    # 4 GiB of KV for the bundled model, in an address space of 5 GiB that holds all else as well.
    cache = ["--num-blocks", "5800", "--kv-memory-bytes", "4GiB", "--max-model-len", "512"]
    own = ["--port", "0"] if command == "serve" else ["--out", str(tmp_path)]
    options = ["--dtype", "float32", "--device", "cpu", "--num-threads", "1"]
    full = (sys.executable, "-m", "pelton.cli.main", command, "smollm2", *options, *cache, *own)
    done = run_limited(f"-v {5 * 2**20}", *full)
    assert done.returncode == 2
    [error] = errors_of(done)
    assert "--kv-memory-bytes" in error
