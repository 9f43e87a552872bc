# SPDX-License-Identifier: Apache-2.0
"""A step of a model beside the limits of the card: op by op, as a table and as a picture."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pelton.bench.plots import PNG_THEME
from pelton.engine.step_timing import StepTimes
from pelton.perf.cost import CostLog, OpCost
from pelton.perf.hardware import Hardware
from pelton.perf.roofline import NumberFormat, floor_s

_MAX_BARS = 16


@dataclass(frozen=True, slots=True)
class OpRow:
    """All calls of one op that cost the same."""

    op: str
    num_calls: int
    cost: OpCost
    """Of one call."""
    floor_s: float
    """Of all calls, like all times here."""
    is_memory_bound: bool
    measured_s: float | None
    """None: not timed, or not apart from the step's rest."""


def make_rows(log: CostLog, hardware: Hardware, times: StepTimes | None = None) -> list[OpRow]:
    """Longest first. `times` are those of the step that `log` is of; a cost that no timed op bears
    the name of stays untimed."""
    counts: dict[tuple[str, OpCost], int] = defaultdict(int)
    seconds: dict[tuple[str, OpCost], float] = defaultdict(float)
    waiting = [] if times is None else list(reversed(times.ops))
    for entry in log.entries:
        counts[entry] += 1
        if waiting and waiting[-1][0] == entry[0]:
            seconds[entry] += waiting.pop()[1]
    assert not waiting, f"timed but not costed: {waiting[-1][0]}"
    rows = [
        OpRow(
            op,
            count,
            cost,
            floor_s(cost, hardware, _format(op, hardware)) * count,
            cost.bytes / hardware.memory_bytes_per_s
            >= floor_s(cost, hardware, _format(op, hardware)),
            seconds.get((op, cost)),
        )
        for (op, cost), count in counts.items()
    ]
    return sorted(rows, key=lambda row: -(row.measured_s or row.floor_s))


def _format(op: str, hardware: Hardware) -> NumberFormat:
    """What the op multiplies in."""
    return "fp8" if op.startswith("fp8_") and hardware.fp8_flops_per_s else "bfloat16"


def table_lines(rows: Sequence[OpRow], num_tokens: int, times: StepTimes | None) -> Iterator[str]:
    floor = sum(row.floor_s for row in rows)
    head = f"{'op':<22}{'calls':>6}{'MB':>11}{'GFLOP':>11}{'floor us':>10}{'bound':>9}"
    yield head + (f"{'share':>8}" if times is None else f"{'us':>10}{'roofline':>10}{'share':>8}")
    for row in rows:
        yield _line(row, floor, times)
    megabytes = sum(row.cost.bytes * row.num_calls for row in rows) / 1e6
    gigaflops = sum(row.cost.flops * row.num_calls for row in rows) / 1e9
    num_calls = sum(row.num_calls for row in rows)
    step = f"{num_calls:>6}{megabytes:>11,.1f}{gigaflops:>11,.1f}{floor * 1e6:>10,.1f}{'':>9}"
    if times is None:
        yield f"{'step':<22}{step}{1:>8.1%}"
    else:
        total = times.total_s
        rest = f"{times.rest_s * 1e6:>10,.1f}{'':>10}{times.rest_s / total:>8.1%}"
        yield f"{'everything else':<22}{'':>47}{rest}"
        yield f"{'step':<22}{step}{total * 1e6:>10,.1f}{floor / total:>10.1%}{1:>8.1%}"
    yield f"At most {num_tokens / floor:,.1f} tokens/s."


def _line(row: OpRow, step_floor_s: float, times: StepTimes | None) -> str:
    line = (
        f"{row.op:<22}{row.num_calls:>6}{row.cost.bytes * row.num_calls / 1e6:>11,.1f}"
        f"{row.cost.flops * row.num_calls / 1e9:>11,.1f}{row.floor_s * 1e6:>10,.1f}"
        f"{'memory' if row.is_memory_bound else 'compute':>9}"
    )
    if times is None:
        return f"{line}{row.floor_s / step_floor_s:>8.1%}"
    if row.measured_s is None:
        return f"{line}{'-':>10}{'-':>10}{'-':>8}"
    share = row.measured_s / times.total_s
    return f"{line}{row.measured_s * 1e6:>10,.1f}{row.floor_s / row.measured_s:>10.1%}{share:>8.1%}"


def draw_rows(rows: Sequence[OpRow], times: StepTimes | None, title: str, path: Path) -> None:
    """Bars of what each op takes with its floor inside, longest on top; a PNG or an SVG."""
    from matplotlib.figure import Figure

    shown = list(rows[:_MAX_BARS])
    theme = PNG_THEME
    figure = Figure(figsize=(9, 1.3 + 0.33 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(shown))
    if times is not None:
        measured = [(row.measured_s or 0.0) * 1e6 for row in shown]
        axes.barh(places, measured, height=0.72, color=theme.second, alpha=0.45, label="measured")
        for place, row in enumerate(shown):
            if row.measured_s:
                axes.text(
                    row.measured_s * 1e6, place, f" {row.floor_s / row.measured_s:.0%} of roofline",
                    va="center", fontsize=8, color=theme.muted,
                )  # fmt: skip
    floors = [row.floor_s * 1e6 for row in shown]
    axes.barh(places, floors, height=0.4, color=theme.first, label="floor")
    axes.set_yticks(places, [f"{row.op} x{row.num_calls}" for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("microseconds a step")
    axes.margins(x=0.14)
    axes.set_title(title, loc="left", fontsize=10, color=theme.ink)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
