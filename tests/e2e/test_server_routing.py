# SPDX-License-Identifier: Apache-2.0
"""kv-aware routing between processes: who has a prompt gets it, and a dead worker has nothing."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, running_server, wait_until
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
    model = "stand-in:smollm2?step_ms=20&max_num_requests=1"  # a slot and 8 places a worker
    with running_server(model, "--workers", "2") as server, ThreadPoolExecutor(60) as pool:
        ends: dict[str, float] = {}

        def send(name: str, **fields: Any) -> httpx.Response:
            reply = complete(server.url, max_tokens=20, **fields)
            ends[name] = time.monotonic()
            return reply

        def queued() -> float:
            return server.metrics()["pelton_requests_queued"]

        replies: dict[str, Future[httpx.Response]] = {
            f"low {i}": pool.submit(send, f"low {i}", priority=1) for i in range(40)
        }
        wait_until(lambda: queued() >= 12)
        replies["urgent"] = pool.submit(send, "urgent", priority=-1)
        wait_until(lambda: 5 <= queued() < 12)  # and rates are known
        late = complete(server.url, timeout_s=0.5, priority=2)
        assert late.status_code == 429
        assert late.json()["error"]["code"] == "deadline_unreachable"
        assert int(late.headers["retry-after"]) >= 1
        assert {reply.result().status_code for reply in replies.values()} == {200}
        assert sum(end > ends["urgent"] for end in ends.values()) > 5
        assert queued() == 0
