# SPDX-License-Identifier: Apache-2.0
"""What a worker says about a traced request: the phases that it went through."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a choice's life in one engine. Times are nanoseconds since 1970, so that those
    of several processes, or machines that keep time, can be laid beside each other."""

    name: str
    """`queue`, `prefill`, `kv_pull` or `decode`."""
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    is_remote: bool = False
    """It was spent in the worker that computed the prompt for the one that says so."""
    index: int = 0
    """Of the choice."""
    next_name: str = ""
    """Of the phase that began as this one ended; empty: none did."""
