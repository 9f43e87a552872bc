# SPDX-License-Identifier: Apache-2.0
"""The phases of an engine's traced requests, noted as they end. Of a request with several choices
only the first is followed: the others share its prompt."""

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
        self._open: dict[str, _OpenPhase] = {}
        """By request."""
        self._ended: dict[str, list[Phase]] = {}

    def begin(self, request_id: str, name: str) -> None:
        """Ends the phase that the request is in, unless it is this one already."""
        current = self._open.get(request_id)
        if current is None or current.name != name:
            self.end(request_id)
            self._open[request_id] = _OpenPhase(name, self._now_ns())

    def end(self, request_id: str) -> None:
        current = self._open.pop(request_id, None)
        if current is not None:
            ended = Phase(current.name, current.start_ns, self._now_ns(), current.attributes)
            self._ended.setdefault(request_id, []).append(ended)

    def end_pull(self, result: PullResult) -> None:
        """The KV that the request waits for is here, or will not come."""
        pull = self._open[result.request_id]
        pull.attributes["pelton.kv.bytes"] = result.num_bytes
        pull.attributes["pelton.kv.copy_s"] = result.copy_s
        if result.error is not None:
            pull.attributes["error.type"] = result.error
        self._ended.setdefault(result.request_id, []).extend(result.phases)
        self.begin(result.request_id, "queue" if result.error is not None else "decode")

    def take(self) -> dict[str, list[Phase]]:
        """By request: what ended since the last call."""
        ended, self._ended = self._ended, {}
        return ended
