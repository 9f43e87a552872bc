# SPDX-License-Identifier: Apache-2.0
"""A worker client's end of the wire: a DEALER socket in an asyncio event loop."""

import asyncio
import uuid
from collections.abc import Callable

import zmq

from pelton.serving.wire_keys import WireKeys, secure_client


class ZmqTransport:
    """A DEALER socket driven by the running event loop.

    ZMQ's file descriptor is edge-triggered: after any read or write the socket's own event flags
    are asked again, or a message could lie unread until the next one.
    """

    def __init__(self, address: str, keys: WireKeys | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        secure_client(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._address = address
        self._on_message: Callable[[bytes], None] = lambda payload: None
        self._on_lost: Callable[[], None] = lambda: None

    def start(self, on_message: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.add_reader(self._monitor.fileno(), self._read_monitor)
        self._socket.connect(self._address)
        self._loop.call_soon(self._read)
        self._loop.call_soon(self._read_monitor)

    def send(self, payload: bytes) -> None:
        self._socket.send(payload, zmq.NOBLOCK, copy=len(payload) < 65536)
        if self._has_input(self._socket):
            self._loop.call_soon(self._read)

    def close(self) -> None:
        if self._socket.closed:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    @staticmethod
    def _has_input(socket: "zmq.Socket[bytes]") -> bool:
        return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _read(self) -> None:
        while not self._socket.closed:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(payload)

    def _read_monitor(self) -> None:
        """The only monitored event is the loss of the connection; what came before it counts."""
        if self._socket.closed or not self._has_input(self._monitor):
            return
        self._monitor.recv_multipart(zmq.NOBLOCK)
        self._read()
        self._on_lost()
