# SPDX-License-Identifier: Apache-2.0
"""Whether a request can be in time, and the order of those that no worker has room for."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import inf

from pelton.serving.router.booking import WorkerBooks
from pelton.serving.router.types import RouteRequest


def estimate_wait_s(books: WorkerBooks, num_new_tokens: int) -> float:
    """Seconds until the worker would give a request with `num_new_tokens` to prefill its first
    token: the prefill ahead of it, and a slot's turn if all are taken. A rate that is unknown
    counts as infinite, so nobody is refused on a guess."""
    view, load = books.view, books.load
    wait_s = 0.0
    if view.prefill_tokens_per_s > 0:
        wait_s = (load.prefill_tokens + num_new_tokens) / view.prefill_tokens_per_s
    num_ahead = load.requests + 1 - view.num_slots
    if num_ahead > 0 and view.requests_per_s > 0:
        wait_s += num_ahead / view.requests_per_s
    return wait_s


class RateMeter:
    """How fast something gets done while there is something to do: a mean over the last samples
    that forgets, by half after `half_life_s` of busy time. Idle time says nothing of a rate."""

    def __init__(self, half_life_s: float = 5.0) -> None:
        self.per_s = 0.0
        """0 until two samples in a row were taken with something left to do."""
        self._half_life_s = half_life_s
        self._last: tuple[float, int, bool] | None = None

    def sample(self, now_s: float, total: int, has_more: bool) -> None:
        """`total`: how much was done so far, by a counter that starts again with its worker."""
        last, self._last = self._last, (now_s, total, has_more)
        if last is None or not (last[2] and has_more) or total < last[1] or now_s <= last[0]:
            return
        rate = (total - last[1]) / (now_s - last[0])
        keep = 0.5 ** ((now_s - last[0]) / self._half_life_s) if self.per_s else 0.0
        self.per_s = keep * self.per_s + (1 - keep) * rate


class AdmissionQueue:
    """Requests that no worker has room for, by priority, then deadline, then arrival. Whoever owns
    it bounds it."""

    def __init__(self) -> None:
        self._order: list[tuple[int, float, int, str]] = []
        self._requests: dict[str, tuple[tuple[int, float, int, str], RouteRequest]] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._order)

    def add(self, request: RouteRequest) -> None:
        place = (*_rank(request), self._num_added, request.request_id)
        self._num_added += 1
        insort(self._order, place)
        self._requests[request.request_id] = (place, request)

    def count_before(self, request: RouteRequest) -> int:
        """How many are served before a newcomer like this one."""
        return bisect_left(self._order, (*_rank(request), self._num_added, ""))

    @property
    def first(self) -> RouteRequest | None:
        """The request that is next."""
        return self._requests[self._order[0][3]][1] if self._order else None

    def backwards(self) -> Iterator[RouteRequest]:
        """From the request that everybody else is served before."""
        return (self._requests[place[3]][1] for place in reversed(self._order))

    def withdraw(self, request_id: str) -> bool:
        """Removes a request; False if it is not waiting."""
        found = self._requests.pop(request_id, None)
        if found is None:
            return False
        del self._order[bisect_left(self._order, found[0])]
        return True


def _rank(request: RouteRequest) -> tuple[int, float]:
    return request.priority, inf if request.deadline_s is None else request.deadline_s
