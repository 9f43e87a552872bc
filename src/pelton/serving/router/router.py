# SPDX-License-Identifier: Apache-2.0
"""Which worker takes a request, and why.

    router.update(views)                     what workers report, a few times a second
    booking = router.route(request)          decides and books before anything is sent
    booking.release()                        returns the load, on every path

A decision reads one snapshot of the books and changes nothing but them. The clock and the seed
are arguments: the same calls in the same order give the same decisions.
"""

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from random import Random

from pelton.core.clock import Clock
from pelton.core.config import Role
from pelton.core.errors import (
    ConfigError,
    DeadlineExceededError,
    DeadlineUnreachableError,
    OverloadedError,
    UnavailableError,
)
from pelton.serving.router.admission import estimate_wait_s
from pelton.serving.router.booking import Booking, Load, WorkerBooks
from pelton.serving.router.events import CacheDump, CacheEvent, ReplayRequest
from pelton.serving.router.policies import Candidates, choose
from pelton.serving.router.prefix_index import PrefixIndex
from pelton.serving.router.recent import RecentDecisions
from pelton.serving.router.types import (
    Decision,
    Policy,
    RouterConfig,
    RouteRequest,
    WorkerView,
)


class Router:
    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self.recent: deque[Decision] = deque(maxlen=config.num_explained)
        """The newest decisions, oldest first: what `GET /debug/route` shows."""
        self._config = config
        self._clock = clock
        self._random = Random(config.seed)
        self._num_decisions = 0
        self._workers: dict[str, WorkerBooks] = {}
        self._able: dict[Role, list[WorkerBooks]] = {need: [] for need in Role}
        """Who does what: those of the role, and the mixed ones."""
        self._index = PrefixIndex()
        self._decisions = RecentDecisions(config.event_delay_s)
        self._sessions: OrderedDict[tuple[str, Role], tuple[str, float]] = OrderedDict()
        """The worker of each session and when it was last used, by last use."""
        self._turn = ""
        """The worker that round-robin chose last."""

    # What workers say

    def update(self, views: Iterable[WorkerView]) -> None:
        """Takes reports of workers, known or new; those not named stay as they are. A report of an
        earlier generation than the known one is ignored. Raises `ConfigError` for a worker whose
        blocks have another size than the others'."""
        for view in views:
            books = self._workers.get(view.id)
            if books is not None and view.generation < books.view.generation:
                continue
            others = (b.view.block_size for i, b in self._workers.items() if i != view.id)
            if any(size != view.block_size for size in others):
                raise ConfigError(
                    f"Worker {view.id} has blocks of {view.block_size} tokens and the others do"
                    " not: start all workers with the same block size."
                )
            if books is None or view.generation > books.view.generation:
                books = self._workers[view.id] = WorkerBooks(
                    view, self._config.num_frontends, self._config.prefill_weight
                )
                self._index.add_worker(view.id, view.generation)
            books.take_report(view, self._config.report_delay_s)
            self._sort_by_need()
        self._decisions.lifetime_s = (
            self._config.event_delay_s
            if all(books.view.publishes_events for books in self._workers.values())
            else self._config.eventless_memory_s
        )

    def remove(self, worker_id: str) -> None:
        """Forgets the worker, its load and its blocks. Bookings on it may still be released."""
        self._workers.pop(worker_id, None)
        self._sort_by_need()
        self._index.remove_worker(worker_id)

    def apply_events(
        self, worker_id: str, generation: int, events: Sequence[CacheEvent]
    ) -> ReplayRequest | None:
        """`PrefixIndex.apply`: returns what to ask the worker for when events are missing."""
        return self._index.apply(worker_id, generation, events, self._clock.now_s())

    def expect_events(
        self, worker_id: str, generation: int, next_sequence: int
    ) -> ReplayRequest | None:
        """`PrefixIndex.expect`, for the number that a worker's heartbeat carries."""
        return self._index.expect(worker_id, generation, next_sequence, self._clock.now_s())

    def load_dump(self, worker_id: str, generation: int, dump: CacheDump) -> None:
        self._index.load_dump(worker_id, generation, dump)

    # What requests ask

    def route(self, request: RouteRequest, need: Role = Role.MIXED) -> Booking:
        """Chooses a worker and books the request on it. `need` says for what: both phases, or one
        of them where they run apart.

        Raises `UnavailableError` (no worker of that role is up), `OverloadedError` (all are full),
        `DeadlineUnreachableError` (none would start in time), `DeadlineExceededError`.
        """
        now_s = self._clock.now_s()
        if request.deadline_s is not None and request.deadline_s <= now_s:
            raise DeadlineExceededError("The deadline passed before a worker was chosen.")
        candidates = Candidates(
            self._find_eligible(request, need),
            request,
            need,
            self._find_cached(request, now_s),
        )
        place, scores, reason = self._choose(request, candidates, now_s)
        books, num_new_tokens = candidates.workers[place], candidates.num_new_tokens(place)
        self._num_decisions += 1
        books.turn = self._num_decisions
        view, cached_tokens = books.view, max(0, request.num_prompt_tokens - num_new_tokens)
        decision = Decision(
            request_id=request.request_id,
            worker_id=view.id,
            generation=view.generation,
            policy=self._config.policy_for(need),
            compared=[books.id for books in candidates.workers] if scores else (),
            costs=scores,
            cached_tokens=cached_tokens if request.knows_caches else None,
            reason=reason,
        )
        self.recent.append(decision)
        if request.block_hashes:
            self._decisions.note(books.incarnation, request.block_hashes, now_s)
        if request.session and self._config.num_frontends == 1:
            self._remember_session((request.session, need), view.id, now_s)
        return Booking(
            books,
            decision,
            Load(
                request.num_choices,
                0 if need is Role.DECODE else num_new_tokens,
                candidates.num_new_blocks(place),
            ),
            booked_at_s=now_s,
        )

    def check_wait(self, request: RouteRequest, num_ahead: int, need: Role = Role.MIXED) -> None:
        """For a request that waits with `num_ahead` others before it, while every worker is full:
        raises `DeadlineUnreachableError` if the rates measured so far say that it cannot start in
        time, `UnavailableError` if none is up. Where a rate is unknown nobody is refused."""
        books = self._find_up(request, need)
        rates = [b.view.requests_per_s for b in books]
        if request.deadline_s is None or min(rates) <= 0:
            return
        wait_s = num_ahead / sum(rates) + min(estimate_wait_s(b, 1) for b in books)
        if self._clock.now_s() + wait_s > request.deadline_s:
            raise self._explain_late(request.deadline_s, wait_s, len(books))

    def load_of(self, worker_id: str) -> Load:
        """What the worker is believed to owe to all frontends. Not to be changed."""
        return self._workers[worker_id].load

    def booked_on(self, worker_id: str) -> Load:
        """What this router has booked on the worker. Not to be changed."""
        return self._workers[worker_id].own

    def num_booked_on(self, worker_id: str) -> int:
        """Requests that this router has booked on the worker, if it is known."""
        books = self._workers.get(worker_id)
        return 0 if books is None else books.own.requests

    def num_indexed_blocks(self, worker_id: str) -> int:
        return self._index.num_blocks(worker_id)

    def _sort_by_need(self) -> None:
        for need, able in self._able.items():
            able[:] = [b for b in self._workers.values() if b.view.role in (need, Role.MIXED)]

    def _find_eligible(self, request: RouteRequest, need: Role) -> list[WorkerBooks]:
        up = self._find_up(request, need)
        free = [books for books in up if not books.is_full]
        if not free:
            raise OverloadedError(
                f"Each of {len(up)} workers has all its slots taken and as many requests waiting as"
                " it may have: try again later."
            )
        return free

    def _find_up(self, request: RouteRequest, need: Role) -> list[WorkerBooks]:
        up = self._able[need]
        if request.excluded:
            up = [books for books in up if books.id not in request.excluded]
        if not up:
            raise UnavailableError(
                f"No worker for {need.value} work can take the request: all are down or draining."
                " Try again later."
            )
        return up

    def _find_cached(self, request: RouteRequest, now_s: float) -> dict[str, int]:
        """Leading blocks of the prompt by worker, the more of what events tell of and of what this
        router's own recent decisions make likely."""
        cached = self._index.depths(request.block_hashes)
        for incarnation, depth in self._decisions.depths(request.block_hashes, now_s).items():
            books = self._workers.get(incarnation.rpartition("/")[0])
            if books is not None and books.incarnation == incarnation:
                cached[books.id] = max(depth, cached.get(books.id, 0))
        return cached

    def _choose(
        self, request: RouteRequest, candidates: Candidates, now_s: float
    ) -> tuple[int, list[float], str]:
        """The place of the chosen worker among the candidates, the scores, and the reason."""
        home = self._find_home(request, candidates, now_s)
        if home is not None and self._is_punctual(request, candidates, home, now_s):
            return home, [], f"session of worker {candidates.workers[home].id}"
        place, scores = choose(self._config, candidates, self._random, self._turn)
        if not self._is_punctual(request, candidates, place, now_s):
            self._keep_punctual(request, candidates, now_s)
            place, scores = choose(self._config, candidates, self._random, self._turn)
        policy = self._config.policy_for(candidates.need)
        if policy is Policy.ROUND_ROBIN:
            self._turn = candidates.workers[place].id
        reason = f"{policy.value} of {len(candidates)}: {candidates.describe(place)}"
        return place, scores, reason

    def _is_punctual(
        self, request: RouteRequest, candidates: Candidates, place: int, now_s: float
    ) -> bool:
        if request.deadline_s is None or candidates.need is Role.DECODE:
            return True
        wait_s = estimate_wait_s(candidates.workers[place], candidates.num_new_tokens(place))
        return now_s + wait_s <= request.deadline_s

    def _keep_punctual(self, request: RouteRequest, candidates: Candidates, now_s: float) -> None:
        """Drops the workers that would start too late; raises when that is all of them."""
        every = range(len(candidates))
        punctual = [p for p in every if self._is_punctual(request, candidates, p, now_s)]
        if punctual:
            candidates.keep(punctual)
            return
        assert request.deadline_s is not None, "late without a deadline"
        soonest_s = min(
            estimate_wait_s(books, candidates.num_new_tokens(place))
            for place, books in enumerate(candidates.workers)
        )
        raise self._explain_late(request.deadline_s, soonest_s, len(candidates))

    def _explain_late(
        self, deadline_s: float, wait_s: float, num_workers: int
    ) -> DeadlineUnreachableError:
        time_left_s = deadline_s - self._clock.now_s()
        return DeadlineUnreachableError(
            f"The first token would take {wait_s:.1f} s on the least busy of {num_workers} workers"
            f" and the deadline is in {time_left_s:.1f} s: try again later or allow more time.",
            retry_after_s=max(1, math.ceil(wait_s - time_left_s)),
        )

    def _find_home(self, request: RouteRequest, candidates: Candidates, now_s: float) -> int | None:
        """The place of the session's worker. None: it has none, or that cannot take it."""
        if not request.session:
            return None
        if self._config.num_frontends > 1:
            return self._find_common_home(request.session, candidates)
        key = (request.session, candidates.need)
        if key not in self._sessions:
            return None
        worker_id, used_at_s = self._sessions[key]
        if now_s - used_at_s > self._config.session_ttl_s:
            return None
        ids = [books.id for books in candidates.workers]
        return ids.index(worker_id) if worker_id in ids else None

    @staticmethod
    def _find_common_home(session: str, candidates: Candidates) -> int:
        """The same in every frontend, with no word between them: the highest of a hash of session
        and worker (rendezvous hashing), so that one worker's end moves only its own sessions."""

        def weigh(place: int) -> bytes:
            name = f"{candidates.workers[place].id}/{session}"
            return hashlib.blake2b(name.encode(), digest_size=8).digest()

        return max(range(len(candidates)), key=weigh)

    def _remember_session(self, key: tuple[str, Role], worker_id: str, now_s: float) -> None:
        self._sessions[key] = (worker_id, now_s)
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._config.max_sessions:
            self._sessions.popitem(last=False)
