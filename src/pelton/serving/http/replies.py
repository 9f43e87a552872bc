# SPDX-License-Identifier: Apache-2.0
"""What every reply shares: the request id, the names of ignored fields, OpenAI's error body."""

import asyncio
import contextlib
import math
import re
import secrets
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pelton.core.errors import (
    InvalidRequestError,
    OverloadedError,
    PeltonError,
    UnavailableError,
)
from pelton.serving.http.schema import ErrorBody, ErrorResponse
from pelton.serving.tracing import Trace

Headers = list[tuple[bytes, bytes]]

JSON_TYPE = (b"content-type", b"application/json")
EVENTS_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")
TRACE_KEY = "pelton.trace"
"""Where an ASGI scope has the request's trace."""
_MAX_NAMED_FIELDS = 20
_CLIENT_ID = re.compile(r"[!-~]{1,128}")
_LINGER_S = 2.0
_LINGER_BYTES = 64 * 2**20

encode_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Exchange:
    """One HTTP request and what its reply will carry whatever comes of it."""

    request: Request
    request_id: str
    arrival_s: float
    ignored_fields: list[str] = field(default_factory=list)
    num_body_bytes: int = 0
    has_unread_body: bool = False
    """The body was refused before all of it had arrived."""
    route: str = ""
    """Which worker took the request and why; empty: none did."""
    trace: Trace | None = None

    def span(self, name: str) -> AbstractContextManager[None]:
        """A part of the exchange's trace, if it has one."""
        return contextlib.nullcontext() if self.trace is None else self.trace.span(name)

    @property
    def session(self) -> str:
        """What the client calls the conversation; empty: nothing. Raises `InvalidRequestError`."""
        session = self.request.headers.get("x-pelton-session", "")
        if session and not _CLIENT_ID.fullmatch(session):
            raise InvalidRequestError(
                "x-pelton-session must be 1 to 128 visible ASCII characters.",
                param="x-pelton-session",
            )
        return session

    @classmethod
    def of(cls, request: Request) -> "Exchange":
        given = request.headers.get("x-request-id", "")
        is_usable = _CLIENT_ID.fullmatch(given) is not None
        request_id = given if is_usable else secrets.token_hex(12)
        trace = request.scope.get(TRACE_KEY)
        return cls(request, request_id, time.monotonic(), trace=trace)

    def headers(self) -> Headers:
        headers = [(b"x-request-id", self.request_id.encode())]
        if self.route:
            headers.append((b"x-pelton-route", self.route.encode()))
        if self.ignored_fields:
            names = [quote(name, errors="replace")[:64] for name in self.ignored_fields]
            value = ",".join(names[:_MAX_NAMED_FIELDS])
            headers.append((b"x-pelton-ignored-fields", value.encode()))
        return headers


class JSONReply(Response):
    """A whole JSON body that is bytes already."""

    def __init__(self, exchange: Exchange, body: bytes, status: int = 200) -> None:
        self.body = body
        self.status_code = status
        self.raw_headers = [
            JSON_TYPE,
            (b"content-length", str(len(body)).encode()),
            *exchange.headers(),
        ]
        self.background = None


class ErrorReply(JSONReply):
    def __init__(self, exchange: Exchange, error: PeltonError) -> None:
        super().__init__(exchange, encode_json(make_error(error)), error.status)
        if exchange.trace is not None:
            exchange.trace.fail(error)
        if isinstance(error, (OverloadedError, UnavailableError)):
            retry_after_s = math.ceil(error.retry_after_s)
            self.raw_headers.append((b"retry-after", str(retry_after_s).encode()))
        if error.status == 401:
            self.raw_headers.append((b"www-authenticate", b"Bearer"))
        self._must_linger = exchange.has_unread_body
        if self._must_linger:
            self.raw_headers.append((b"connection", b"close"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if self._must_linger:
            await _discard_body(receive)
        await send({"type": "http.response.body", "body": b""})


def make_error(error: PeltonError) -> ErrorResponse:
    return ErrorResponse(ErrorBody(error.message, error.type, error.param, error.code))


async def _discard_body(receive: Receive) -> None:
    """Reads on for a moment: closing at once would reset the connection under a client that is
    still sending, before it has read why it is refused."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while num_bytes < _LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body"):
                    return
