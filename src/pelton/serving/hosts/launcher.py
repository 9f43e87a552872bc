# SPDX-License-Identifier: Apache-2.0
"""Workers on machines that have joined the server: the other end of `agent`.

A worker that is launched waits for a machine with room for its role. A machine that says nothing
for `messages.SILENCE_S`, or joins again, has lost its workers; whoever keeps them launches others,
which wait for room in turn.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

import pelton
from pelton.core.errors import ConfigError, PeltonError
from pelton.serving import messages
from pelton.serving.child_process import STOP_GRACE_S
from pelton.serving.hosts import messages as wire
from pelton.serving.launcher import ReportedWorker
from pelton.serving.wire_keys import WireGuard, WireKeys

_POLL_MS = 20
_KILLED = -9
_log = logging.getLogger("pelton.serving")


@dataclass(slots=True)
class _Host:
    join: wire.Join
    workers: "dict[int, RemoteWorker]" = field(default_factory=dict)
    num_looks: int = 0
    """At it, `PING_S` apart, since it said something last."""

    @property
    def silence_s(self) -> float:
        """It has said nothing for at least so long. The clock would run on while this process stood
        still, and so did its ears."""
        return max(self.num_looks - 1, 0) * wire.PING_S


class RemoteWorker(ReportedWorker):
    """Implements `WorkerHandle`."""

    def __init__(
        self,
        launcher: "HostsLauncher",
        number: int,
        start: messages.StartWorker,
        on_progress: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> None:
        super().__init__(on_progress, on_exit)
        self.number, self.start = number, start
        self.host = ""
        self.returncode: int | None = None
        self._launcher = launcher
        self._why_lost = ""
        self._ended = threading.Event()

    @property
    def name(self) -> str:
        return f"{self.host or 'no machine yet'} {self.number}"

    def wait_ready(self, timeout_s: float) -> None:
        super().wait_ready(timeout_s)
        self.holds_device = True  # a place on its machine, whatever device it is on

    def describe_early_end(self, returncode: int) -> str:
        if self._why_lost:
            return f"The worker was lost while it was starting: {self._why_lost}."
        how = f"code {returncode}" if returncode >= 0 else f"signal {-returncode}"
        return (
            f"The worker on {self.host} ended by {how} while it was starting; its own message is"
            " where 'pelton worker' runs, or in Ray's logs there; that system's log says whether"
            " memory had run out."
        )

    def kill(self) -> None:
        """Also where its machine does not answer: it is gone for this server, whatever runs there
        ends once the machine notices."""
        self._launcher.order(lambda: self._launcher.end(self, at_once=True))

    def ask_to_end(self) -> None:
        self._launcher.order(lambda: self._launcher.end(self, at_once=False))

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        self.ask_to_end()
        if not self._ended.wait(grace_s):
            self.kill()
            self._ended.wait(grace_s)

    def note_exit(self, code: int, why_lost: str = "") -> None:
        """Called by the launcher's thread. `why_lost`: nobody saw how it ended."""
        if self.returncode is None:
            self.returncode, self._why_lost = code, why_lost
            self._ended.set()
            self._exited(code)


class HostsLauncher:
    """Implements `Launcher`. One thread owns the socket and all that is known of machines."""

    def __init__(
        self,
        address: str,
        keys: WireKeys,
        waiting_for: str = "a machine with room: pelton worker --join ...",
    ) -> None:
        """`waiting_for`: what a worker is said to wait for. Raises `ConfigError` for an address
        that cannot be had."""
        self._waiting_for = waiting_for
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = WireGuard(self._context, keys)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._guard.secure(self._socket)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._guard.close()
            self._context.term()
            raise ConfigError(
                f"Machines cannot join at {address}: {error.strerror}; name an address of this"
                " machine, as in --listen-workers tcp://10.0.0.1:7000.",
                param="listen_workers",
            ) from error
        self._hosts: dict[bytes, _Host] = {}
        self._waiting: list[RemoteWorker] = []
        self._numbers = itertools.count(1)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def launch(
        self,
        start: messages.StartWorker,
        generation: int,
        *,
        on_progress: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> RemoteWorker:
        worker = RemoteWorker(self, next(self._numbers), start, on_progress, on_exit)
        on_progress(f"waiting for {self._waiting_for}")
        self.order(lambda: self._waiting.append(worker))
        return worker

    def order(self, work: Callable[[], None]) -> None:
        """Has it done on the launcher's thread."""
        self._orders.put(work)

    def close(self) -> None:
        if not self._is_closing.is_set():
            self._is_closing.set()
            self._thread.join()
            self._socket.close(linger=200)
            self._guard.close()
            self._context.term()

    def end(self, worker: RemoteWorker, *, at_once: bool) -> None:
        """On the launcher's thread."""
        if worker in self._waiting:
            self._waiting.remove(worker)
            worker.note_exit(_KILLED, "no machine had room for it yet")
            return
        for identity, host in list(self._hosts.items()):
            if worker.number in host.workers:
                self._send(identity, wire.End(worker.number, at_once))
                if at_once and host.silence_s >= 2 * wire.PING_S:
                    self._lose(identity, f"it has said nothing for {host.silence_s:.0f} s")

    def fail(self, worker: RemoteWorker, error: PeltonError) -> None:
        """On the launcher's thread: no machine will take it in, or its machine is gone."""
        if worker in self._waiting:
            failed = messages.Failed(messages.ErrorInfo.of(error))
            worker.take_line(messages.encode_line(failed))
            self.end(worker, at_once=True)
        for identity, host in list(self._hosts.items()):
            if worker.number in host.workers:
                self._lose(identity, error.message)

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # nobody says any more how these end
            placed = [w for host in self._hosts.values() for w in host.workers.values()]
            for worker in (*placed, *self._waiting):
                worker.note_exit(_KILLED, "the server listens to machines no more")

    def _serve(self) -> None:
        next_ping_s = time.monotonic()
        while not self._is_closing.is_set() or not self._orders.empty():
            while not self._orders.empty():
                self._orders.get()()
            if self._socket.poll(_POLL_MS):
                identity, *payloads = self._socket.recv_multipart()
                self._take(identity, payloads)
            self._place_waiting()
            now_s = time.monotonic()
            if now_s >= next_ping_s:
                next_ping_s = now_s + wire.PING_S
                for identity, host in list(self._hosts.items()):
                    self._send(identity, wire.Ping())
                    host.num_looks += 1
                    if host.silence_s >= wire.SILENCE_S:
                        self._lose(identity, f"it has said nothing for {wire.SILENCE_S:g} s")

    def _take(self, identity: bytes, payloads: list[bytes]) -> None:
        try:
            (payload,) = payloads
            message = wire.decode_from_host(payload)
        except (ValueError, msgspec.MsgspecError) as error:
            # Not even its first message is of this version.
            text = (
                f"This server runs Pelton {pelton.__version__} and does not understand what the"
                " machine says: install one version on both."
            )
            self._send(identity, wire.TurnedAway(text))
            _log.error("event=host_not_understood error=%r", str(error))
        else:
            self._receive(identity, message)

    def _receive(self, identity: bytes, message: wire.FromHost) -> None:
        if isinstance(message, wire.Join):
            self._take_in(identity, message)
            return
        host = self._hosts.get(identity)
        if host is None:
            return  # it was given up, and will notice the silence
        host.num_looks = 0
        match message:
            case wire.Leave():
                self._lose(identity, "it has left")
            case wire.Status(number, line) if number in host.workers:
                host.workers[number].take_line(line)
            case wire.Exited(number, code) if number in host.workers:
                host.workers.pop(number).note_exit(code)
                if host.join.only_worker:
                    del self._hosts[identity]

    def _take_in(self, identity: bytes, join: wire.Join) -> None:
        mine = (wire.VERSION, messages.PROTOCOL_VERSION, pelton.__version__)
        if (join.version, join.protocol, join.pelton) != mine:
            text = (
                f"This server runs Pelton {pelton.__version__}, protocol {mine[:2]}, and the"
                f" machine {join.name} {join.pelton}, protocol {(join.version, join.protocol)}:"
                " install one version on both."
            )
            self._send(identity, wire.TurnedAway(text))
            _log.error("event=host_turned_away host=%s error=%r", join.name, text)
            return
        if identity in self._hosts:
            self._lose(identity, "it has joined again")
        self._hosts[identity] = _Host(join)
        self._send(identity, wire.Joined())
        _log.info("event=host_joined host=%s num_workers=%d", join.name, join.num_workers)

    def _place_waiting(self) -> None:
        for worker in list(self._waiting):
            role = worker.start.place.role
            able = [
                (len(host.workers), identity)
                for identity, host in self._hosts.items()
                if len(host.workers) < host.join.num_workers
                and host.join.role in (None, role)
                and host.join.only_worker in (0, worker.number)
            ]
            if not able:
                continue
            _, identity = min(able)
            host = self._hosts[identity]
            if not self._send(identity, wire.Launch(worker.number, worker.start)):
                self._lose(identity, "its connection has broken")
                continue  # the worker waits for the next
            self._waiting.remove(worker)
            worker.host = host.join.name
            host.workers[worker.number] = worker

    def _lose(self, identity: bytes, why: str) -> None:
        host = self._hosts.pop(identity)
        _log.error("event=host_lost host=%s error=%r", host.join.name, why)
        for worker in host.workers.values():
            worker.note_exit(_KILLED, f"the machine {host.join.name} was given up, as {why}")

    def _send(self, identity: bytes, message: wire.ToHost) -> bool:
        """Whether there is a connection to carry it."""
        try:
            self._socket.send_multipart([identity, wire.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.debug("event=host_unreachable error=%r", error.strerror)
            return False
        return True
