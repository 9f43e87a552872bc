# SPDX-License-Identifier: Apache-2.0
"""An engine that prefills and one that decodes, in one process: real sockets, real shared memory.

Nothing runs by itself: `Pair.pump` reads messages and steps both. What travels can be held back or
changed on the way.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

import zmq

from pelton.core.clock import ManualClock
from pelton.core.config import KVTransportName, Role
from pelton.core.kv_transfer import KVLayout
from pelton.core.request import GenerateRequest, PrefillSource, RequestOutput
from pelton.engine.engine import Engine
from pelton.engine.kv.pool import KVPool
from pelton.serving import messages
from pelton.serving.kv_transfer.decode import DecodeSide
from pelton.serving.kv_transfer.link import KVLink
from pelton.serving.kv_transfer.prefill import PrefillSide
from pelton.serving.worker import Worker, bind_router, make_worker_info

Connect = Callable[[KVPool, KVLayout], DecodeSide | None]
MakeEngine = Callable[[Role, Connect], Engine]
Changed = Callable[[messages.FromWorker], messages.FromWorker | None]


class Pair:
    """A context manager: leaving it closes sockets, and must find every block given back."""

    def __init__(
        self, make_engine: MakeEngine, min_tokens: int = 2, transport: KVTransportName = "auto"
    ) -> None:
        self._make_engine = make_engine
        self._transport: KVTransportName = transport
        self._min_tokens = min_tokens
        self.change: Changed = lambda message: message
        """Applied to what the prefilling worker sends; None drops it."""
        self.is_frozen = False
        """The prefilling worker stands still."""
        self.outputs: list[RequestOutput] = []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="kv")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clock = ManualClock()
        self._num_starts = 0
        self._poller = zmq.Poller()
        self._decode_link = KVLink(Role.DECODE, self._poller, self._transport)
        self.decode = self._make_engine(Role.DECODE, self._decode_link.connect)
        self.start_prefill()
        return self

    def start_prefill(self, keeps_address: bool = False) -> None:
        """A new process of the prefilling worker, as far as anybody can tell."""
        self._num_starts += not keeps_address
        self.address = f"ipc://{Path(self._folder.name) / f'p{self._num_starts}'}"
        link = KVLink(Role.PREFILL, zmq.Poller(), self._transport)
        self.prefill = self._make_engine(Role.PREFILL, link.connect)
        self._socket = bind_router(self._context, self.address)
        self.worker = Worker(
            self.prefill,
            make_worker_info(self.prefill, self.address, link),
            self._send,
            lambda send: PrefillSide(self.prefill, *link.shared, send),
        )

    def kill_prefill(self) -> None:
        self._socket.close(linger=0)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._decode_link.close()
        self._socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()
        if kind is None:
            assert_all_is_given_back(self.decode)

    def add(self, request: GenerateRequest) -> None:
        source = PrefillSource(address=self.address, min_tokens=self._min_tokens)
        self.decode.add(replace(request, prefill_at=source))

    def pump(self) -> list[RequestOutput]:
        """One turn of both loops."""
        if not self._socket.closed and not self.is_frozen:
            while self._socket.poll(1 if self.decode.is_starved else 0):
                client, payload = self._socket.recv_multipart()
                self.worker.receive(client, payload)
            if self.worker.has_work:
                self.worker.step()
            self.worker.heartbeat()
        self._poller.poll(1 if self.decode.is_starved else 0)
        new = self.decode.step() if self.decode.has_work else []
        if not self.decode.has_work:
            self._decode_link.read_idle()
        self.outputs += new
        return new

    def until(self, condition: Callable[[], bool]) -> None:
        """Pumps until it is true, however long a thread of ZMQ's takes to bring messages."""
        deadline_s = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < deadline_s, "it never came true"
            self.pump()

    def until_given_back(self) -> None:
        """Until the prefilling worker holds nothing."""
        self.until(lambda: not any(_held(self.prefill)))

    def deliver(self, num_messages: int) -> None:
        """Gives the prefilling worker what it was sent, which it does not act upon yet."""
        for _ in range(num_messages):
            assert self._socket.poll(60_000), "a message is missing"
            self.worker.receive(*self._socket.recv_multipart())

    def settle(self, max_turns: int = 20) -> None:
        """Lets the last messages arrive, which a thread of ZMQ's brings while neither works."""
        for _ in range(max_turns):
            self.pump()
            time.sleep(0.001)

    def _send(self, client: bytes, payload: bytes) -> bool:
        message = self.change(messages.decode_from_worker(payload))
        if message is None:
            return True
        try:
            self._socket.send_multipart([client, messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


def assert_all_is_given_back(engine: Engine) -> None:
    assert _held(engine) == (0, 0, 0, 0)


def _held(engine: Engine) -> tuple[int, int, int, int]:
    stats = engine.stats()
    return stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_leased_blocks
