# SPDX-License-Identifier: Apache-2.0
"""`pelton bench`: the official LoadGen against an engine or a server."""

from typing import TYPE_CHECKING

import typer

from pelton.bench.config import BenchConfig
from pelton.cli.options import Settings, with_settings
from pelton.core.config import EngineConfig
from pelton.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from pelton.bench.harness import Outcome

# One line a paragraph: the terminal's width decides where it breaks.
_HELP = "\n\n".join(
    (
        "Measure an engine or a server with MLPerf's LoadGen; write a record and a report.",
        "Without --url the engine runs in a process of its own and is measured without HTTP; the "
        "engine options below apply to it. With --url they do not, and MODEL is what the server "
        "calls it. KV is not reused between requests unless --prefix-cache asks for it.",
        "The exit code is 0 for a VALID run, 3 for an INVALID one, 2 for bad input and 130 after "
        "Ctrl-C, which still leaves a record.",
        "Examples:",
        "  pelton bench smollm2 --scenario offline",
        "  pelton bench smollm2 --scenario server --qps 4 --min-duration 120 --out report",
        "  pelton bench smollm2 --scenario interactive --url http://127.0.0.1:8000",
        "  pelton bench ./Llama-3.1-8B-Instruct --input-len 1000 --output-len 1000",
        "  pelton bench smollm2 --scenario single-stream --dataset questions.jsonl",
    )
)


def register(app: typer.Typer) -> None:
    app.command(help=_HELP)(bench)


@with_settings(EngineConfig, BenchConfig, defaults={"prefix_cache": False})
def bench(settings: Settings) -> None:
    from rich.console import Console

    run_bench = import_harness()
    console = Console(stderr=True)
    outcome = run_bench(settings[BenchConfig], settings[EngineConfig], console)
    print_outcome(outcome, Console())
    raise typer.Exit(outcome.exit_code)


def import_harness() -> "Callable[[BenchConfig, EngineConfig, Console], Outcome]":
    """The harness, or a `ConfigError` that says which extra is missing."""
    try:
        import aiohttp  # noqa: F401
        import matplotlib  # noqa: F401
        import mlperf_loadgen  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Measuring needs the package {error.name}: pip install 'pelton[bench]'."
        ) from error
    from pelton.bench.harness import run_bench

    return run_bench


def print_outcome(outcome: "Outcome", console: "Console") -> None:
    """The figures as a table, the verdict, and where the files lie."""
    from rich.table import Table

    from pelton.bench.report import describe_run, latency_rows

    record = outcome.record
    table = Table(title=f"{record.target.model}, {record.scenario}", title_justify="left")
    for heading in ("ms", "mean", "p50", "p90", "p99", "largest", "limit", "LoadGen p99"):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for row in latency_rows(record):
        table.add_row(*row)
    console.print()
    if table.row_count:
        console.print(table)
    summary = record.summary
    console.print(
        f"[bold]{summary.output_tokens_per_s:,.1f}[/bold] output tokens/s, "
        f"[bold]{summary.requests_per_s:,.2f}[/bold] requests/s, {summary.num_failed} failed",
        highlight=False,
    )
    console.print(describe_run(record), style="dim", highlight=False)
    if record.verdict.is_valid:
        console.print(f"[bold green]VALID[/bold green]{_binding(record.verdict.binding_limit)}")
    else:
        console.print("[bold red]INVALID[/bold red]")
        for reason in record.verdict.reasons:
            console.print(f"  {reason}", highlight=False, soft_wrap=True)
    for name in ("record.json", "report.html"):
        console.print(f"{name:12} {outcome.folder / name}", highlight=False, soft_wrap=True)


def _binding(limit: str) -> str:
    return "" if limit == "none" else f", {limit.upper()} comes closest to its limit"
