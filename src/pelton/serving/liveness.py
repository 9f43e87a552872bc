# SPDX-License-Identifier: Apache-2.0
"""Notices a child process that stands still: it says no more, every so often, that it lives."""

import asyncio
import contextlib
from collections.abc import Callable

_LOOKS_PER_HEARTBEAT = 4


async def falls_silent(
    exited: asyncio.Event, num_heard: Callable[[], int], heartbeat_s: float, start_timeout_s: float
) -> bool:
    """Waits until the process ends (False), or has said nothing for two heartbeats since it last
    spoke, less the time between two looks, in which it may have fallen silent, or for
    `start_timeout_s` before it ever did (True). `num_heard`: how often it has spoken."""
    silence_s, num_before = 0.0, 0
    interval_s = heartbeat_s / _LOOKS_PER_HEARTBEAT
    while not exited.is_set():
        # Looks are counted, not the clock: while this process stood still, so did its ears.
        num_now = num_heard()
        silence_s = silence_s + interval_s if num_now == num_before else 0.0
        num_before = num_now
        if silence_s >= (2 * heartbeat_s - interval_s if num_now else start_timeout_s):
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(exited.wait(), interval_s)
    return False
