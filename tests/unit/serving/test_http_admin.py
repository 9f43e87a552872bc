# SPDX-License-Identifier: Apache-2.0
"""Who may change a server's workers, and what comes back."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from in_memory import Server, running_server
from starlette.requests import Request

from pelton.core.config import Role, ServerConfig
from pelton.core.errors import ConflictError, ForbiddenError
from pelton.serving import fleet_messages, messages
from pelton.serving.fleet_messages import Operation, WorkerEntry
from pelton.serving.http.admin import check_operator
from pelton.serving.http.frontend import Frontend
from pelton.serving.local_calls import answer_calls, control_path

KEY = {"authorization": "Bearer secret"}


@asynccontextmanager
async def supervised(
    directory: Path, reply: fleet_messages.FleetReply, **settings: Any
) -> AsyncIterator[tuple[Server, list[fleet_messages.FleetRequest]]]:
    """A server, and what its supervisor was asked."""
    asked: list[fleet_messages.FleetRequest] = []

    async def answer(question: bytes) -> bytes:
        asked.append(fleet_messages.decode_request(question))
        return fleet_messages.encode(reply)

    async with running_server(**settings) as server:
        server.frontend.directory = str(directory)
        calls = await answer_calls(control_path(str(directory)), answer)
        try:
            yield server, asked
        finally:
            calls.close()


def make_reply() -> fleet_messages.Workers:
    entries = [
        WorkerEntry(0, Role.MIXED, "ready", 1, "pid 7"),
        WorkerEntry(1, Role.MIXED, "starting", 2, ""),
    ]
    return fleet_messages.Workers(entries, Operation("add", [1]))


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/admin/workers", {}, fleet_messages.AddWorkers(Role.MIXED, 1)),
        (
            "/admin/workers",
            {"role": "decode", "count": 2},
            fleet_messages.AddWorkers(Role.DECODE, 2),
        ),
        ("/admin/workers/3/drain", {"timeout_s": 5}, fleet_messages.DrainOne(3, 5.0)),
        ("/admin/workers/roll", {}, fleet_messages.RollWorkers(60.0)),
    ],
)
async def test_what_an_operator_asks_reaches_the_supervisor(
    path: str, body: dict[str, Any], asked: fleet_messages.FleetRequest, tmp_path: Path
) -> None:
    async with supervised(tmp_path, make_reply()) as (server, requests):
        reply = await server.post(path, body)
        assert reply.status == 202, reply.body
        assert requests == [asked]
        assert reply.json["operation"]["workers"] == [1]
        assert [row["phase"] for row in reply.json["data"]] == ["ready", "starting"]


async def test_the_list_has_what_the_frontend_knows_of_each_process(tmp_path: Path) -> None:
    async with supervised(tmp_path, make_reply()) as (server, _):
        await server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        reply = await server.get("/admin/workers")
        assert reply.status == 200
        assert [row["num_routed"] for row in reply.json["data"]] == [1, 0]


async def test_a_refusal_of_the_supervisor_is_the_reply(tmp_path: Path) -> None:
    refusal = fleet_messages.NotDone(messages.ErrorInfo.of(ConflictError("Not now.")))
    async with supervised(tmp_path, refusal) as (server, _):
        reply = await server.post("/admin/workers/roll", {})
        assert (reply.status, reply.error["message"]) == (409, "Not now.")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/admin/workers", {"role": "both"}, "role"),
        ("/admin/workers", {"count": "two"}, "count"),
        ("/admin/workers/x/drain", {}, "worker"),
        ("/admin/workers/1/drain", {"timeout_s": -1}, "timeout_s"),
        ("/admin/workers/roll", {"timeout_s": 1e99}, "timeout_s"),
    ],
)
async def test_bad_input_names_its_field(
    path: str, body: dict[str, Any], param: str, tmp_path: Path
) -> None:
    async with supervised(tmp_path, make_reply()) as (server, requests):
        reply = await server.post(path, body)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert requests == []


async def test_a_supervisor_that_does_not_answer_is_503() -> None:
    async with running_server() as server:
        server.frontend.directory = "/no/such/directory"
        assert (await server.get("/admin/workers")).status == 503


async def test_with_an_api_key_only_who_has_it_is_let_in(tmp_path: Path) -> None:
    async with supervised(tmp_path, make_reply(), api_key="secret") as (server, requests):
        assert (await server.get("/admin/workers")).status == 401
        assert (await server.post("/admin/workers/roll", {})).status == 401
        assert requests == []
        assert (await server.get("/admin/workers", headers=KEY)).status == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("origin", "http://127.0.0.1:8000"),
        ("origin", "null"),
        ("sec-fetch-site", "same-origin"),
        ("x-forwarded-for", "10.0.0.1"),
        ("forwarded", "for=10.0.0.1"),
        ("via", "1.1 proxy"),
    ],
)
async def test_without_one_no_page_of_a_browser_is_let_in_and_nobody_through_a_proxy(
    name: str, value: str, tmp_path: Path
) -> None:
    async with supervised(tmp_path, make_reply()) as (server, requests):
        reply = await server.post("/admin/workers/roll", {}, headers={name: value})
        assert (reply.status, reply.error["code"]) == (403, "forbidden")
        assert requests == []


class _Frontend:
    def __init__(self, api_key: str) -> None:
        self.config = ServerConfig(api_key=api_key)


@pytest.mark.parametrize(
    ("host", "api_key", "is_let_in"),
    [
        ("127.0.0.1", "", True),
        ("127.8.9.1", "", True),
        ("::1", "", True),
        ("::ffff:127.0.0.1", "", True),
        ("10.0.0.1", "", False),
        ("::ffff:10.0.0.1", "", False),
        ("", "", False),
        ("10.0.0.1", "secret", True),
    ],
)
def test_without_an_api_key_only_this_machine_is_let_in(
    host: str, api_key: str, is_let_in: bool
) -> None:
    client = (host, 1) if host else None
    request = Request({"type": "http", "headers": [], "client": client})
    frontend: Frontend = _Frontend(api_key)  # type: ignore[assignment]  # all that is read
    if is_let_in:
        check_operator(frontend, request)
    else:
        with pytest.raises(ForbiddenError, match="--api-key"):
            check_operator(frontend, request)
