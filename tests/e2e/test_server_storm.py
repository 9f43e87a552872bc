# SPDX-License-Identifier: Apache-2.0
"""Workers are killed and frozen while requests run: each ends with its tokens or a typed error."""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from server_process import ServerProcess, is_gone, running_server, wait_until

NUM_REQUESTS = 160
NUM_SEEDS = 8
NUM_TOKENS = 120
BLOWS = ["kill", "suspend", "kill", "kill", "suspend", "kill"]
TYPED = {"worker_lost", "unavailable"}


def body_of(number: int) -> dict[str, object]:
    return {
        "prompt": [1000 + number % 40] * 64,
        "max_tokens": NUM_TOKENS,
        "seed": number % NUM_SEEDS,
        "temperature": 1.0,
        "return_token_ids": True,
    }


def strike(server: ServerProcess, blow: str, chance: random.Random) -> None:
    workers = server.workers()
    if len(workers) > 1:
        victim = chance.choice(workers)
        getattr(victim, blow)()
        wait_until(lambda: is_gone(victim.pid))


@pytest.mark.slow
def test_a_storm_passes_and_leaves_nothing_behind() -> None:
    model = "stand-in:smollm2?scheduled=1&step_ms=5&max_num_requests=8"
    options = ("--workers", "3", "--worker-heartbeat-s", "0.5")
    chance = random.Random(7)
    with running_server(model, *options) as server, httpx.Client(timeout=60) as client:
        url = f"{server.url}/v1/completions"

        def tokens_of(reply: httpx.Response) -> list[int]:
            token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
            return token_ids

        def send(number: int) -> str:
            leaves = number % 5 == 4
            try:
                timeout = 0.05 * (number % 13) + 0.05 if leaves else 60
                reply = client.post(url, json=body_of(number), timeout=timeout)
            except httpx.TimeoutException:
                assert leaves, "a request hung"
                return "left"
            if reply.status_code == 200:
                assert len(tokens_of(reply)) == NUM_TOKENS
                assert tokens_of(reply) == expected[number % 40, number % NUM_SEEDS]
                return "ok"
            assert reply.json()["error"]["code"] in TYPED
            return "typed"

        kinds = {(n % 40, n % NUM_SEEDS): n for n in range(NUM_REQUESTS)}
        expected = {key: tokens_of(client.post(url, json=body_of(n))) for key, n in kinds.items()}
        frontend = psutil.Process(server.frontend.pid)
        num_fds = frontend.num_fds()
        with ThreadPoolExecutor(24) as pool:
            sent = [pool.submit(send, number) for number in range(NUM_REQUESTS)]
            for blow in BLOWS:
                time.sleep(0.7)
                strike(server, blow, chance)
            ends = Counter(future.result() for future in sent)
        assert ends["ok"] >= 0.6 * NUM_REQUESTS
        assert ends["left"] > 0
        wait_until(lambda: httpx.get(f"{server.url}/health").json()["status"] == "ok")
        wait_until(lambda: server.metrics()["pelton_requests_running"] == 0)
        metrics = server.metrics()
        assert metrics["pelton_requests_migrated_total"] > 0
        for name in ("requests_live", "requests_queued", "requests_waiting", "kv_blocks_used"):
            assert metrics[f"pelton_{name}"] == 0, name
        client.close()
        wait_until(lambda: frontend.num_fds() <= num_fds)
