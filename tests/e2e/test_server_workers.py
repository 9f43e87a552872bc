# SPDX-License-Identifier: Apache-2.0
"""`pelton serve --workers N` as processes: the same answers, and no request ends with a worker."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    suspended,
    wait_until,
)

STAND_IN = "stand-in:smollm2?step_ms=5"
PROMPTS = ["Once upon a time", "The capital of France is", "def add(a, b):", "1, 2, 3,"]


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with running_server(STAND_IN, "--workers", "2", "--router", "round-robin") as process:
        yield process


LONG = {"max_tokens": 400, "seed": 5, "return_token_ids": True}


def complete(url: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 3, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def worker_of(reply: httpx.Response) -> str:
    return reply.headers["x-pelton-route"].split(";")[0].removeprefix("worker=")


class TwoRunning:
    """A request on each of two workers, which stand still until the test goes on with them."""

    def __init__(self, server: ServerProcess) -> None:
        self._pool = ThreadPoolExecutor(2)
        self.workers, self._replies = catch_running(
            server,
            lambda: [self._pool.submit(complete, server.url, **LONG) for _ in range(2)],
            lambda: server.metrics()["pelton_requests_running"] == 2,
        )

    def join(self) -> dict[str, httpx.Response]:
        """By worker."""
        replies = [reply.result(60) for reply in self._replies]
        self._pool.shutdown()
        return {worker_of(reply): reply for reply in replies}


def wait_until_both_serve(server: ServerProcess) -> None:
    def has_all() -> bool:
        reply = httpx.get(f"{server.url}/ready", timeout=10)
        return reply.status_code == 200 and reply.json()["status"] == "ready"

    wait_until(has_all)
    assert {worker_of(complete(server.url)) for _ in range(4)} == {"0", "1"}


@pytest.mark.slow
def test_two_workers_give_the_tokens_of_one() -> None:
    fields = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    options = ("--dtype", "float32", "--device", "cpu", "--max-model-len", "512")
    tokens: list[list[list[int]]] = []
    for workers in ("1", "2"):
        with running_server(
            "smollm2", *options, "--workers", workers, "--router", "round-robin"
        ) as server:
            replies = [complete(server.url, **{**fields, "prompt": p}) for p in PROMPTS]
            tokens.append([reply.json()["choices"][0]["token_ids"] for reply in replies])
            assert len({worker_of(reply) for reply in replies}) == int(workers)
    assert tokens[0] == tokens[1]


def test_the_routes_are_told(server: ServerProcess) -> None:
    replies = [complete(server.url) for _ in range(4)]
    assert {worker_of(reply) for reply in replies} == {"0", "1"}
    routes = httpx.get(f"{server.url}/debug/route").json()["data"]
    assert [route["worker"] for route in routes] == [worker_of(reply) for reply in replies]
    metrics = server.worker_metrics()
    assert metrics['pelton_requests_routed_total{worker="0"}'] == 2
    assert metrics['pelton_requests_routed_total{worker="1"}'] == 2


def assert_unharmed(server: ServerProcess, replies: dict[str, httpx.Response]) -> None:
    assert [reply.status_code for reply in replies.values()] == [200, 200]
    expected = complete(server.url, **LONG).json()["choices"][0]["token_ids"]
    assert len(expected) == 400
    for reply in replies.values():
        assert reply.json()["choices"][0]["token_ids"] == expected
        assert reply.json()["usage"]["completion_tokens"] == 400
    assert server.metrics()["pelton_requests_migrated_total"] == 1


def test_killed_workers_requests_go_on_elsewhere_and_it_comes_back(server: ServerProcess) -> None:
    running = TwoRunning(server)
    running.workers[0].kill()
    running.workers[1].resume()
    assert_unharmed(server, running.join())
    wait_until_both_serve(server)
    assert server.metrics()["pelton_worker_generation"] == 3


@pytest.mark.parametrize("option", ["--worker-heartbeat-s", "--worker-timeout-s"])
def test_stopped_workers_requests_go_on_elsewhere_and_it_is_replaced(option: str) -> None:
    options = ("--workers", "2", "--router", "round-robin", option, "2")
    with running_server(STAND_IN, *options) as server:
        running = TwoRunning(server)
        living, old = running.workers
        living.resume()
        assert_unharmed(server, running.join())
        wait_until(lambda: is_gone(old.pid))
        wait_until_both_serve(server)


def test_a_main_process_that_stands_still_stops_no_request_and_restarts_nothing() -> None:
    options = ("--workers", "2", "--router", "round-robin", "--worker-heartbeat-s", "1.5")
    with running_server(STAND_IN, *options) as server:
        workers = [worker.pid for worker in server.workers()]
        with suspended(psutil.Process(server.process.pid)):
            replies = [complete(server.url) for _ in range(4)]
            time.sleep(3.2)  # after two heartbeats a worker that is silent is replaced
        assert {reply.status_code for reply in replies} == {200}
        assert complete(server.url, **LONG).status_code == 200
        assert [worker.pid for worker in server.workers()] == workers


def test_without_migration_a_killed_worker_takes_only_its_own_requests() -> None:
    options = ("--workers", "2", "--router", "round-robin", "--max-worker-losses", "0")
    with running_server(STAND_IN, *options) as server:
        running = TwoRunning(server)
        running.workers[0].kill()
        running.workers[1].resume()
        replies = running.join().values()
        assert sorted(reply.status_code for reply in replies) == [200, 503]
        (lost,) = [reply for reply in replies if reply.status_code == 503]
        assert lost.json()["error"]["code"] == "worker_lost"


@pytest.mark.slow
def test_migrated_requests_of_a_real_model_have_the_same_tokens() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    bodies: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "n": 2},
        {"temperature": 0, "frequency_penalty": 0.8, "repetition_penalty": 1.1},
        {"temperature": 0, "stop": ["zzzz", "qqqq"], "min_tokens": 20},
        {"temperature": 0, "guided_json": schema},
    ]
    bodies = [
        {"prompt": PROMPTS[0], "max_tokens": 32, "return_token_ids": True, **b} for b in bodies
    ]
    options = ("--dtype", "float32", "--device", "cpu", "--max-model-len", "512")
    with running_server("smollm2", *options, "--workers", "2") as server:

        def tokens_of(reply: httpx.Response) -> list[list[int]]:
            assert reply.status_code == 200, reply.text
            return [choice["token_ids"] for choice in reply.json()["choices"]]

        expected = [tokens_of(complete(server.url, **body)) for body in bodies]
        with ThreadPoolExecutor(len(bodies)) as pool:
            name, tokens = "pelton_requests_running", "pelton_worker_generation_tokens_total"
            num_before = server.metrics()[tokens]

            def are_running() -> bool:
                metrics = server.metrics()
                return metrics[name] >= len(bodies) and metrics[tokens] >= num_before + 20

            workers, replies = catch_running(
                server,
                lambda: [pool.submit(complete, server.url, **body) for body in bodies],
                are_running,
            )
            counts = server.worker_metrics()
            has_most = counts[f'{name}{{worker="1"}}'] > counts[f'{name}{{worker="0"}}']
            workers.pop(has_most).kill()
            workers[0].resume()
            assert [tokens_of(reply.result()) for reply in replies] == expected
        assert server.metrics()["pelton_requests_migrated_total"] > 0


def test_a_server_without_one_of_its_workers_is_degraded(server: ServerProcess) -> None:
    degraded = {"status": "degraded", "workers": 2, "workers_up": 1}
    with suspended(psutil.Process(server.process.pid)):  # so that nothing is replaced
        server.workers()[0].kill()
        wait_until(lambda: httpx.get(f"{server.url}/health", timeout=10).json() == degraded)
    wait_until_both_serve(server)


def test_drain_finishes_what_runs_on_every_worker(temporary: str) -> None:
    with running_server(STAND_IN, "--workers", "2", "--router", "round-robin") as server:
        running = TwoRunning(server)
        children = [child.pid for child in psutil.Process(server.process.pid).children()]
        server.process.send_signal(signal.SIGINT)
        for worker in running.workers:
            worker.resume()
        replies = running.join()
        assert [reply.status_code for reply in replies.values()] == [200, 200]
        assert server.process.wait(60) == 0
        assert len(children) == 3
        assert all(is_gone(pid) for pid in children)
    assert os.listdir(temporary) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--workers", "0"), "--workers must be between 1 and 64, got 0."),
        (("--workers", "10000"), "--workers must be between 1 and 64, got 10000."),
    ],
)
def test_what_cannot_be_is_exit_code_2_and_one_sentence(
    options: tuple[str, ...], sentence: str
) -> None:
    done = subprocess.run(
        serve_command(STAND_IN, "--port", "0", *options),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(sentence)


def test_the_first_worker_that_cannot_start_ends_the_start(temporary: str) -> None:
    done = subprocess.run(
        serve_command("stand-in:smollm2?no_such_option=1", "--port", "0", "--workers", "3"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "no_such_option" in errors[0]
    assert os.listdir(temporary) == []
