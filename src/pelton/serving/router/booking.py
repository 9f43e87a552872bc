# SPDX-License-Identifier: Apache-2.0
"""The router's books: what each worker owes, and the part of it that one request stands for.

A worker's load is what its last report says, or this router's own bookings on it where they are
more, plus the bookings that are too young to be in that report. With F frontends a young booking
counts F times: the others see the same gap, and fill it with requests of their own.
"""

from pelton.serving.router.types import Decision, WorkerView


class Load:
    """Requests, prompt tokens to prefill, and blocks held."""

    __slots__ = ("blocks", "prefill_tokens", "requests")

    def __init__(self, requests: int = 0, prefill_tokens: int = 0, blocks: int = 0) -> None:
        self.requests = requests
        self.prefill_tokens = prefill_tokens
        self.blocks = blocks

    def __repr__(self) -> str:
        return f"Load({self.requests}, {self.prefill_tokens}, {self.blocks})"

    def add(self, other: "Load", times: int = 1) -> None:
        self.requests += times * other.requests
        self.prefill_tokens += times * other.prefill_tokens
        self.blocks += times * other.blocks

    def is_zero(self) -> bool:
        return not (self.requests or self.prefill_tokens or self.blocks)


class WorkerBooks:
    """One incarnation of a worker. `load` is kept up to date, so that a decision only reads it.

    Owns the account, not the bookings: those belong to whoever routed, and one that is released
    after its worker has gone changes nothing that is still read.
    """

    __slots__ = (
        *("_bookings", "_others", "_prefill_weight", "_weight_of_young", "_young"),
        *("id", "incarnation", "is_full", "load", "own", "turn", "view", "work"),
    )

    def __init__(self, view: WorkerView, num_frontends: int, prefill_weight: float) -> None:
        self.view = view
        self.id = view.id
        self.incarnation = f"{view.id}/{view.generation}"
        self.own = Load()
        """Every live booking of this router."""
        self.load = Load()
        self.work = 0.0
        """`load` in blocks held, as `kv-aware` weighs it (`policies`)."""
        self.is_full = False
        """All slots are taken, and as many requests wait as may."""
        self._others = Load()
        """What the last report says beyond the bookings that it can include."""
        self._young = Load()
        """Live bookings that the last report cannot include."""
        self._weight_of_young = num_frontends - 1
        self._prefill_weight = prefill_weight
        self.turn = 0
        """Which of the router's decisions chose it last; 0: none yet."""
        self._bookings: set[Booking] = set()

    def take_report(self, view: WorkerView, report_delay_s: float) -> None:
        """Replaces the last report. A booking that was made less than `report_delay_s` before the
        report may be missing in it, and is added to it."""
        self.view = view
        seen, self._young = Load(), Load()
        for booking in self._bookings:
            booking.is_young = booking.booked_at_s > view.reported_at_s - report_delay_s
            (self._young if booking.is_young else seen).add(booking.load)
        self._others = Load(
            max(0, view.num_running + view.num_waiting - seen.requests),
            max(0, view.num_pending_prefill_tokens - seen.prefill_tokens),
            max(0, view.num_used_blocks - seen.blocks),
        )
        self._add_up()

    def open(self, booking: "Booking") -> None:
        self._bookings.add(booking)
        self.change(booking, booking.load, 1)

    def close(self, booking: "Booking") -> None:
        self._bookings.remove(booking)
        self.change(booking, booking.load, -1)

    def change(self, booking: "Booking", change: Load, times: int) -> None:
        self.own.add(change, times)
        if booking.is_young:
            self._young.add(change, times)
        self._add_up()

    def _add_up(self) -> None:
        self.load = load = Load()
        load.add(self._others)
        load.add(self.own)
        if self._weight_of_young:
            load.add(self._young, self._weight_of_young)
        prefill_blocks = load.prefill_tokens / self.view.block_size
        self.work = load.blocks + self._prefill_weight * prefill_blocks
        self.is_full = load.requests >= self.view.num_slots + self.view.max_waiting


class Booking:
    """Load that is held while a request is under way. Calls after the release do nothing, so every
    path may release."""

    def __init__(
        self,
        books: WorkerBooks,
        decision: Decision,
        load: Load,
        booked_at_s: float,
    ) -> None:
        self.decision = decision
        self.load = load
        """What is booked now. Changed by this class only."""
        self.booked_at_s = booked_at_s
        self.is_young = True
        """Whether the worker's reports cannot include it yet."""
        self.is_released = False
        self._books = books
        books.open(self)

    @property
    def worker_id(self) -> str:
        return self.decision.worker_id

    def on_first_token(self) -> None:
        """The prompt is prefilled."""
        if self.load.prefill_tokens and not self.is_released:
            self._books.change(self, Load(0, self.load.prefill_tokens, 0), -1)
            self.load.prefill_tokens = 0

    def release(self) -> None:
        """The request ended, moved or was never sent."""
        if not self.is_released:
            self.is_released = True
            self._books.close(self)
