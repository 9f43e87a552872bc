# SPDX-License-Identifier: Apache-2.0
"""A server with a KV pool too small for what is asked of it."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from server_process import ServerProcess, running_server, suspended, wait_until

from conftest import TinyLlama

BEGINNINGS = (
    "Once upon a time",
    "The sea is",
    "To bake bread you need",
    "A computer can",
    "In 1905",
)
MAX_TOKENS = 64
# 8 usable blocks of 16 tokens: two requests at their end, five at their beginning.
OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "128", "--num-blocks", "9"),
    *("--max-num-requests", "5", "--no-prefix-cache"),
)


def complete(server: ServerProcess, prompt: str) -> list[int]:
    body: Any = {
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return token_ids


def test_preempted_requests_complete_with_the_tokens_they_have_alone(tiny_llama: TinyLlama) -> None:
    with running_server(str(tiny_llama.single), *OPTIONS) as server:
        alone = [complete(server, prompt) for prompt in BEGINNINGS]
        assert server.metrics()["pelton_preemptions_total"] == 0
        with ThreadPoolExecutor(len(BEGINNINGS)) as pool:
            with suspended(server.worker):  # until all are there
                replies = pool.map(lambda prompt: complete(server, prompt), BEGINNINGS)
                wait_until(lambda: server.metrics()["pelton_requests_live"] == len(BEGINNINGS))
            together = list(replies)
        assert together == alone
        assert all(len(tokens) == MAX_TOKENS for tokens in together)
        wait_until(lambda: server.metrics()["pelton_requests_running"] == 0)
        metrics = server.metrics()
        assert metrics["pelton_preemptions_total"] >= 3
        assert metrics["pelton_kv_blocks_used"] == 0
