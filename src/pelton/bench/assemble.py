# SPDX-License-Identifier: Apache-2.0
"""Puts a record together from what a measurement collected."""

import hashlib
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import repeat
from pathlib import Path

import msgspec

from pelton.bench.config import BenchConfig
from pelton.bench.loadgen_log import LoadGenResult
from pelton.bench.machine import (
    Machine,
    describe_command,
    describe_machine,
    describe_source,
    list_versions,
)
from pelton.bench.measurements import BUCKET_NS, RequestRecord, Summary, summarise
from pelton.bench.record import (
    FORMAT_VERSION,
    DataSetInfo,
    Drafting,
    PrefixReuse,
    Record,
    StatsPoint,
    Status,
    TargetInfo,
    Timeline,
)
from pelton.bench.scenarios.calibration import Capacity
from pelton.bench.scenarios.policy import Limits, LoadSettings
from pelton.bench.scenarios.verdict import Verdict, judge
from pelton.bench.traffic import DataSet
from pelton.core.config import EngineConfig, to_dict
from pelton.core.stats import EngineStats


@dataclass(slots=True, kw_only=True)
class Measurement:
    """What is known so far. Filled by the harness; a run that ends early leaves parts unset."""

    bench: BenchConfig
    engine: EngineConfig
    limits: Limits
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: Machine = field(default_factory=describe_machine)
    target_info: TargetInfo | None = None
    data_set: DataSet | None = None
    capacity: Capacity | None = None
    settings: LoadSettings | None = None
    loadgen: LoadGenResult | None = None
    records: list[RequestRecord] = field(default_factory=list)
    tokens_by_bucket: dict[int, int] = field(default_factory=dict)
    stats: list[tuple[int, EngineStats]] = field(default_factory=list)
    """(`time.time_ns`, statistics)."""
    is_interrupted: bool = False
    aborted: str | None = None


def make_record(measurement: Measurement) -> Record:
    bench = measurement.bench
    summary = summarise(measurement.records)
    loadgen = measurement.loadgen or _no_loadgen_result()
    target = measurement.target_info or _target_asked_for(measurement)
    verdict = _judge(measurement, summary, loadgen)
    bench_config = to_dict(bench)
    return Record(
        format_version=FORMAT_VERSION,
        name=_make_name(measurement, target),
        status=_find_status(measurement),
        scenario=bench.scenario.value,
        started_at=measurement.started_at,
        verdict=verdict,
        loadgen=loadgen,
        summary=summary,
        limits=asdict(measurement.limits),
        load=asdict(measurement.settings) if measurement.settings else {},
        calibration=measurement.capacity,
        data_set=_describe_data_set(measurement),
        prefix_reuse=PrefixReuse(
            is_allowed=measurement.engine.cache.prefix_cache,
            num_cached_tokens=summary.num_cached_tokens,
        ),
        target=target,
        bench_config=bench_config,
        config_hash=_hash(bench_config, target.config),
        machine=measurement.machine,
        versions=list_versions(),
        source=describe_source(),
        command=describe_command(bench.api_key),
        timeline=_make_timeline(measurement),
        drafting=_make_drafting(measurement),
    )


def _judge(measurement: Measurement, summary: Summary, loadgen: LoadGenResult) -> Verdict:
    aborted = "interrupted by the user" if measurement.is_interrupted else measurement.aborted
    return judge(
        limits=measurement.limits,
        ttft_p99_ms=summary.ttft_ms.p99 if summary.ttft_ms else None,
        tpot_p99_ms=summary.tpot_ms.p99 if summary.tpot_ms else None,
        loadgen_reasons=loadgen.reasons,
        num_failed=0 if measurement.is_interrupted else summary.num_failed,
        commonest_error=next(iter(summary.errors), ""),
        num_cached_tokens=summary.num_cached_tokens,
        may_reuse_prefixes=measurement.engine.cache.prefix_cache,
        aborted=aborted,
    )


def _find_status(measurement: Measurement) -> Status:
    if measurement.is_interrupted:
        return Status.INTERRUPTED
    return Status.ENDED_EARLY if measurement.aborted else Status.COMPLETE


def _no_loadgen_result() -> LoadGenResult:
    return LoadGenResult(
        is_valid=False, reasons=["LoadGen did not start its test."], version="", num_errors=0,
        samples_per_s=None, tokens_per_s=None, ttft_ms=None, tpot_ms=None, parameters={},
    )  # fmt: skip


def _target_asked_for(measurement: Measurement) -> TargetInfo:
    """For a run that ended before its target answered."""
    bench = measurement.bench
    return TargetInfo(
        kind="server" if bench.url else "engine", model=measurement.engine.model.model,
        url=bench.url or None, max_model_len=None, config=None, config_hash=None,
    )  # fmt: skip


def _describe_data_set(measurement: Measurement) -> DataSetInfo:
    data_set = measurement.data_set
    if data_set is None:
        return DataSetInfo(
            name=measurement.bench.dataset, description="", sha256="", num_samples=0,
            is_synthetic=bool(measurement.bench.input_len), seed=None,
        )  # fmt: skip
    return DataSetInfo(
        name=data_set.name,
        description=data_set.description,
        sha256=data_set.sha256,
        num_samples=len(data_set.samples),
        is_synthetic=data_set.is_synthetic,
        seed=data_set.seed,
    )


def _make_name(measurement: Measurement, target: TargetInfo) -> str:
    gpus = measurement.machine.gpus
    card = f"{len(gpus)}x{gpus[0].name.replace(' ', '-')}" if gpus else "cpu"
    model = Path(target.model).name or target.model
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return f"{model}_{card}_{measurement.bench.scenario}_{date}"


def _hash(*configs: object) -> str:
    canonical = msgspec.json.encode(configs, order="sorted")
    return hashlib.sha256(canonical).hexdigest()[:12]


def _make_drafting(measurement: Measurement) -> Drafting | None:
    """From the counts before the first scheduled request to the last ones."""
    if not measurement.stats:
        return None
    start_ns = min((record.scheduled_ns for record in measurement.records), default=0)
    earlier = [stats for time_ns, stats in measurement.stats if time_ns <= start_ns]
    before, after = earlier[-1] if earlier else EngineStats(), measurement.stats[-1][1]
    num_places = len(after.drafted_total)
    drafted = _grown(before.drafted_total, after.drafted_total, num_places)
    accepted = _grown(before.accepted_total, after.accepted_total, num_places)
    num_rows = after.decode_rows_total - before.decode_rows_total
    if not any(drafted) or not num_rows:
        return None
    num_tokens = after.decode_tokens_total - before.decode_tokens_total
    return Drafting(tokens_per_decode=num_tokens / num_rows, drafted=drafted, accepted=accepted)


def _grown(before: tuple[int, ...], after: tuple[int, ...], num_places: int) -> list[int]:
    """By place; a count that is missing is zero."""
    old, new = ((*counts, *repeat(0, num_places - len(counts))) for counts in (before, after))
    return [last - first for first, last in zip(old, new, strict=True)]


def _make_timeline(measurement: Measurement) -> Timeline:
    start_ns = min((record.scheduled_ns for record in measurement.records), default=0)
    first = start_ns // BUCKET_NS
    buckets = measurement.tokens_by_bucket
    last = max(buckets, default=first - 1)
    return Timeline(
        bucket_s=BUCKET_NS / 1e9,
        output_tokens=[buckets.get(bucket, 0) for bucket in range(first, last + 1)],
        engine=[
            StatsPoint(
                time_s=round((time_ns - start_ns) / 1e9, 3),
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                batch_rows=stats.batch_rows,
                kv_use=stats.num_used_blocks / max(1, stats.num_blocks),
            )
            for time_ns, stats in measurement.stats
            if time_ns >= start_ns
        ],
    )
