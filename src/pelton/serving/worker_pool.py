# SPDX-License-Identifier: Apache-2.0
"""The workers behind one frontend: who is up, and which of them takes a request.

One frontend sends all requests there are, so its own bookings are the whole load: workers' reports
add nothing to them. A worker that has said nothing for a while gets no new request as long as
another has; whether it is hung, its client decides later.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from pelton.core.clock import MonotonicClock
from pelton.core.errors import PeltonError, UnavailableError
from pelton.core.request import GenerateRequest
from pelton.core.stats import EngineStats
from pelton.serving.messages import WorkerInfo
from pelton.serving.router.router import Router
from pelton.serving.router.types import Decision, Policy, RouterConfig, RouteRequest, WorkerView
from pelton.serving.worker_client import RequestStream


class WorkerPort(Protocol):
    """What a frontend needs of `WorkerClient`."""

    @property
    def info(self) -> WorkerInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def lost(self) -> asyncio.Event: ...
    @property
    def is_quiet(self) -> bool: ...
    def submit(self, *requests: GenerateRequest) -> RequestStream: ...
    def cancel_all(self, error: PeltonError) -> None: ...


@dataclass(slots=True)
class WorkerState:
    """One worker, whichever process it is now."""

    client: WorkerPort | None = None
    generation: int = 0
    """How many processes there have been; 0: none yet."""
    num_routed: int = 0
    """Requests that were sent to it, whichever process it was."""

    @property
    def is_up(self) -> bool:
        return self.client is not None and not self.client.lost.is_set()

    @property
    def stats(self) -> EngineStats:
        """All zeros while it is not up."""
        return self.client.stats if self.client is not None and self.is_up else EngineStats()


class WorkerPool:
    def __init__(self, num_workers: int, policy: Policy, max_queue: int) -> None:
        """`max_queue` is the frontend's own limit: no worker refuses earlier."""
        config = RouterConfig(policy=policy, max_waiting_per_worker=max_queue)
        self.states = [WorkerState() for _ in range(num_workers)]
        self._router = Router(config, MonotonicClock())

    @property
    def recent(self) -> Sequence[Decision]:
        """The newest decisions, oldest first."""
        return self._router.recent

    @property
    def num_up(self) -> int:
        return sum(state.is_up for state in self.states)

    @property
    def info(self) -> WorkerInfo | None:
        """Of the worker with the shortest context, so that any can take what fits; None while no
        worker is up."""
        infos = [state.client.info for state in self.states if state.client and state.is_up]
        return min(infos, key=lambda info: info.max_model_len, default=None)

    def use(self, index: int, client: WorkerPort | None, generation: int) -> None:
        """Sends requests to `client`; None: there is none in this place now."""
        state = self.states[index]
        state.client, state.generation = client, generation
        if client is None:
            self._router.remove(str(index))
            return
        info = client.info
        view = WorkerView(
            id=str(index),
            generation=generation,
            num_slots=info.max_num_requests,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
        )
        self._router.update([view])

    @contextmanager
    def submit(
        self, requests: Sequence[GenerateRequest]
    ) -> Iterator[tuple[RequestStream, Decision]]:
        """Sends the requests, which are answered together, to one worker; they count as its load
        inside. Raises `UnavailableError` while no worker can take them."""
        if not self.num_up:
            raise UnavailableError("The model is being loaded; try again shortly.")
        route = RouteRequest(
            request_id=requests[0].request_id,
            num_prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
            num_choices=sum(request.sampling.n for request in requests),
            excluded=self._find_unusable(),
        )
        with self._router.route(route) as booking:
            state = self.states[int(booking.worker_id)]
            assert state.client is not None
            stream = state.client.submit(*requests)
            stream.on_first_output = booking.on_first_token
            state.num_routed += len(requests)
            yield stream, booking.decision

    def cancel_all(self, error: PeltonError) -> None:
        """Ends every request in flight with `error`."""
        for state in self.states:
            if state.client is not None:
                state.client.cancel_all(error)

    def _find_unusable(self) -> frozenset[str]:
        """Workers that are lost, and quiet ones unless all are."""
        up = {str(i): state for i, state in enumerate(self.states) if state.is_up}
        quiet = {i for i, state in up.items() if state.client and state.client.is_quiet}
        lost = {str(i) for i in range(len(self.states))} - set(up)
        return frozenset(lost if len(quiet) == len(up) else lost | quiet)
