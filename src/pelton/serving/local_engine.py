# SPDX-License-Identifier: Apache-2.0
"""Drives an engine inside this process, for one caller at a time.

However a run ends (done, abandoned, interrupted), every request of it is out of the engine
afterwards. Ctrl-C takes effect between steps, never inside one, so the engine stays usable.
"""

import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from pelton.core.errors import ConfigError
from pelton.core.request import GenerateRequest, RequestOutput
from pelton.engine.engine import Engine


class LocalEngine:
    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._is_running = threading.Lock()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ConfigError("This engine is closed or has failed; make a new one.")
        return self._engine

    def close(self) -> None:
        """Lets go of the engine and its memory. Idempotent."""
        self._engine = None

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self.engine.cancel(request_id, index)

    def run(
        self, requests: Sequence[GenerateRequest]
    ) -> Generator[list[RequestOutput], None, None]:
        """The outputs of each step until all `requests` ended. Close the iterator to give up.

        Raises what `Engine.add` does, before any step. A second run at the same time:
        `ConfigError`.
        """
        engine = self.engine
        if not self._is_running.acquire(blocking=False):
            raise ConfigError("This engine is busy with another call; make calls one by one.")
        try:
            with _deferred_interrupts() as raise_if_interrupted:
                yield from self._run(engine, requests, raise_if_interrupted)
        finally:
            self._is_running.release()

    def _run(
        self,
        engine: Engine,
        requests: Sequence[GenerateRequest],
        raise_if_interrupted: Callable[[], None],
    ) -> Iterator[list[RequestOutput]]:
        try:
            for request in requests:
                engine.add(request)
            while engine.has_work:
                raise_if_interrupted()
                yield self._step(engine)
        finally:
            self._clear(requests)

    def _step(self, engine: Engine) -> list[RequestOutput]:
        try:
            return engine.step()
        except BaseException:
            self._engine = None  # the device's state is unknown
            raise

    def _clear(self, requests: Sequence[GenerateRequest]) -> None:
        if self._engine is None:
            return
        for request in requests:
            self._engine.cancel(request.request_id)
        while self._engine is not None and self._engine.has_work:
            self._step(self._engine)


@contextmanager
def _deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Ctrl-C only sets a flag; the yielded function raises `KeyboardInterrupt` if it is set.

    Signals arrive in the main thread only, so elsewhere there is nothing to defer.
    """
    is_interrupted = False

    def raise_if_interrupted() -> None:
        if is_interrupted:
            raise KeyboardInterrupt

    def note(signal_number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True

    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    # Anything but Python's own handler belongs to an application that knows what it wants.
    if not is_main or previous is not signal.default_int_handler:
        yield raise_if_interrupted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield raise_if_interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
    raise_if_interrupted()
