# SPDX-License-Identifier: Apache-2.0
"""Runs one measurement: target, load process, calibration, LoadGen, record, report.

    harness (this process)     starts the target and the load process, watches both
    load process               sends requests, runs LoadGen          (`loadgen_process`)
    target                     a worker, or a server at a URL        (`target`)

A measurement that started always leaves a record behind, whether it ended well, was found
hopeless, or was interrupted.
"""

import asyncio
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from pelton.bench.assemble import Measurement, make_record
from pelton.bench.config import BenchConfig
from pelton.bench.load_client import LoadClient, LoadProcessError, launch_load_process
from pelton.bench.load_messages import RunClosedLoop, RunLoadGen, Setup
from pelton.bench.loadgen_log import apply_schedule, read_result
from pelton.bench.measurements import RequestRecord
from pelton.bench.progress import ProgressView
from pelton.bench.record import RECORD_NAME, REQUESTS_NAME, Record, write_record, write_requests
from pelton.bench.scenarios.calibration import CalibrationError, Capacity, find_capacity
from pelton.bench.scenarios.policy import Demand, Limits, LoadSettings
from pelton.bench.scenarios.table import SCENARIOS, resolve_limits, resolve_min_duration_s
from pelton.bench.target import Target, find_server
from pelton.bench.traffic import DataSet, Sample, load_data_set, make_synthetic
from pelton.core.config import Auto, EngineConfig
from pelton.core.errors import ConfigError
from pelton.serving.process import raise_file_limit

EXIT_VALID, EXIT_INVALID, EXIT_INTERRUPTED = 0, 3, 130
REPORT_NAME = "report.html"
PICTURE_NAME = "report.png"
_LOG_FOLDER = "loadgen"
_STATS_PERIOD_S = 0.25
_WARMUP_CONCURRENCY = 4
_WARMUP_TIME_LIMIT_S = 60.0
_LEVEL_TIME_S = 2.5
_LEVEL_REQUESTS_PER_CLIENT = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    record: Record
    folder: Path
    exit_code: int


class _HopelessError(Exception):
    """The run has no sense any more; the argument says why. Becomes an invalid record."""


def run_bench(bench: BenchConfig, engine: EngineConfig, console: Console) -> Outcome:
    """Measures and writes everything into `bench.out`. Bad input is a `ConfigError` and leaves
    nothing behind."""
    limits = resolve_limits(bench)
    raise_file_limit()
    folder = make_folder(Path(bench.out))
    measurement = asyncio.run(_Harness(bench, engine, limits, folder, console).run())
    with console.status("Writing record and report"):
        record = make_record(measurement)
        write_requests(measurement.records, folder)
        write_record(record, folder)
        from pelton.bench.report import write_report

        write_report(record, measurement.records, folder / REPORT_NAME, folder / PICTURE_NAME)
    return Outcome(record, folder, _exit_code(record, measurement))


class _Harness:
    def __init__(
        self,
        bench: BenchConfig,
        engine: EngineConfig,
        limits: Limits,
        folder: Path,
        console: Console,
    ) -> None:
        self._bench, self._engine = bench, engine
        self._limits = limits
        self._folder = folder
        self._scenario = SCENARIOS[bench.scenario]
        self._view = ProgressView(console)
        self._client: LoadClient | None = None
        self._is_loadgen_running = False
        self._data_set = (
            None if bench.input_len else load_data_set(bench.dataset, output_len=bench.output_len)
        )
        self._measurement = Measurement(bench=bench, engine=engine, limits=limits)

    async def run(self) -> Measurement:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt, task)
        try:
            with self._view:
                await self._measure()
        except asyncio.CancelledError:
            if not self._measurement.is_interrupted:
                raise
            task.uncancel()
        except (_HopelessError, LoadProcessError) as error:
            self._measurement.aborted = str(error)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return self._measurement

    def _interrupt(self, task: "asyncio.Task[object]") -> None:
        """The first time LoadGen's run is ended and its requests collected; else all stops."""
        is_first = not self._measurement.is_interrupted
        self._measurement.is_interrupted = True
        if is_first and self._is_loadgen_running and self._client is not None:
            self._client.abort("Interrupted.")
        else:
            task.cancel()

    async def _measure(self) -> None:
        measurement = self._measurement
        self._view.start_phase("Starting the target")
        async with self._open_target() as target:
            measurement.target_info = target.info
            data_set = self._data_set or self._make_synthetic(target)
            measurement.data_set = data_set
            samples = target.prepare(data_set.samples)
            async with self._open_load_process(target, samples) as client:
                self._client = client
                await self._warm_up(client)
                settings = await self._plan(client)
                measurement.settings = settings
                await self._run_loadgen(target, client, settings)

    def _open_target(self) -> AbstractAsyncContextManager[Target]:
        if self._bench.url:
            return find_server(self._bench, self._engine.model.model)
        from pelton.bench.engine_target import start_engine

        loop = asyncio.get_running_loop()

        def show_phase(phase: str) -> None:
            loop.call_soon_threadsafe(self._view.start_phase, phase.capitalize())

        return start_engine(self._engine, show_phase)

    def _make_synthetic(self, target: Target) -> DataSet:
        return make_synthetic(
            input_len=self._bench.input_len,
            output_len=self._bench.output_len,
            seed=self._engine.model.seed,
            vocab_size=target.vocab_size,
        )

    @asynccontextmanager
    async def _open_load_process(
        self, target: Target, samples: Sequence[Sample]
    ) -> AsyncGenerator[LoadClient, None]:
        with tempfile.TemporaryDirectory(prefix="pelton-bench-") as temporary:
            path = Path(temporary) / "samples.json"
            path.write_bytes(msgspec.json.encode(samples))
            setup = Setup(
                target=target.address,
                samples_path=str(path),
                may_reuse_prefixes=self._engine.cache.prefix_cache,
                request_timeout_s=self._bench.request_timeout,
            )
            async with launch_load_process(setup) as client:
                yield client

    async def _warm_up(self, client: LoadClient) -> None:
        num_requests = self._bench.warmup_requests
        if not num_requests:
            return
        self._view.start_phase("Warming up")
        records = await client.run_closed_loop(
            RunClosedLoop(
                concurrency=_WARMUP_CONCURRENCY,
                num_requests=num_requests,
                time_limit_s=_WARMUP_TIME_LIMIT_S,
            )
        )
        if not any(record.is_ok for record in records):
            raise _HopelessError(f"Every warm-up request failed: {records[0].error}")

    async def _plan(self, client: LoadClient) -> LoadSettings:
        bench, scenario = self._bench, self._scenario
        min_duration_s = resolve_min_duration_s(bench)
        num_requests = None if isinstance(bench.requests, Auto) else bench.requests
        capacity: Capacity | None = None
        has_rate = scenario.load_fraction is not None
        if isinstance(bench.qps, Auto) if has_rate else min_duration_s > 0:
            capacity = await self._calibrate(client)
        rate = capacity.requests_per_s if capacity else 1.0
        if scenario.load_fraction is not None:
            rate = bench.qps if not isinstance(bench.qps, Auto) else rate * scenario.load_fraction
            if capacity is not None:
                self._view.note(
                    f"Calibrated: {capacity.requests_per_s:.2f} requests/s within the limits; "
                    f"offering {rate:.2f} ({scenario.load_fraction:.0%})."
                )
        self._measurement.capacity = capacity
        return scenario.plan(
            Demand(
                limits=self._limits,
                min_duration_s=min_duration_s,
                num_requests=num_requests,
                requests_per_s=rate,
                request_latency_s=capacity.request_latency_s if capacity else 1.0,
            )
        )

    async def _calibrate(self, client: LoadClient) -> Capacity:
        most = self._bench.max_in_flight

        async def run_level(concurrency: int) -> list[RequestRecord]:
            self._view.start_phase(f"Calibrating: {concurrency} in flight")
            return await client.run_closed_loop(
                RunClosedLoop(
                    concurrency=concurrency,
                    num_requests=concurrency * _LEVEL_REQUESTS_PER_CLIENT,
                    time_limit_s=_LEVEL_TIME_S,
                )
            )

        try:
            return await find_capacity(
                run_level, self._limits, [min(level, most) for level in self._scenario.ladder]
            )
        except CalibrationError as error:
            raise _HopelessError(error.message) from error

    async def _run_loadgen(
        self, target: Target, client: LoadClient, settings: LoadSettings
    ) -> None:
        measurement = self._measurement
        log_dir = self._folder / _LOG_FOLDER
        log_dir.mkdir(exist_ok=True)
        is_offline = settings.loadgen_scenario == "Offline"
        self._view.start_phase(
            f"LoadGen {self._bench.scenario}", total=settings.num_expected_requests
        )
        command = RunLoadGen(
            settings=settings,
            log_dir=str(log_dir),
            max_in_flight=self._bench.max_in_flight if is_offline else None,
        )
        watch = asyncio.create_task(self._watch_stats(target))
        self._is_loadgen_running = True
        try:
            done = await client.run_loadgen(command, self._view.show)
        finally:
            self._is_loadgen_running = False
            watch.cancel()
            measurement.loadgen = read_result(log_dir)
        # However short the run was, its last counts are known.
        await self._take_stats(target)
        apply_schedule(log_dir, done.records)
        measurement.records = done.records
        measurement.tokens_by_bucket = done.tokens_by_bucket
        if not measurement.is_interrupted:
            measurement.aborted = done.aborted

    async def _watch_stats(self, target: Target) -> None:
        while await self._take_stats(target):
            await asyncio.sleep(_STATS_PERIOD_S)

    async def _take_stats(self, target: Target) -> bool:
        """False: the target tells of none."""
        stats = await target.read_stats()
        if stats is not None:
            self._measurement.stats.append((time.time_ns(), stats))
        return stats is not None


def make_folder(folder: Path) -> Path:
    """An empty place for the results: what an earlier run left there under these names goes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stale = [folder / name for name in (RECORD_NAME, REQUESTS_NAME, REPORT_NAME, PICTURE_NAME)]
        stale += (folder / _LOG_FOLDER).glob("mlperf_log_*")
        for path in stale:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {folder} cannot be written: {error.strerror}.", param="out"
        ) from error
    return folder


def _exit_code(record: Record, measurement: Measurement) -> int:
    if measurement.is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_VALID if record.verdict.is_valid else EXIT_INVALID
