# SPDX-License-Identifier: Apache-2.0
"""Limits on a connection before its request is known."""

import asyncio
import json
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from pelton.serving.http import protocol
from pelton.serving.http.protocol import MAX_HEAD_BYTES, LimitedProtocol

OK = b"HTTP/1.1 200 OK"
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Connection(asyncio.Transport):
    """What the server wrote, and whether it has hung up."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = asyncio.Event()

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed.set()

    def is_closing(self) -> bool:
        return self.is_closed.is_set()

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def error(self) -> Any:
        return json.loads(self.written.partition(b"\r\n\r\n")[2])["error"]


async def say_ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def connect() -> tuple[LimitedProtocol, Connection]:
    config = uvicorn.Config(say_ok, lifespan="off", log_config=None)
    server = LimitedProtocol(config=config, server_state=ServerState(), app_state={})
    connection = Connection()
    server.connection_made(connection)
    return server, connection


async def answered(connection: Connection, count: int = 1) -> None:
    while connection.written.count(OK) < count and not connection.is_closing():
        await asyncio.sleep(0)


async def test_requests_in_small_pieces_on_one_connection_are_answered() -> None:
    server, connection = await connect()
    for count in (1, 2):
        for position in range(len(REQUEST)):
            server.data_received(REQUEST[position : position + 1])
        await answered(connection, count)
    assert not connection.is_closing()


async def test_many_requests_in_one_piece_are_no_large_head() -> None:
    server, connection = await connect()
    count = 2 * MAX_HEAD_BYTES // len(REQUEST)
    server.data_received(REQUEST * count + REQUEST[:5])
    server.data_received(REQUEST[5:])
    await answered(connection, count + 1)
    assert not connection.is_closing()


async def test_a_head_without_end_is_refused() -> None:
    server, connection = await connect()
    server.data_received(b"GET / HTTP/1.1\r\nX: ")
    for _ in range(MAX_HEAD_BYTES // 1024 + 1):
        if not connection.is_closing():
            server.data_received(b"a" * 1024)
    assert connection.written.startswith(b"HTTP/1.1 431")
    assert connection.error()["code"] == "head_too_large"


async def test_what_is_no_http_gets_the_usual_error_body() -> None:
    server, connection = await connect()
    server.data_received(b"\x16\x03\x01hello\r\n\r\n")
    assert connection.written.startswith(b"HTTP/1.1 400")
    assert connection.error()["code"] == "invalid_http"
    assert connection.is_closing()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", REQUEST + b"GET"], ids=["none", "half", "next"])
async def test_a_head_that_does_not_come_ends_the_connection(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT_S", 0.01)
    server, connection = await connect()
    server.data_received(sent)
    await asyncio.wait_for(connection.is_closed.wait(), 10)


async def test_a_head_that_came_has_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT_S", 0.0)
    server, connection = await connect()
    server.data_received(REQUEST)
    await answered(connection)
    await asyncio.sleep(0.01)
    assert not connection.is_closing()
