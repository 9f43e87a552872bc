# SPDX-License-Identifier: Apache-2.0
"""Workers and frontends of a running server that come, go and are replaced: as processes."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
from server_process import ServerProcess, command_of, is_gone, running_server, wait_until

STAND_IN = "stand-in:smollm2?step_ms=5"


def pelton_workers(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pelton.cli.main", "workers", *arguments]
    return subprocess.run(
        [*command, "--url", server.url], capture_output=True, text=True, timeout=120
    )


def list_workers(server: ServerProcess) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = httpx.get(f"{server.url}/admin/workers").json()["data"]
    return rows


class ConstantStream:
    """Requests one after the other on each of some connections, until it is left; every third
    outlasts the drain of its worker."""

    def __init__(self, server: ServerProcess, num_clients: int = 4) -> None:
        self.failures: list[str] = []
        self.num_done = 0
        self._url = f"{server.url}/v1/completions"
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(n,)) for n in range(num_clients)]

    def _send(self, first: int) -> None:
        with httpx.Client(timeout=60) as client:
            for number in itertools.count(first):
                if self._is_over.is_set():
                    return
                max_tokens = 300 if number % 3 == 0 else 10
                body = {"prompt": "a", "max_tokens": max_tokens, "return_token_ids": True}
                reply = client.post(self._url, json=body)
                if reply.status_code != 200:
                    self.failures.append(reply.text)
                elif len(reply.json()["choices"][0]["token_ids"]) != max_tokens:
                    self.failures.append("tokens are missing")
                self.num_done += 1

    def __enter__(self) -> "ConstantStream":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)


def test_a_roll_fails_no_request() -> None:
    with running_server(STAND_IN, "--workers", "2") as server:
        old = server.workers()
        with ConstantStream(server) as stream:
            wait_until(lambda: stream.num_done >= 8)
            done = pelton_workers(server, "roll", "--timeout-s", "0.2")
            assert done.returncode == 0, done.stderr
            num_done = stream.num_done
            wait_until(lambda: stream.num_done >= num_done + 8)
            added = pelton_workers(server, "add")
            assert added.returncode == 0, added.stderr
            number = str(list_workers(server)[0]["worker"])
            drained = pelton_workers(server, "drain", number, "--timeout-s", "0")
            assert drained.returncode == 0, drained.stderr
        assert stream.failures == []
        assert all(is_gone(process.pid) for process in old)
        listed = pelton_workers(server, "list")
        assert (listed.returncode, listed.stdout.count("ready")) == (0, 2), listed.stdout
        assert [row["phase"] for row in list_workers(server)] == ["ready", "ready"]
        assert server.metrics()["pelton_requests_migrated_total"] > 0


def test_bad_input_is_exit_code_2_and_a_sentence() -> None:
    with running_server(STAND_IN) as server:
        for arguments, sentence in [
            (("drain", "0"), "only one that can decode"),
            (("drain", "5"), "There is no worker 5"),
            (("add", "--role", "decode"), "give role mixed"),
        ]:
            done = pelton_workers(server, *arguments)
            assert done.returncode == 2, done
            assert sentence in done.stderr


def frontends_of(server: ServerProcess) -> list[psutil.Process]:
    found = [c for c in server.children() if not is_gone(c.pid)]
    return [c for c in found if "pelton.serving.http.main" in command_of(c)]


def test_a_killed_frontend_takes_only_its_own_connections() -> None:
    options = ("--workers", "2", "--frontends", "2", "--worker-heartbeat-s", "1.5")
    with ExitStack() as opened, running_server(STAND_IN, *options) as server:
        assert len(frontends_of(server)) == 2
        # Connections until each frontend holds three: which one takes one is the kernel's to say.
        clients: dict[int, list[httpx.Client]] = defaultdict(list)
        while len(clients) < 2 or min(map(len, clients.values())) < 3:
            limits = httpx.Limits(max_connections=1)
            client = opened.enter_context(httpx.Client(timeout=60, limits=limits))
            client.get(f"{server.url}/health").raise_for_status()
            clients[owner_of(server, client)].append(client)
            assert sum(map(len, clients.values())) < 200
        dying, living = sorted(clients)
        outcomes: dict[int, list[int]] = {dying: [], living: []}

        def send(pid: int, client: httpx.Client) -> None:
            # Those that are to be cut off would take 40 s, and nobody waits for that.
            max_tokens = 8000 if pid == dying else 600
            body = {"prompt": "a", "max_tokens": max_tokens, "return_token_ids": True}
            try:
                reply = client.post(f"{server.url}/v1/completions", json=body)
                tokens = reply.json()["choices"][0]["token_ids"]
                outcomes[pid].append(len(tokens))
            except httpx.TransportError:
                outcomes[pid].append(-1)

        threads = [
            threading.Thread(target=send, args=(pid, client))
            for pid in (dying, living)
            for client in clients[pid][:2]
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: num_running(server, clients[living][2]) == 4 or bool(outcomes[living]))
        os.kill(dying, signal.SIGKILL)
        # The workers give back what the dead one's requests held; the others' go on.
        wait_until(lambda: num_running(server, clients[living][2]) <= 2, 20.0)
        for thread in threads:
            thread.join(60)
        assert outcomes == {dying: [-1, -1], living: [600, 600]}
        wait_until(lambda: len(frontends_of(server)) == 2)
        wait_until(lambda: server.metrics()['pelton_frontend_up{frontend="0"}'] == 1)
        wait_until(lambda: server.metrics()['pelton_frontend_up{frontend="1"}'] == 1)
        wait_until(lambda: server.metrics()["pelton_kv_blocks_used"] == 0)
        # One that stands still keeps nobody waiting: a roll is done by the other.
        os.kill(frontends_of(server)[0].pid, signal.SIGSTOP)
        with ConstantStream(server) as stream:
            assert pelton_workers(server, "roll", "--timeout-s", "0.2").returncode == 0
        assert stream.failures == []


def num_running(server: ServerProcess, client: httpx.Client) -> int:
    rows = client.get(f"{server.url}/admin/workers").json()["data"]
    return sum(row["num_running"] for row in rows)


def owner_of(server: ServerProcess, client: httpx.Client) -> int:
    """The frontend that holds the other end of the client's connection."""
    connection = client._transport._pool.connections[0]._connection  # type: ignore[attr-defined]
    client_port = connection._network_stream.get_extra_info("client_addr")[1]
    for process in frontends_of(server):
        if any(c.raddr and c.raddr.port == client_port for c in process.net_connections()):
            return process.pid
    raise AssertionError("no frontend holds the connection")
