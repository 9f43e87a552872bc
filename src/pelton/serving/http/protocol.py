# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP protocol, with limits on what a client may send before its request is known.

A connection has `HEADER_TIMEOUT_S` to send the head of its first request, and each later one as
long from its first byte; between requests the keep-alive limit holds. Bodies have limits of their
own (`parse.read_body`). What is no HTTP gets OpenAI's error body like everything else.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pelton.core.errors import InvalidRequestError
from pelton.serving.http.replies import encode_json, make_error

MAX_HEAD_BYTES = 64 * 2**10
HEADER_TIMEOUT_S = 30.0


class _InvalidHTTPError(InvalidRequestError):
    code = "invalid_http"


class _HeadTooLargeError(InvalidRequestError):
    status = 431
    code = "head_too_large"


class LimitedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        """Since the head began that is being received; 0 while none is."""
        self._is_in_head = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        is_continued = self._is_in_head
        super().data_received(data)
        if not self._is_in_head or self.transport.is_closing():
            self._num_head_bytes = 0
            return
        # The head may share its first piece with the end of another request.
        self._num_head_bytes += len(data) if is_continued else 1
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                _HeadTooLargeError(f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_arrived()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(_InvalidHTTPError(msg))

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as if it had not asked; that needs no line in the log."""

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._give_up)

    def _head_arrived(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        self.transport.close()

    def _refuse(self, error: InvalidRequestError) -> None:
        body = encode_json(make_error(error))
        length = str(len(body)).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
        self.transport.write(STATUS_LINE[error.status] + head + length + b"\r\n\r\n" + body)
        self.transport.close()
