# SPDX-License-Identifier: Apache-2.0
"""A server as anybody would run it, and requests as a client sees them."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 40.0
_READY = re.compile(r"Ready at (http://\S+) ")


@dataclass(frozen=True, slots=True)
class Answer:
    worker: str
    ttft_s: float
    took_s: float
    """Until the last token."""
    num_prompt_tokens: int
    num_cached_tokens: int
    token_ids: list[int]

    @property
    def tpot_s(self) -> float:
        return (self.took_s - self.ttft_s) / max(len(self.token_ids) - 1, 1)


@contextmanager
def running_server(model: str, options: list[str]) -> Iterator[str]:
    """The address of `pelton serve MODEL OPTIONS`, whose warnings go to this process's stderr."""
    command = [sys.executable, "-m", "pelton.cli.main", "serve", model, "--port", "0"]
    command += ["--log-level", "warning", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    too_late = threading.Timer(START_TIMEOUT_S, process.terminate)
    too_late.start()
    try:
        assert process.stdout is not None
        ready = _READY.search(process.stdout.readline())
        too_late.cancel()
        if ready is None:
            raise SystemExit(f"the server did not start within {START_TIMEOUT_S:.0f} s, or failed")
        yield ready[1]
        if process.poll() is not None:
            raise SystemExit(f"the server ended by itself with {process.returncode}")
    finally:
        too_late.cancel()
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def make_client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    return httpx.AsyncClient(base_url=url, timeout=600, limits=limits)


async def ask(client: httpx.AsyncClient, prompt: list[int], num_tokens: int) -> Answer:
    """A greedy stream of exactly so many tokens."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    sent_s, first_s, usage = time.perf_counter(), 0.0, dict[str, Any]()
    token_ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"status {reply.status_code}: {(await reply.aread()).decode()}")
        worker = reply.headers["x-pelton-route"].split(";")[0].removeprefix("worker=")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                first_s = first_s or time.perf_counter()
                last_s = time.perf_counter()
                token_ids += choice.get("token_ids") or []
            usage = event.get("usage") or usage
    assert len(token_ids) == num_tokens, f"{len(token_ids)} of {num_tokens} tokens"
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(worker, first_s - sent_s, last_s - sent_s, len(prompt), cached, token_ids)
