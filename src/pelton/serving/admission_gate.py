# SPDX-License-Identifier: Apache-2.0
"""Lets requests through to workers one by one, in order, as workers have room for them.

While every worker has as many requests as it may, newcomers wait here: bound late, they go to
whoever is free first, and a request of higher priority (a lower number) overtakes. Whatever makes
room calls `pump`. Nobody waits in vain: a request that could not start before its deadline is
refused before it waits, as far as measured rates tell.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pelton.core.errors import (
    DeadlineExceededError,
    DeadlineUnreachableError,
    OverloadedError,
    PeltonError,
    UnavailableError,
)
from pelton.serving.router.admission import AdmissionQueue
from pelton.serving.router.booking import Booking
from pelton.serving.router.types import RouteRequest


class Route(Protocol):
    """`Router.route` among the workers that can be used now."""

    def __call__(self, request: RouteRequest) -> Booking: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    future: "asyncio.Future[Booking | None]"
    is_patient: bool
    """It also waits for a worker to come up."""
    has_begun: bool
    """Its client has been sent a part of the reply, which a refusal would cut short."""


class AdmissionGate:
    def __init__(self, route: Route, check_wait: Callable[[RouteRequest, int], None]) -> None:
        """`check_wait` raises for a request that would wait in vain behind so many others."""
        self._route = route
        self._check_wait = check_wait
        self._queue = AdmissionQueue()
        self._waiting: dict[str, _Waiting] = {}
        """By request id."""
        self._closed_by: PeltonError | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def book(
        self, request: RouteRequest, *, is_patient: bool = False, has_begun: bool = False
    ) -> Booking | None:
        """A booking, once there is one to be had; None: `withdraw` was called meanwhile.

        Raises what `Router.route` does, except that it waits where all workers are full and, if
        `is_patient`, where none is up. What `has_begun` is never displaced.
        """
        if self._closed_by is not None:
            raise self._closed_by
        num_ahead = self._queue.count_before(request)
        try:
            if not num_ahead:
                return self._route(request)
            self._check_wait(request, num_ahead)
        except DeadlineUnreachableError:
            raise
        except OverloadedError:
            self._check_wait(request, num_ahead)
        except UnavailableError:
            if not is_patient:
                raise
        future: asyncio.Future[Booking | None] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = _Waiting(future, is_patient, has_begun)
        self._queue.add(request)
        limit_s = None if request.deadline_s is None else request.deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            self._give_back(future)
            raise DeadlineExceededError("The deadline passed before a worker had room.") from None
        except asyncio.CancelledError:
            self._give_back(future)
            raise
        finally:
            self._leave(request.request_id)

    def pump(self) -> None:
        """Lets through who can go. Called whenever a worker may have room."""
        while (request := self._queue.first) is not None:
            future = self._waiting[request.request_id].future
            if future.done():  # given up, and about to say so
                self._leave(request.request_id)
                continue
            try:
                booking = self._route(request)
            except DeadlineUnreachableError as error:
                future.set_exception(error)
            except OverloadedError:
                return
            except UnavailableError as error:
                for request_id in [i for i, w in self._waiting.items() if not w.is_patient]:
                    self._refuse(request_id, error)
                return
            except PeltonError as error:
                future.set_exception(error)
            else:
                future.set_result(booking)
            self._leave(request.request_id)

    def withdraw(self, request_id: str) -> None:
        """The request's client gave it up."""
        found = self._waiting.get(request_id)
        if found is not None and not found.future.done():
            found.future.set_result(None)
            self._leave(request_id)

    def has_lower(self, priority: int) -> bool:
        """Whether somebody waits that a request of `priority` may displace."""
        last = self._find_last()
        return last is not None and last.priority > priority

    def displace_last(self) -> None:
        """Refuses whoever would be served last, of those that may be."""
        last = self._find_last()
        assert last is not None, "nobody waits who may be displaced"
        self._refuse(
            last.request_id, OverloadedError("A request of higher priority took its place.")
        )

    def close(self, error: PeltonError) -> None:
        """Refuses whoever waits, and whoever comes later."""
        self._closed_by = error
        for request_id in list(self._waiting):
            self._refuse(request_id, error)

    def _find_last(self) -> RouteRequest | None:
        """Of those that may be displaced."""
        for request in self._queue.backwards():
            if not self._waiting[request.request_id].has_begun:
                return request
        return None

    def _refuse(self, request_id: str, error: PeltonError) -> None:
        future = self._waiting[request_id].future
        if not future.done():
            future.set_exception(error)
        self._leave(request_id)

    def _leave(self, request_id: str) -> None:
        self._queue.withdraw(request_id)
        self._waiting.pop(request_id, None)

    def _give_back(self, future: "asyncio.Future[Booking | None]") -> None:
        """A booking that came at the moment its request was given up."""
        if future.done() and not future.cancelled() and future.exception() is None:
            booking = future.result()
            if booking is not None:
                booking.release()
                self.pump()
