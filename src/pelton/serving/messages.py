# SPDX-License-Identifier: Apache-2.0
"""What the processes of a server say to each other.

Three conversations, all of tagged array-like structs with one encoder each:

    client <-> worker       msgpack over ZMQ: `ToWorker`, `FromWorker`; a worker that decodes is
                            a client of those that prefill
    worker <-> launcher     JSON lines on the worker's stdin and stdout: `StartWorker`,
                            `WorkerStatus`
    supervisor <-> frontend JSON lines on the frontend's stdin and stdout: `ToFrontend`,
                            `FromFrontend`

The types of `core` (requests, outputs, statistics) travel as they are. `PROTOCOL_VERSION` changes
when any of this does; a worker refuses a client of another version.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from pelton.core import errors
from pelton.core.config import EngineConfig, Role, ServerConfig, WorkerPlace
from pelton.core.kv_transfer import KVLayout
from pelton.core.request import GenerateRequest, RequestOutput
from pelton.core.stats import EngineStats, PrefillLoad
from pelton.core.trace import Phase
from pelton.serving.kv_transfer.transport import PoolHandle
from pelton.serving.router.events import CacheDump, CacheEvent
from pelton.serving.wire_keys import WireKeys

PROTOCOL_VERSION = 13


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of every message; the class name is its tag."""


class ErrorInfo(msgspec.Struct, array_like=True, frozen=True):
    """A `core.errors` error on the wire: the name of its class and what it says."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: errors.PeltonError) -> "ErrorInfo":
        return cls(type(error).__name__, error.message, error.param)

    def to_error(self) -> errors.PeltonError:
        error = _ERRORS_BY_NAME.get(self.kind, errors.PeltonError)(self.message)
        error.param = self.param
        return error


def error_from_code(code: str | None, message: str) -> errors.PeltonError:
    """The error an output with `FinishReason.ERROR` stands for, found by its `error_code`."""
    return _ERRORS_BY_CODE.get(code or "", errors.PeltonError)(message)


def _error_classes(root: type[errors.PeltonError]) -> Iterator[type[errors.PeltonError]]:
    yield root
    for child in root.__subclasses__():
        yield from _error_classes(child)


_ERRORS_BY_NAME: dict[str, type[errors.PeltonError]] = {
    e.__name__: e for e in _error_classes(errors.PeltonError)
}
_ERRORS_BY_CODE = {error.code: error for error in _ERRORS_BY_NAME.values() if error.code}


class WorkerInfo(msgspec.Struct, frozen=True):
    """What a client must know of the engine it talks to. Fixed for the worker's life."""

    model: str
    """The MODEL string."""
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_requests: int
    shares_prefixes: bool
    """Whether a request may find blocks of another one cached."""
    config: dict[str, Any]
    """The resolved EngineConfig as plain values."""
    config_hash: str
    address: str = ""
    """Where other workers reach it."""
    role: Role = Role.MIXED
    pool: PoolHandle | None = None
    """Its KV, where it computes prompts for others."""


class Hello(Message, frozen=True):
    """First message of a client, and again whenever it wants to know whether it is known."""

    version: int
    wants_cache_events: bool = False
    """Send every `CacheEvents` from now on."""
    layout: KVLayout | None = None
    """Of a worker that wants KV: the blocks that it can use."""


class Submit(Message, frozen=True):
    request: GenerateRequest
    time_left_s: float | None = None
    """Until its deadline, for a worker whose clock may be another one."""


class Cancel(Message, frozen=True):
    request_id: str
    index: int | None = None
    """Which choice to end; None: all of them."""


class ReplayCacheEvents(Message, frozen=True):
    """Send the events from this number on once more, or what they amount to."""

    from_sequence: int


class Prefill(Message, frozen=True):
    """Compute the prompt, all but its last token, and say which blocks can be read."""

    lease_id: str
    """Of the sender's making; never used twice."""
    request: GenerateRequest
    first_entries: list[int]
    """For each KV group, the first entry of the block table that is wanted."""
    time_left_s: float | None = None
    """As in `Submit`."""


class KeepLeases(Message, frozen=True):
    """The sender lives and still wants these."""

    lease_ids: list[str]


class EndLease(Message, frozen=True):
    """All is copied, or nothing more is wanted."""

    lease_id: str


ToPrefill = Prefill | KeepLeases | EndLease
ToWorker = Hello | Submit | Cancel | ReplayCacheEvents | ToPrefill


class Welcome(Message, frozen=True):
    """Answer to a Hello of the same version."""

    info: WorkerInfo


class Refused(Message, frozen=True):
    """A Hello or a Submit that the worker cannot take; `request_id` is empty for a Hello."""

    request_id: str
    error: ErrorInfo


class Outputs(Message, frozen=True):
    """Everything one step made for one client."""

    outputs: list[RequestOutput]
    stats: EngineStats
    phases: dict[str, list[Phase]] = {}
    """Of traced requests, by their ids: what ended since the last message."""


class Heartbeat(Message, frozen=True):
    """Sent a few times a second to every client, busy or not."""

    stats: EngineStats
    prefill: PrefillLoad
    at_s: float
    """When it was so, on the worker's monotonic clock."""
    next_event: int
    """The number of the first cache event that was not sent yet."""


class CacheEvents(Message, frozen=True):
    """What the prefix cache gained and lost, in order; shortly before the heartbeat that counts
    them, or again because somebody asked."""

    events: list[CacheEvent]


class CacheContents(Message, frozen=True):
    """Answer to `ReplayCacheEvents` where some of them are gone."""

    dump: CacheDump


class BlockRun(msgspec.Struct, array_like=True, frozen=True):
    """Consecutive entries of one KV group."""

    group: int
    first_entry: int
    block_ids: list[int]
    digest: bytes
    """Of the blocks' content, keyed with prompt and entries."""


class Blocks(Message, frozen=True):
    """Blocks of a lease that can be read until it ends."""

    lease_id: str
    runs: list[BlockRun]
    is_last: bool
    num_cached_tokens: int
    """Of the prompt, that the worker need not compute."""
    phases: list[Phase] = []
    """Of a traced request, with the last blocks: what the worker did when."""


class PrefillFailed(Message, frozen=True):
    """No more blocks come; those that did are given back."""

    lease_id: str
    error: str


FromPrefill = Blocks | PrefillFailed
FromWorker = Welcome | Refused | Outputs | Heartbeat | CacheEvents | CacheContents | FromPrefill


class StartWorker(Message, frozen=True):
    """The only line a worker reads."""

    config: EngineConfig
    place: WorkerPlace
    heartbeat_s: float = 0.0
    """How often to say `Alive`; 0: never."""
    keys: WireKeys | None = None
    """Of a worker that is reached over a network."""
    log_level: str = "warning"
    """The least level that it logs."""


class Started(Message, frozen=True):
    """First line of a worker, before it reads any; never to be changed."""

    protocol: int
    """Its `PROTOCOL_VERSION`."""
    pelton: str


class Loading(Message, frozen=True):
    phase: str
    """What is being done, such as "loading smollm2"."""


class Ready(Message, frozen=True):
    """The worker is bound to its address and takes requests."""

    holds_device: bool = False
    """It fills a GPU."""
    address: str = ""
    """Where its clients connect."""
    layout: KVLayout | None = None
    """Of its KV, for all workers to have the same; None: a stand-in, which has none."""


class Failed(Message, frozen=True):
    """The worker cannot start, and exits."""

    error: ErrorInfo


class Alive(Message, frozen=True):
    """The process runs, whatever its engine or its event loop does. A worker says it from when it
    is ready."""


WorkerStatus = Started | Loading | Ready | Failed | Alive


class StartFrontend(Message, frozen=True):
    """First line a frontend reads."""

    config: ServerConfig
    model: str
    listen_fd: int
    directory: str
    """Where the sockets of this server's processes lie."""
    vocab_size: int = 0
    """Of the weights that run, where they are not MODEL's; 0: MODEL's own."""
    number: int = 0
    """Which of the frontends it is."""


class UseWorker(Message, frozen=True):
    """A worker is ready; it replaces the one before with its number."""

    address: str
    worker: int
    generation: int


class DrainWorker(Message, frozen=True):
    """Send the worker nothing new and, after `timeout_s`, have its requests go on elsewhere; say
    `Released` once none of them is left."""

    worker: int
    generation: int
    timeout_s: float


class RemoveWorker(Message, frozen=True):
    """There is no worker of this number any more."""

    worker: int


class Drain(Message, frozen=True):
    """Take nothing new, let running requests finish for so long, then exit."""

    timeout_s: float


ToFrontend = StartFrontend | UseWorker | DrainWorker | RemoveWorker | Drain


class Listening(Message, frozen=True):
    """The frontend answers HTTP, whether or not it has a worker."""


class Serving(Message, frozen=True):
    """The frontend has said hello to the worker of this generation and sends it requests."""

    worker: int
    generation: int


class Released(Message, frozen=True):
    """Answer to `DrainWorker`: no request of this frontend needs the worker of this generation."""

    worker: int
    generation: int


class WorkerStalled(Message, frozen=True):
    """The worker of this generation lives but has said nothing for too long."""

    worker: int
    generation: int


class StartFailed(Message, frozen=True):
    """The frontend cannot start (tokenizer or template unusable), and exits."""

    error: ErrorInfo


FromFrontend = Listening | Serving | Released | WorkerStalled | StartFailed | Alive

_encoder = msgspec.msgpack.Encoder()
_line_encoder = msgspec.json.Encoder()

encode = _encoder.encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_start_worker = msgspec.json.Decoder(StartWorker).decode
decode_worker_status = msgspec.json.Decoder(WorkerStatus).decode
decode_to_frontend = msgspec.json.Decoder(ToFrontend).decode
decode_from_frontend = msgspec.json.Decoder(FromFrontend).decode


def encode_line(message: Any) -> bytes:
    """One JSON line, newline included."""
    return _line_encoder.encode(message) + b"\n"
