# SPDX-License-Identifier: Apache-2.0
"""`pelton serve` as processes: start, refusal to start, death of either child, drain, clean end."""

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import (
    ServerProcess,
    command_of,
    is_gone,
    running_server,
    serve_command,
    suspended,
    wait_until,
)

MODEL = "stand-in:smollm2?step_ms=5"
LONG = {"prompt": "a", "max_tokens": 8000}


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with running_server(MODEL) as process:
        yield process


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(serve_command(*arguments), capture_output=True, text=True, timeout=60)


class Streaming:
    """One streamed request, read on a thread."""

    def __init__(self, url: str, *, has_begun: bool = True, **fields: Any) -> None:
        """`has_begun`: made once its first event has come."""
        self.events: list[dict[str, Any]] = []
        self.first = threading.Event()
        self._url, self._body = url, {**LONG, **fields, "stream": True}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert not has_begun or self.first.wait(60)

    def _read(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=60) as r:
            for line in r.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line.removeprefix("data: ")))
                    self.first.set()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def complete(url: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 3, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_port_in_use_is_exit_code_2_and_one_sentence() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = run_serve(MODEL, "--port", port)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: Cannot listen on 127.0.0.1 port {port}: Address already in use; choose another"
        " with --host and --port."
    ]


def test_unknown_model_is_exit_code_2_and_one_sentence() -> None:
    done = run_serve("no-such-model", "--port", "0")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "no-such-model" in errors[0]
    assert "Traceback" not in done.stderr


def test_broken_file_is_exit_code_2(tmp_path: Path) -> None:
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    done = run_serve(str(broken), "--port", "0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_killed_worker_gives_an_error_event_and_is_replaced(server: ServerProcess) -> None:
    streaming = Streaming(server.url)
    old = server.worker
    old.kill()
    streaming.join()
    assert streaming.events[-1]["error"]["code"] == "worker_lost"
    server.wait_until_ready()
    assert complete(server.url).status_code == 200
    assert server.worker.pid != old.pid
    assert server.metrics()["pelton_worker_generation"] == 2


def test_whole_reply_of_a_killed_worker_is_503(server: ServerProcess) -> None:
    replies: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: replies.append(complete(server.url, max_tokens=8000)))
    thread.start()
    wait_until(lambda: server.metrics()["pelton_requests_running"] == 1)
    server.worker.kill()
    thread.join(60)
    assert replies[0].status_code == 503
    assert replies[0].json()["error"]["code"] == "worker_lost"


def test_stopped_worker_counts_as_hung_and_is_replaced() -> None:
    with running_server(MODEL, "--worker-timeout-s", "2") as server:
        streaming = Streaming(server.url)
        old = server.worker
        old.suspend()
        streaming.join()
        assert streaming.events[-1]["error"]["code"] == "worker_lost"
        wait_until(lambda: is_gone(old.pid))
        server.wait_until_ready()
        assert complete(server.url).status_code == 200


def test_killed_frontend_is_replaced_and_its_requests_are_cancelled(server: ServerProcess) -> None:
    old = server.frontend
    with send_request(server, LONG):
        wait_until(lambda: server.metrics()["pelton_requests_running"] == 1)
        old.kill()
        wait_until(lambda: is_gone(old.pid) and is_serving(server.url))
    assert server.frontend.pid != old.pid
    assert complete(server.url).status_code == 200
    wait_until(lambda: server.metrics()["pelton_requests_running"] == 0)


def send_request(server: ServerProcess, fields: dict[str, Any]) -> socket.socket:
    """A request whose reply nobody reads."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    data = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.slow
def test_worker_that_keeps_dying_ends_the_server() -> None:
    with running_server(MODEL) as server:
        for _ in range(8):
            if server.process.poll() is not None:
                break
            kill_worker(server)
        assert server.process.wait(60) == 1
        assert "Worker 0 died 6 times" in server.log()


def kill_worker(server: ServerProcess) -> None:
    """Kills the worker that is there, and waits until there is another or the server ended."""
    try:
        old = server.worker
        old.kill()
    except (ValueError, ProcessLookupError):
        return
    wait_until(
        lambda: (
            server.process.poll() is not None
            or any(
                "pelton.serving.worker" in command_of(child) and child.pid != old.pid
                for child in server.children()
                if not is_gone(child.pid)
            )
        )
    )


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    with running_server(MODEL) as server:
        with suspended(server.worker):  # so that the stream cannot end meanwhile
            streaming = Streaming(server.url, has_begun=False, max_tokens=20)
            wait_until(lambda: server.metrics()["pelton_requests_live"] == 1)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: complete(server.url).status_code == 503)
            assert httpx.get(f"{server.url}/ready").status_code == 503
        streaming.join()
        assert streaming.events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(60) == 0


def test_drain_ends_what_does_not_finish_in_time_with_a_typed_error() -> None:
    with running_server(MODEL, "--drain-timeout-s", "0.2") as server:
        streaming = Streaming(server.url)
        server.process.send_signal(signal.SIGINT)
        streaming.join()
        assert streaming.events[-1]["error"]["code"] == "unavailable"
        assert server.process.wait(60) == 0


def test_second_signal_ends_at_once() -> None:
    with (
        running_server(MODEL) as server,
        httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=60
        ) as running,
    ):
        assert running.status_code == 200
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: complete(server.url).status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_killed_supervisor_leaves_nothing_behind(temporary: str) -> None:
    with running_server(MODEL) as server:
        children = [child.pid for child in server.children()]
        assert len(children) == 2
        os.kill(server.process.pid, signal.SIGKILL)
        for pid in children:
            wait_until(lambda pid=pid: is_gone(pid))
    assert os.listdir(temporary) == []


def test_frontend_never_imports_torch(server: ServerProcess) -> None:
    maps = Path(f"/proc/{server.frontend.pid}/maps").read_text()
    assert "libtorch" not in maps


def test_a_stream_flows_while_an_endless_template_is_refused(server: ServerProcess) -> None:
    """The template compares lists of 2 ** 60 leaves inside one operation of the interpreter."""
    template = (
        "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
        "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}"
    )
    messages = [{"role": "user", "content": "a"}]
    body = {"messages": messages, "chat_template": template, "max_tokens": 2}
    streaming = Streaming(server.url)
    old = server.frontend.pid
    num_before = len(streaming.events)
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert len(streaming.events) > num_before
    assert reply.status_code == 400
    assert "takes more than 1 s" in reply.json()["error"]["message"]
    server.worker.kill()
    streaming.join()
    assert server.frontend.pid == old


def is_serving(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
