# SPDX-License-Identifier: Apache-2.0
"""What the harness and the load process say to each other: one JSON object a line."""

import msgspec

from pelton.bench.measurements import RequestRecord
from pelton.bench.scenarios.policy import LoadSettings


class HttpTarget(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A server that speaks OpenAI's API."""

    url: str
    model: str
    api_key: str = ""


class WorkerTarget(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An engine worker, spoken to without HTTP."""

    address: str


class Setup(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """First, once."""

    target: HttpTarget | WorkerTarget
    samples_path: str
    """JSON of a list of `traffic.Sample`."""
    may_reuse_prefixes: bool
    request_timeout_s: float


class RunClosedLoop(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`concurrency` clients, each sending its next request when its last one is done. For warm-up
    and calibration."""

    concurrency: int
    num_requests: int
    time_limit_s: float
    """No request starts later than this."""


class RunLoadGen(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    settings: LoadSettings
    log_dir: str
    max_in_flight: int | None
    """None: a request goes out the moment LoadGen issues it."""


class Abort(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """End now: what is known comes back in `LoadGenDone`, and the process ends."""

    reason: str


Command = Setup | RunClosedLoop | RunLoadGen | Abort


class Ready(msgspec.Struct, tag=True, frozen=True):
    pass


class ClosedLoopDone(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    records: list[RequestRecord]


class Progress(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    num_issued: int
    num_completed: int
    num_failed: int
    num_output_tokens: int


class LoadGenDone(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    records: list[RequestRecord]
    """In the order of issue."""
    tokens_by_bucket: dict[int, int]
    """Time over `measurements.BUCKET_NS` to output tokens that arrived in that bucket."""
    aborted: str | None
    """Why the run ended early. None: LoadGen ended it."""


class LoadFailed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The load process itself cannot go on."""

    reason: str


Reply = Ready | ClosedLoopDone | Progress | LoadGenDone | LoadFailed

encode = msgspec.json.Encoder().encode
decode_command = msgspec.json.Decoder(Command).decode
decode_reply = msgspec.json.Decoder(Reply).decode
MAX_LINE_BYTES = 2**30
