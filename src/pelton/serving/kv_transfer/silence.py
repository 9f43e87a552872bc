# SPDX-License-Identifier: Apache-2.0
"""How long the other side has said nothing, for one that looks now and then."""

import time

_MAX_LOOK_S = 1.0


class Silence:
    """Of the time since the last look no more than a second counts: a long step, or a machine that
    stood still, is not the other's silence."""

    def __init__(self) -> None:
        self._seconds, self._looked_s = 0.0, time.monotonic()

    def look(self) -> float:
        """-> seconds since something was heard."""
        now_s = time.monotonic()
        self._seconds += min(now_s - self._looked_s, _MAX_LOOK_S)
        self._looked_s = now_s
        return self._seconds

    def end(self) -> None:
        """Something was heard."""
        self._seconds, self._looked_s = 0.0, time.monotonic()
