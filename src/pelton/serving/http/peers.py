# SPDX-License-Identifier: Apache-2.0
"""What the frontends of one server tell each other, so that any of them can answer for all.

A page that is about the server reaches one of them. It asks the others, over their sockets, for
what only they know; what workers say they all know. One that does not answer in time is left out.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from pelton.core.errors import UnavailableError
from pelton.serving.http.frontend import Frontend
from pelton.serving.http.latency import Sample
from pelton.serving.http.metrics import Family
from pelton.serving.http.schema import RouteCard
from pelton.serving.local_calls import call, frontend_path

ReplyT = TypeVar("ReplyT")

_TIMEOUT_S = 1.0
_METRICS, _SHARE = b"metrics", b"share"


class Share(msgspec.Struct):
    """What one frontend has of the server's requests."""

    num_live: int
    num_queued: int
    num_migrated: int
    routed: dict[int, int]
    """Requests sent, by the number of the worker."""
    ttft: list[Sample]
    tpot: list[Sample]
    routes: list[RouteCard]
    """The newest last."""


_decode_families = msgspec.json.Decoder(list[Family]).decode
_decode_share = msgspec.json.Decoder(Share).decode


def make_share(frontend: Frontend) -> Share:
    now_s, pool, metrics = time.monotonic(), frontend.workers, frontend.metrics
    return Share(
        num_live=metrics.num_live,
        num_queued=pool.gate.num_waiting,
        num_migrated=pool.num_migrated,
        routed={number: state.num_routed for number, state in pool.roster.states.items()},
        ttft=metrics.recent_ttft.samples(now_s),
        tpot=metrics.recent_tpot.samples(now_s),
        routes=[RouteCard.of(decision, frontend.number) for decision in pool.recent],
    )


async def answer_peer(frontend: Frontend, question: bytes) -> bytes:
    if question == _METRICS:
        return msgspec.json.encode(frontend.metrics.own_families(frontend.workers))
    return msgspec.json.encode(make_share(frontend))


async def collect_shares(frontend: Frontend) -> list[Share]:
    """Of every frontend, this one's first."""
    others = await _ask_others(frontend, _SHARE, _decode_share)
    return [make_share(frontend), *others.values()]


async def render_metrics(frontend: Frontend) -> bytes:
    """Prometheus' text format. With several frontends, what is one's own carries its number."""
    if frontend.config.frontends == 1:
        return frontend.metrics.render(frontend.workers, None)
    families: dict[int, list[Family] | None] = dict.fromkeys(range(frontend.config.frontends))
    families |= await _ask_others(frontend, _METRICS, _decode_families)
    families[frontend.number] = frontend.metrics.own_families(frontend.workers)
    return frontend.metrics.render(frontend.workers, families)


async def _ask_others(
    frontend: Frontend, question: bytes, decode: Callable[[bytes], ReplyT]
) -> dict[int, ReplyT]:
    async def ask(number: int) -> tuple[int, bytes] | None:
        path = frontend_path(frontend.directory, number)
        try:
            return number, await call(path, question, _TIMEOUT_S)
        except UnavailableError:
            return None  # it is being replaced

    numbers = [n for n in range(frontend.config.frontends) if n != frontend.number]
    replies = await asyncio.gather(*map(ask, numbers))
    return {reply[0]: decode(reply[1]) for reply in replies if reply is not None}
