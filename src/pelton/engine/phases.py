# SPDX-License-Identifier: Apache-2.0
"""The phases of the choices of an engine's traced requests, noted as they end."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pelton.core.kv_transfer import PullResult
from pelton.core.trace import Phase


@dataclass(slots=True)
class _OpenPhase:
    name: str
    start_ns: int
    attributes: dict[str, str | int | float] = field(default_factory=dict)


class PhaseLog:
    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._open: dict[tuple[str, int], _OpenPhase] = {}
        """By request and choice."""
        self._ended: dict[str, list[Phase]] = {}

    def begin(self, request_id: str, index: int, name: str) -> None:
        """Ends the phase that the choice is in, unless it is this one already."""
        current = self._open.get((request_id, index))
        if current is None or current.name != name:
            self.end(request_id, index, name)
            self._open[request_id, index] = _OpenPhase(name, self._now_ns())

    def end(self, request_id: str, index: int, next_name: str = "") -> None:
        current = self._open.pop((request_id, index), None)
        if current is not None:
            ended = Phase(
                current.name,
                current.start_ns,
                self._now_ns(),
                current.attributes,
                index=index,
                next_name=next_name,
            )
            self._ended.setdefault(request_id, []).append(ended)

    def end_pull(self, result: PullResult) -> None:
        """The KV that the first choice waits for is here, or will not come."""
        pull = self._open[result.request_id, 0]
        pull.attributes["pelton.kv.bytes"] = result.num_bytes
        pull.attributes["pelton.kv.copy_s"] = result.copy_s
        if result.error is not None:
            pull.attributes["error.type"] = result.error
        self._ended.setdefault(result.request_id, []).extend(result.phases)
        self.begin(result.request_id, 0, "queue" if result.error is not None else "decode")

    def take(self) -> dict[str, list[Phase]]:
        """By request: what ended since the last call."""
        ended, self._ended = self._ended, {}
        return ended
