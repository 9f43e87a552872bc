# SPDX-License-Identifier: Apache-2.0
"""`pelton serve --prefill P --decode D` as processes: the same answers, whatever part dies."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server_process import (
    ServerProcess,
    catch_running,
    is_gone,
    running_server,
    serve_command,
    wait_until,
)

MODEL = (
    *("smollm2", "--random-weights", "smollm2-135m", "--layers", "2", "--dtype", "float32"),
    *("--device", "cpu", "--num-threads", "1", "--max-model-len", "2048", "--num-blocks", "400"),
    *("--max-num-requests", "4", "--max-num-batched-tokens", "16"),
)
BLOCK = 16
BLOCK_BYTES = 2 * 2 * BLOCK * 3 * 64 * 4
"""Two layers, keys and values, three heads of 64, float32."""
PREFILL, DECODE = "0", "1"
LONG = 1300


@contextmanager
def running(*options: str) -> Iterator[ServerProcess]:
    with running_server(*MODEL, *options) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Of all the tests: each has prompts of its own, which no other has put in a cache."""
    with running("--prefill", "1", "--decode", "1") as server:
        yield server


@pytest.fixture(scope="module")
def alone() -> Iterator[ServerProcess]:
    """One worker that does both."""
    with running() as server:
        yield server


def body(length: int, seed: int = 0, **fields: Any) -> dict[str, Any]:
    prompt = [300 + (seed * 7919 + i * i * 31) % 40000 for i in range(length)]
    sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return {"prompt": prompt, "return_token_ids": True, **sampling, **fields}


def complete(server: ServerProcess, length: int, seed: int = 0, **fields: Any) -> httpx.Response:
    request = body(length, seed, **fields)
    return httpx.post(f"{server.url}/v1/completions", json=request, timeout=90)


def answer(reply: httpx.Response) -> tuple[list[int], dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    content = reply.json()
    return content["choices"][0]["token_ids"], content["usage"]


def stat(server: ServerProcess, name: str, worker: str) -> float:
    return server.worker_metrics()[f'pelton_{name}{{worker="{worker}"}}']


def mapped_pools(process: psutil.Process) -> set[str]:
    """Other workers' KV in the process's memory; its own as well, for one that prefills."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "memfd:pelton-kv" in line}


def wait_until_idle(server: ServerProcess, *workers: str) -> None:
    names = ("kv_blocks_used", "kv_blocks_leased", "requests_running", "requests_waiting")

    def is_idle() -> bool:
        metrics = server.worker_metrics()
        found = [metrics[f'pelton_{n}{{worker="{w}"}}'] for n in names for w in workers]
        return not any(found)

    wait_until(is_idle)


def hold_prefill(server: ServerProcess) -> psutil.Process | None:
    """The prefilling worker, which stands still while KV of a request that was sent is on its way;
    None: that was over before it could be held."""
    num_pulls = stat(server, "kv_pulls_total", DECODE)

    def is_under_way() -> bool:  # which each worker says at its own time
        is_leased = stat(server, "kv_blocks_leased", PREFILL) > 0
        return is_leased and stat(server, "requests_receiving", DECODE) == 1

    def is_over() -> bool:
        return stat(server, "kv_pulls_total", DECODE) > num_pulls

    wait_until(lambda: is_under_way() or is_over())
    (prefill,) = (worker for worker in server.workers() if not is_decode(worker))
    prefill.suspend()
    complete(server, 1, max_tokens=1)  # with it the other says how things stand now
    if stat(server, "requests_receiving", DECODE) == 1:
        return prefill
    prefill.resume()
    return None


class Waiting:
    """A long prompt whose KV is on its way, from a prefilling worker that stands still."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        prefill = None
        while prefill is None:
            seed += 100
            self._pool = ThreadPoolExecutor(1)
            self._reply = self._pool.submit(complete, server, LONG, seed)
            prefill = hold_prefill(server)
        self.prefill, self.seed = prefill, seed

    def join(self) -> httpx.Response:
        reply = self._reply.result(90)
        self._pool.shutdown()
        return reply


def test_answers_and_usage_are_those_of_one_worker(
    server: ServerProcess, alone: ServerProcess
) -> None:
    lengths = (1, 79, 80, 81, 300, 300)
    names = (
        ("prefills_total", PREFILL),
        ("prefills_total", DECODE),
        ("kv_pulled_bytes_total", DECODE),
    )
    before = [stat(server, *name) for name in names]
    apart = [complete(server, length) for length in lengths]
    assert stat(server, "kv_pull_fallbacks_total", DECODE) == 0
    # The one that prefills says what it did a moment later.
    wait_until(lambda: stat(server, "prefills_total", PREFILL) >= before[0] + 2)
    wait_until_idle(server, PREFILL, DECODE)
    together = [complete(alone, length) for length in lengths]
    gained = [stat(server, *name) - start for name, start in zip(names, before, strict=True)]

    assert [answer(reply) for reply in apart] == [answer(reply) for reply in together]
    # One token is computed where it is decoded, and so is the end of what is cached there: prompts
    # of one seed begin alike.
    assert gained == [2, 0, (5 + (19 - 5)) * BLOCK_BYTES]
    assert "prefill=0" in apart[1].headers["x-pelton-route"]
    assert "prefill=" not in apart[0].headers["x-pelton-route"]


def test_killed_prefill_worker_costs_time_and_nothing_else(
    server: ServerProcess, alone: ServerProcess
) -> None:
    waiting = Waiting(server, seed=1)
    prefill, decode = sorted(server.workers(), key=is_decode)
    assert prefill == waiting.prefill
    before = mapped_pools(decode)
    assert len(before) == 1
    fallbacks = stat(server, "kv_pull_fallbacks_total", DECODE)
    prefill.kill()
    lost = answer(waiting.join())
    assert stat(server, "kv_pull_fallbacks_total", DECODE) == fallbacks + 1
    wait_until(lambda: is_gone(prefill.pid))
    wait_until(lambda: not mapped_pools(decode))
    wait_until(lambda: httpx.get(f"{server.url}/health").json()["status"] == "ok")
    prefills = stat(server, "prefills_total", PREFILL)

    reply = complete(server, LONG, seed=2)
    assert answer(reply)[0] != lost[0]
    assert "prefill=0" in reply.headers["x-pelton-route"]
    wait_until(lambda: stat(server, "prefills_total", PREFILL) == prefills + 1)
    assert len(mapped_pools(decode) - before) == 1
    assert re.search(rf"WARNING pid={decode.pid} event=prefill_fallback", server.log())
    wait_until_idle(server, PREFILL, DECODE)
    assert answer(complete(alone, LONG, waiting.seed)) == lost


def test_frozen_prefill_worker_costs_time_and_is_replaced() -> None:
    with running("--prefill", "1", "--decode", "1", "--worker-heartbeat-s", "1.5") as server:
        waiting = Waiting(server, seed=1)
        prefill, decode = sorted(server.workers(), key=is_decode)
        num_pulls = stat(server, "kv_pulls_total", DECODE)
        answer(waiting.join())
        assert stat(server, "kv_pull_fallbacks_total", DECODE) == 1
        wait_until(lambda: is_gone(prefill.pid))
        wait_until(lambda: not mapped_pools(decode))
        wait_until(lambda: httpx.get(f"{server.url}/health").json()["status"] == "ok")
        assert complete(server, LONG, seed=2).status_code == 200
        wait_until(lambda: stat(server, "kv_pulls_total", DECODE) == num_pulls + 1)
        wait_until_idle(server, PREFILL, DECODE)


def test_killed_decode_worker_leaves_no_lease(server: ServerProcess) -> None:
    waiting = Waiting(server, seed=3)
    decode = next(worker for worker in server.workers() if is_decode(worker))
    decode.kill()
    waiting.prefill.resume()
    lost = waiting.join()
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "worker_lost")
    wait_until_idle(server, PREFILL)
    wait_until(lambda: httpx.get(f"{server.url}/health").json()["status"] == "ok")
    assert complete(server, LONG, seed=4).status_code == 200
    wait_until_idle(server, PREFILL, DECODE)


def is_decode(worker: psutil.Process) -> bool:
    """The address ends with the worker's number and generation."""
    return worker.cmdline()[-1].split("-")[-2] == DECODE


def test_a_client_that_leaves_ends_the_prefill(server: ServerProcess) -> None:
    prefill, seed = None, 5
    while prefill is None:
        seed += 100
        client = HTTPConnection(server.url.removeprefix("http://"))
        client.request("POST", "/v1/completions", json.dumps(body(LONG, seed, stream=True)))
        prefill = hold_prefill(server)
    names = ("prefills_total", PREFILL), ("kv_pulls_total", DECODE)
    before = [stat(server, *name) for name in names]
    client.close()
    wait_until(lambda: stat(server, "requests_receiving", DECODE) == 0)
    prefill.resume()
    wait_until_idle(server, PREFILL, DECODE)
    assert [stat(server, *name) for name in names] == before
    assert complete(server, LONG, seed).status_code == 200


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--prefill", "1"), "--prefill and --decode belong together"),
        (("--prefill", "1", "--decode", "1", "--workers", "2"), "leave one of them out."),
    ],
)
def test_what_cannot_be_is_exit_code_2_and_one_sentence(
    options: tuple[str, ...], sentence: str
) -> None:
    done = subprocess.run(
        serve_command("stand-in:smollm2", "--port", "0", *options),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert sentence in done.stderr


def test_a_roll_of_both_roles_fails_no_request(alone: ServerProcess) -> None:
    lengths = (5, 40, 200, 400)
    expected = [answer(complete(alone, length, seed=30))[0] for length in lengths]
    with running("--prefill", "1", "--decode", "1") as server:
        old = server.workers()
        is_over = threading.Event()
        found: list[tuple[int, list[int]]] = []

        def send(place: int) -> None:
            while not is_over.is_set():
                found.append((place, answer(complete(server, lengths[place], seed=30))[0]))

        with ThreadPoolExecutor(len(lengths)) as pool:
            clients = [pool.submit(send, place) for place in range(len(lengths))]
            try:
                wait_until(lambda: len(found) >= 8)
                command = [sys.executable, "-m", "pelton.cli.main", "workers", "roll"]
                done = subprocess.run(
                    [*command, "--url", server.url, "--timeout-s", "0.2"],
                    capture_output=True, text=True, timeout=120,
                )  # fmt: skip
                num_found = len(found)
                wait_until(lambda: len(found) >= num_found + 8)
            finally:
                is_over.set()
            for client in clients:
                client.result()
        assert done.returncode == 0, done.stderr
        assert all(is_gone(process.pid) for process in old)
        assert found == [(place, expected[place]) for place, _ in found]
        roles = {row["role"] for row in httpx.get(f"{server.url}/admin/workers").json()["data"]}
        assert roles == {"prefill", "decode"}


def test_killed_decode_workers_requests_go_on_at_another() -> None:
    with running("--prefill", "1", "--decode", "2") as server:
        fields = {"max_tokens": 60}
        expected = [answer(complete(server, 100, seed, **fields))[0] for seed in range(4)]
        with ThreadPoolExecutor(4) as pool:
            workers, replies = catch_running(
                server,
                lambda: [pool.submit(complete, server, 100, seed, **fields) for seed in range(4)],
                lambda: stat(server, "requests_running", DECODE) >= 1,
            )
            for worker in workers:
                worker.kill() if is_decode(worker) else worker.resume()
            assert [answer(reply.result())[0] for reply in replies] == expected
        assert server.metrics()["pelton_requests_migrated_total"] >= 1
