# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of a running server's workers, and what the supervisor answers."""

from typing import Literal

import msgspec

from pelton.core.config import Role
from pelton.serving.messages import ErrorInfo, Message

WorkerPhase = Literal["starting", "ready", "draining", "given-up"]
OperationKind = Literal["add", "drain", "roll"]


class ListWorkers(Message, frozen=True):
    """Answered with `Workers`, as the others are."""


class AddWorkers(Message, frozen=True):
    role: Role
    count: int


class DrainOne(Message, frozen=True):
    """The worker ends once its requests have; after `timeout_s` they go on elsewhere."""

    worker: int
    timeout_s: float


class RollWorkers(Message, frozen=True):
    """Every worker is replaced, one after the other, as `DrainOne` lets each end."""

    timeout_s: float


FleetRequest = ListWorkers | AddWorkers | DrainOne | RollWorkers


class WorkerEntry(msgspec.Struct, frozen=True):
    """One worker, as the supervisor knows it."""

    worker: int
    """Its number: the GPU that it has, where it has one. The lowest that is free is taken."""
    role: Role
    phase: WorkerPhase
    generation: int
    """How many processes this number has had."""
    process: str
    """What an operator finds it by; empty while none runs."""


class Operation(msgspec.Struct):
    """The newest change of the workers that was asked for. There is one at a time."""

    kind: OperationKind
    workers: list[int]
    """That are added, drained or replaced."""
    num_done: int = 0
    """Of them, in order."""
    is_done: bool = False
    error: str | None = None
    """Why it ended before all was done."""


class Workers(Message, frozen=True):
    workers: list[WorkerEntry]
    operation: Operation | None


class NotDone(Message, frozen=True):
    error: ErrorInfo


FleetReply = Workers | NotDone

_encoder = msgspec.json.Encoder()
encode = _encoder.encode
decode_request = msgspec.json.Decoder(FleetRequest).decode
decode_reply = msgspec.json.Decoder(FleetReply).decode
