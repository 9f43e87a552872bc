# SPDX-License-Identifier: Apache-2.0
"""The worker process: an engine and the message loop around it.

    python -m pelton.serving.worker ADDRESS     first line of stdin: `messages.StartWorker`

ADDRESS is ipc://PATH, or tcp://HOST:* with the key of the server in that line.

The loop is the only place that mixes messages and stepping: take what has arrived, run one step,
send each client one message with everything the step made for it. Python's cyclic collector never
runs inside a step. End of file on stdin means that the parent is gone, and so is the worker at
once, wherever its main thread is.
"""

import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec
import zmq

import pelton
from pelton.core.config import Device, EngineConfig, Role, WorkerPlace, config_hash, to_dict
from pelton.core.errors import ConfigError, InvalidRequestError, PeltonError
from pelton.core.geometry import ModelGeometry
from pelton.core.request import GenerateRequest, RequestOutput
from pelton.core.stats import EngineStats, PrefillLoad
from pelton.core.trace import Phase
from pelton.engine.allocation import is_out_of_memory
from pelton.engine.engine import Engine
from pelton.engine.grammar import TokenVocabulary
from pelton.engine.kv.blocks import CacheChange
from pelton.models.checkpoint import open_checkpoint
from pelton.models.geometries import random_vocab_size
from pelton.serving import messages
from pelton.serving.cache_events import CachePublisher
from pelton.serving.kv_transfer.link import KVLink
from pelton.serving.kv_transfer.prefill import PrefillSide, SendMessage
from pelton.serving.process import (
    read_first_line,
    set_up_logging,
    start_beating,
    take_over_stdout,
)
from pelton.serving.router.events import CacheDump
from pelton.serving.stand_in import (
    STAND_IN_SCHEME,
    make_scheduled_stand_in,
    make_stand_in,
    parse_stand_in,
)
from pelton.serving.time_left import set_deadline
from pelton.serving.tokenizer import Tokenizer
from pelton.serving.wire_keys import WireGuard, WireKeys

HEARTBEAT_INTERVAL_S = 0.25
_COLLECT_INTERVAL_S = 10.0
_MAX_MESSAGES_PER_STEP = 1024

Send = Callable[[bytes, bytes], bool]
"""(client, payload) -> whether the client is still there."""
MakePrefillSide = Callable[[SendMessage], PrefillSide]


class WorkerEngine(Protocol):
    """What the loop needs of `engine.Engine`."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def geometry(self) -> ModelGeometry: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def is_starved(self) -> bool: ...
    def add(self, request: GenerateRequest) -> None: ...
    def cancel(self, request_id: str, index: int | None = None) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def take_phases(self) -> dict[str, list[Phase]]: ...
    def stats(self) -> EngineStats: ...
    def prefill_load(self) -> PrefillLoad: ...
    def watch_cache(self) -> list[CacheChange] | None: ...


@dataclass(slots=True)
class _LiveRequest:
    client: bytes
    open_choices: set[int]
    """Indices of those that have not ended and that the client has not cancelled."""


class Worker:
    """Answers messages and steps the engine; knows which client owns which request."""

    def __init__(
        self,
        engine: WorkerEngine,
        info: messages.WorkerInfo,
        send: Send,
        make_prefill_side: MakePrefillSide | None = None,
    ) -> None:
        """With `make_prefill_side` it computes prompts for other workers."""
        self._engine = engine
        self._info = info
        self._send = send
        self._clients: set[bytes] = set()
        self._live: dict[str, _LiveRequest] = {}
        self._cache = CachePublisher(engine)
        self._prefill: PrefillSide | None = None
        if make_prefill_side is not None:
            self._prefill = make_prefill_side(self._send_or_forget)

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def can_step(self) -> bool:
        """False: a step would find nothing to do before a message arrives."""
        return self._engine.has_work and not self._engine.is_starved

    def receive(self, client: bytes, payload: bytes) -> None:
        try:
            message = messages.decode_to_worker(payload)
        except (msgspec.MsgspecError, InvalidRequestError) as error:
            self._refuse(client, "", ConfigError(f"Message not understood: {error}."))
            return
        match message:
            case messages.Submit(request, time_left_s):
                self._submit(client, set_deadline(request, time_left_s))
            case messages.Cancel(request_id, index):
                self._cancel(client, request_id, index)
            case messages.Hello():
                self._welcome(client, message)
            case messages.ReplayCacheEvents(from_sequence):
                self._replay(client, from_sequence)
            case messages.Prefill(lease_id) if self._prefill is None:
                text = "This worker computes no prompts for others: start it with --prefill."
                self._send_or_forget(client, messages.PrefillFailed(lease_id, text))
            case messages.Prefill() | messages.KeepLeases() | messages.EndLease():
                if self._prefill is not None:
                    self._prefill.receive(client, message)

    def step(self) -> None:
        """Runs one engine step and sends what it made."""
        outputs_by_client: dict[bytes, list[RequestOutput]] = defaultdict(list)
        new_outputs, phases = self._engine.step(), self._engine.take_phases()
        phases_by_client: dict[bytes, dict[str, list[Phase]]] = defaultdict(dict)
        for request_id in phases.keys() & self._live.keys():
            phases_by_client[self._live[request_id].client][request_id] = phases[request_id]
        for output in new_outputs:
            live = self._live.get(output.request_id)
            if live is None or output.index not in live.open_choices:
                continue  # cancelled while the step was running
            outputs_by_client[live.client].append(output)
            if output.finish_reason is not None:
                self._close_choice(output.request_id, live, output.index)
        if self._prefill is not None:
            self._prefill.tell(phases)
        clients = outputs_by_client.keys() | phases_by_client.keys()
        if not clients:
            return
        stats = self._engine.stats()
        for client in clients:
            message = messages.Outputs(outputs_by_client[client], stats, phases_by_client[client])
            self._send_or_forget(client, message)

    def heartbeat(self) -> None:
        """Tells every client how things stand; who asked for it, what the cache gained and lost."""
        if self._prefill is not None:
            self._prefill.expire()
        events = self._cache.take()
        for client in list(self._cache.subscribers) if events else ():
            self._send_or_forget(client, messages.CacheEvents(events))
        engine, next_event = self._engine, self._cache.next_sequence
        message = messages.Heartbeat(
            engine.stats(), engine.prefill_load(), time.monotonic(), next_event
        )
        for client in list(self._clients):
            self._send_or_forget(client, message)

    def _submit(self, client: bytes, request: GenerateRequest) -> None:
        try:
            if request.request_id in self._live:
                raise InvalidRequestError(
                    f"Request id {request.request_id!r} is in use; ids must be unique.",
                    param="request_id",
                )
            self._engine.add(request)
        except PeltonError as error:
            self._refuse(client, request.request_id, error)
        else:
            self._live[request.request_id] = _LiveRequest(client, set(request.choices))

    def _cancel(self, client: bytes, request_id: str, index: int | None = None) -> None:
        live = self._live.get(request_id)
        if live is None or live.client != client:
            return
        if index is None:
            del self._live[request_id]
        else:
            self._close_choice(request_id, live, index)
        self._engine.cancel(request_id, index)

    def _close_choice(self, request_id: str, live: _LiveRequest, index: int) -> None:
        live.open_choices.discard(index)
        if not live.open_choices:
            del self._live[request_id]

    def _welcome(self, client: bytes, hello: messages.Hello) -> None:
        refusal = None
        if hello.version != messages.PROTOCOL_VERSION:
            refusal = (
                f"This worker speaks protocol version {messages.PROTOCOL_VERSION}, not"
                f" {hello.version}; run both ends from one installation."
            )
        elif hello.layout is not None and self._prefill is not None:
            refusal = self._prefill.refuse(hello.layout)
        if refusal is not None:
            self._refuse(client, "", ConfigError(refusal))
            return
        self._clients.add(client)
        if hello.wants_cache_events:
            self._cache.subscribe(client)
        self._send_or_forget(client, messages.Welcome(self._info))

    def _replay(self, client: bytes, from_sequence: int) -> None:
        reply = self._cache.replay(from_sequence)
        if isinstance(reply, CacheDump):
            self._send_or_forget(client, messages.CacheContents(reply))
        else:
            self._send_or_forget(client, messages.CacheEvents(reply))

    def _refuse(self, client: bytes, request_id: str, error: PeltonError) -> None:
        info = messages.ErrorInfo.of(error)
        self._send_or_forget(client, messages.Refused(request_id, info))

    def _send_or_forget(self, client: bytes, message: messages.FromWorker) -> None:
        """A client that is gone gets its requests cancelled: nobody will read them."""
        if self._send(client, messages.encode(message)):
            return
        self._clients.discard(client)
        self._cache.subscribers.discard(client)
        if self._prefill is not None:
            self._prefill.forget_client(client)
        for request_id in [i for i, live in self._live.items() if live.client == client]:
            self._cancel(client, request_id)


def make_worker_info(
    engine: WorkerEngine, address: str = "", link: KVLink | None = None
) -> messages.WorkerInfo:
    config, geometry = engine.config, engine.geometry
    max_model_len = config.model.max_model_len
    num_blocks, max_num_requests = config.cache.num_blocks, config.scheduler.max_num_requests
    assert isinstance(max_model_len, int), max_model_len
    assert isinstance(num_blocks, int), num_blocks
    assert isinstance(max_num_requests, int), max_num_requests
    return messages.WorkerInfo(
        model=config.model.model,
        max_model_len=max_model_len,
        vocab_size=geometry.vocab_size,
        block_size=config.cache.block_size,
        num_blocks=num_blocks,
        max_num_requests=max_num_requests,
        shares_prefixes=config.cache.prefix_cache,
        config=to_dict(config),
        config_hash=config_hash(config),
        address=address,
        role=Role.MIXED if link is None else link.role,
        pool=None if link is None else link.handle(),
    )


def run_loop(
    socket: "zmq.Socket[bytes]",
    poller: zmq.Poller,
    engine: WorkerEngine,
    info: messages.WorkerInfo,
    link: KVLink,
) -> NoReturn:
    """Serves `socket` (a bound ROUTER) for ever. `poller` has it and those of `link`."""
    worker = Worker(engine, info, _sender(socket), _find_prefill_side(engine, link))
    gc.collect()
    gc.freeze()
    gc.disable()
    next_heartbeat_s = next_collect_s = time.monotonic()
    has_garbage = False
    while True:
        now_s = time.monotonic()
        if now_s >= next_heartbeat_s:
            worker.heartbeat()
            next_heartbeat_s = now_s + HEARTBEAT_INTERVAL_S
            if has_garbage and not worker.has_work:
                # All there is takes tens of milliseconds, which those who stream would feel.
                gc.collect()
                has_garbage = False
            elif now_s >= next_collect_s:
                gc.collect(1)
                next_collect_s = now_s + _COLLECT_INTERVAL_S
        wait_s = 0.0 if worker.can_step else max(next_heartbeat_s - now_s, 0.001)
        if link.is_reading:
            wait_s = min(wait_s, link.read_interval_s)
        if poller.poll(round(wait_s * 1000)):
            _receive_all(socket, worker)
        if worker.has_work:
            has_garbage = True
            worker.step()
        else:
            link.read_idle()


def _find_prefill_side(engine: WorkerEngine, link: KVLink) -> MakePrefillSide | None:
    if link.role is not Role.PREFILL:
        return None
    assert isinstance(engine, Engine), engine
    return partial(PrefillSide, engine, *link.shared)


def _receive_all(socket: "zmq.Socket[bytes]", worker: Worker) -> None:
    for _ in range(_MAX_MESSAGES_PER_STEP):
        try:
            client, payload = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        worker.receive(client, payload)


def _sender(socket: "zmq.Socket[bytes]") -> Send:
    def send(client: bytes, payload: bytes) -> bool:
        try:
            socket.send_multipart([client, payload], zmq.NOBLOCK, copy=len(payload) < 65536)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    return send


def bind_router(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: WireKeys | None = None
) -> "zmq.Socket[bytes]":
    """A ROUTER that reports vanished clients and never drops a message to one that is there. With
    `keys` only their holders can be clients, for the rest of this process's life."""
    socket = context.socket(zmq.ROUTER)
    if keys is not None:
        WireGuard(context, keys).secure(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    return socket


def load_engine(config: EngineConfig, place: WorkerPlace, link: KVLink) -> WorkerEngine:
    if config.model.model.startswith(STAND_IN_SCHEME):
        if place.role is not Role.MIXED:
            raise ConfigError("A stand-in has no KV to move: use --workers.", param="prefill")
        options = parse_stand_in(config.model.model)
        if options.scheduled:
            return make_scheduled_stand_in(config, options)
        return make_stand_in(config)
    from pelton.engine.factory import make_engine  # imports torch

    def load_vocabulary(geometry: ModelGeometry) -> TokenVocabulary:
        vocab_size = random_vocab_size(config.model)
        tokenizer = Tokenizer.load(open_checkpoint(config.model.model), vocab_size)
        return tokenizer.vocabulary(geometry.eos_token_ids, geometry.vocab_size)

    return make_engine(
        config,
        load_vocabulary=load_vocabulary,
        place=place,
        connect=link.connect,
        find_landing_bytes=link.find_landing_bytes,
    )


def read_start(report: Callable[[messages.WorkerStatus], None]) -> messages.StartWorker:
    """The order that the launcher sends, who is told first which version reads it."""
    report(messages.Started(messages.PROTOCOL_VERSION, pelton.__version__))
    try:
        start: messages.StartWorker = messages.decode_start_worker(read_first_line())
    except msgspec.MsgspecError as error:
        sys.exit(
            f"error: This worker runs Pelton {pelton.__version__}, protocol"
            f" {messages.PROTOCOL_VERSION}, and its order is of another version ({error}): start"
            " the server and its workers from one installation."
        )
    return start


def main(arguments: list[str]) -> NoReturn:
    (address,) = arguments
    report = take_over_stdout()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = read_start(report)
    threading.Thread(target=_exit_with_parent, args=(address,), daemon=True).start()
    poller = zmq.Poller()
    try:
        set_up_logging(start.log_level)
        report(messages.Loading(f"loading {start.config.model.label}"))
        link = KVLink(start.place.role, poller, start.place.kv_transport, start.keys)
        engine = load_engine(start.config, start.place, link)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = bind_router(context, address, start.keys)
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        info = make_worker_info(engine, address, link)
    except ConfigError as error:
        report(messages.Failed(messages.ErrorInfo.of(error)))
        sys.exit(2)
    poller.register(socket, zmq.POLLIN)
    holds_device = engine.config.executor.device is Device.CUDA
    report(messages.Ready(holds_device, address, link.layout))
    if start.heartbeat_s:
        start_beating(report, start.heartbeat_s)
    try:
        run_loop(socket, poller, engine, info, link)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(
            "error: A step found no memory, so the worker ends; lower --max-num-batched-tokens,"
            " --max-num-requests or --kv-memory-bytes."
        )


def _exit_with_parent(address: str) -> None:
    """Waits for the end of stdin, then ends the process: `os._exit`, because the main thread may be
    inside a long kernel. A parent that asks for it sends a line first; one that does not is gone,
    and all that it made goes with it."""
    was_asked = False
    while os.read(0, 4096):
        was_asked = True
    if not was_asked and address.startswith("ipc://"):
        shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
