# SPDX-License-Identifier: Apache-2.0
"""The service around generation: who is let in, who has left, deadlines, loss, metrics."""

import asyncio
import re
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from in_memory import Server, running_server

from pelton.core.errors import UnavailableError

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 8000}


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def series(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


async def read_metrics(server: Server) -> dict[str, float]:
    return series((await server.get("/metrics")).body.decode())


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_client_that_leaves_ends_its_request_at_once(is_streamed: bool) -> None:
    async with running_server() as server:
        leave = asyncio.Event()
        request = asyncio.create_task(
            server.post(COMPLETE, {**LONG, "stream": is_streamed}, leave=leave)
        )
        await until(lambda: server.engine.has_work)
        leave.set()
        await request
        assert not server.engine.has_work
        metrics = await read_metrics(server)
        assert metrics["pelton_requests_aborted_total"] == 1
        assert metrics["pelton_requests_live"] == 0


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics"])
async def test_what_can_be_read_answers_head_too(path: str) -> None:
    async with running_server() as server:
        assert (await server.call("HEAD", path, b"")).status == 200


async def test_client_that_leaves_mid_stream_ends_every_prompt() -> None:
    async with running_server() as server:
        body = {**LONG, "prompt": ["a", "b"], "n": 2, "stream": True}
        await server.post(COMPLETE, body, leave_after_chunks=2)
        await until(lambda: not server.engine.has_work)


async def test_full_queue_is_429_with_retry_after_and_recovers() -> None:
    async with running_server(max_queue=2) as server:
        leave = asyncio.Event()
        running = asyncio.create_task(
            server.post(COMPLETE, {**LONG, "prompt": ["a", "b"]}, leave=leave)
        )
        await until(lambda: server.frontend.metrics.num_live == 2)
        refused = await server.post(COMPLETE, {"prompt": "c"})
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        leave.set()
        await running
        assert (await server.post(COMPLETE, {"prompt": "c"})).status == 200


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_deadline_before_the_first_token_is_408(is_streamed: bool) -> None:
    async with running_server() as server:
        body = {**LONG, "timeout_s": 1e-9, "stream": is_streamed}
        reply = await server.post(COMPLETE, body)
        assert (reply.status, reply.error["code"]) == (408, "deadline_exceeded")


async def test_deadline_in_a_stream_is_an_error_event() -> None:
    async with running_server() as server:
        server.num_steps_left = 3
        request = asyncio.create_task(server.post(COMPLETE, {**LONG, "stream": True}))
        await until(lambda: server.num_steps_left == 0)
        (choice,) = server.engine._choices
        choice.request = replace(choice.request, deadline_s=time.monotonic())
        server.num_steps_left = -1
        reply = await request
        assert reply.status == 200
        assert reply.events[-1]["error"]["code"] == "deadline_exceeded"


async def test_deadline_holds_when_the_worker_is_stuck() -> None:
    async with running_server() as server:
        server.num_steps_left = 0
        reply = await server.post(COMPLETE, {**LONG, "timeout_s": 0.01})
        assert (reply.status, reply.error["code"]) == (408, "deadline_exceeded")


async def test_worker_death_is_503_for_a_whole_reply() -> None:
    async with running_server() as server:
        request = asyncio.create_task(server.post(COMPLETE, LONG))
        await until(lambda: server.engine.has_work)
        server.transport.lose()
        reply = await request
        assert (reply.status, reply.error["code"]) == (503, "worker_lost")
        assert "retry-after" in reply.headers


async def test_worker_death_is_an_error_event_in_a_stream() -> None:
    async with running_server() as server:
        server.num_steps_left = 3
        request = asyncio.create_task(server.post(COMPLETE, {**LONG, "stream": True}))
        await until(lambda: server.num_steps_left == 0)
        server.transport.lose()
        reply = await request
        assert reply.status == 200
        assert reply.events[-1]["error"]["code"] == "worker_lost"


async def test_requests_without_a_worker_are_503_until_there_is_one() -> None:
    async with running_server() as server:
        server.transport.lose()
        refused = await server.post(COMPLETE, {"prompt": "a"})
        assert (refused.status, refused.error["code"]) == (503, "unavailable")
        assert (await server.get("/ready")).status == 503
        assert (await server.get("/health")).status == 200
        await server.connect()
        assert (await server.get("/ready")).status == 200
        assert (await server.post(COMPLETE, {"prompt": "a"})).status == 200


async def test_draining_server_refuses_and_finishes_what_runs() -> None:
    async with running_server() as server:
        running = asyncio.create_task(server.post(COMPLETE, {"prompt": "a", "max_tokens": 50}))
        await until(lambda: server.engine.has_work)
        server.frontend.is_draining = True
        assert (await server.get("/ready")).status == 503
        assert (await server.post(COMPLETE, {"prompt": "a"})).status == 503
        assert (await running).status == 200


async def test_end_of_the_drain_ends_what_still_runs_with_a_typed_error() -> None:
    async with running_server() as server:
        running = asyncio.create_task(server.post(COMPLETE, LONG))
        await until(lambda: server.engine.has_work)
        server.frontend.cancel_all(UnavailableError("shutting down"))
        reply = await running
        assert (reply.status, reply.error["message"]) == (503, "shutting down")
        assert not server.engine.has_work


@pytest.mark.parametrize(
    ("header", "status"),
    [(None, 401), ("Bearer wrong", 401), ("secret", 401), ("Bearer secret", 200)],
)
async def test_api_key(header: str | None, status: int) -> None:
    async with running_server(api_key="secret") as server:
        headers = {"authorization": header} if header else {}
        reply = await server.post(COMPLETE, {"prompt": "a"}, headers=headers)
        assert reply.status == status


async def test_health_needs_no_key_and_models_do() -> None:
    async with running_server(api_key="secret") as server:
        assert (await server.get("/health")).status == 200
        assert (await server.get("/v1/models")).error["code"] == "invalid_api_key"


async def test_wrong_paths_and_methods_get_an_error_body_on_every_route() -> None:
    async with running_server() as server:
        methods: dict[str, set[str]] = defaultdict(set)
        for route in server.app._app.routes:
            methods[route.path] |= route.methods
        assert {"/v1/chat/completions", "/admin/workers", "/openapi.json"} <= set(methods)
        for pattern, allowed in methods.items():
            path = re.sub(r"\{[^}]*\}", "1", pattern)
            for wrong in (f"{path}/", f"/{path}", f"{path}/more/"):
                for method in ("GET", "POST", "PUT"):
                    reply = await server.call(method, wrong, b"{}")
                    is_model = wrong.startswith("/v1/models/") and method != "GET"
                    assert reply.status == (405 if is_model else 404), (method, wrong)
                    assert reply.error["type"] == "invalid_request_error"
            for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"} - allowed:
                reply = await server.call(method, path, b"{}")
                assert reply.status == 405, (method, path)
                assert reply.error["code"] == "method_not_allowed"
                assert reply.headers["allow"] == ", ".join(sorted(allowed))
        assert (await server.get("/v1/models/")).error["code"] == "not_found"


async def test_models_are_listed_and_found_by_name() -> None:
    async with running_server() as server:
        (card,) = (await server.get("/v1/models")).json["data"]
        assert (card["id"], card["max_model_len"]) == ("stand-in", 8192)
        assert (await server.get("/v1/models/stand-in")).json == card
        assert (await server.get("/v1/models/other/one")).status == 404


async def test_request_id_is_the_clients_when_usable() -> None:
    async with running_server() as server:
        given = await server.get("/health", headers={"x-request-id": "abc-1"})
        made = await server.get("/health", headers={"x-request-id": "a b"})
        assert given.headers["x-request-id"] == "abc-1"
        assert made.headers["x-request-id"] not in ("", "a b")


async def test_a_session_is_told_in_the_route_and_must_be_a_word() -> None:
    async with running_server() as server:
        body = {"prompt": "a", "max_tokens": 1}
        for reason in ("kv-aware of 1", "session of worker 0"):
            headers = {"x-pelton-session": "talk-1"}
            reply = await server.post("/v1/completions", body, headers=headers)
            assert f"reason={reason}" in reply.headers["x-pelton-route"]
        headers = {"x-pelton-session": "two words"}
        reply = await server.post("/v1/completions", body, headers=headers)
        assert (reply.status, reply.error["param"]) == (400, "x-pelton-session")


async def test_metrics_count_what_was_served() -> None:
    async with running_server() as server:
        await server.post(COMPLETE, {"prompt": [1, 2, 3], "max_tokens": 5})
        await server.post(COMPLETE, {"prompt": [-1]})
        server.transport.worker.heartbeat()
        metrics = await read_metrics(server)
        assert metrics["pelton_ttft_seconds_count"] == 1
        assert metrics["pelton_tpot_seconds_count"] == 1
        assert metrics["pelton_e2e_latency_seconds_count"] == 1
        assert metrics["pelton_prompt_tokens_total"] == 3
        assert metrics["pelton_generation_tokens_total"] == 5
        assert metrics['pelton_choices_finished_total{reason="length"}'] == 1
        assert metrics['pelton_errors_total{code="invalid_request_error"}'] == 1
        assert metrics['pelton_kv_blocks_used{worker="0"}'] == 0
        assert metrics['pelton_worker_prompt_tokens_total{worker="0"}'] == 3
        assert metrics['pelton_worker_generation_tokens_total{worker="0"}'] == 5
        assert metrics['pelton_worker_info{role="mixed",worker="0"}'] == 1


async def test_a_worker_that_is_down_has_no_role() -> None:
    async with running_server() as server:
        server.transport.lose()
        metrics = await read_metrics(server)
        assert metrics['pelton_worker_up{worker="0"}'] == 0
        assert not any(name.startswith("pelton_worker_info") for name in metrics)


async def test_large_prompts_are_tokenised_off_the_event_loop() -> None:
    async with running_server() as server:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticker = asyncio.create_task(tick())
        await server.post("/tokenize", {"prompt": "word " * 100_000})
        ticker.cancel()
        assert ticks > 10


async def test_deadline_counts_from_arrival() -> None:
    async with running_server() as server:
        request = asyncio.create_task(server.post(COMPLETE, {**LONG, "timeout_s": 1000.0}))
        await until(lambda: server.engine.has_work)
        (choice,) = server.engine._choices
        assert choice.request.deadline_s is not None
        assert choice.request.deadline_s < time.monotonic() + 1000.0
        server.frontend.cancel_all(UnavailableError("done"))
        await request


async def test_clients_that_tokenise_here_learn_the_special_tokens() -> None:
    async with running_server() as server:
        info = (await server.get("/tokenizer_info")).json
        assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
        assert "<|im_start|>" in info["chat_template"]
        body = {"prompt": info["eos_token"], "add_special_tokens": False}
        [token] = (await server.post("/tokenize", body)).json["tokens"]
        assert (await server.post("/detokenize", {"tokens": [token]})).json[
            "prompt"
        ] == "<|im_end|>"


async def test_openapi_document_names_every_route() -> None:
    async with running_server() as server:
        document = (await server.get("/openapi.json")).json
        assert {CHAT, COMPLETE, "/tokenize", "/detokenize", "/v1/models", "/metrics"} <= set(
            document["paths"]
        )
        assert "messages" in document["components"]["schemas"]["ChatRequest"]["required"]
