# SPDX-License-Identifier: Apache-2.0
"""The environment variables Pelton reads: for debugging only, everything else is configuration."""

import os


def is_debug() -> bool:
    """PELTON_DEBUG=1 turns on invariant checks that cost time (block accounting at every step)."""
    return os.environ.get("PELTON_DEBUG", "0") == "1"
