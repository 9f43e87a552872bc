# SPDX-License-Identifier: Apache-2.0
"""`/admin/workers`: an operator lists, adds, drains and replaces workers while the server runs.

A change is begun and answered at once with how things stand; `GET /admin/workers` says how far it
is. The frontend only passes on: what workers there are is the supervisor's to decide. A server
without an API key lets only clients of the same machine in: no page of a browser, and nobody
through a proxy that says so.
"""

import ipaddress
from typing import Literal

import msgspec
from starlette.requests import Request

from pelton.core.config import Role
from pelton.core.errors import ForbiddenError, InvalidRequestError
from pelton.serving import fleet_messages
from pelton.serving.fleet_messages import FleetRequest, Operation, WorkerPhase
from pelton.serving.http.frontend import Frontend
from pelton.serving.http.replies import Exchange, JSONReply, encode_json
from pelton.serving.http.schema import MAX_TIMEOUT_S
from pelton.serving.local_calls import call, control_path

_FOREIGN_HEADERS = frozenset(
    ("origin", "sec-fetch-site", "forwarded", "via", "x-forwarded-for", "x-real-ip")
)
"""Of pages in a browser, and of proxies on this machine, which pass on what others ask."""


class AddBody(msgspec.Struct):
    role: Role = Role.MIXED
    count: int = 1


class EndBody(msgspec.Struct):
    """Of a drain and of a roll."""

    timeout_s: float = 60.0
    """How long requests may take to end before they go on elsewhere."""


class WorkerRow(msgspec.Struct):
    worker: int
    role: Role
    phase: WorkerPhase
    generation: int
    process: str
    num_running: int
    num_waiting: int
    """Requests in it, of all frontends."""
    num_routed: int
    """Requests that this frontend has sent to it."""


class WorkerTable(msgspec.Struct):
    object: Literal["list"]
    data: list[WorkerRow]
    operation: Operation | None
    """The newest change; null: there was none."""


def check_operator(frontend: Frontend, request: Request) -> None:
    """Raises `ForbiddenError` for who may not change this server; the API key was checked."""
    if frontend.config.api_key:
        return
    host = request.client.host if request.client is not None else ""
    is_program = _FOREIGN_HEADERS.isdisjoint(request.headers.keys())
    if not (is_program and _is_loopback(host)):
        raise ForbiddenError(
            "A server without an API key takes /admin only from programs on its own machine: start"
            " it with --api-key to let others in."
        )


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


async def answer_list(frontend: Frontend, exchange: Exchange) -> JSONReply:
    return await _ask(frontend, exchange, fleet_messages.ListWorkers())


async def answer_add(frontend: Frontend, exchange: Exchange, body: AddBody) -> JSONReply:
    return await _ask(frontend, exchange, fleet_messages.AddWorkers(body.role, body.count))


async def answer_drain(frontend: Frontend, exchange: Exchange, body: EndBody) -> JSONReply:
    number = exchange.request.path_params["worker"]
    if not number.isdecimal() or len(number) > 4:
        raise InvalidRequestError("A worker is named by its number.", param="worker")
    request = fleet_messages.DrainOne(int(number), _check_timeout(body.timeout_s))
    return await _ask(frontend, exchange, request)


async def answer_roll(frontend: Frontend, exchange: Exchange, body: EndBody) -> JSONReply:
    request = fleet_messages.RollWorkers(_check_timeout(body.timeout_s))
    return await _ask(frontend, exchange, request)


def _check_timeout(timeout_s: float) -> float:
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequestError(
            f"timeout_s must be between 0 and {MAX_TIMEOUT_S:g}, got {timeout_s:g}.",
            param="timeout_s",
        )
    return timeout_s


async def _ask(frontend: Frontend, exchange: Exchange, request: FleetRequest) -> JSONReply:
    """The reply to what the supervisor was asked; raises what it refuses with."""
    check_operator(frontend, exchange.request)
    line = await call(control_path(frontend.directory), fleet_messages.encode(request))
    reply = fleet_messages.decode_reply(line)
    if isinstance(reply, fleet_messages.NotDone):
        raise reply.error.to_error()
    rows = [_make_row(frontend, entry) for entry in reply.workers]
    status = 200 if isinstance(request, fleet_messages.ListWorkers) else 202
    table = WorkerTable("list", rows, reply.operation)
    return JSONReply(exchange, encode_json(table), status)


def _make_row(frontend: Frontend, entry: fleet_messages.WorkerEntry) -> WorkerRow:
    state = frontend.workers.roster.states.get(entry.worker)
    is_same = state is not None and state.generation == entry.generation
    stats = state.stats if state is not None and is_same else None
    return WorkerRow(
        worker=entry.worker,
        role=entry.role,
        phase=entry.phase,
        generation=entry.generation,
        process=entry.process,
        num_running=0 if stats is None else stats.num_running,
        num_waiting=0 if stats is None else stats.num_waiting,
        num_routed=0 if state is None else state.num_routed,
    )
