# SPDX-License-Identifier: Apache-2.0
"""kv-aware routing between processes: who has a prompt gets it, and a dead worker has nothing."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, running_server, suspended, wait_until
from test_server_workers import complete, worker_of

STAND_IN = "stand-in:smollm2?scheduled=1&step_ms=1"
NUM_WORKERS = 3
BLOCK_SIZE = 16


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with running_server(STAND_IN, "--workers", str(NUM_WORKERS)) as process:
        yield process


def make_prompt(number: int, num_tokens: int = 10 * BLOCK_SIZE) -> list[int]:
    return [1000 + number] * num_tokens


def indexed_blocks(server: ServerProcess) -> dict[str, int]:
    metrics = server.worker_metrics()
    names = [f'pelton_kv_blocks_indexed{{worker="{worker}"}}' for worker in range(NUM_WORKERS)]
    return {str(worker): int(metrics[name]) for worker, name in enumerate(names)}


def wait_until_indexed(server: ServerProcess, num_blocks: int) -> None:
    wait_until(lambda: sum(indexed_blocks(server).values()) >= num_blocks)


def test_conversations_stay_where_their_beginning_is_cached(server: ServerProcess) -> None:
    homes = {}
    for number in range(6):
        reply = complete(server.url, prompt=make_prompt(number))
        homes[number] = worker_of(reply)
    wait_until_indexed(server, 6 * 10)
    assert len(set(homes.values())) == NUM_WORKERS
    for number in (3, 0, 5, 1, 4, 2):
        reply = complete(server.url, prompt=make_prompt(number, 14 * BLOCK_SIZE))
        assert worker_of(reply) == homes[number]
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 160
    metrics = server.metrics()
    assert metrics["pelton_cached_tokens_predicted_total"] == 6 * 160
    assert metrics["pelton_cached_tokens_total"] == 6 * 160
    newest = httpx.get(f"{server.url}/debug/route").json()["data"][-1]
    assert newest["policy"] == "kv-aware"
    assert newest["cached_tokens"] == 160
    assert set(newest["scores"]) == {"0", "1", "2"}


def test_a_killed_worker_has_nothing_and_gets_nothing(server: ServerProcess) -> None:
    for number in range(6):
        complete(server.url, prompt=make_prompt(number))
    wait_until_indexed(server, 6 * 10)
    before = indexed_blocks(server)
    server.workers()[0].kill()
    wait_until(lambda: 0 in indexed_blocks(server).values())
    after = indexed_blocks(server)
    (dead,) = [worker for worker, count in after.items() if not count]
    assert before[dead] > 0
    for number in range(6):
        reply = complete(server.url, prompt=make_prompt(number))
        assert reply.status_code == 200
        if worker_of(reply) == dead:  # back already, as another process
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_full_workers_make_newcomers_wait_in_order_and_refuse_who_would_be_late() -> None:
    model = "stand-in:smollm2?step_ms=10&max_num_requests=1"  # a slot and 8 places a worker
    with running_server(model, "--workers", "2") as server, ThreadPoolExecutor(70) as pool:

        def send(**fields: Any) -> Future[httpx.Response]:
            return pool.submit(complete, server.url, max_tokens=20, **fields)

        def wait_until_queued(count: int) -> None:
            wait_until(lambda: server.metrics()["pelton_requests_queued"] == count)

        with suspended(*server.workers()):
            replies = [send(priority=1) for _ in range(60)]
            wait_until_queued(60 - 2 * 9)
        # So many of each that the rates are known. Then the queue stands still.
        wait_until(lambda: all(num_finished(server, worker) >= 6 for worker in range(2)))
        with suspended(*server.workers()):
            # The second answer comes after whatever they had sent before.
            counts = [server.metrics()["pelton_requests_queued"] for _ in range(2)]
            num_queued = int(counts[-1])
            assert num_queued > 5
            urgent = send(priority=-1)
            wait_until_queued(num_queued + 1)
            late = complete(server.url, timeout_s=0.5, priority=2)
        assert late.status_code == 429
        assert late.json()["error"]["code"] == "deadline_unreachable"
        assert int(late.headers["retry-after"]) >= 1
        replies.append(urgent)
        assert {reply.result().status_code for reply in replies} == {200}
        routes = httpx.get(f"{server.url}/debug/route", timeout=60).json()["data"]
        ids = [route["request_id"] for route in routes]
        assert len(ids) - ids.index(urgent.result().json()["id"]) > num_queued
        wait_until_queued(0)


def num_finished(server: ServerProcess, worker: int) -> float:
    """Requests of 20 tokens."""
    return (
        server.worker_metrics()[f'pelton_worker_generation_tokens_total{{worker="{worker}"}}'] / 20
    )
