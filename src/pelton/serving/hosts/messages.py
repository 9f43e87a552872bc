# SPDX-License-Identifier: Apache-2.0
"""What a server and the machines that run its workers say to each other: msgpack over ZMQ."""

import msgspec

from pelton.core.config import Role
from pelton.serving.messages import Message, StartWorker

VERSION = 2
SILENCE_S = 10.0
"""Without a word for this long, the other side is gone: its workers end, and are started anew."""
PING_S = 1.0


class Join(Message, frozen=True):
    """First message of a machine."""

    version: int
    protocol: int
    """Of `serving.messages`."""
    pelton: str
    name: str
    num_workers: int
    """It runs at most."""
    role: Role | None
    """Of all of them; None: any."""
    only_worker: int = 0
    """The one worker that it is there for, by the number in `Launch`; 0: any."""


class Joined(Message, frozen=True):
    pass


class TurnedAway(Message, frozen=True):
    error: str


class Ping(Message, frozen=True):
    """Both sides, when nothing else is to be said."""


class Leave(Message, frozen=True):
    """The machine ends its workers and goes."""


class Launch(Message, frozen=True):
    worker: int
    """Never used twice."""
    start: StartWorker


class End(Message, frozen=True):
    worker: int
    at_once: bool


class Status(Message, frozen=True):
    """A line that a worker has said: `messages.WorkerStatus`."""

    worker: int
    line: bytes


class Exited(Message, frozen=True):
    worker: int
    code: int


ToHost = Joined | TurnedAway | Ping | Launch | End
FromHost = Join | Leave | Ping | Status | Exited

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
