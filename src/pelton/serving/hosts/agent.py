# SPDX-License-Identifier: Apache-2.0
"""`pelton worker`: runs workers of a server on this machine, as the server orders.

    server ── Launch, End ──► agent ── StartWorker ──► worker
           ◄── Status, Exited ──   ◄── its status ──

The agent joins, and joins again when it has lost the server, whose workers end with the connection:
nobody else knows of them. The workers are children, so they end with the agent as well. Requests
and KV go to the workers directly, with the same key.
"""

import logging
import os
import queue
import socket
import threading
import time
from dataclasses import replace

import msgspec
import zmq

import pelton
from pelton.core.config import HostConfig, Role
from pelton.core.env import WAITING_THREADS_SLEEP
from pelton.core.errors import ConfigError, UnavailableError
from pelton.serving import messages
from pelton.serving.child_process import ChildProcess
from pelton.serving.hosts import messages as wire
from pelton.serving.wire_keys import read_keys, secure_client

_POLL_MS = 50
_REJOIN_S = 1.0
_LAST_WORDS_MS = 500
_NOT_LAUNCHED = 1
_log = logging.getLogger("pelton.serving")


class HostAgent:
    def __init__(self, config: HostConfig, only_worker: int = 0) -> None:
        """`only_worker`: as in `Join`. Raises `ConfigError` for a key or an address that cannot be
        used."""
        self._config = config
        self._only_worker = only_worker
        self._keys = read_keys(config.worker_key)
        address = _parse_address(config.join)
        self._host = config.host or _find_own_host(config.join, *address)
        self._said: queue.SimpleQueue[wire.FromHost] = queue.SimpleQueue()
        self._children: dict[int, ChildProcess] = {}
        self._slots: dict[int, int] = {}
        """Of each worker, which of this machine's it is."""
        self.stop = threading.Event()

    def run(self) -> None:
        """Returns once `stop` is set. Raises `ConfigError` when the server turns it away."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            while not self.stop.is_set():
                with context.socket(zmq.DEALER) as socket:
                    socket.setsockopt(zmq.LINGER, 0)
                    secure_client(socket, self._keys)
                    _connect(socket, self._config.join)
                    try:
                        self._serve(socket)
                    finally:
                        self._end_all()
                self.stop.wait(_REJOIN_S)
        finally:
            context.term()

    def _serve(self, socket: "zmq.Socket[bytes]") -> None:
        """Until the server is lost."""
        config = self._config
        role = None if config.role == "any" else Role(config.role)
        socket.send(
            wire.encode(
                wire.Join(
                    wire.VERSION,
                    messages.PROTOCOL_VERSION,
                    pelton.__version__,
                    self._host,
                    config.num_workers,
                    role,
                    self._only_worker,
                )
            )
        )
        pinged_s = time.monotonic()
        # At the server, `PING_S` apart, since it said something last. The clock would run on while
        # this process stood still, and so did its ears.
        num_looks = 0
        has_joined = False
        while not self.stop.is_set():
            now_s = time.monotonic()
            if socket.poll(_POLL_MS):
                num_looks = 0
                order = _decode(socket.recv())
                if isinstance(order, wire.Joined):
                    has_joined = True
                    _log.info("event=joined server=%s", config.join)
                self._obey(order)
            while not self._said.empty():
                socket.send(wire.encode(self._said.get()), zmq.NOBLOCK)
            if now_s - pinged_s > wire.PING_S:
                pinged_s = now_s
                socket.send(wire.encode(wire.Ping()), zmq.NOBLOCK)
                num_looks += 1
            if (num_looks - 1) * wire.PING_S >= wire.SILENCE_S:
                what = "lost" if has_joined else "not_reached"
                _log.warning("event=server_%s server=%s", what, config.join)
                return
        socket.setsockopt(zmq.LINGER, _LAST_WORDS_MS)
        socket.send(wire.encode(wire.Leave()), zmq.NOBLOCK)

    def _obey(self, order: wire.ToHost) -> None:
        match order:
            case wire.TurnedAway(error):
                raise ConfigError(error)
            case wire.Launch(number, start):
                self._launch(number, start)
            case wire.End(number, at_once):
                child = self._children.get(number)
                if child is not None and at_once:
                    child.kill()
                elif child is not None:
                    child.ask_to_end()
            case _:
                return

    def _launch(self, number: int, start: messages.StartWorker) -> None:
        self._forget_ended()
        slot = min(set(range(len(self._slots) + 1)) - set(self._slots.values()))
        self._slots[number] = slot
        place = replace(start.place, index=slot, num_workers=self._config.num_workers)
        order = msgspec.structs.replace(
            start, place=place, keys=self._keys, log_level=self._config.log_level
        )
        try:
            self._children[number] = ChildProcess(
                "pelton.serving.worker",
                [f"tcp://{self._host}:*"],
                messages.encode_line(order),
                on_line=lambda line: self._said.put(wire.Status(number, line)),
                on_exit=lambda code: self._said.put(wire.Exited(number, code)),
                environment=WAITING_THREADS_SLEEP | os.environ,
            )
        except UnavailableError as error:
            _log.error("event=worker_not_launched error=%r", error.message)
            del self._slots[number]
            failed = messages.encode_line(messages.Failed(messages.ErrorInfo.of(error)))
            self._said.put(wire.Status(number, failed))
            self._said.put(wire.Exited(number, _NOT_LAUNCHED))

    def _forget_ended(self) -> None:
        for number in [n for n, child in self._children.items() if child.returncode is not None]:
            self._children.pop(number).stop()
            del self._slots[number]

    def _end_all(self) -> None:
        for child in self._children.values():
            child.ask_to_end()
        for child in self._children.values():
            child.stop()
        self._children.clear()
        self._slots.clear()
        while not self._said.empty():
            self._said.get()


def _parse_address(server: str) -> tuple[str, int]:
    """Host and port. ZMQ would try an address that cannot be for ever."""
    host, _, port = server.removeprefix("tcp://").rpartition(":")
    is_port = port.isdecimal() and 0 < int(port[:6]) < 65536
    if not (server.startswith("tcp://") and host and is_port):
        raise _no_address(server)
    return host, int(port)


def _find_own_host(server: str, host: str, port: int) -> str:
    """The address of this machine that packets to the server leave from."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise _no_address(server) from error


def _connect(socket: "zmq.Socket[bytes]", server: str) -> None:
    try:
        socket.connect(server)
    except zmq.ZMQError as error:
        raise _no_address(server) from error


def _no_address(server: str) -> ConfigError:
    return ConfigError(
        f"{server} is not the address of a server: name it with --join tcp://HOST:PORT.",
        param="join",
    )


def _decode(payload: bytes) -> wire.ToHost:
    try:
        order: wire.ToHost = wire.decode_to_host(payload)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"The server's orders are not those of Pelton {pelton.__version__}: install one version"
            " on both machines."
        ) from error
    return order
