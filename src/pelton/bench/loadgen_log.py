# SPDX-License-Identifier: Apache-2.0
"""Reads what LoadGen wrote: its verdict, its own figures, and when each query was scheduled."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pelton.bench.measurements import RequestRecord

_DETAIL_PREFIX = ":::MLLOG "
_SAMPLE_LINE = re.compile(
    r'"name":\s*"Sample".*"ph":\s*"b".*"ts":\s*(?P<ts>-?[\d.]+).*"sample_seq":\s*(?P<seq>\d+)'
    r'.*"issue_start_ns":\s*(?P<issue>-?\d+)'
)
_DETAIL_NAME = "mlperf_log_detail.txt"
_TRACE_NAME = "mlperf_log_trace.json"


class LoadGenPercentiles(msgspec.Struct, frozen=True, kw_only=True):
    """LoadGen's own, milliseconds."""

    p50: float
    p90: float
    p99: float


class LoadGenResult(msgspec.Struct, frozen=True, kw_only=True):
    """LoadGen's own word on the run."""

    is_valid: bool
    reasons: list[str]
    """Why it is invalid, a sentence each; empty when valid."""
    version: str
    num_errors: int
    samples_per_s: float | None
    tokens_per_s: float | None
    ttft_ms: LoadGenPercentiles | None
    """None where the scenario has no first tokens (offline)."""
    tpot_ms: LoadGenPercentiles | None
    parameters: dict[str, Any]
    """The effective settings, as LoadGen names them."""


@dataclass(frozen=True, slots=True)
class _Detail:
    values: dict[str, Any]
    errors: list[str]


def read_result(log_dir: Path) -> LoadGenResult:
    """The result in `log_dir`. A log without one (the run did not end) is invalid and says so."""
    detail = _read_detail(log_dir / _DETAIL_NAME)
    values = detail.values
    is_valid = values.get("result_validity") == "VALID"
    return LoadGenResult(
        is_valid=is_valid,
        reasons=[] if is_valid else _find_reasons(detail),
        version=str(values.get("loadgen_version", "unknown")),
        num_errors=int(values.get("num_errors", len(detail.errors))),
        samples_per_s=_first(
            values, "result_completed_samples_per_sec", "result_samples_per_second",
            "result_qps_with_loadgen_overhead",
        ),
        tokens_per_s=_first(
            values, "result_completed_tokens_per_second", "result_tokens_per_second"
        ),
        ttft_ms=_percentiles(values, "result_first_token_{}_percentile_latency_ns"),
        tpot_ms=_percentiles(values, "result_time_per_output_token_{}_percentile_ns"),
        parameters={
            key.removeprefix("effective_"): value
            for key, value in values.items()
            if key.startswith("effective_")
        },
    )  # fmt: skip


def apply_schedule(log_dir: Path, records: list[RequestRecord]) -> None:
    """Sets each record's `scheduled_ns` from LoadGen's trace.

    The trace has its own origin. LoadGen issues a query before we see it, and nearly at once when
    nothing else wants the interpreter lock: the smallest difference over all queries ties the two
    time lines together. Records without a line in the trace keep what they have. The trace, some
    kilobytes a request, is removed: what it held is in the records.
    """
    trace = log_dir / _TRACE_NAME
    schedule = _read_schedule(trace)
    trace.unlink(missing_ok=True)
    known = [(records[seq], times) for seq, times in schedule.items() if seq < len(records)]
    if not known:
        return
    origin_ns = min(record.issued_ns - (ts + issue_delay) for record, (ts, issue_delay) in known)
    for record, (ts, _) in known:
        record.scheduled_ns = origin_ns + ts


def _read_detail(path: Path) -> _Detail:
    values: dict[str, Any] = {}
    errors: list[str] = []
    if not path.exists():
        return _Detail(values, errors)
    for line in path.read_text(errors="replace").splitlines():
        if not line.startswith(_DETAIL_PREFIX):
            continue
        try:
            entry = json.loads(line.removeprefix(_DETAIL_PREFIX))
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed
        values[entry["key"]] = entry["value"]
        if entry.get("metadata", {}).get("is_error"):
            errors.append(str(entry["value"]))
    return _Detail(values, errors)


def _find_reasons(detail: _Detail) -> list[str]:
    values = detail.values
    if "result_validity" not in values:
        return ["LoadGen did not end its test."]
    reasons = []
    if not values.get("result_perf_constraints_met", True):
        reasons.append("A latency limit is not met: " + _clean(values["result_invalid_reason"]))
    if not values.get("result_min_duration_met", True):
        reasons.append("The run was shorter than the minimum duration.")
    if not values.get("result_min_queries_met", True):
        reasons.append("Fewer requests than the minimum were issued.")
    if not values.get("early_stopping_met", True):
        reasons.append(_early_stopping_reason(values))
    reasons += [f"LoadGen error: {_clean(text)}" for text in dict.fromkeys(detail.errors)]
    return reasons or ["LoadGen calls it invalid without a reason."]


def _early_stopping_reason(values: dict[str, Any]) -> str:
    """LoadGen's text, shortened to what the user can act on."""
    text = _clean(
        f"{values.get('early_stopping_ttft_result', '')} "
        f"{values.get('early_stopping_tpot_result', '')}"
    )
    more = re.search(r"at least (\d+) more queries", text)
    total = re.search(r"Need to process at least (\d+) queries", text)
    num = values.get("result_query_count", 0)
    if more:
        return (
            f"Too few requests to trust the p99: {num} were issued, at least {more.group(1)} more "
            "under the limits are needed (--requests)."
        )
    if total:
        return (
            f"Too few requests to trust the p90: {num} were issued, at least {total.group(1)} are "
            "needed (--requests)."
        )
    return f"Early stopping is not satisfied. {text}".strip()


def _clean(text: object) -> str:
    return re.sub(r"[\s*]+", " ", str(text)).strip()


def _first(values: dict[str, Any], *keys: str) -> float | None:
    for key in keys:
        if key in values:
            return float(values[key])
    return None


def _percentiles(values: dict[str, Any], pattern: str) -> LoadGenPercentiles | None:
    keys = [pattern.format(f"{percent:.2f}") for percent in (50, 90, 99)]
    if any(key not in values for key in keys):
        return None
    p50, p90, p99 = (values[key] / 1e6 for key in keys)
    return LoadGenPercentiles(p50=p50, p90=p90, p99=p99)


def _read_schedule(path: Path) -> dict[int, tuple[int, int]]:
    """Sequence number to (scheduled time from the trace's origin, issue delay), nanoseconds."""
    schedule: dict[int, tuple[int, int]] = {}
    if not path.exists():
        return schedule
    with path.open(errors="replace") as lines:
        for line in lines:
            match = _SAMPLE_LINE.search(line)
            if match:
                ts_ns = round(float(match["ts"]) * 1e3)
                schedule[int(match["seq"])] = (ts_ns, int(match["issue"]))
    return schedule
