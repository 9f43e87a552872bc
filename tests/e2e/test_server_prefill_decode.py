# SPDX-License-Identifier: Apache-2.0
"""`pelton serve --prefill P --decode D` as processes: the same answers, whatever part dies."""

import json
import re
import subprocess
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


class Waiting:
    """A long prompt whose KV is on its way."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self.reply: httpx.Response | None = None
        self._thread = threading.Thread(target=self._send, args=(server, seed))
        self._thread.start()
        # Each worker says so at its own time.
        wait_until(
            lambda: (
                stat(server, "kv_blocks_leased", PREFILL) > 0
                and stat(server, "requests_receiving", DECODE) == 1
            )
        )

    def _send(self, server: ServerProcess, seed: int) -> None:
        self.reply = complete(server, LONG, seed)

    def join(self) -> httpx.Response:
        self._thread.join(90)
        assert self.reply is not None
        return self.reply


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
    gained = [stat(server, *name) - start for name, start in zip(names, before, strict=True)]
    assert stat(server, "kv_pull_fallbacks_total", DECODE) == 0
    wait_until_idle(server, PREFILL, DECODE)
    together = [complete(alone, length) for length in lengths]

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
    assert answer(complete(alone, LONG, seed=1)) == lost


def test_frozen_prefill_worker_costs_time_and_is_replaced() -> None:
    with running("--prefill", "1", "--decode", "1", "--worker-heartbeat-s", "1") as server:
        waiting = Waiting(server, seed=1)
        prefill = next(worker for worker in server.workers() if not is_decode(worker))
        decode = next(worker for worker in server.workers() if is_decode(worker))
        prefill.suspend()
        answer(waiting.join())
        assert stat(server, "kv_pull_fallbacks_total", DECODE) == 1
        wait_until(lambda: is_gone(prefill.pid))
        wait_until(lambda: not mapped_pools(decode))
        wait_until(lambda: httpx.get(f"{server.url}/health").json()["status"] == "ok")
        assert complete(server, LONG, seed=2).status_code == 200
        wait_until(lambda: stat(server, "kv_pulls_total", DECODE) == 1)
        wait_until_idle(server, PREFILL, DECODE)


def test_killed_decode_worker_leaves_no_lease(server: ServerProcess) -> None:
    waiting = Waiting(server, seed=3)
    decode = next(worker for worker in server.workers() if is_decode(worker))
    decode.kill()
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
    names = ("prefills_total", PREFILL), ("kv_pulls_total", DECODE)
    before = [stat(server, *name) for name in names]
    client = HTTPConnection(server.url.removeprefix("http://"))
    client.request("POST", "/v1/completions", json.dumps(body(LONG, seed=5, stream=True)))
    wait_until(lambda: stat(server, "kv_blocks_leased", PREFILL) > 0)
    client.close()
    wait_until_idle(server, PREFILL, DECODE)
    assert [stat(server, *name) for name in names] == before
    assert complete(server, LONG, seed=5).status_code == 200


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


def test_killed_decode_workers_requests_go_on_at_another() -> None:
    with running("--prefill", "1", "--decode", "2") as server:
        fields = {"max_tokens": 60}
        expected = [answer(complete(server, 100, seed, **fields))[0] for seed in range(4)]
        with ThreadPoolExecutor(4) as pool:
            replies = [pool.submit(complete, server, 100, seed, **fields) for seed in range(4)]
            wait_until(lambda: stat(server, "requests_running", DECODE) >= 1)
            server.workers()[int(DECODE)].kill()
            assert [answer(reply.result())[0] for reply in replies] == expected
        assert server.metrics()["pelton_requests_migrated_total"] >= 1
