# SPDX-License-Identifier: Apache-2.0
"""An asyncio client of one worker: submit requests, read their outputs, notice its death.

A client belongs to one incarnation of a worker. Once the worker is lost (its socket closed, or it
said nothing for too long) every open stream loses the requests that it carried and the client is
of no further use; whoever owns it connects a new one to the next incarnation.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from msgspec import structs

from pelton.core.errors import (
    PeltonError,
    UnavailableError,
    WorkerDrainedError,
    WorkerLostError,
)
from pelton.core.request import GenerateRequest
from pelton.core.stats import EngineStats
from pelton.serving import messages
from pelton.serving.request_stream import RequestStream
from pelton.serving.time_left import find_time_left
from pelton.serving.wire_keys import WireKeys
from pelton.serving.zmq_transport import ZmqTransport

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


class WorkerClient:
    """Use `await WorkerClient.connect(address)`, then `submit`; `close` when done."""

    def __init__(
        self, transport: Transport, stall_timeout_s: float, *, shares_clock: bool = True
    ) -> None:
        self.shares_clock = shares_clock
        """Whether the worker is on this host, so that both read one monotonic clock."""
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
        *,
        timeout_s: float = 10.0,
        stall_timeout_s: float = 60.0,
        keys: WireKeys | None = None,
    ) -> "WorkerClient":
        """Connects and waits for the worker's welcome.

        `keys`: of a worker that is reached over a network. Raises `UnavailableError` when there is
        none within `timeout_s`, `ConfigError` when the worker speaks another protocol version.
        """
        return await cls.over(
            ZmqTransport(address, keys),
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
            shares_clock=keys is None,
        )

    @classmethod
    async def over(
        cls,
        transport: Transport,
        *,
        timeout_s: float = 10.0,
        stall_timeout_s: float = 60.0,
        shares_clock: bool = True,
    ) -> "WorkerClient":
        client = cls(transport, stall_timeout_s, shares_clock=shares_clock)
        transport.start(client._receive, client._worker_died)
        hello = messages.Hello(messages.PROTOCOL_VERSION)
        transport.send(messages.encode(hello))
        try:
            await asyncio.wait_for(asyncio.shield(client._welcomed), timeout_s)
        except TimeoutError:
            client.close()
            raise UnavailableError(
                f"The worker did not answer within {timeout_s:g} s; its log may say why."
            ) from None
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
        self._check_usable()
        stream = RequestStream(requests)
        for request in requests:
            self.carry(stream, request)
        return stream

    def carry(self, stream: RequestStream, request: GenerateRequest) -> None:
        """Sends the request, or what is left of it; its outputs go to `stream`. As `submit`."""
        self._check_usable()
        self._streams[request.request_id] = stream
        stream.carried_by(self, request.request_id)
        time_left_s = find_time_left(request, shares_clock=self.shares_clock)
        self._transport.send(messages.encode(messages.Submit(request, time_left_s)))

    def _check_usable(self) -> None:
        if self.lost.is_set() or self._is_closed:
            raise _worker_lost()

    def cancel_request(self, request_id: str, index: int | None = None) -> None:
        """Ends a request in the worker, or only one choice of it. Streams do this; use
        `RequestStream.cancel` and `cancel_choice`."""
        if not self.lost.is_set() and not self._is_closed:
            self._transport.send(messages.encode(messages.Cancel(request_id, index)))

    def watch_cache(self) -> None:
        """Asks for what the worker's prefix cache gains and loses from now on; it comes as reports
        do, and what was lost before can be asked for."""
        if not self.lost.is_set() and not self._is_closed:
            hello = messages.Hello(messages.PROTOCOL_VERSION, wants_cache_events=True)
            self._transport.send(messages.encode(hello))

    def replay_cache_events(self, from_sequence: int) -> None:
        """Asks for events that are missing; they come as reports do."""
        if not self.lost.is_set() and not self._is_closed:
            self._transport.send(messages.encode(messages.ReplayCacheEvents(from_sequence)))

    def cancel_all(self, error: PeltonError) -> None:
        """Ends every open stream with `error`."""
        for stream in list(self._streams.values()):
            stream.cancel(error)

    def hand_over(self) -> None:
        """Every request that can go on elsewhere does so, as if the worker were lost; the others
        stay."""
        for request_id, stream in list(self._streams.items()):
            if stream.can_move:
                self.cancel_request(request_id)
                self.forget(request_id)
                stream.lose(request_id, WorkerDrainedError("The worker is to end."))

    def forget(self, request_id: str) -> None:
        """Drops the routing of a request whose stream is done."""
        self._streams.pop(request_id, None)

    def close(self) -> None:
        """Every open stream loses its requests; releases the socket. Idempotent."""
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
            case messages.Outputs(outputs, stats, phases):
                self.stats = stats
                streams = self._streams
                for request_id in phases.keys() & streams.keys():
                    streams[request_id].on_phases(request_id, phases[request_id])
                for output in outputs:
                    stream = streams.get(output.request_id)
                    if stream is not None:
                        stream.push(output)
            case messages.Heartbeat(stats):
                self.stats = stats
                if not self.shares_clock:
                    message = structs.replace(message, at_s=time.monotonic())
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
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.lose(request_id, _worker_lost())

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
