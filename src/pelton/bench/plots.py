# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report, drawn with matplotlib: each on axes it is given, in a theme's colours.

The same drawing serves two outputs. In the page, colours are placeholders that become CSS
variables, so that one SVG is right in light and dark; in the PNG they are the light theme's.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from pelton.bench.measurements import Distribution, RequestRecord
from pelton.bench.record import Drafting, Record, StatsPoint

_MAX_POINTS = 600
_MAX_BINS = 160
_LOG_SPAN = 12.0
"""Values (limit included) that span more than this are drawn on a logarithmic axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    ink: str
    muted: str
    grid: str
    first: str
    second: str
    limit: str
    surface: str


PNG_THEME = Theme(
    ink="#1b2430", muted="#5c6b7c", grid="#e3e8ee", first="#2563c9", second="#c2700c",
    limit="#c62f2f", surface="#ffffff",
)  # fmt: skip
# Colours that stand for the page's CSS variables of the same names.
_PAGE_THEME = Theme(
    ink="#010101", muted="#020202", grid="#030303", first="#040404", second="#050505",
    limit="#060606", surface="#070707",
)  # fmt: skip
_RC: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "svg.fonttype": "none",
    "lines.linewidth": 1.8,
}

Draw = Callable[[Axes, Theme], None]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    description: str
    """For who cannot see it: the figure's text alternative."""
    draw: Draw


def make_panels(record: Record, requests: Sequence[RequestRecord]) -> list[Panel]:
    """The report's pictures: four, of which those without data say so, and one of drafting where
    there was any."""
    drafting = record.drafting
    drafted = [] if drafting is None else [_drafting_panel(drafting)]
    ok = [request for request in requests if request.is_ok]
    limits = record.limits
    return [
        Panel(
            "Output tokens/s over time",
            f"Mean {record.summary.output_tokens_per_s:.0f} output tokens a second",
            lambda axes, theme: _draw_throughput(axes, theme, record),
        ),
        Panel(
            "Requests running and KV use over time",
            "Rows in the batch, requests waiting and the share of KV blocks held",
            lambda axes, theme: _draw_engine(axes, theme, record),
        ),
        _latency_panel(
            "Time to first token (TTFT)", [request.ttft_ms for request in ok],
            record.summary.ttft_ms, limits.get("ttft_ms"),
        ),
        _latency_panel(
            "Time per output token (TPOT)", [request.tpot_ms for request in ok],
            record.summary.tpot_ms, limits.get("tpot_ms"),
        ),
        *drafted,
    ]  # fmt: skip


def render_svg(panel: Panel, *, salt: str) -> str:
    """One panel as an `<svg>` element for the page: no outside names, colours as variables."""
    with mpl.rc_context(_RC | {"svg.hashsalt": salt}):
        figure = Figure(figsize=(5.6, 3.3), layout="constrained")
        figure.patch.set_alpha(0.0)
        _draw_panel(figure.add_subplot(), panel, _PAGE_THEME, has_title=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return _adapt_to_page(buffer.getvalue(), panel)


def write_png(panels: Sequence[Panel], title: str, subtitle: str, path: str) -> None:
    """All panels in one picture, for a README."""
    with mpl.rc_context(_RC):
        num_rows = math.ceil(len(panels) / 2)
        figure = Figure(
            figsize=(11.5, 3.7 * num_rows), layout="constrained", facecolor=PNG_THEME.surface
        )
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15, wspace=0.03, hspace=0.03)  # type: ignore[union-attr, call-arg]
        figure.suptitle(
            f"{title}\n", x=0.012, ha="left", fontsize=15, fontweight="bold", color=PNG_THEME.ink
        )
        below_title = 1 - 0.104 / num_rows
        figure.text(0.0125, below_title, subtitle, fontsize=10, color=PNG_THEME.muted, va="top")
        places = figure.subplots(num_rows, 2).flat
        for axes, panel in zip(places, panels, strict=False):
            _draw_panel(axes, panel, PNG_THEME, has_title=True)
        for axes in places[len(panels) :]:
            axes.set_axis_off()
        figure.savefig(path, format="png", dpi=140, metadata={"Software": None})


def _draw_panel(axes: Axes, panel: Panel, theme: Theme, *, has_title: bool) -> None:
    axes.set_facecolor("none")
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.tick_params(colors=theme.muted, length=0)
    for spine in axes.spines.values():
        spine.set_color(theme.grid)
    axes.xaxis.label.set_color(theme.muted)
    axes.yaxis.label.set_color(theme.muted)
    panel.draw(axes, theme)
    if has_title:
        axes.set_title(panel.title, color=theme.ink)


def _draw_throughput(axes: Axes, theme: Theme, record: Record) -> None:
    tokens, bucket_s = record.timeline.output_tokens, record.timeline.bucket_s
    if not tokens:
        _say(axes, theme, "No tokens arrived")
        return
    width = max(1, round(max(1.0, len(tokens) * bucket_s / 120) / bucket_s))
    rates = [
        sum(tokens[i : i + width]) / (len(tokens[i : i + width]) * bucket_s)
        for i in range(0, len(tokens), width)
    ]
    edges = [min(i * width, len(tokens)) * bucket_s for i in range(len(rates) + 1)]
    mean = record.summary.output_tokens_per_s
    axes.stairs(rates, edges, color=theme.first, alpha=0.14, fill=True)
    axes.stairs(rates, edges, color=theme.first, linewidth=1.6)
    axes.axhline(mean, color=theme.muted, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(
        0.99, 0.985, f"mean {mean:,.1f}" if mean < 100 else f"mean {mean:,.0f}",
        transform=axes.transAxes, ha="right", va="top", color=theme.muted,
    )  # fmt: skip
    axes.set_ylim(0, max(*rates, mean) * 1.18)
    axes.set_xlim(0, len(tokens) * bucket_s)
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens/s")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _draw_engine(axes: Axes, theme: Theme, record: Record) -> None:
    points = record.timeline.engine
    if not points:
        _say(axes, theme, "The system under test gives no engine statistics")
        return
    bins = _make_bins(points)
    times = [group[0].time_s for group in bins]
    running = [fmean(point.num_running for point in group) for group in bins]
    waiting = [fmean(point.num_running + point.num_waiting for point in group) for group in bins]
    kv_use = [100 * fmean(point.kv_use for point in group) for group in bins]
    axes.fill_between(times, running, color=theme.first, alpha=0.14, linewidth=0, step="post")
    axes.plot(times, running, color=theme.first, drawstyle="steps-post", label="running")
    if any(point.num_waiting for point in points):
        axes.plot(
            times, waiting, color=theme.muted, drawstyle="steps-post", linewidth=1.0,
            label="running + waiting",
        )  # fmt: skip
    axes.set_ylim(0, max(*waiting, 1) * 1.25)
    axes.set_xlim(0, max(times[-1], 1e-3))
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    use = axes.twinx()
    use.grid(visible=False)
    use.plot(times, kv_use, color=theme.second, linewidth=1.4, label="KV use")
    use.set_ylim(0, max(1.25 * max(kv_use), 1.0))
    use.set_ylabel("% of KV blocks", color=theme.second)
    use.tick_params(colors=theme.muted, length=0)
    for spine in use.spines.values():
        spine.set_visible(False)
    lines = [*axes.get_lines(), *use.get_lines()]
    axes.legend(
        lines, [str(line.get_label()) for line in lines], loc="upper left", ncols=len(lines),
        frameon=False, labelcolor=theme.ink, handlelength=1.4, columnspacing=1.2, borderpad=0.1,
    )  # fmt: skip


def _drafting_panel(drafting: Drafting) -> Panel:
    shares = acceptance(drafting)
    described = ", ".join(f"place {place}: {share:.0f}%" for place, share in enumerate(shares, 1))

    def draw(axes: Axes, theme: Theme) -> None:
        places = range(1, len(shares) + 1)
        axes.bar(places, shares, width=0.6, color=theme.first)
        for place, share in zip(places, shares, strict=True):
            axes.annotate(
                f"{share:.0f}%", (place, share), xytext=(0, 3), textcoords="offset points",
                ha="center", color=theme.ink,
            )  # fmt: skip
        axes.text(
            0.99, 0.985, f"{drafting.tokens_per_decode:.2f} tokens a step",
            transform=axes.transAxes, ha="right", va="top", color=theme.muted,
        )  # fmt: skip
        axes.set_ylim(0, 118)
        axes.set_yticks([0, 25, 50, 75, 100])
        axes.set_xticks(list(places))
        axes.set_xlabel("place of the draft after the sure token")
        axes.set_ylabel("% accepted")

    return Panel("Drafts accepted by place", described, draw)


def acceptance(drafting: Drafting) -> list[float]:
    """Percent accepted of what was drafted at each place."""
    pairs = zip(drafting.drafted, drafting.accepted, strict=True)
    return [100 * accepted / drafted if drafted else 0.0 for drafted, accepted in pairs]


def _make_bins(points: Sequence[StatsPoint]) -> list[Sequence[StatsPoint]]:
    """Neighbours in time, in at most `_MAX_BINS` groups: what is drawn is their mean."""
    size = math.ceil(len(points) / _MAX_BINS)
    return [points[i : i + size] for i in range(0, len(points), size)]


def _latency_panel(
    title: str, values: Sequence[float], distribution: Distribution | None, limit: float | None
) -> Panel:
    if distribution is None:
        return Panel(title, "No data", lambda axes, theme: _say(axes, theme, "No answers"))
    described = (
        f"p50 {distribution.p50:.1f} ms, p90 {distribution.p90:.1f} ms, "
        f"p99 {distribution.p99:.1f} ms"
    )
    if limit is not None:
        described += f", limit {limit:g} ms"
    return Panel(
        title,
        described,
        lambda axes, theme: _draw_distribution(axes, theme, sorted(values), distribution, limit),
    )


def _draw_distribution(
    axes: Axes,
    theme: Theme,
    values: Sequence[float],
    distribution: Distribution,
    limit: float | None,
) -> None:
    """The share of requests at or under each latency, with its percentiles and limit."""
    step = max(1, len(values) // _MAX_POINTS)
    shown = [*range(0, len(values), step), len(values) - 1]
    axes.plot(
        [values[i] for i in shown], [100 * (i + 1) / len(values) for i in shown],
        color=theme.first, drawstyle="steps-post",
    )  # fmt: skip
    low, high = max(values[0], 1e-3), max(values[-1], limit or 0.0)
    for name, percent in (("p50", 50), ("p90", 90), ("p99", 99)):
        value = getattr(distribution, name)
        axes.plot([value], [percent], "o", color=theme.first, markersize=5)
        axes.annotate(
            f"{name} {_milliseconds(value)}", (value, percent), xytext=(8, -3),
            textcoords="offset points", va="top", color=theme.ink,
        )  # fmt: skip
    if high / low > _LOG_SPAN:
        axes.set_xscale("log")
        axes.set_xlim(low * 0.8, high * 2.2)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(max(0.0, low - 0.1 * (high - low)), high + 0.3 * (high - low) + 1e-6)
    if limit is not None:
        axes.axvline(limit, color=theme.limit, linewidth=1.5, linestyle=(0, (5, 3)))
        # On the side where the curve is not.
        side = -1 if limit > distribution.p50 * 2 else 1
        axes.annotate(
            f"limit {_milliseconds(limit)}", (limit, 3), xytext=(5 * side, 0),
            ha="right" if side < 0 else "left", textcoords="offset points", va="bottom",
            color=theme.limit,
        )  # fmt: skip
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(0, 104)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("% of requests")


def _say(axes: Axes, theme: Theme, text: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=theme.muted)


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _adapt_to_page(svg: str, panel: Panel) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    # Names of groups repeat from figure to figure and nothing refers to them.
    svg = re.sub(r'\sid="[a-zA-Z0-9.]+(_\d+)+"', "", svg)
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 system-ui, sans-serif", svg)
    for name in Theme.__dataclass_fields__:
        svg = svg.replace(getattr(_PAGE_THEME, name), f"var(--{name})")
    label = f"{panel.title}: {panel.description}"
    opening = svg[: svg.index(">")]
    view_box = re.search(r'viewBox="[^"]*"', opening)
    assert view_box is not None, opening
    body = svg[svg.index(">") + 1 :]
    return f'<svg {view_box[0]} role="img" aria-label="{label}">{body}'
