# SPDX-License-Identifier: Apache-2.0
"""`pelton bench` with the official LoadGen against a server whose latencies are known.

This checks the harness: its figures must equal the truth. The bounds are wide because the machine
may be busy, far narrower than what a wrong clock or a wrong start would give. They hold for a part
of the requests, as the machine may also stand still for a while, and then the figures tell of that.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO

import httpx
import msgspec
import pytest
from server_process import wait_until

from pelton.bench.http_sut import HttpSut
from pelton.bench.load_messages import HttpTarget
from pelton.bench.loadgen_log import LoadGenPercentiles
from pelton.bench.measurements import Distribution, RequestRecord, make_distribution
from pelton.bench.record import Record, Status, read_record
from pelton.bench.request_runner import RequestRunner
from pelton.bench.traffic import Sample

SERVER = Path(__file__).parent / "fixed_rate_server.py"
TOLERANCE_MS = 20.0
LEAST_SHARE = 0.4
AGREEMENT_MS = 5.0
"""Between our percentiles and LoadGen's, which stamp the same moments microseconds apart."""
UNLIMITED = ("--ttft-ms", "60000", "--tpot-ms", "60000")

StartServer = Callable[..., str]


@contextmanager
def run_server(**behaviour: object) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER), json.dumps(behaviour)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.wait(timeout=60)


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    with ExitStack() as servers:
        yield lambda **behaviour: servers.enter_context(run_server(**behaviour))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pelton.cli.main", "bench", *arguments]


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)


def read_requests(folder: Path) -> list[RequestRecord]:
    lines = (folder / "requests.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=RequestRecord) for line in lines]


def assert_near(found_ms: list[float], truth_ms: float) -> None:
    num_near = sum(truth_ms / 2 <= found <= truth_ms + TOLERANCE_MS for found in found_ms)
    assert num_near >= LEAST_SHARE * len(found_ms), sorted(found_ms)


def assert_agrees(
    own: Distribution | None,
    loadgen: LoadGenPercentiles | None,
    names: tuple[str, ...] = ("p50", "p90", "p99"),
) -> None:
    assert own is not None
    assert loadgen is not None
    for name in names:
        assert abs(getattr(own, name) - getattr(loadgen, name)) <= AGREEMENT_MS, name


@pytest.mark.parametrize("scenario", ["server", "interactive"])
def test_poisson_scenarios_measure_the_truth_and_agree_with_loadgen(
    start_server: StartServer, tmp_path: Path, scenario: str
) -> None:
    url = start_server(ttft_ms=50, tpot_ms=10)
    done = run_bench(
        "fixed", "--url", url, "--scenario", scenario, "--qps", "100", "--requests", "480",
        "--output-len", "5", *UNLIMITED, "--out", str(tmp_path),
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(tmp_path / "record.json")
    assert record.verdict.is_valid
    assert record.status is Status.COMPLETE
    assert record.scenario == scenario
    requests = read_requests(tmp_path)
    assert_near([request.ttft_ms for request in requests], 50)
    assert_near([request.tpot_ms for request in requests], 10)
    assert min(request.ttft_ms for request in requests) > 49
    assert record.summary.ttft_ms == make_distribution([r.ttft_ms for r in requests])
    assert record.summary.tpot_ms == make_distribution([r.tpot_ms for r in requests])
    assert_agrees(record.summary.ttft_ms, record.loadgen.ttft_ms)
    assert_agrees(record.summary.tpot_ms, record.loadgen.tpot_ms)
    assert record.summary.num_ok == 480
    assert record.summary.num_output_tokens == 480 * 5 == sum(record.timeline.output_tokens)
    assert record.prefix_reuse.num_cached_tokens == 0
    assert "VALID" in done.stdout
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "report.png").stat().st_size > 10_000
    assert "Result is : VALID" in (tmp_path / "loadgen/mlperf_log_summary.txt").read_text()


def test_offline_sends_every_prompt_in_one_query(start_server: StartServer, tmp_path: Path) -> None:
    url = start_server(ttft_ms=20, tpot_ms=5)
    done = run_bench(
        "fixed", "--url", url, "--scenario", "offline", "--requests", "300", "--output-len", "4",
        "--max-in-flight", "100", "--out", str(tmp_path),
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(tmp_path / "record.json")
    requests = read_requests(tmp_path)
    assert len(requests) == record.summary.num_ok == 300
    assert len({request.scheduled_ns for request in requests}) == 1
    assert record.loadgen.ttft_ms is None
    assert record.verdict.binding_limit == "none"
    assert record.summary.num_output_tokens == 1200
    assert record.loadgen.samples_per_s is not None
    assert record.loadgen.tokens_per_s is not None
    assert round(record.loadgen.tokens_per_s / record.loadgen.samples_per_s, 2) == 4
    # LoadGen's clock runs from before it calls us until it has been told of the last answer.
    own_s, loadgen_s = record.summary.duration_s, 300 / record.loadgen.samples_per_s
    assert own_s - 0.005 <= loadgen_s <= own_s + 2.5


def test_offline_lasts_as_long_as_it_must(start_server: StartServer, tmp_path: Path) -> None:
    """A duration makes the harness find the rate first, or LoadGen would call the run too short."""
    url = start_server(ttft_ms=5, tpot_ms=2)
    done = run_bench(
        "fixed", "--url", url, "--scenario", "offline", "--min-duration", "2", "--output-len", "3",
        "--max-in-flight", "4", "--out", str(tmp_path),
    )  # fmt: skip

    record = read_record(tmp_path / "record.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert record.calibration is not None
    assert record.summary.duration_s >= 2


def test_single_stream_has_one_request_at_a_time(start_server: StartServer, tmp_path: Path) -> None:
    url = start_server(ttft_ms=20, tpot_ms=2)
    done = run_bench(
        "fixed", "--url", url, "--scenario", "single-stream", "--min-duration", "1",
        "--output-len", "3", "--out", str(tmp_path),
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(tmp_path / "record.json")
    requests = sorted(read_requests(tmp_path), key=lambda request: request.issued_ns)
    assert all(earlier.last_token_ns <= later.issued_ns for earlier, later in pairwise(requests))
    assert_near([request.ttft_ms for request in requests], 20)
    # The p99 of so few is the largest: of one request, between whose stamps anything may come.
    assert_agrees(record.summary.ttft_ms, record.loadgen.ttft_ms, ("p50", "p90"))


def test_without_a_rate_the_harness_finds_one(start_server: StartServer, tmp_path: Path) -> None:
    """The limit on TTFT is under the truth from the start, so the ladder ends after one level."""
    url = start_server(ttft_ms=20, tpot_ms=1)
    done = run_bench(
        "fixed", "--url", url, "--scenario", "server", "--requests", "20", "--output-len", "2",
        "--ttft-ms", "10", "--tpot-ms", "1000000", "--out", str(tmp_path),
    )  # fmt: skip

    record = read_record(tmp_path / "record.json")
    assert done.returncode == 3
    assert record.calibration is not None
    assert record.load["target_qps"] == pytest.approx(0.6 * record.calibration.requests_per_s)
    assert record.verdict.binding_limit == "ttft"
    assert any("over its limit of 10 ms" in reason for reason in record.verdict.reasons)


def test_too_few_requests_are_invalid_and_said(start_server: StartServer, tmp_path: Path) -> None:
    url = start_server(ttft_ms=5, tpot_ms=1)
    done = run_bench(
        "fixed", "--url", url, "--qps", "100", "--requests", "50", "--output-len", "2",
        *UNLIMITED, "--out", str(tmp_path),
    )  # fmt: skip

    assert done.returncode == 3
    assert "Too few requests to trust the p99: 50 were issued" in done.stdout
    assert not read_record(tmp_path / "record.json").verdict.is_valid


def test_a_server_that_fails_makes_the_run_invalid(
    start_server: StartServer, tmp_path: Path
) -> None:
    url = start_server(ttft_ms=5, tpot_ms=1, fail_after=30)
    done = run_bench(
        "fixed", "--url", url, "--qps", "100", "--requests", "60", "--output-len", "4",
        "--out", str(tmp_path),
    )  # fmt: skip

    assert done.returncode == 3, done.stdout + done.stderr
    record = read_record(tmp_path / "record.json")
    assert record.summary.num_failed == 60 - record.summary.num_ok > 0
    assert "HTTP 500: out of order" in next(iter(record.summary.errors))
    assert any("requests failed" in reason for reason in record.verdict.reasons)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("drop", "Error"),
        ("one_token", "1 output tokens came back"),
        ("error", "the model fell over"),
        ("garbage", "not a chunk"),
        ("silent", "No complete answer within 0.3 s"),
    ],
)
async def test_every_way_to_fail_is_a_failed_request(
    start_server: StartServer, failure: str, words: str
) -> None:
    target = HttpTarget(url=start_server(fail_after=0, failure=failure), model="fixed")
    sut = HttpSut(target, may_reuse_prefixes=True)
    timeout_s = 0.3 if failure == "silent" else 60.0
    runner = RequestRunner(sut, [Sample(prompt="x", max_tokens=4)], timeout_s=timeout_s)
    record = runner.make_record(0, issued_ns=0)

    await runner.run(record)
    await sut.close()

    assert not record.is_ok
    assert words in str(record.error)


def test_a_server_that_never_works_ends_the_run_early(
    start_server: StartServer, tmp_path: Path
) -> None:
    url = start_server(fail_after=0)
    # At this rate all the requests would take 2,000 s; run_bench waits two minutes.
    done = run_bench(
        "fixed", "--url", url, "--qps", "50", "--requests", "100000", "--warmup-requests", "0",
        "--out", str(tmp_path),
    )  # fmt: skip

    assert done.returncode == 3
    record = read_record(tmp_path / "record.json")
    assert record.status is Status.ENDED_EARLY
    assert "requests in a row failed" in record.verdict.reasons[0]


def test_reused_prefixes_are_refused_unless_asked_for(
    start_server: StartServer, tmp_path: Path
) -> None:
    url = start_server(ttft_ms=5, tpot_ms=1, cached_tokens=3)
    arguments = (
        "fixed", "--url", url, "--scenario", "offline", "--requests", "70", "--output-len", "2",
        "--out", str(tmp_path),
    )  # fmt: skip

    refused = run_bench(*arguments)
    refused_record = read_record(tmp_path / "record.json")
    allowed = run_bench(*arguments, "--prefix-cache")
    allowed_record = read_record(tmp_path / "record.json")

    assert refused.returncode == 3
    assert "210 prompt tokens were reused" in refused_record.verdict.reasons[0]
    assert allowed.returncode == 0
    assert allowed_record.prefix_reuse.is_allowed
    assert "allowed, 210 prompt tokens reused" in (tmp_path / "report.html").read_text()


def test_ctrl_c_leaves_a_record_and_no_process(start_server: StartServer, tmp_path: Path) -> None:
    url = start_server(ttft_ms=50, tpot_ms=10)
    bench = subprocess.Popen(
        command(
            "fixed", "--url", url, "--scenario", "single-stream", "--requests", "100000",
            "--output-len", "8", "--warmup-requests", "0", "--out", str(tmp_path),
        ),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert bench.stderr is not None
    # The third was sent after two answers had been read.
    wait_until(lambda: httpx.get(f"{url}/count", timeout=10).json() >= 3)
    children = list_children(bench.pid)
    bench.send_signal(signal.SIGINT)
    bench.communicate(timeout=60)

    record = read_record(tmp_path / "record.json")
    assert bench.returncode == 130
    assert record.status is Status.INTERRUPTED
    assert record.summary.num_ok > 0
    assert children
    assert not any(is_alive(pid) for pid in children)


def wait_for_line(stream: IO[str], word: str) -> None:
    for line in stream:
        if word in line:
            return
    raise AssertionError(f"the output ended without {word!r}")


def list_children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_load_process_that_dies_is_an_invalid_run(
    start_server: StartServer, tmp_path: Path
) -> None:
    url = start_server(ttft_ms=50, tpot_ms=10)
    bench = subprocess.Popen(
        command("fixed", "--url", url, "--qps", "50", "--min-duration", "300",
                "--warmup-requests", "0", "--out", str(tmp_path)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert bench.stderr is not None
    wait_for_line(bench.stderr, "LoadGen")
    for pid in list_children(bench.pid):
        os.kill(pid, signal.SIGKILL)
    bench.communicate(timeout=60)

    record: Record = read_record(tmp_path / "record.json")
    assert bench.returncode == 3
    assert "load process ended unasked" in record.verdict.reasons[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9 cannot be reached"),
        (["m", "--url", "localhost:8000"], "must start with http://"),
        (["m", "--dataset", "nowhere.jsonl"], "cannot be read"),
        (["m", "--dataset", "squad"], "must be 'bundled'"),
        (["m", "--input-len", "100"], "--input-len needs --output-len"),
        (["m", "--output-len", "1"], "at least 2"),
        (["m", "--scenario", "offline", "--qps", "3"], "does not apply to offline"),
        (["m", "--qps", "0"], "--qps must be a number of at least 0.001"),
        (["m", "--requests", "0"], "--requests must be a number of at least 1"),
        (["m", "--out", "/proc/nowhere"], "cannot be written"),
        (["m", "--scenario", "multi-stream"], "multi-stream"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    folder = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    done = run_bench(*arguments, *folder)

    assert done.returncode == 2, done.stdout + done.stderr
    assert words in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_another_model_than_the_servers_is_refused(
    start_server: StartServer, tmp_path: Path
) -> None:
    done = run_bench("llama", "--url", start_server(), "--out", str(tmp_path))

    assert done.returncode == 2
    assert "serves fixed, not llama" in done.stderr


CALLBACK_FAILS = """
import asyncio, sys
from pelton.bench.loadgen_run import LoadGenRun
from pelton.bench.request_runner import RequestRunner
from pelton.bench.scenarios.policy import NO_LIMITS, Demand
from pelton.bench.scenarios.server import SERVER
from pelton.bench.traffic import Sample

async def main():
    loop = asyncio.get_running_loop()
    settings = SERVER.plan(Demand(limits=SERVER.default_limits, min_duration_s=0.0,
        num_requests=20, requests_per_s=200.0, request_latency_s=0.1))
    class BrokenLoop:
        is_closed = loop.is_closed
        create_future = loop.create_future
        def call_soon_threadsafe(self, callback, *arguments):
            if callback.__name__ == "_start_requests":
                raise RuntimeError("no more")
            loop.call_soon_threadsafe(callback, *arguments)
    run = LoadGenRun(RequestRunner(None, [Sample(prompt="x")], timeout_s=1.0), settings,
        num_samples=1, log_dir=sys.argv[1], max_in_flight=None, loop=BrokenLoop())
    await asyncio.to_thread(run.run)
    print(await run.aborted)

asyncio.run(main())
"""


def test_an_error_in_a_callback_ends_the_test_and_not_the_process(tmp_path: Path) -> None:
    """LoadGen turns an exception that leaves its callback into a segmentation fault."""
    done = subprocess.run(
        [sys.executable, "-c", CALLBACK_FAILS, str(tmp_path)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "A LoadGen callback failed: RuntimeError: no more"
