# SPDX-License-Identifier: Apache-2.0
"""A server whose latencies are known: it speaks OpenAI's streamed shape and computes nothing.

    python fixed_rate_server.py '{"ttft_ms": 50, "tpot_ms": 10}'

prints its port. Requests do not wait for each other. `fail_after` names a number of requests after
which it misbehaves in the way `failure` says.
"""

import asyncio
import json
import sys
from dataclasses import dataclass

from aiohttp import web


@dataclass(frozen=True)
class Behaviour:
    ttft_ms: float = 50.0
    tpot_ms: float = 10.0
    fail_after: int = 10**9
    failure: str = "status"
    """"status": HTTP 500. "drop": closes the connection in mid-stream. "silent": never answers.
    "one_token": ends after one token. "error": an error event in the stream. "garbage": no JSON."""
    cached_tokens: int = 0


class FixedRateServer:
    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._num_requests = 0
        self._num_answered = 0

    async def count(self, request: web.Request) -> web.Response:
        """How many requests got a whole answer."""
        return web.json_response(self._num_answered)

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fixed", "object": "model"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self._num_requests += 1
        if self._num_requests > self._behaviour.fail_after:
            return await self._misbehave(request)
        num_tokens = body.get("max_tokens") or body["max_completion_tokens"]
        response = await self._begin(request)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        for i in range(num_tokens):
            due_s = start_s + (self._behaviour.ttft_ms + i * self._behaviour.tpot_ms) / 1e3
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            finish = "length" if i == num_tokens - 1 else None
            choice = {"index": 0, "text": "a", "token_ids": [i], "finish_reason": finish}
            await send(response, {"choices": [choice]})
        details = {"cached_tokens": self._behaviour.cached_tokens}
        usage = {"prompt_tokens": 5, "prompt_tokens_details": details}
        await send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        self._num_answered += 1
        return response

    async def _begin(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        return response

    async def _misbehave(self, request: web.Request) -> web.StreamResponse:
        failure = self._behaviour.failure
        if failure == "status":
            return web.json_response({"error": {"message": "out of order"}}, status=500)
        if failure == "silent":
            await asyncio.sleep(3600)
        response = await self._begin(request)
        choice = {"index": 0, "text": "a", "token_ids": [1], "finish_reason": None}
        if failure == "one_token":
            await send(response, {"choices": [choice | {"finish_reason": "stop"}]})
            return response
        await send(response, {"choices": [choice]})
        if failure == "error":
            await send(response, {"error": {"message": "the model fell over"}})
        elif failure == "garbage":
            await response.write(b"data: {not json\n\n")
        elif failure == "drop" and request.transport is not None:
            request.transport.abort()
        return response


async def send(response: web.StreamResponse, chunk: object) -> None:
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


async def serve(behaviour: Behaviour) -> None:
    server = FixedRateServer(behaviour)
    app = web.Application()
    app.add_routes(
        [
            web.get("/v1/models", server.list_models),
            web.get("/count", server.count),
            web.post("/v1/completions", server.complete),
            web.post("/v1/chat/completions", server.complete),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    # The parent's death or farewell ends stdin, and so this server.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(Behaviour(**json.loads(sys.argv[1]))))
