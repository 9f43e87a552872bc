# SPDX-License-Identifier: Apache-2.0
"""What `/dashboard` gives to a browser, and the numbers behind it."""

import re
from typing import Any

import pytest
from in_memory import InMemoryTransport, Server, make_engine, running_server

from pelton.serving.http.latency import MAX_KEPT, RecentLatency, summarize
from pelton.serving.worker_client import WorkerClient

DATA = "/dashboard/data"
FILES = {
    "/dashboard": "text/html; charset=utf-8",
    "/dashboard/page.css": "text/css; charset=utf-8",
    "/dashboard/page.js": "text/javascript; charset=utf-8",
}


async def read_data(server: Server) -> Any:
    reply = await server.get(DATA)
    assert reply.status == 200
    return reply.json


async def serve_some(server: Server, num_requests: int = 3) -> None:
    for _ in range(num_requests):
        await server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 5})
    server.transport.worker.heartbeat()


async def test_a_worker_is_shown_with_what_it_said_last() -> None:
    async with running_server() as server:
        await serve_some(server)
        [worker] = (await read_data(server))["workers"]
        stats = worker.pop("stats")
        assert worker == {
            "worker": "0",
            "role": "mixed",
            "state": "up",
            "generation": 1,
            "num_routed": 3,
            "is_draining": False,
        }
        assert (stats["generated_tokens_total"], stats["prompt_tokens_total"]) == (15, 9)
        assert (stats["num_running"], stats["num_blocks"]) == (0, 65536)


async def test_latency_is_of_requests_and_null_before_the_first() -> None:
    async with running_server() as server:
        before = await read_data(server)
        await serve_some(server)
        after = await read_data(server)
        assert (before["ttft"], before["tpot"]) == (None, None)
        for latency in (after["ttft"], after["tpot"]):
            assert latency["num_requests"] == 3
            assert 0 < latency["p50_s"] <= latency["p90_s"] <= latency["p99_s"]


async def test_routes_are_the_newest_twenty_of_debug_route() -> None:
    async with running_server() as server:
        await serve_some(server, 22)
        explained = (await server.get("/debug/route")).json["data"]
        assert (await read_data(server))["routes"] == explained[-20:]
        assert explained[-1]["scores"].keys() == {"0"}


async def test_workers_have_the_roles_of_the_server_while_none_is_up() -> None:
    async with running_server(prefill=1, decode=2) as server:
        server.transport.lose()
        workers = (await read_data(server))["workers"]
        assert [worker["role"] for worker in workers] == ["prefill", "decode", "decode"]
        assert {worker["state"] for worker in workers} == {"down"}
        assert {worker["stats"] for worker in workers} == {None}


async def test_a_lost_worker_is_down_and_its_successor_another_generation() -> None:
    async with running_server(workers=2) as server:
        second = await WorkerClient.over(InMemoryTransport(make_engine()))
        server.frontend.workers.roster.use(1, second, 1)
        server.transport.lose()
        states = [worker["state"] for worker in (await read_data(server))["workers"]]
        assert states == ["down", "up"]
        server.client.close()
        server.client = await WorkerClient.over(InMemoryTransport(make_engine()))
        server.frontend.workers.roster.use(0, server.client, 2)
        workers = (await read_data(server))["workers"]
        assert [worker["state"] for worker in workers] == ["up", "up"]
        assert [worker["generation"] for worker in workers] == [2, 1]
        second.close()


async def test_a_worker_without_a_word_for_seconds_is_silent() -> None:
    async with running_server() as server:
        server.client._silence_s = 3.0
        [worker] = (await read_data(server))["workers"]
        assert worker["state"] == "silent"
        assert worker["stats"] is not None


async def test_a_draining_server_still_says_so() -> None:
    async with running_server() as server:
        server.frontend.is_draining = True
        assert (await read_data(server))["is_draining"] is True


async def test_the_numbers_need_the_key_and_the_page_that_asks_for_it_does_not() -> None:
    async with running_server(api_key="secret") as server:
        right, wrong = ({"authorization": f"Bearer {key}"} for key in ("secret", "other"))
        assert (await server.get(DATA)).status == 401
        assert (await server.get(DATA, headers=wrong)).status == 401
        assert (await server.get(DATA, headers=right)).status == 200
        for path in FILES:
            assert (await server.get(path)).status == 200


@pytest.mark.parametrize("path", FILES)
async def test_files_of_the_page(path: str) -> None:
    async with running_server() as server:
        reply = await server.get(path)
        assert (reply.status, reply.headers["content-type"]) == (200, FILES[path])
        assert reply.headers["content-security-policy"].startswith("default-src 'none';")
        assert (await server.call("HEAD", path, b"")).status == 200
        assert (await server.post(path, {})).status == 405


@pytest.mark.parametrize("path", FILES)
async def test_the_page_names_no_other_host(path: str) -> None:
    async with running_server() as server:
        assert not re.search(rb"https?:|//\w+\.|@import|url\(", (await server.get(path)).body)


async def test_everything_that_the_page_loads_is_there() -> None:
    async with running_server() as server:
        html = (await server.get("/dashboard")).body.decode()
        links = re.findall(r'(?:src|href)="(?!data:)([^"]+)"', html)
        assert [f"/{link}" for link in links] == list(FILES)[1:]


def test_percentiles_are_of_requests_that_there_were() -> None:
    latency = RecentLatency()
    for i in range(1, 101):
        latency.add(ended_s=10.0, value_s=float(i))
    summary = summarize(latency.samples(now_s=10.0))
    assert summary is not None
    assert (summary.p50_s, summary.p90_s, summary.p99_s) == (50, 90, 99)


def test_latency_of_one_request_is_every_percentile() -> None:
    latency = RecentLatency()
    latency.add(ended_s=1.0, value_s=0.25)
    summary = summarize(latency.samples(now_s=1.0))
    assert summary is not None
    assert (summary.num_requests, summary.p50_s, summary.p99_s) == (1, 0.25, 0.25)


def test_latency_forgets_what_is_older_than_a_minute() -> None:
    latency = RecentLatency()
    latency.add(ended_s=0.0, value_s=9.0)
    latency.add(ended_s=30.0, value_s=1.0)
    summary = summarize(latency.samples(now_s=60.5))
    assert summary is not None
    assert (summary.num_requests, summary.p99_s) == (1, 1.0)
    assert summarize(latency.samples(now_s=91.0)) is None


def test_latency_keeps_a_bounded_number() -> None:
    latency = RecentLatency()
    for i in range(MAX_KEPT + 10):
        latency.add(ended_s=0.0, value_s=float(i))
    summary = summarize(latency.samples(now_s=0.0))
    assert summary is not None
    assert summary.num_requests == MAX_KEPT
