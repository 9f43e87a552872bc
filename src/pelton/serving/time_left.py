# SPDX-License-Identifier: Apache-2.0
"""Deadlines on their way to another host: its monotonic clock is another one, so what is sent is
the time that is left."""

import time
from dataclasses import replace

from pelton.core.request import GenerateRequest


def find_time_left(request: GenerateRequest, *, shares_clock: bool) -> float | None:
    """What goes along with the request, in seconds. None: its deadline means the same there, or it
    has none."""
    if shares_clock or request.deadline_s is None:
        return None
    return request.deadline_s - time.monotonic()


def set_deadline(request: GenerateRequest, time_left_s: float | None) -> GenerateRequest:
    """The request that came with `time_left_s`, as this host sees it."""
    if time_left_s is None:
        return request
    return replace(request, deadline_s=time.monotonic() + time_left_s)
