# SPDX-License-Identifier: Apache-2.0
"""An asyncio client of one worker: submit requests, read their outputs, notice its death.

A client belongs to one incarnation of a worker. Once the worker is lost (its socket closed, or it
said nothing for too long) every open stream ends with `WorkerLostError` and the client is of no
further use; whoever owns it connects a new one to the next incarnation.

All outputs that arrive between two reads of a stream are handed over together, so a slow reader
gets fewer and longer batches, never a longer queue of small ones.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pelton.core.errors import (
    DeadlineExceededError,
    PeltonError,
    UnavailableError,
    WorkerLostError,
)
from pelton.core.request import FinishReason, GenerateRequest, RequestOutput
from pelton.core.stats import EngineStats
from pelton.serving import messages
from pelton.serving.zmq_transport import ZmqTransport

_DEADLINE_GRACE_S = 0.5
"""The engine ends a request at its deadline; this much later the client does it for the engine."""
_WATCH_INTERVAL_S = 0.25
_QUIET_S = 2.0
"""Of silence: a long step, or a worker that is stopped."""

Report = messages.Heartbeat | messages.CacheEvents | messages.CacheContents
_log = logging.getLogger("pelton.serving")


class Transport(Protocol):
    """Carries payloads to one worker and back."""

    def start(self, on_message: Callable[[bytes], None], on_lost: Callable[[], None]) -> None: ...
    def send(self, payload: bytes) -> None: ...
    def close(self) -> None: ...


class RequestStream:
    """The outputs of requests submitted together: an async iterator of what arrived since the
    last read. Ends when every choice of every request has finished; raises the typed error that
    ended them otherwise. Whoever stops reading early calls `cancel`.
    """

    def __init__(self, client: "WorkerClient", requests: Sequence[GenerateRequest]) -> None:
        self._client = client
        self._requests = requests
        self._num_unfinished = sum(request.sampling.n for request in requests)
        self._closed: set[tuple[str, int]] = set()
        """Choices, by request id and index, that have ended while others go on."""
        self._pending: list[RequestOutput] = []
        self._error: PeltonError | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._wants_all = False
        self._timer: asyncio.TimerHandle | None = None
        self.is_done = False
        """Nothing more will arrive; what has may still be unread."""
        self.first_output_s: float | None = None
        """When the first output arrived, on the host's monotonic clock."""
        self.on_first_output: Callable[[], None] = lambda: None
        """Called then."""
        deadlines_s = [r.deadline_s for r in requests if r.deadline_s is not None]
        if deadlines_s:
            delay_s = min(deadlines_s) - time.monotonic() + _DEADLINE_GRACE_S
            self._timer = self._loop.call_later(max(delay_s, 0), self._deadline_passed)

    @property
    def request_ids(self) -> list[str]:
        return [request.request_id for request in self._requests]

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> list[RequestOutput]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self.is_done:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        outputs, self._pending = self._pending, []
        return outputs

    async def collect(self) -> list[RequestOutput]:
        """Everything still to come, once it is all there: one wake-up instead of one a step."""
        self._wants_all = True
        while not self.is_done:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        outputs, self._pending = self._pending, []
        return outputs

    def cancel(self, error: PeltonError | None = None) -> None:
        """Ends the requests in the worker; a reader gets `error`, or the end of the stream.

        Does nothing once the stream is done.
        """
        if not self.is_done:
            self._client.cancel_requests(self.request_ids)
            self._finish(error)

    def cancel_choice(self, request_id: str, index: int) -> None:
        """Ends one choice in the worker; nothing more of it arrives, and the others go on. Does
        nothing for a choice that has ended."""
        if not self.is_done and (request_id, index) not in self._closed:
            self._client.cancel_requests([request_id], index)
            self._close_choice(request_id, index)

    def push(self, output: RequestOutput) -> None:
        """Takes one output from the worker. Called by the client only, once a token."""
        if self.is_done or (self._closed and (output.request_id, output.index) in self._closed):
            return
        if output.finish_reason is not None and not self._count_finished(output):
            return
        if self.first_output_s is None:
            self.first_output_s = time.monotonic()
            self.on_first_output()
        self._pending.append(output)
        if not self._wants_all:
            self._wake()

    def _count_finished(self, output: RequestOutput) -> bool:
        """Whether the output of a choice that ended is to be read, not an error to be raised."""
        if output.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            text = output.error or "The worker ended this request before it was done."
            error = messages.error_from_code(output.error_code, text)
            if self._num_unfinished > 1:
                self._client.cancel_requests(self.request_ids)
            self._finish(error)
            return False
        self._close_choice(output.request_id, output.index)
        return True

    def _close_choice(self, request_id: str, index: int) -> None:
        self._num_unfinished -= 1
        if self._num_unfinished == 0:
            self._finish(None)
        else:
            self._closed.add((request_id, index))

    def fail(self, error: PeltonError) -> None:
        """The worker refused the requests or is lost. Called by the client only."""
        if not self.is_done:
            self._finish(error)

    def _finish(self, error: PeltonError | None) -> None:
        self.is_done = True
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
        self._client.forget(self.request_ids)
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _deadline_passed(self) -> None:
        self.cancel(DeadlineExceededError("The request's deadline passed before it was done."))


class WorkerClient:
    """Use `await WorkerClient.connect(address, name)`, then `submit`; `close` when done."""

    def __init__(self, transport: Transport, stall_timeout_s: float) -> None:
        self._transport = transport
        self._stall_timeout_s = stall_timeout_s
        self._streams: dict[str, RequestStream] = {}
        self._was_heard = True
        """Since the last look at it."""
        self._silence_s = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._welcomed: asyncio.Future[messages.WorkerInfo] = (
            asyncio.get_running_loop().create_future()
        )
        self._is_closed = False
        self.stats = EngineStats()
        """The newest the worker sent; at most a heartbeat old."""
        self.on_report: Callable[[Report], None] = lambda report: None
        """Gets what the worker says of its load and its cache."""
        self.lost = asyncio.Event()
        """Set once the worker is gone for this client."""
        self.is_stalled = False
        """The worker is lost because it went silent, not because it died."""

    @classmethod
    async def connect(
        cls,
        address: str,
        name: str,
        *,
        timeout_s: float = 10.0,
        stall_timeout_s: float = 60.0,
        wants_cache_events: bool = False,
    ) -> "WorkerClient":
        """Connects and waits for the worker's welcome.

        Raises `UnavailableError` when there is none within `timeout_s`, `ConfigError` when the
        worker speaks another protocol version.
        """
        return await cls.over(
            ZmqTransport(address),
            name,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
            wants_cache_events=wants_cache_events,
        )

    @classmethod
    async def over(
        cls,
        transport: Transport,
        name: str,
        *,
        timeout_s: float = 10.0,
        stall_timeout_s: float = 60.0,
        wants_cache_events: bool = False,
    ) -> "WorkerClient":
        client = cls(transport, stall_timeout_s)
        transport.start(client._receive, client._worker_died)
        hello = messages.Hello(messages.PROTOCOL_VERSION, name, wants_cache_events)
        transport.send(messages.encode(hello))
        try:
            await asyncio.wait_for(asyncio.shield(client._welcomed), timeout_s)
        except TimeoutError:
            client.close()
            raise UnavailableError(f"The worker did not answer within {timeout_s:g} s.") from None
        except BaseException:  # a refusal, or the caller was cancelled
            client.close()
            raise
        client._watch_silence()
        return client

    @property
    def info(self) -> messages.WorkerInfo:
        return self._welcomed.result()

    @property
    def is_quiet(self) -> bool:
        """Whether the worker has said nothing for longer than most steps take."""
        return self._silence_s > _QUIET_S

    @property
    def num_live_requests(self) -> int:
        return len(self._streams)

    def submit(self, *requests: GenerateRequest) -> RequestStream:
        """Sends the requests and returns the stream of their outputs together.

        A refusal arrives through the stream; a worker already lost raises `WorkerLostError` here.
        """
        if self.lost.is_set() or self._is_closed:
            raise _worker_lost()
        stream = RequestStream(self, requests)
        for request in requests:
            self._streams[request.request_id] = stream
            self._transport.send(messages.encode(messages.Submit(request)))
        return stream

    def cancel_requests(self, request_ids: Sequence[str], index: int | None = None) -> None:
        """Ends requests in the worker, or only one choice of each. Streams do this; use
        `RequestStream.cancel` and `cancel_choice`."""
        if not self.lost.is_set() and not self._is_closed:
            for request_id in request_ids:
                self._transport.send(messages.encode(messages.Cancel(request_id, index)))

    def replay_cache_events(self, from_sequence: int) -> None:
        """Asks for events that are missing; they come as reports do."""
        if not self.lost.is_set() and not self._is_closed:
            self._transport.send(messages.encode(messages.ReplayCacheEvents(from_sequence)))

    def cancel_all(self, error: PeltonError) -> None:
        """Ends every open stream with `error`."""
        for stream in list(self._streams.values()):
            stream.cancel(error)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops the routing of requests whose stream is done."""
        for request_id in request_ids:
            self._streams.pop(request_id, None)

    def close(self) -> None:
        """Ends every open stream with `WorkerLostError` and releases the socket. Idempotent."""
        if self._is_closed:
            return
        self._end_streams()
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._welcomed.cancel()
        self._transport.close()

    def _receive(self, payload: bytes) -> None:
        self._was_heard = True
        message = messages.decode_from_worker(payload)
        match message:
            case messages.Outputs(outputs, stats):
                self.stats = stats
                streams = self._streams
                for output in outputs:
                    stream = streams.get(output.request_id)
                    if stream is not None:
                        stream.push(output)
            case messages.Heartbeat(stats):
                self.stats = stats
                self.on_report(message)
            case messages.CacheEvents() | messages.CacheContents():
                self.on_report(message)
            case messages.Refused("", error):
                self._refused(error.to_error())
            case messages.Refused(request_id, error):
                stream = self._streams.get(request_id)
                if stream is not None:
                    stream.cancel(error.to_error())
            case messages.Welcome(info):
                if not self._welcomed.done():
                    self._welcomed.set_result(info)

    def _refused(self, error: PeltonError) -> None:
        if self._welcomed.done():
            _log.error("event=message_refused error=%r", error.message)
        else:
            self._welcomed.set_exception(error)

    def _worker_died(self) -> None:
        if self.lost.is_set():
            return
        self.lost.set()
        if not self._welcomed.done():
            self._welcomed.set_exception(_worker_lost())
        self._end_streams()

    def _end_streams(self) -> None:
        for stream in list(self._streams.values()):
            stream.fail(_worker_lost())

    def _watch_silence(self) -> None:
        # Looks are counted, not the clock: while this process itself stood still, the worker's
        # messages waited unread.
        self._silence_s = 0.0 if self._was_heard else self._silence_s + _WATCH_INTERVAL_S
        self._was_heard = False
        if self._silence_s > self._stall_timeout_s:
            self.is_stalled = True
            self._worker_died()
            return
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(_WATCH_INTERVAL_S, self._watch_silence)


def _worker_lost() -> WorkerLostError:
    return WorkerLostError("The worker that held this request is gone; send the request again.")
