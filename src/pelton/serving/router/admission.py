# SPDX-License-Identifier: Apache-2.0
"""Whether a request can be in time, and who waits where no worker has room."""

from bisect import bisect_left, insort
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
    """Requests that no worker has room for, by priority, then deadline, then arrival. Bounded:
    when it is full, whoever would be served last is refused, be it the newcomer or another."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._order: list[tuple[int, float, int, str]] = []
        self._requests: dict[str, tuple[tuple[int, float, int, str], RouteRequest]] = {}
        self._num_offered = 0

    def __len__(self) -> int:
        return len(self._order)

    def offer(self, request: RouteRequest) -> RouteRequest | None:
        """Puts the request in its place; returns the one that has to be refused for it."""
        deadline_s = inf if request.deadline_s is None else request.deadline_s
        place = (request.priority, deadline_s, self._num_offered, request.request_id)
        self._num_offered += 1
        insort(self._order, place)
        self._requests[request.request_id] = (place, request)
        if len(self._order) <= self._max_requests:
            return None
        return self._requests.pop(self._order.pop()[3])[1]

    def take(self) -> RouteRequest | None:
        """Removes and returns the request that is next."""
        return self._requests.pop(self._order.pop(0)[3])[1] if self._order else None

    def withdraw(self, request_id: str) -> bool:
        """Removes a request that its client gave up; False if it is not waiting."""
        found = self._requests.pop(request_id, None)
        if found is None:
            return False
        del self._order[bisect_left(self._order, found[0])]
        return True

    def expire(self, now_s: float) -> list[RouteRequest]:
        """Removes and returns the requests whose deadline has passed."""
        late = [
            request
            for _, request in self._requests.values()
            if request.deadline_s is not None and request.deadline_s <= now_s
        ]
        for request in late:
            self.withdraw(request.request_id)
        return late
