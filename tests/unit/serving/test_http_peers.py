# SPDX-License-Identifier: Apache-2.0
"""Several frontends of one server: each can answer for all of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from in_memory import Reply, Server, running_server

from pelton.serving.http.peers import answer_peer
from pelton.serving.local_calls import answer_calls, frontend_path


@asynccontextmanager
async def two_frontends(directory: Path) -> AsyncIterator[list[Server]]:
    """Each with a request answered, the second with two; they share no worker here."""
    async with running_server(frontends=2) as first, running_server(frontends=2) as second:
        calls = []
        for number, server in enumerate((first, second)):
            server.frontend.number, server.frontend.directory = number, str(directory)
            path = frontend_path(str(directory), number)
            calls.append(await answer_calls(path, partial(answer_peer, server.frontend)))
            for _ in range(number + 1):
                await server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
        try:
            yield [first, second]
        finally:
            for each in calls:
                each.close()


def read_metrics(reply: Reply) -> dict[str, float]:
    lines = [line for line in reply.body.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def test_metrics_say_which_frontend_each_figure_is_of(tmp_path: Path) -> None:
    async with two_frontends(tmp_path) as servers:
        for server in servers:
            metrics = read_metrics(await server.get("/metrics"))
            for number in (0, 1):
                label = f'frontend="{number}"'
                assert metrics[f"pelton_frontend_up{{{label}}}"] == 1
                assert metrics[f"pelton_generation_tokens_total{{{label}}}"] == 2 * (number + 1)
                assert metrics[f"pelton_ttft_seconds_count{{{label}}}"] == number + 1
            assert metrics['pelton_worker_up{worker="0"}'] == 1


async def test_a_frontend_that_is_away_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    async with two_frontends(tmp_path) as (first, _):
        frontend_path(str(tmp_path), 1).unlink()
        metrics = read_metrics(await first.get("/metrics"))
        assert metrics['pelton_frontend_up{frontend="1"}'] == 0
        assert metrics['pelton_generation_tokens_total{frontend="0"}'] == 2
        assert 'pelton_generation_tokens_total{frontend="1"}' not in metrics
        assert (await first.get("/dashboard/data")).json["workers"][0]["num_routed"] == 1


async def test_the_dashboard_is_about_all_of_them(tmp_path: Path) -> None:
    async with two_frontends(tmp_path) as servers:
        for server in servers:
            data = (await server.get("/dashboard/data")).json
            assert data["workers"][0]["num_routed"] == 3
            assert data["ttft"]["num_requests"] == 3
            assert sorted(route["frontend"] for route in data["routes"]) == [0, 1, 1]
            routes = (await server.get("/debug/route")).json["data"]
            assert sorted(route["frontend"] for route in routes) == [0, 1, 1]


async def test_each_has_its_share_of_the_queue() -> None:
    async with running_server(frontends=3, max_queue=7) as server:
        assert server.frontend.max_queue == 3
