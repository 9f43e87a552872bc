# SPDX-License-Identifier: Apache-2.0
"""A decoding worker's connection to one that prefills: a socket in its loop, and the mapped pool.

Says hello with the layout of its KV; a worker that cannot give blocks of that layout refuses. Once
the other is gone or refusing, `error` says so, and whoever owns the peer closes it. A silent one
may be frozen or only slow: nothing is to be asked of it until it speaks again.
"""

import uuid
from collections.abc import Iterator

import zmq

from pelton.core.kv_transfer import KVLayout
from pelton.serving import messages
from pelton.serving.kv_transfer.silence import Silence
from pelton.serving.kv_transfer.transport import KVTransport, RemotePool
from pelton.serving.wire_keys import WireKeys, secure_client

SILENCE_S = 10.0
"""Longer than a step takes. Whoever was only slow costs no more than computing prompts here."""
GONE = "It is gone."
"""The error of a worker whose process has ended, by order or not."""


class Peer:
    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        address: str,
        layout: KVLayout,
        transport: KVTransport,
        keys: WireKeys | None = None,
    ) -> None:
        """Adds its sockets to `poller`."""
        self.error: str | None = None
        self.silence = ""
        """A sentence while it has said nothing for `SILENCE_S`."""
        self.pool: RemotePool | None = None
        """Once the other has welcomed this worker."""
        self._transport = transport
        self._poller = poller
        self._silence = Silence()
        self._unsent: list[messages.ToPrefill] = []
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        secure_client(self._socket, keys)
        # A worker is bound before anybody is told of it: a connection to be tried again is to one
        # that has died since.
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        )
        self._socket.connect(address)
        for socket in (self._socket, self._monitor):
            poller.register(socket, zmq.POLLIN)
        hello = messages.Hello(messages.PROTOCOL_VERSION, layout=layout)
        self._socket.send(messages.encode(hello), zmq.NOBLOCK)

    def send(self, message: messages.ToPrefill) -> None:
        """Once welcomed; until then the message waits here."""
        if self.pool is None:
            self._unsent.append(message)
        elif self.error is None:
            self._socket.send(messages.encode(message), zmq.NOBLOCK)

    def receive(self) -> Iterator[messages.FromPrefill]:
        """What has arrived. Ends early when the reader does: the rest waits in the socket."""
        while self.error is None:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._silence.end()
            self.silence = ""
            match messages.decode_from_worker(payload):
                case messages.Welcome(info):
                    self._open(info)
                case messages.Refused(_, error):
                    self.error = error.message
                case messages.Blocks() | messages.PrefillFailed() as message:
                    yield message
                case _:
                    continue
        self._look_for_its_end()

    def close(self) -> None:
        """Idempotent."""
        if self._socket.closed:
            return
        for socket in (self._socket, self._monitor):
            self._poller.unregister(socket)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def _open(self, info: messages.WorkerInfo) -> None:
        if info.pool is None:
            self.error = "It does not compute prompts for others."
            return
        try:
            self.pool = self._transport.open(info.pool)
        except OSError as error:
            self.error = f"Its KV cannot be reached: {error}."
            return
        for message in self._unsent:
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        self._unsent.clear()

    def _look_for_its_end(self) -> None:
        if self.error is not None:
            return
        if int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.error = GONE
        elif self._silence.look() > SILENCE_S:
            self.silence = f"It has said nothing for {SILENCE_S:g} s."
