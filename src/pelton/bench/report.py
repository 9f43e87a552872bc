# SPDX-License-Identifier: Apache-2.0
"""report.html: the record as one page that needs nothing from outside, with its pictures in it."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import jinja2
import msgspec

from pelton.bench.measurements import Distribution, RequestRecord
from pelton.bench.plots import acceptance, make_panels, render_svg, write_png
from pelton.bench.record import Drafting, Record, write_atomically

Row = tuple[str, ...]


def write_report(
    record: Record, requests: Sequence[RequestRecord], page: Path, picture: Path
) -> None:
    """Writes the page, and all its pictures as one PNG."""
    panels = make_panels(record, requests)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_data),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("report.html.jinja").render(
        record=record,
        style=_read_data("report.css"),
        title=f"{record.scenario} · {record.target.model}",
        subtitle=describe_run(record),
        tiles=_tiles(record),
        panels=[
            (panel.title, render_svg(panel, salt=f"panel{number}"))
            for number, panel in enumerate(panels)
        ],
        latency_rows=latency_rows(record),
        run_rows=_run_rows(record),
        system_rows=_system_rows(record),
        calibration_rows=_calibration_rows(record),
        raw=msgspec.json.format(
            msgspec.json.encode({"bench": record.bench_config, "engine": record.target.config}),
            indent=2,
        ).decode(),
    )
    write_atomically(page, html.encode())
    verdict = "VALID" if record.verdict.is_valid else "INVALID"
    write_png(
        panels,
        f"{record.target.model}, {record.scenario} scenario: {verdict}, "
        f"{record.summary.output_tokens_per_s:,.0f} output tokens/s",
        describe_run(record),
        str(picture),
    )


def describe_run(record: Record) -> str:
    """Machine, traffic and size of the run, in one line."""
    machine = record.machine
    parts = [
        ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus))
        or f"{machine.cpu}, {machine.num_threads} threads",
        "synthetic data" if record.data_set.is_synthetic else f"data set {record.data_set.name}",
        f"{record.summary.num_requests:,} requests in {record.summary.duration_s:.0f} s",
    ]
    return " · ".join(parts)


def latency_rows(record: Record) -> list[Row]:
    """Name, mean, p50, p90, p99, largest, limit, LoadGen's p99: text, milliseconds."""
    summary, loadgen = record.summary, record.loadgen
    rows = []
    for name, distribution, own, limit in (
        ("TTFT", summary.ttft_ms, loadgen.ttft_ms, record.limits.get("ttft_ms")),
        ("TPOT", summary.tpot_ms, loadgen.tpot_ms, record.limits.get("tpot_ms")),
    ):
        if distribution is not None:
            rows.append(
                (
                    name,
                    *_figures(distribution),
                    "–" if limit is None else f"{limit:g}",
                    "–" if own is None else _milliseconds(own.p99),
                )
            )
    return rows


def _figures(distribution: Distribution) -> Row:
    values = ("mean", "p50", "p90", "p99", "max")
    return tuple(_milliseconds(getattr(distribution, name)) for name in values)


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _tiles(record: Record) -> list[tuple[str, str, str]]:
    """Label, value, and what to hold it against."""
    summary, limits = record.summary, record.limits
    tiles = [
        ("Output tokens/s", f"{summary.output_tokens_per_s:,.0f}", _loadgen_rate(record)),
        ("Requests/s", f"{summary.requests_per_s:,.2f}", _offered(record)),
    ]
    for name, distribution, limit in (
        ("TTFT p99", summary.ttft_ms, limits.get("ttft_ms")),
        ("TPOT p99", summary.tpot_ms, limits.get("tpot_ms")),
    ):
        value = "none" if distribution is None else f"{distribution.p99:,.1f} ms"
        note = "no limit" if limit is None else f"limit {limit:g} ms"
        if limit is not None and record.verdict.binding_limit == name[:4].lower():
            note += ", the one that binds"
        tiles.append((name, value, note))
    return tiles


def _loadgen_rate(record: Record) -> str:
    rate = record.loadgen.tokens_per_s
    return "LoadGen gave none" if rate is None else f"LoadGen: {rate:,.0f}"


def _offered(record: Record) -> str:
    if record.load.get("loadgen_scenario") == "Server":
        return f"offered {record.load['target_qps']:,.2f}"
    return f"{record.summary.num_requests:,} requests"


def _run_rows(record: Record) -> list[Row]:
    summary, reuse, data_set = record.summary, record.prefix_reuse, record.data_set
    cached = reuse.num_cached_tokens
    synthetic = " (synthetic)" if data_set.is_synthetic else ""
    return [
        ("Status", record.status.value),
        ("Started", record.started_at),
        ("Requests", f"{summary.num_ok:,} answered, {summary.num_failed:,} failed"),
        ("Tokens", f"{summary.num_prompt_tokens:,} in, {summary.num_output_tokens:,} out"),
        ("Data set", f"{data_set.name}{synthetic}: {data_set.description}"),
        ("Data set hash", data_set.sha256[:16] or "none"),
        (
            "Prefix reuse between requests",
            ("allowed" if reuse.is_allowed else "not allowed")
            + f", {'unknown' if cached is None else f'{cached:,}'} prompt tokens reused",
        ),
        *_drafting_rows(record.drafting),
        ("LoadGen was late by", _describe_delay(summary.issue_delay_p99_ms)),
        ("LoadGen", f"{record.loadgen.version or 'not run'}, {record.loadgen.num_errors} errors"),
        ("Command", record.command),
    ]


def _drafting_rows(drafting: Drafting | None) -> list[Row]:
    if drafting is None:
        return []
    shares = ", ".join(
        f"{share:.1f}% of {count:,}"
        for share, count in zip(acceptance(drafting), drafting.drafted, strict=True)
    )
    return [
        ("Drafts accepted, by place", shares),
        ("Tokens a decode step", f"{drafting.tokens_per_decode:.2f} for each request, on average"),
    ]


def _describe_delay(p99_ms: float | None) -> str:
    """TTFT counts from the schedule, so a late client would count against the system."""
    return "unknown" if p99_ms is None else f"{p99_ms:.2f} ms at the p99, counted in TTFT"


def _system_rows(record: Record) -> list[Row]:
    machine, source = record.machine, record.source
    gpus = ", ".join(f"{gpu.name} (driver {gpu.driver})" for gpu in machine.gpus) or "none"
    commit = "not in a git tree"
    if source.commit is not None:
        commit = source.commit[:12] + (" with local changes" if source.is_dirty else "")
    where = record.target.url or "engine in a worker of its own, without HTTP"
    return [
        ("Measured", f"{record.target.model}: {where}"),
        ("Processor", f"{machine.cpu}, {machine.num_cores} cores, {machine.num_threads} threads"),
        ("Memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        ("GPU", gpus),
        ("Load average at start", f"{machine.load_average:g}"),
        ("Commit", commit),
        ("Configuration hash", record.config_hash),
        ("Versions", ", ".join(f"{name} {value}" for name, value in record.versions.items())),
    ]


def _calibration_rows(record: Record) -> list[Row]:
    if record.calibration is None:
        return []
    return [
        (
            str(level.concurrency),
            f"{level.requests_per_s:.2f}",
            f"{level.output_tokens_per_s:,.0f}",
            f"{level.ttft_p90_ms:,.1f}",
            f"{level.tpot_p90_ms:,.1f}",
            "yes" if level.is_within_limits else "no",
        )
        for level in record.calibration.levels
    ]


def _read_data(name: str) -> str:
    return resources.files("pelton.bench").joinpath(f"data/{name}").read_text()
