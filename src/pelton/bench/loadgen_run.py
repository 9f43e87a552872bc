# SPDX-License-Identifier: Apache-2.0
"""One LoadGen test: its callbacks on one side, the event loop that sends requests on the other.

    LoadGen's thread                       event loop
    StartTest
      issue_query([id, index]) ──────────▶ a task for each sample
                                           first tokens  ─▶ FirstTokenComplete
      (waits)                  ◀────────── last token    ─▶ QuerySamplesComplete

What the C++ side does not forgive, and is kept from it here: an exception out of a callback (the
process segfaults), a query that is never completed (the test hangs), an output of fewer than two
tokens (an error, and garbage statistics), a completion before its first token.
"""

import asyncio
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import mlperf_loadgen

from pelton.bench.measurements import RequestRecord
from pelton.bench.request_runner import RequestRunner
from pelton.bench.scenarios.policy import LoadSettings

_DUMMY_TOKENS = (0, 0)
_LOG_POLL_MS = 100
_MAX_FAILED_IN_A_ROW = 64


@dataclass(slots=True)
class _Query:
    """A sample that LoadGen issued and what it was told of it so far."""

    response_id: int
    has_first_token: bool = False
    is_complete: bool = False


class LoadGenRun:
    """`run` is called once, on a thread of its own; everything else on the event loop."""

    def __init__(
        self,
        runner: RequestRunner,
        settings: LoadSettings,
        *,
        num_samples: int,
        log_dir: str,
        max_in_flight: int | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._runner = runner
        self._settings = settings
        self._num_samples = num_samples
        self._log_dir = log_dir
        self._loop = loop
        self._in_flight = asyncio.Semaphore(max_in_flight or sys.maxsize)
        self._tasks: set[asyncio.Task[None]] = set()
        self.records: list[RequestRecord] = []
        self.aborted: asyncio.Future[str] = loop.create_future()
        """Resolved with a reason when the test cannot go on. LoadGen has no call that ends a
        test, so the process must end then."""

    @property
    def num_issued(self) -> int:
        return len(self.records)

    def abort(self, reason: str) -> None:
        if not self.aborted.done():
            self.aborted.set_result(reason)
        for task in self._tasks:
            task.cancel()

    def run(self) -> None:
        """Blocks until LoadGen has every answer and has written its logs."""
        sut = mlperf_loadgen.ConstructSUT(self._issue_queries, _ignore_flush)
        qsl = mlperf_loadgen.ConstructQSL(
            self._num_samples, self._num_samples, _ignore_samples, _ignore_samples
        )
        log_settings = mlperf_loadgen.LogSettings()
        log_settings.log_output.outdir = self._log_dir
        log_settings.log_output.copy_summary_to_stdout = False
        log_settings.log_mode_async_poll_interval_ms = _LOG_POLL_MS
        # The trace is the only place where LoadGen tells when it had scheduled each query.
        log_settings.enable_trace = True
        try:
            mlperf_loadgen.StartTestWithLogSettings(
                sut,
                qsl,
                _make_test_settings(self._settings),
                log_settings,
                f"{self._log_dir}/audit.config",
            )
        finally:
            mlperf_loadgen.DestroyQSL(qsl)
            mlperf_loadgen.DestroySUT(sut)

    def _issue_queries(self, samples: Sequence[mlperf_loadgen.QuerySample]) -> None:
        """LoadGen's thread. Returns at once and raises nothing."""
        issued_ns = time.time_ns()
        queries: list[tuple[_Query, int]] = []
        try:
            queries = [(_Query(sample.id), sample.index) for sample in samples]
            self._loop.call_soon_threadsafe(self._start_requests, queries, issued_ns)
        except BaseException as error:
            self._end_after(error, [query for query, _ in queries])

    def _end_after(self, error: BaseException, queries: Sequence[_Query]) -> None:
        """Nothing may leave a callback, not even KeyboardInterrupt: note it, end the test."""
        for query in queries:
            self._complete(query, _DUMMY_TOKENS)
        reason = f"A LoadGen callback failed: {type(error).__name__}: {error}"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.abort, reason)

    def _start_requests(self, queries: Sequence[tuple[_Query, int]], issued_ns: int) -> None:
        for query, sample_index in queries:
            record = self._runner.make_record(sample_index, issued_ns)
            self.records.append(record)
            task = self._loop.create_task(self._serve(query, record))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, query: _Query, record: RequestRecord) -> None:
        try:
            async with self._in_flight:
                await self._runner.run(
                    record,
                    on_first=lambda tokens: self._first_token(query, tokens),
                    on_finish=lambda tokens: self._complete(query, tokens),
                )
        finally:
            if not query.is_complete:
                self._complete(query, _DUMMY_TOKENS)
        if self._runner.num_failed_in_a_row >= _MAX_FAILED_IN_A_ROW:
            self.abort(
                f"{_MAX_FAILED_IN_A_ROW} requests in a row failed, the last one with: "
                f"{self._runner.newest_error}"
            )

    def _first_token(self, query: _Query, tokens: Sequence[int]) -> None:
        query.has_first_token = True
        if self._settings.has_first_token:
            _respond(mlperf_loadgen.FirstTokenComplete, query.response_id, tokens)

    def _complete(self, query: _Query, tokens: Sequence[int]) -> None:
        if not query.has_first_token:
            self._first_token(query, tokens[:1])
        query.is_complete = True
        _respond(mlperf_loadgen.QuerySamplesComplete, query.response_id, tokens)


def _respond(complete: object, response_id: int, tokens: Sequence[int]) -> None:
    """LoadGen copies the tokens during the call; the buffer lives until it returned."""
    assert callable(complete)
    data = array("i", tokens)
    address, num_items = data.buffer_info()
    complete(
        [
            mlperf_loadgen.QuerySampleResponse(
                response_id, address, num_items * data.itemsize, num_items
            )
        ]
    )


def _ignore_flush() -> None:
    pass


def _ignore_samples(indices: Sequence[int]) -> None:
    """Samples are in memory already."""


def _make_test_settings(settings: LoadSettings) -> mlperf_loadgen.TestSettings:
    test = mlperf_loadgen.TestSettings()
    test.scenario = getattr(mlperf_loadgen.TestScenario, settings.loadgen_scenario)
    test.mode = mlperf_loadgen.TestMode.PerformanceOnly
    test.use_token_latencies = True
    if settings.limits.ttft_ms is not None:
        test.ttft_latency = round(settings.limits.ttft_ms * 1e6)
    if settings.limits.tpot_ms is not None:
        test.tpot_latency = round(settings.limits.tpot_ms * 1e6)
    test.server_target_qps = settings.target_qps
    test.offline_expected_qps = settings.target_qps
    test.single_stream_expected_latency_ns = settings.expected_latency_ns
    test.min_query_count = settings.min_query_count
    test.min_duration_ms = settings.min_duration_ms
    test.qsl_rng_seed = settings.qsl_seed
    test.sample_index_rng_seed = settings.sample_index_seed
    test.schedule_rng_seed = settings.schedule_seed
    return test
