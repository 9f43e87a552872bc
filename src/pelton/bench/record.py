# SPDX-License-Identifier: Apache-2.0
"""record.json: everything a figure needs to be believed, in one file, written whole or not at all.

Next to it lie `requests.jsonl` (one line a request, raw) and LoadGen's own logs.
"""

import os
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from pelton.bench.loadgen_log import LoadGenResult
from pelton.bench.machine import Machine, Source
from pelton.bench.measurements import RequestRecord, Summary
from pelton.bench.scenarios.calibration import Capacity
from pelton.bench.scenarios.verdict import Verdict

FORMAT_VERSION = 1
RECORD_NAME = "record.json"
REQUESTS_NAME = "requests.jsonl"


class Status(StrEnum):
    COMPLETE = "complete"
    ENDED_EARLY = "ended early"
    """By the harness: it had no hope or no system to measure."""
    INTERRUPTED = "interrupted"
    """By the user."""


class DataSetInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str
    sha256: str
    num_samples: int
    is_synthetic: bool
    seed: int | None


class PrefixReuse(msgspec.Struct, frozen=True, kw_only=True):
    is_allowed: bool
    num_cached_tokens: int | None
    """Prompt tokens that came from other requests' KV. None: the system does not say."""


class TargetInfo(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    """"engine" (a worker, without HTTP) or "server" (a URL)."""
    model: str
    url: str | None
    max_model_len: int | None
    config: dict[str, Any] | None
    """The engine's resolved configuration. None: the server does not say."""
    config_hash: str | None


class StatsPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The engine at one moment of the test."""

    time_s: float
    num_running: int
    num_waiting: int
    batch_rows: int
    kv_use: float
    """Held blocks over all blocks."""


class Drafting(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding during the test."""

    tokens_per_decode: float
    """Mean new tokens of a decode row."""
    drafted: list[int]
    """By place: a row's first draft, its second, and so on."""
    accepted: list[int]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds count from the first scheduled request."""

    bucket_s: float
    output_tokens: list[int]
    """Output tokens that reached the client in each bucket."""
    engine: list[StatsPoint]
    """Empty where the system under test gives no statistics."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    format_version: int
    name: str
    status: Status
    scenario: str
    started_at: str
    """ISO 8601, UTC."""
    verdict: Verdict
    loadgen: LoadGenResult
    summary: Summary
    limits: dict[str, float | None]
    load: dict[str, Any]
    """LoadGen's settings as they were handed to it, seeds included."""
    calibration: Capacity | None
    data_set: DataSetInfo
    prefix_reuse: PrefixReuse
    target: TargetInfo
    bench_config: dict[str, Any]
    config_hash: str
    """Of the measurement's and the engine's settings together."""
    machine: Machine
    versions: dict[str, str]
    source: Source
    command: str
    timeline: Timeline
    drafting: Drafting | None = None
    """None: nothing was drafted, or the system under test gives no statistics."""


def write_record(record: Record, folder: Path) -> Path:
    path = folder / RECORD_NAME
    write_atomically(path, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    return path


def read_record(path: Path) -> Record:
    return msgspec.json.decode(path.read_bytes(), type=Record)


def write_requests(records: list[RequestRecord], folder: Path) -> None:
    encoder = msgspec.json.Encoder()
    write_atomically(folder / REQUESTS_NAME, encoder.encode_lines(records))


def write_atomically(path: Path, data: bytes) -> None:
    """A reader sees the old file or the whole new one, whatever happens in between."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
