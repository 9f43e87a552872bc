# SPDX-License-Identifier: Apache-2.0
"""Workers on two machines: network namespaces, joined by a cable that can be cut."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import running_server, serve_command

MODEL = (
    *("smollm2", "--random-weights", "smollm2-135m", "--layers", "2", "--dtype", "float32"),
    *("--device", "cpu", "--num-threads", "1", "--max-model-len", "2048", "--num-blocks", "400"),
    *("--max-num-requests", "4", "--max-num-batched-tokens", "64"),
)
CASES = ((0, 8), (1, 400), (2, 400))
"""Seed of the prompt, tokens to generate."""
HERE, THERE = "10.77.31.1", "10.77.31.2"
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


@pytest.mark.slow
def test_prefill_here_and_decode_there_until_the_cable_is_cut(machines: Machines) -> None:
    with running_server(*MODEL) as alone:
        tokens = [
            httpx.post(f"{alone.url}/v1/completions", json=body(*case), timeout=60).json()
            for case in CASES
        ]
    expected = [reply["choices"][0]["token_ids"] for reply in tokens]
    key = machines.folder / "key"
    pelton = (sys.executable, "-m", "pelton.cli.main")
    subprocess.run([*pelton, "worker", "--new-key", str(key)], check=True, capture_output=True)
    listen = f"tcp://{HERE}:7000"
    join = (*pelton, "worker", "--join", listen, "--worker-key", str(key))
    options = ("--prefill", "1", "--decode", "2")
    addresses = ("--host", HERE, "--port", "8000", "--listen-workers", listen)
    serve = serve_command(*MODEL, *options, *addresses, "--worker-key", str(key))
    with contextlib.ExitStack() as stack:

        def start(where: str, device: str, *command: str) -> subprocess.Popen[str]:
            process = machines.start(where, *command, device=device)
            stack.callback(end, process)
            return process

        server = start(machines.here, "cable-a", *serve)
        start(machines.here, "cable-a", *join, "--role", "prefill")
        start(machines.here, "cable-a", *join, "--role", "decode")
        start(machines.there, "cable-b", *join, "--role", "decode")
        assert server.stdout is not None
        ready = _READY.search(server.stdout.readline())
        assert ready is not None, machines.log()
        url = ready[1]
        assert complete(machines, url, *CASES[0]) == expected[0], machines.log()
        assert stat(machines, url, "kv_pulls_total") == 1, machines.log()

        # Each machine decodes one of them when the other is cut off; then one decodes both.
        streams = [Stream(machines, url, *case) for case in CASES[1:]]
        ip("-n", machines.there, "addr", "del", f"{THERE}/24", "dev", "cable-b")
        assert [stream.read() for stream in streams] == expected[1:], machines.log()
        assert machines.log().count("event=migrate ") == 1, machines.log()
        assert machines.log().count("event=prefill_fallback") == 0, machines.log()
