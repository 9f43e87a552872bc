# SPDX-License-Identifier: Apache-2.0
"""Carries out what the supervisor orders a frontend: workers to use, to leave or to forget."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from pelton.core.config import Role
from pelton.core.errors import ConfigError, PeltonError, UnavailableError, WorkerLostError
from pelton.serving import messages
from pelton.serving.http.frontend import Frontend
from pelton.serving.wire_keys import read_keys
from pelton.serving.worker_client import WorkerClient

_LAST_WORDS_S = 2.0
"""How long replies may take to be written once their requests were ended by a drain."""
_POLL_S = 0.02

Report = Callable[[Any], None]
_log = logging.getLogger("pelton.serving")


class Control:
    """Owns the tasks that connect to a worker each and watch it, and those that drain one; a new
    process of a worker ends both, whatever they are waiting for."""

    def __init__(self, frontend: Frontend, report: Report) -> None:
        self._frontend = frontend
        self._roster = frontend.workers.roster
        self._report = report
        config = frontend.config
        self._keys = read_keys(config.worker_key) if config.has_machines else None
        self._following: dict[int, asyncio.Task[None]] = {}
        self._draining: dict[int, asyncio.Task[None]] = {}
        self.orders: asyncio.Queue[messages.ToFrontend] = asyncio.Queue()

    async def run(self) -> None:
        """Returns once drained."""
        while True:
            match await self.orders.get():
                case messages.UseWorker(_, worker) as order:
                    await self._leave(worker)
                    self._following[worker] = asyncio.create_task(self._follow_worker(order))
                case messages.DrainWorker(worker) as order:
                    self._draining[worker] = asyncio.create_task(self._drain_worker(order))
                case messages.RemoveWorker(worker):
                    await self._leave(worker)
                    self._roster.remove(worker)
                case messages.Drain(timeout_s):
                    await self._drain(timeout_s)
                    for worker in list(self._following):
                        await self._leave(worker)
                    return

    async def _leave(self, worker: int) -> None:
        await _end(self._draining.pop(worker, None))
        await _end(self._following.pop(worker, None))

    async def _follow_worker(self, order: messages.UseWorker) -> None:
        """Uses the worker until it is lost. The supervisor, which sees its end as well, starts
        another; of one that only went silent it must be told."""
        timeout_s = self._frontend.config.worker_timeout_s
        worker, generation = order.worker, order.generation
        try:
            client = await WorkerClient.connect(
                order.address,
                timeout_s=timeout_s,
                stall_timeout_s=timeout_s,
                keys=self._keys,
            )
        except WorkerLostError:
            return
        except PeltonError as error:
            _log.error(
                "event=worker_unreachable worker=%d generation=%d error=%r",
                *(worker, generation, error.message),
            )
            if isinstance(error, ConfigError):
                # This frontend is of another version than the server, whose workers others need.
                self._report(messages.StartFailed(messages.ErrorInfo.of(error)))
                self.orders.put_nowait(messages.Drain(0.0))
            else:
                self._report(messages.WorkerStalled(worker, generation))
            return
        try:
            self._roster.use(worker, client, generation)
            self._report(messages.Serving(worker, generation))
            await client.lost.wait()
            _log.error("event=worker_lost worker=%d generation=%d", worker, generation)
            if client.is_stalled:
                self._report(messages.WorkerStalled(worker, generation))
        finally:
            self._roster.use(worker, None, generation)
            client.close()

    async def _drain_worker(self, order: messages.DrainWorker) -> None:
        worker = order.worker
        state = self._roster.states.get(worker)
        if state is not None:
            self._roster.drain(worker)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(order.timeout_s):
                    await self._until_unused(worker)
            # Who waits for a prompt from a worker that ends computes it itself.
            if state.role is not Role.PREFILL:
                self._roster.hand_over(worker)
                await self._until_unused(worker)
        await _end(self._following.pop(worker, None))
        self._report(messages.Released(worker, order.generation))

    async def _until_unused(self, worker: int) -> None:
        while self._roster.num_booked(worker):
            await asyncio.sleep(_POLL_S)

    async def _drain(self, timeout_s: float) -> None:
        self._frontend.is_draining = True
        _log.info("event=drain live=%d timeout_s=%g", self._frontend.metrics.num_live, timeout_s)
        if not await self._wait_until_idle(timeout_s):
            self._frontend.cancel_all(
                UnavailableError("The server shut down before the request was done.")
            )
            await self._wait_until_idle(_LAST_WORDS_S)

    async def _wait_until_idle(self, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while self._frontend.metrics.num_live and loop.time() < deadline_s:
            await asyncio.sleep(_POLL_S)
        return self._frontend.metrics.num_live == 0


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
