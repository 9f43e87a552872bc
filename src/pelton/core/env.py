# SPDX-License-Identifier: Apache-2.0
"""The environment variables Pelton reads or sets; everything else is configuration."""

import os


def is_debug() -> bool:
    """PELTON_DEBUG=1 turns on invariant checks that cost time (block accounting at every step)."""
    return os.environ.get("PELTON_DEBUG", "0") == "1"


# Compute threads that spin while they wait for each other keep everything else off the cores they
# wait for: with three busy processes on two cores a step took ten times as long.
WAITING_THREADS_SLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}


def let_waiting_threads_sleep() -> None:
    """For this process; has an effect only before torch is loaded. A user's own setting wins."""
    for name, value in WAITING_THREADS_SLEEP.items():
        os.environ.setdefault(name, value)
