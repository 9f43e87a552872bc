# SPDX-License-Identifier: Apache-2.0
"""Workers on two machines: network namespaces, joined by a cable that can be cut."""

import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server_process import command_of, running_server, serve_command, wait_until

MODEL = (
    *("smollm2", "--random-weights", "smollm2-135m", "--layers", "2", "--dtype", "float32"),
    *("--device", "cpu", "--num-threads", "1", "--max-model-len", "2048", "--num-blocks", "400"),
    *("--max-num-requests", "4", "--max-num-batched-tokens", "64"),
)
CASES = ((0, 8), (1, 400), (2, 400), (3, 8))
"""Seed of the prompt, tokens to generate."""
HERE, THERE = "10.77.31.1", "10.77.31.2"
PELTON = (sys.executable, "-m", "pelton.cli.main")
_READY = re.compile(r"Ready at (http://\S+) ")


@dataclass(frozen=True, slots=True)
class Machines:
    here: str
    there: str
    folder: Path

    def start(self, where: str, *command: str, device: str) -> subprocess.Popen[str]:
        environment = os.environ | {"UCX_NET_DEVICES": device, "UCX_TLS": "tcp"}
        with (self.folder / f"{where}-{len(list(self.folder.iterdir()))}.log").open("w") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", where, *command],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed (extra kv)")
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    here, there = f"pelton-a{os.getpid()}", f"pelton-b{os.getpid()}"
    with contextlib.ExitStack() as stack:
        try:
            for name in (here, there):
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip(
                "link",
                "add",
                "cable-a",
                "netns",
                here,
                "type",
                "veth",
                "peer",
                "cable-b",
                "netns",
                there,
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode()}")
        for name, device, address in ((here, "cable-a", HERE), (there, "cable-b", THERE)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Machines(here, there, tmp_path)


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def body(seed: int, max_tokens: int) -> dict[str, Any]:
    prompt = [300 + (seed * 7919 + i * i * 31) % 40000 for i in range(200)]
    sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"prompt": prompt, "return_token_ids": True, **sampling}


_ASK = """
import sys, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, {"content-type": "application/json"})
for line in urllib.request.urlopen(request, timeout=90):
    print(line.decode(), end="", flush=True)
"""


def start_asking(
    machines: Machines, url: str, content: dict[str, Any] | None = None
) -> subprocess.Popen[str]:
    data = "" if content is None else json.dumps(content)
    command = ["ip", "netns", "exec", machines.here, sys.executable, "-c", _ASK, url, data]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ask(machines: Machines, url: str, content: dict[str, Any] | None = None) -> str:
    with start_asking(machines, url, content) as asking:
        assert asking.stdout is not None
        reply = asking.stdout.read()
    assert asking.returncode == 0, machines.log()
    return reply


def complete(machines: Machines, url: str, seed: int, max_tokens: int) -> list[int]:
    reply = json.loads(ask(machines, f"{url}/v1/completions", body(seed, max_tokens)))
    return reply["choices"][0]["token_ids"]


class Stream:
    """A reply that comes token by token; made once the first have come."""

    def __init__(self, machines: Machines, url: str, seed: int, max_tokens: int) -> None:
        content = body(seed, max_tokens) | {"stream": True}
        self._asking = start_asking(machines, f"{url}/v1/completions", content)
        assert self._asking.stdout is not None
        self._lines = self._asking.stdout
        self._first = self._lines.readline()

    def read(self) -> list[int]:
        with self._asking:
            lines = [self._first, *self._lines]
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return [token for choice in choices for token in choice["token_ids"]]


def stat(machines: Machines, url: str, name: str) -> float:
    lines = ask(machines, f"{url}/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"pelton_{name}{{"))


@functools.cache
def tokens_of_one_worker() -> list[list[int]]:
    """What each of `CASES` is to get."""
    with running_server(*MODEL) as alone:
        replies = [
            httpx.post(f"{alone.url}/v1/completions", json=body(*case), timeout=60).json()
            for case in CASES
        ]
    return [reply["choices"][0]["token_ids"] for reply in replies]


def make_key(machines: Machines) -> str:
    key = str(machines.folder / "key")
    subprocess.run([*PELTON, "worker", "--new-key", key], check=True, capture_output=True)
    return key


def read_url(machines: Machines, server: subprocess.Popen[str]) -> str:
    """Once the server is ready."""
    assert server.stdout is not None
    ready = _READY.search(server.stdout.readline())
    assert ready is not None, machines.log()
    return ready[1]


@pytest.mark.slow
def test_prefill_here_and_decode_there_until_the_cable_is_cut(machines: Machines) -> None:
    expected = tokens_of_one_worker()
    key = make_key(machines)
    listen = f"tcp://{HERE}:7000"
    join = (*PELTON, "worker", "--join", listen, "--worker-key", key)
    options = ("--prefill", "1", "--decode", "2")
    addresses = ("--host", HERE, "--port", "8000", "--listen-workers", listen)
    serve = serve_command(*MODEL, *options, *addresses, "--worker-key", key)
    with contextlib.ExitStack() as stack:

        def start(where: str, device: str, *command: str) -> subprocess.Popen[str]:
            process = machines.start(where, *command, device=device)
            stack.callback(end, process)
            return process

        server = start(machines.here, "cable-a", *serve)
        start(machines.here, "cable-a", *join, "--role", "prefill")
        start(machines.here, "cable-a", *join, "--role", "decode")
        start(machines.there, "cable-b", *join, "--role", "decode")
        url = read_url(machines, server)
        assert complete(machines, url, *CASES[0]) == expected[0], machines.log()
        assert stat(machines, url, "kv_pulls_total") == 1, machines.log()

        # Each machine decodes one of them when the other is cut off; then one decodes both.
        streams, workers = catch_streams(machines, url)
        ip("-n", machines.there, "addr", "del", f"{THERE}/24", "dev", "cable-b")
        for worker in workers:
            worker.resume()
        assert [stream.read() for stream in streams] == expected[1:3], machines.log()
        assert machines.log().count("event=migrate ") == 1, machines.log()
        assert machines.log().count("event=prefill_fallback") == 0, machines.log()


def catch_streams(machines: Machines, url: str) -> tuple[list[Stream], list[psutil.Process]]:
    """Two streams that have begun, and all workers, which stand still so that none ends."""
    while True:
        streams = [Stream(machines, url, *case) for case in CASES[1:3]]
        workers = find_processes("pelton.serving.worker", "tcp://10.77.31.")
        assert len(workers) == 3
        for worker in workers:
            worker.suspend()
        # The second answer comes after whatever they had sent before they stood still.
        counts = [json.loads(ask(machines, f"{url}/dashboard/data"))["num_live"] for _ in range(2)]
        if counts == [2, 2]:
            return streams, workers
        for worker in workers:
            worker.resume()
        for stream in streams:
            stream.read()


WITH_RAY = (
    *("env", "-u", "http_proxy", "-u", "https_proxy", "-u", "HTTP_PROXY", "-u", "HTTPS_PROXY"),
    *("RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={'5' * 32}", "RAY_USAGE_STATS_ENABLED=0"),
    "PYTHONUNBUFFERED=1",
)


def find_processes(*words: str) -> list[psutil.Process]:
    """Those whose commands have all the words."""
    return [
        process
        for process in psutil.process_iter()
        if all(any(word in part for part in command_of(process)) for word in words)
    ]


@pytest.mark.slow
def test_ray_places_workers_replaces_them_and_keeps_none(machines: Machines) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed (extra cluster)")
    head = f"{HERE}:6379"
    ray = (*WITH_RAY, sys.executable, "-m", "ray.scripts.scripts", "start", "--block")
    ray = (*ray, "--num-cpus", "1", "--object-store-memory", "80000000")
    ray = (*ray, "--include-log-monitor", "false")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray"))

        def start(where: str, device: str, *command: str) -> subprocess.Popen[str]:
            process = machines.start(where, *command, device=device)
            stack.callback(end, process)
            return process

        def start_node(where: str, device: str, *options: str) -> None:
            lines = start(where, device, *ray, *options).stdout
            assert lines is not None
            assert any("Ray runtime started" in line for line in lines), machines.log()

        start_node(
            *(machines.here, "cable-a", "--head", "--port", "6379"),
            *("--include-dashboard", "false", "--no-monitor", "--node-ip-address", HERE),
            *("--temp-dir", f"{folder}/a"),
        )
        start_node(
            *(machines.there, "cable-b", "--address", head),
            *("--node-ip-address", THERE, "--temp-dir", f"{folder}/b"),
        )
        expected = tokens_of_one_worker()
        options = ("--prefill", "1", "--decode", "1", "--port", "8000", "--launcher", "ray")
        serve = serve_command(*MODEL, *options, "--worker-key", make_key(machines))
        server = start(machines.here, "cable-a", *WITH_RAY, *serve, "--ray-address", head)
        url = read_url(machines, server)
        assert complete(machines, url, *CASES[0]) == expected[0], machines.log()
        assert stat(machines, url, "kv_pulls_total") == 1, machines.log()
        rows = json.loads(ask(machines, f"{url}/admin/workers"))["data"]
        hosts = {row["role"]: row["process"].split()[0] for row in rows}
        assert set(hosts.values()) == {HERE, THERE}

        # A worker's process, and the actor of the other one.
        (decode,) = find_processes("pelton.serving.worker", f"tcp://{hosts['decode']}:")
        (prefill,) = find_processes("pelton.serving.worker", f"tcp://{hosts['prefill']}:")
        decode.kill()
        prefill.parent().kill()

        def is_replaced() -> bool:
            time.sleep(0.3)
            workers = json.loads(ask(machines, f"{url}/dashboard/data"))["workers"]
            return all(w["state"] == "up" and w["generation"] == 2 for w in workers)

        wait_until(is_replaced)
        assert complete(machines, url, *CASES[3]) == expected[3], machines.log()
        assert stat(machines, url, "kv_pulls_total") == 1, machines.log()

        server.kill()
        wait_until(lambda: not find_processes("pelton.serving.worker", "tcp://10.77.31."))
        wait_until(lambda: not find_processes("ray::RayAgent"))
