# SPDX-License-Identifier: Apache-2.0
"""The record of a benchmark script: what it found, and all that is needed to believe it."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from pelton.bench.machine import (
    Source,
    describe_command,
    describe_machine,
    describe_source,
    list_versions,
)
from pelton.bench.record import write_atomically


def write_figures(
    path: Path, benchmark: str, figures: dict[str, Any], *, commit: str | None = None
) -> None:
    """Writes `figures` with machine, versions, source and command, whole or not at all.

    `commit` is for a machine that has the source tree without its history.
    """
    record = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": describe_command(),
        "source": Source(commit=commit, is_dirty=None) if commit else describe_source(),
        "machine": describe_machine(),
        "versions": list_versions(),
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
