# SPDX-License-Identifier: Apache-2.0
"""When a child process that died is started again."""

from collections import deque
from dataclasses import dataclass, field

from pelton.core.errors import PeltonError


class RestartLimitError(PeltonError):
    """A child process died too often in a short time."""


@dataclass(slots=True)
class RestartPolicy:
    """Later each time, and not for ever."""

    max_restarts: int = 5
    window_s: float = 300.0
    first_delay_s: float = 0.25
    max_delay_s: float = 10.0
    _deaths_s: deque[float] = field(default_factory=deque)

    def next_delay_s(self, now_s: float) -> float | None:
        """Notes a death at `now_s`; None: it has died too often within the window."""
        while self._deaths_s and now_s - self._deaths_s[0] > self.window_s:
            self._deaths_s.popleft()
        self._deaths_s.append(now_s)
        if len(self._deaths_s) > self.max_restarts:
            return None
        doublings: float = 2.0 ** (len(self._deaths_s) - 1)
        return min(self.first_delay_s * doublings, self.max_delay_s)

    def delay_s(self, name: str, now_s: float) -> float:
        """`next_delay_s` of the process called `name`; raises `RestartLimitError` for None."""
        delay_s = self.next_delay_s(now_s)
        if delay_s is None:
            raise RestartLimitError(
                f"{name.capitalize()} died {self.max_restarts + 1} times within"
                f" {self.window_s:g} s; its messages are above."
            )
        return delay_s
