# SPDX-License-Identifier: Apache-2.0
"""`pelton bench` and `pelton demo` against Pelton itself, with the stand-in engine."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from rich.console import Console

from pelton.bench.measurements import RequestRecord
from pelton.bench.record import read_record
from pelton.cli import demo
from pelton.core.config import Device

STEP_MS = 10
TOLERANCE_MS = 20.0
MODEL = f"stand-in:smollm2?step_ms={STEP_MS}"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pelton.cli.main", *arguments],
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip


@contextmanager
def serve(model: str) -> Iterator[str]:
    command = [sys.executable, "-m", "pelton.cli.main", "serve", model, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    with server.stdout:
        yield server.stdout.readline().split()[2]
        server.terminate()
    server.wait(timeout=60)


def test_an_engine_without_http_is_measured(tmp_path: Path) -> None:
    done = run(
        "bench", MODEL, "--scenario", "server", "--qps", "100", "--requests", "480",
        "--input-len", "12", "--output-len", "4", "--ttft-ms", "60000", "--tpot-ms", "60000",
        "--out", str(tmp_path),
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(tmp_path / "record.json")
    assert record.target.kind == "engine"
    assert record.target.config is not None
    assert not record.target.config["cache"]["prefix_cache"]
    assert record.data_set.is_synthetic
    assert record.summary.num_prompt_tokens == 480 * 12
    assert record.summary.num_output_tokens == 480 * 4
    lines = (tmp_path / "requests.jsonl").read_bytes().splitlines()
    found_ms = [msgspec.json.decode(line, type=RequestRecord).tpot_ms for line in lines]
    # The others are for a machine that stands still for a while.
    num_near = sum(STEP_MS / 2 <= tpot_ms <= STEP_MS + TOLERANCE_MS for tpot_ms in found_ms)
    assert num_near >= 0.4 * len(found_ms)
    assert record.timeline.engine


def test_text_is_tokenised_for_an_engine_as_a_server_would(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    arguments = ("--scenario", "single-stream", "--requests", "64", "--dataset", "prompts",
                 "--output-len", "2")  # fmt: skip
    model = "stand-in:smollm2"
    in_engine = run("bench", model, *arguments, "--out", str(folder))
    with serve(model) as url:
        over_http = run("bench", model, *arguments, "--url", url, "--out", str(tmp_path / "http"))

    assert in_engine.returncode == over_http.returncode == 0, over_http.stderr
    engine, http = (read_record(tmp_path / name / "record.json") for name in ("engine", "http"))
    assert engine.summary.num_prompt_tokens == http.summary.num_prompt_tokens
    # A stand-in has no prefix cache, whatever the command's default.
    assert http.target.config == engine.target.config
    assert http.target.config_hash
    assert http.timeline.engine
    assert http.prefix_reuse.num_cached_tokens == 0


def test_an_engine_that_cannot_take_the_prompts_is_bad_input(tmp_path: Path) -> None:
    done = run(
        "bench", "stand-in:smollm2?max_model_len=20", "--scenario", "offline", "--requests", "9",
        "--input-len", "18", "--output-len", "4", "--out", str(tmp_path),
    )  # fmt: skip

    assert done.returncode == 2
    assert "has 18 tokens and may get 4 more; the model takes 20 in all" in done.stderr


def test_a_model_that_does_not_exist_is_bad_input(tmp_path: Path) -> None:
    done = run("bench", "no-such-model", "--out", str(tmp_path))

    assert done.returncode == 2
    assert "no model 'no-such-model'" in done.stderr


WITHOUT_LIMITS = """
from pelton.bench import demo_load
demo_load.TTFT_MS = demo_load.TPOT_MS = 1e6
from pelton.cli.main import main
main()
"""


def test_the_demos_server_prefills_and_decodes_apart() -> None:
    with demo._serve("smollm2", Device.CPU, Console()) as url:
        workers = httpx.get(f"{url}/dashboard/data").json()["workers"]
        prompt = {"prompt": "light " * 60, "max_tokens": 4}
        httpx.post(f"{url}/v1/completions", json=prompt, timeout=60).raise_for_status()
        said = list(demo._describe_workers(url))
    assert [worker["role"] for worker in workers] == ["prefill", "decode"]
    assert said[0] == "Worker 0 (prefill) computed 1 prompts for the other."


def test_a_demo_that_is_told_to_end_takes_its_server_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "pelton.cli.main", "demo"]
    options = ("--model", "stand-in:smollm2?step_ms=2", "--device", "auto", "--out", str(tmp_path))
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        ready = next(found for line in started.stdout if (found := re.search(r"at (\S+);", line)))
        httpx.get(f"{ready[1]}/health").raise_for_status()

        started.terminate()

        assert started.wait(timeout=30) == 128 + signal.SIGTERM
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{ready[1]}/health")


def test_a_demo_of_what_is_not_there_is_bad_input(tmp_path: Path) -> None:
    done = run("demo", "--model", "no-such-model", "--out", str(tmp_path))
    unwritable = run("demo", "--out", "/proc/here")

    assert done.returncode == unwritable.returncode == 2
    assert "no model 'no-such-model'" in done.stderr
    assert "--out /proc/here cannot be written" in unwritable.stderr


@pytest.mark.slow
def test_the_demo_answers_measures_and_says_where_the_report_is(tmp_path: Path) -> None:
    options = ("--model", "stand-in:smollm2?step_ms=2", "--device", "auto", "--out", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIMITS, "demo", *options],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert "You: What is a lighthouse for?" in done.stdout
    assert "VALID" in done.stdout
    assert str(tmp_path / "report.html") in done.stdout.replace("\n", "")
    assert read_record(tmp_path / "record.json").verdict.is_valid
