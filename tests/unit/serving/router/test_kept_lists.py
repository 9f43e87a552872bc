# SPDX-License-Identifier: Apache-2.0
"""What the router keeps up to date for decisions, against the same worked out anew each time."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from router_harness import make_hashes, stored

from pelton.core.clock import ManualClock
from pelton.core.config import Role
from pelton.core.errors import OverloadedError, UnavailableError
from pelton.serving.router.booking import Booking
from pelton.serving.router.recent import noted_depths
from pelton.serving.router.router import Router
from pelton.serving.router.types import RouterConfig, RouteRequest, WorkerView

IDS = ["a", "b", "c", "d"]
TRUNKS = [make_hashes(range(start, start + 40 * 16)) for start in (0, 10_000)]
"""Prompts, and their beginnings, are these."""


class Model:
    """A router whose workers join, leave, restart, change role and fill up at random."""

    def __init__(self, random: Random) -> None:
        self.random, self.clock = random, ManualClock()
        self.router = Router(RouterConfig(num_frontends=random.choice([1, 2])), self.clock)
        self.generations = dict.fromkeys(IDS, 0)
        self.next_events = dict.fromkeys(IDS, 0)
        self.bookings: list[Booking] = []

    def report(self, worker_id: str) -> None:
        random = self.random
        if self.generations[worker_id] == 0 or random.random() < 0.3:
            self.generations[worker_id] += 1
            self.next_events[worker_id] = 0
        view = WorkerView(
            id=worker_id,
            generation=self.generations[worker_id],
            role=random.choice([Role.MIXED, *Role]),
            num_slots=random.choice([1, 2]),
            num_blocks=100,
            block_size=16,
            num_running=random.randrange(3),
            max_waiting=random.randrange(2),
            reported_at_s=self.clock.now_s(),
            publishes_events=random.random() < 0.8,
        )
        self.router.update([view])

    def leave(self, worker_id: str) -> None:
        self.router.remove(worker_id)
        self.next_events[worker_id] = 0
        self.generations[worker_id] += 1

    def cache(self, worker_id: str) -> None:
        event = stored(self.next_events[worker_id], self.prompt())
        self.router.apply_events(worker_id, self.generations[worker_id], [event])
        self.next_events[worker_id] += worker_id in self.router._workers

    def release(self, worker_id: str) -> None:
        if self.bookings:
            self.bookings.pop(self.random.randrange(len(self.bookings))).release()

    def prompt(self) -> list[bytes]:
        return self.random.choice(TRUNKS)[: self.random.choice([0, 1, 10, 10, 11, 12, 32])]

    def route(self, worker_id: str) -> None:
        """`worker_id` is excluded, now and then."""
        need, hashes, router = self.random.choice(list(Role)), self.prompt(), self.router
        excluded = frozenset([worker_id] if self.random.random() < 0.5 else [])
        able = [
            books
            for books in router._workers.values()
            if books.view.role in (need, Role.MIXED) and books.id not in excluded
        ]
        free = {b.id for b in able if b.load.requests < b.view.num_slots + b.view.max_waiting}
        self.check_depths(hashes)
        request = RouteRequest(
            request_id="r",
            num_prompt_tokens=16 * len(hashes) + 1,
            block_hashes=hashes,
            excluded=excluded,
        )
        try:
            booking = router.route(request, need)
        except UnavailableError:
            assert not able
        except OverloadedError:
            assert able
            assert not free
        else:
            assert booking.worker_id in free
            assert booking.decision.generation == self.generations[booking.worker_id]
            self.bookings.append(booking)

    def check_depths(self, hashes: list[bytes]) -> None:
        index, indexed = self.router._index, {}
        holders = [index.depths([block_hash]) for block_hash in hashes]
        for worker_id in holders[0] if hashes else ():
            have = [worker_id in those for those in holders]
            indexed[worker_id] = have.index(False) if False in have else len(have)
        assert index.depths(hashes) == indexed
        decisions, noted = self.router._decisions, {}
        found = decisions.depths(hashes, self.clock.now_s())
        for depth in noted_depths(len(hashes)):
            for table in (decisions._new, decisions._old):
                noted.update(dict.fromkeys(table.get(hashes[depth - 1], ()), depth))
        assert found == noted


@given(st.randoms(use_true_random=False))
def test_what_is_kept_for_decisions_is_what_would_be_worked_out(random: Random) -> None:
    model = Model(random)
    for _ in range(60):
        model.clock.advance(random.choice([0.0, 0.1, 1.0]))
        steps = [model.report, model.leave, model.cache, model.release, *[model.route] * 4]
        random.choice(steps)(random.choice(IDS))
