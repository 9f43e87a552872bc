# SPDX-License-Identifier: Apache-2.0
"""What operators change of a fleet while it serves: workers are added, drained and replaced.

A worker that is drained is told of to no frontend any more. Those that send it requests let them
end, and say so; then its process ends, and its number is free. There is one change at a time.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from pelton.core.config import Role, ServerConfig
from pelton.core.errors import (
    ConflictError,
    InvalidRequestError,
    PeltonError,
    UnavailableError,
)
from pelton.serving.fleet_messages import Operation
from pelton.serving.worker_fleet import MAX_WORKERS, Worker, WorkerFleet

_POLL_S = 0.02
_log = logging.getLogger("pelton.serving")


class Frontends(Protocol):
    """What operations need of `FrontendGroup`."""

    def is_used(self, worker: int, generation: int) -> bool:
        """Whether all that live send it requests."""
        ...

    async def drain(self, worker: int, generation: int, timeout_s: float) -> None:
        """Returns when none that lives sends it requests or waits for one."""
        ...


class FleetOperations:
    def __init__(self, config: ServerConfig, fleet: WorkerFleet, frontends: Frontends) -> None:
        self._config, self._fleet, self._frontends = config, fleet, frontends
        self.newest: Operation | None = None

    def add(self, role: Role, count: int) -> None:
        """Begins to add workers. Raises `InvalidRequestError` or `ConflictError`."""
        allowed = (Role.PREFILL, Role.DECODE) if self._config.prefill else (Role.MIXED,)
        if role not in allowed:
            raise InvalidRequestError(
                f"The workers of this server are {' and '.join(allowed)}, so {role} cannot be"
                f" added: give role {' or '.join(allowed)}.",
                param="role",
            )
        if not 1 <= count <= MAX_WORKERS - len(self._fleet.workers):
            raise InvalidRequestError(
                f"A server has at most {MAX_WORKERS} workers and this one has"
                f" {len(self._fleet.workers)}, so count cannot be {count}.",
                param="count",
            )
        self._check_idle()
        num_workers = len(self._fleet.workers) + count
        new = [self._fleet.open(role, num_workers) for _ in range(count)]
        operation = Operation("add", [worker.number for worker in new])
        self._begin(operation, self._add(operation, new))

    def drain(self, number: int, timeout_s: float) -> None:
        """Begins to drain a worker. Raises `InvalidRequestError` or `ConflictError`."""
        self._check_idle()
        worker = self._find(number)
        others = [w for w in self._fleet.workers.values() if w is not worker and w.phase == "ready"]
        if worker.can_decode and not any(other.can_decode for other in others):
            raise ConflictError(
                f"Worker {number} is the only one that can decode, so nothing would be served"
                " without it: add another first, or stop the server."
            )
        operation = Operation("drain", [number])
        self._begin(operation, self._drain(operation, worker, timeout_s))

    def roll(self, timeout_s: float) -> None:
        """Begins to replace every worker. Raises `ConflictError`."""
        self._check_idle()
        workers = sorted(self._fleet.workers.values(), key=lambda worker: worker.number)
        if any(worker.phase != "ready" for worker in workers):
            raise ConflictError(
                "Not every worker is ready, and a roll would take one more away: wait until all"
                " are, or drain those that do not come up."
            )
        decoding = [worker for worker in workers if worker.can_decode]
        if len(decoding) == 1 and decoding[0].holds_device:
            raise ConflictError(
                f"Worker {decoding[0].number} is the only one that can decode, and where it runs"
                " there is no room for a second: add one elsewhere first, or restart the server."
            )
        if len(workers) == MAX_WORKERS and not all(w.holds_device for w in workers):
            raise ConflictError(
                f"A server has at most {MAX_WORKERS} workers, so none can be started before another"
                " has ended: drain one first."
            )
        operation = Operation("roll", [worker.number for worker in workers])
        must_wait = [worker.holds_device for worker in workers]
        steps = list(zip(workers, must_wait, strict=True))
        self._begin(operation, self._roll(operation, steps, timeout_s))

    async def _add(self, operation: Operation, new: list[Worker]) -> None:
        for worker in new:
            await self._until_serving(worker)
            operation.num_done += 1

    async def _drain(self, operation: Operation, worker: Worker, timeout_s: float) -> None:
        await self._end(worker, timeout_s)
        operation.num_done += 1

    async def _roll(
        self, operation: Operation, steps: list[tuple[Worker, bool]], timeout_s: float
    ) -> None:
        """`steps`: each worker, and whether its replacement must wait for its end."""
        for worker, must_wait in steps:
            if must_wait:
                if worker.phase == "ready":  # else it died since, and what comes is a replacement
                    worker.is_restarting = True
                    worker.expect_ready()
                    await self._empty(worker, timeout_s)
                await self._until_serving(worker)
            else:
                num_workers = len(self._fleet.workers)
                new = self._fleet.open(worker.place.role, num_workers, is_replacement=True)
                await self._until_serving(new)
                await self._end(worker, timeout_s)
            operation.num_done += 1

    def _check_idle(self) -> None:
        if not self._fleet.has_started:
            raise ConflictError("The server is starting: wait until it is ready.")
        operation = self.newest
        if operation is not None and not operation.is_done:
            raise ConflictError(
                f"Workers {operation.workers} are being changed ({operation.kind}): wait until that"
                " is done."
            )

    def _begin(self, operation: Operation, work: Coroutine[Any, Any, None]) -> None:
        self.newest = operation
        _log.info("event=%s workers=%s", operation.kind, operation.workers)

        async def run() -> None:
            try:
                await work
            except PeltonError as error:
                operation.error = error.message
                if not self._fleet.is_stopping:
                    _log.error("event=%s_failed error=%r", operation.kind, error.message)
            finally:
                operation.is_done = True

        self._fleet.spawn(run())

    def _find(self, number: int) -> Worker:
        worker = self._fleet.workers.get(number)
        if worker is None:
            numbers = ", ".join(map(str, sorted(self._fleet.workers)))
            raise InvalidRequestError(
                f"There is no worker {number}; there are {numbers}.", param="worker"
            )
        return worker

    async def _until_serving(self, worker: Worker) -> None:
        """Returns when all frontends send requests to the newest process, which may be another
        than at first. Raises what keeps it from starting, or `UnavailableError`."""
        await worker.ready
        timeout_s = self._config.start_timeout_s
        deadline_s = time.monotonic() + timeout_s
        while not self._frontends.is_used(worker.number, worker.generation):
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"Worker {worker.number} is up and not every frontend could reach it within"
                    f" {timeout_s:g} s; the log says why."
                )
            await asyncio.sleep(_POLL_S)
            await worker.ready

    async def _end(self, worker: Worker, timeout_s: float) -> None:
        if worker.phase == "given-up":
            self._fleet.remove(worker)
            return
        worker.is_leaving = True
        await self._empty(worker, timeout_s)
        while worker.number in self._fleet.workers:
            await asyncio.sleep(_POLL_S)

    async def _empty(self, worker: Worker, timeout_s: float) -> None:
        """Ends the process once no frontend needs it; its task does the rest."""
        process = worker.process
        if worker.phase == "ready":
            worker.phase = "draining"
            await self._frontends.drain(worker.number, worker.generation, timeout_s)
        if process is not None:
            await asyncio.to_thread(process.stop)
