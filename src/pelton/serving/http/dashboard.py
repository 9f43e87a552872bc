# SPDX-License-Identifier: Apache-2.0
"""`/dashboard`: a page for a browser, and the numbers that it asks for once a second.

A browser that opens an address sends no API key. So the page's files, which say nothing about this
server, need none; the numbers do, as `/metrics` does, and the page asks its reader for it.
"""

import time
from collections.abc import Sequence
from importlib import resources
from itertools import chain
from typing import Literal

import msgspec

from pelton.core.config import Role
from pelton.core.stats import EngineStats
from pelton.serving.http.frontend import Frontend
from pelton.serving.http.latency import Latency, summarize
from pelton.serving.http.peers import Share
from pelton.serving.http.replies import Exchange, JSONReply
from pelton.serving.http.schema import RouteCard
from pelton.serving.worker_roster import WorkerState

_NUM_ROUTES = 20
_FILES = {
    "/dashboard": ("dashboard.html", b"text/html; charset=utf-8"),
    "/dashboard/page.css": ("dashboard.css", b"text/css; charset=utf-8"),
    "/dashboard/page.js": ("dashboard.js", b"text/javascript; charset=utf-8"),
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    b" base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class WorkerCard(msgspec.Struct):
    """One worker, whichever process it is now."""

    worker: str
    role: Role
    state: Literal["up", "silent", "down"]
    """`silent`: up, but without a word for seconds, so that `stats` are as old; `down`: no process
    takes requests."""
    generation: int
    """How many processes there have been. The totals of `stats` start again with each."""
    num_routed: int
    """Requests that were sent to it, whichever process it was."""
    stats: EngineStats | None
    """The newest that it said; null while it is down. Rates are differences of its totals."""
    is_draining: bool = False
    """It finishes what it has and is sent nothing new."""


class DashboardData(msgspec.Struct):
    """What the page shows of the server: of all frontends that answered, and of their workers."""

    at_s: float
    """When it was so, on the host's monotonic clock."""
    model: str
    is_draining: bool
    num_live: int
    """Requests that are being answered."""
    num_queued: int
    """Of these, those that no worker has room for."""
    num_migrated: int
    """Times a request went on elsewhere after its worker was lost."""
    workers: list[WorkerCard]
    ttft: Latency | None
    """Null where no request ended in the last minute; so is `tpot`."""
    tpot: Latency | None
    """Mean time of an output token after the first, one value a request."""
    routes: list[RouteCard]
    """The newest routing decisions, the newest of each frontend last."""


class PageReply(JSONReply):
    """A file of the page. It may load and call nothing but this server."""

    def __init__(self, exchange: Exchange, body: bytes, media_type: bytes) -> None:
        super().__init__(exchange, body)
        self.raw_headers[0] = (b"content-type", media_type)
        self.raw_headers += [
            (b"cache-control", b"no-cache"),
            (b"content-security-policy", _POLICY),
            (b"x-content-type-options", b"nosniff"),
        ]


def read_page_files() -> dict[str, tuple[bytes, bytes]]:
    """By path: the content and its media type."""
    folder = resources.files("pelton.serving.http").joinpath("static")
    return {
        path: (folder.joinpath(name).read_bytes(), media_type)
        for path, (name, media_type) in _FILES.items()
    }


def make_dashboard_data(frontend: Frontend, shares: Sequence[Share]) -> DashboardData:
    """`shares`: of every frontend, this one's among them."""
    states = frontend.workers.roster.states
    cards = [_make_card(number, worker, shares) for number, worker in sorted(states.items())]
    num_routes = -(-_NUM_ROUTES // len(shares))
    return DashboardData(
        at_s=time.monotonic(),
        model=frontend.served_name,
        is_draining=frontend.is_draining,
        num_live=sum(share.num_live for share in shares),
        num_queued=sum(share.num_queued for share in shares),
        num_migrated=sum(share.num_migrated for share in shares),
        workers=cards,
        ttft=summarize(chain.from_iterable(share.ttft for share in shares)),
        tpot=summarize(chain.from_iterable(share.tpot for share in shares)),
        routes=[route for share in shares for route in share.routes[-num_routes:]],
    )


def _make_card(number: int, worker: WorkerState, shares: Sequence[Share]) -> WorkerCard:
    num_routed = sum(share.routed.get(number, 0) for share in shares)
    card = WorkerCard(str(number), worker.role, "down", worker.generation, num_routed, None)
    if worker.client is not None and worker.is_up:
        card.state = "silent" if worker.client.is_quiet else "up"
        card.is_draining = worker.is_draining
        card.stats = worker.stats
    return card
