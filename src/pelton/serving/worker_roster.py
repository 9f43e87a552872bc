# SPDX-License-Identifier: Apache-2.0
"""The workers behind one frontend: who is up, what each owes and what it has cached.

Each worker says a few times a second what it owes and what its prefix cache gained and lost; the
router reads that beside its own bookings. A worker that has said nothing for a while gets no new
request as long as another has; whether it is hung, its client decides later.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from pelton.core.config import Role
from pelton.core.errors import PeltonError
from pelton.core.request import GenerateRequest
from pelton.core.stats import EngineStats
from pelton.serving import messages
from pelton.serving.messages import WorkerInfo
from pelton.serving.request_stream import RequestStream
from pelton.serving.router.admission import RateMeter
from pelton.serving.router.router import Router
from pelton.serving.router.types import Policy, WorkerView
from pelton.serving.worker_client import Report

_MIN_WAITING = 8
"""Requests beyond its slots that a worker gets before others wait in the frontend, or as many as
it has slots: enough that it never runs dry before the next ones arrive."""


class WorkerPort(Protocol):
    """What a frontend needs of `WorkerClient`."""

    on_report: Callable[[Report], None]

    @property
    def info(self) -> WorkerInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def lost(self) -> asyncio.Event: ...
    @property
    def is_quiet(self) -> bool: ...
    def carry(self, stream: RequestStream, request: GenerateRequest) -> None: ...
    def watch_cache(self) -> None: ...
    def replay_cache_events(self, from_sequence: int) -> None: ...
    def hand_over(self) -> None: ...
    def cancel_all(self, error: PeltonError) -> None: ...


@dataclass(slots=True)
class WorkerState:
    """One worker, whichever process it is now."""

    role: Role = Role.MIXED
    client: WorkerPort | None = None
    generation: int = 0
    """How many processes there have been; 0: none yet."""
    is_draining: bool = False
    """The process finishes what it has and is sent nothing new."""
    num_routed: int = 0
    """Requests that were sent to it, whichever process it was."""
    num_indexed_blocks: int = 0
    """Blocks that its events say it has cached."""
    prefill_rate: RateMeter = field(default_factory=RateMeter)
    finish_rate: RateMeter = field(default_factory=RateMeter)

    @property
    def is_up(self) -> bool:
        return self.client is not None and not self.client.lost.is_set()

    @property
    def stats(self) -> EngineStats:
        """All zeros while it is not up."""
        return self.client.stats if self.client is not None and self.is_up else EngineStats()


class WorkerRoster:
    def __init__(
        self, roles: Sequence[Role], policy: Policy, router: Router, on_room: Callable[[], None]
    ) -> None:
        """`roles`: of the workers there will be at first, by number. `on_room` is called whenever a
        worker may have room."""
        self._policy, self._router, self._on_room = policy, router, on_room
        self.states = {number: WorkerState(role) for number, role in enumerate(roles)}
        """By the number of the worker."""

    @property
    def is_kv_aware(self) -> bool:
        """Whether routing reads what workers have cached."""
        return self._policy is Policy.KV_AWARE and len(self.states) > 1

    @property
    def num_up(self) -> int:
        return sum(state.is_up for state in self.states.values())

    @property
    def num_decoding(self) -> int:
        """Workers that decode, up or not."""
        return sum(state.role is not Role.PREFILL for state in self.states.values())

    @property
    def info(self) -> WorkerInfo | None:
        """Of the worker with the shortest context, so that any can take what fits; None while no
        worker is up that decodes."""
        clients = [s.client for s in self.states.values() if s.is_up and s.role is not Role.PREFILL]
        infos = [client.info for client in clients if client is not None]
        return min(infos, key=lambda info: info.max_model_len, default=None)

    def use(self, number: int, client: WorkerPort | None, generation: int) -> None:
        """Sends requests to `client`; None: there is none of this number now. A number that was
        unknown is one worker more."""
        if client is not None and number not in self.states:
            self.states[number] = WorkerState(client.info.role)
        state = self.states.get(number)
        if state is None:
            return  # removed while its process ended
        state.client, state.generation = client, generation
        state.num_indexed_blocks = 0
        state.is_draining = False
        if client is None:
            self._router.remove(str(number))
            return
        state.prefill_rate, state.finish_rate = RateMeter(), RateMeter()
        self._router.remove(str(number))
        # The second worker makes what the first has cached worth knowing.
        others = list(self.states) if len(self.states) == 2 else [number]
        for each in others:
            self._introduce(each)
        self._on_room()

    def _introduce(self, number: int) -> None:
        """Tells the router of the worker, and has its client report."""
        state = self.states[number]
        client = state.client
        if client is None or not state.is_up:
            return
        info = client.info
        view = WorkerView(
            id=str(number),
            generation=state.generation,
            num_slots=info.max_num_requests,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            publishes_events=self.is_kv_aware,
            role=info.role,
            max_waiting=max(_MIN_WAITING, info.max_num_requests),
        )
        self._router.update([view])
        client.on_report = partial(self._take_report, view)
        if self.is_kv_aware:
            client.watch_cache()

    def drain(self, number: int) -> None:
        """Sends the worker nothing new."""
        if number in self.states:
            self.states[number].is_draining = True

    def num_booked(self, number: int) -> int:
        """Requests of this frontend that need the worker."""
        return self._router.num_booked_on(str(number))

    def hand_over(self, number: int) -> None:
        """Has the worker's requests go on elsewhere; those that cannot stay where they are."""
        state = self.states.get(number)
        if state is not None and state.client is not None:
            state.client.hand_over()

    def remove(self, number: int) -> None:
        """There is no such worker any more."""
        self._router.remove(str(number))
        self.states.pop(number, None)

    def cancel_all(self, error: PeltonError) -> None:
        """Ends every request that was sent with `error`."""
        for state in list(self.states.values()):
            if state.client is not None:
                state.client.cancel_all(error)

    def find_unusable(self, need: Role) -> frozenset[str]:
        """Workers for `need` that are lost or draining, and quiet ones unless all are; and all
        others."""
        up = {
            str(number): state
            for number, state in self.states.items()
            if state.is_up and not state.is_draining and state.role is need
        }
        quiet = {i for i, state in up.items() if state.client and state.client.is_quiet}
        lost = {str(number) for number in self.states} - set(up)
        return frozenset(lost if len(quiet) == len(up) else lost | quiet)

    def _take_report(self, view: WorkerView, report: Report) -> None:
        """What the process said that `view` introduced."""
        router, worker_id, generation = self._router, view.id, view.generation
        state = self.states.get(int(worker_id))
        if state is None or state.generation != generation or state.client is None:
            return
        wanted = None
        match report:
            case messages.Heartbeat():
                router.update([_report_load(view, state, report)])
                self._on_room()
                if self.is_kv_aware:
                    wanted = router.expect_events(worker_id, generation, report.next_event)
            case messages.CacheEvents(events):
                wanted = router.apply_events(worker_id, generation, events)
            case messages.CacheContents(dump):
                router.load_dump(worker_id, generation, dump)
        state.num_indexed_blocks = router.num_indexed_blocks(worker_id)
        if wanted is not None:
            state.client.replay_cache_events(wanted.from_sequence)


def _report_load(view: WorkerView, state: WorkerState, report: messages.Heartbeat) -> WorkerView:
    """Also keeps the worker's rates. Blocks are counted as one group of the model sees them."""
    stats, prefill, at_s = report.stats, report.prefill, report.at_s
    is_prefilling, has_queue = prefill.num_pending_tokens > 0, stats.num_waiting > 0
    state.prefill_rate.sample(at_s, prefill.num_computed_total, is_prefilling)
    state.finish_rate.sample(at_s, stats.finished_total, has_queue)
    return replace(
        view,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_used_blocks=view.num_blocks * stats.num_used_blocks // (stats.num_blocks or 1),
        num_pending_prefill_tokens=prefill.num_pending_tokens,
        prefill_tokens_per_s=state.prefill_rate.per_s,
        requests_per_s=state.finish_rate.per_s,
        reported_at_s=at_s,
    )
