# SPDX-License-Identifier: Apache-2.0
"""The environment variables Pelton reads or sets; everything else is configuration."""

import os


def is_debug() -> bool:
    """PELTON_DEBUG=1 turns on invariant checks that cost time (block accounting at every step)."""
    return os.environ.get("PELTON_DEBUG", "0") == "1"


def otlp_endpoint() -> str:
    """Where OpenTelemetry's own variables send traces, unless they switch it off; empty: nowhere.
    Its library reads the others (headers, timeouts, sampler, resource) itself."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "") or base


def send_no_ray_statistics() -> None:
    """For this process; has an effect only before Ray is loaded. A user's own setting wins."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def tokenise_in_the_calling_thread() -> None:
    """For this process, where each text has a thread already: the tokenizers library would have one
    for each core beside them. A user's own setting wins."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


# Compute threads that spin while they wait for each other keep everything else off the cores they
# wait for: with three busy processes on two cores a step took ten times as long.
WAITING_THREADS_SLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}


def let_waiting_threads_sleep() -> None:
    """For this process; has an effect only before torch is loaded. A user's own setting wins."""
    for name, value in WAITING_THREADS_SLEEP.items():
        os.environ.setdefault(name, value)


# A router looks for each prompt's blocks in tables of a hundred megabytes: in pages of 4 kB a slow
# decision waits to learn where in memory they lie. Python's own allocator asks for no larger ones;
# glibc's does (from 2.35 on, older ones ignore it), if the kernel gives them on advice.
HUGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""For a process that is about to start."""
