# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/serving.md: roles, routing, failure.

Colours are placeholders that become CSS classes, so that one SVG follows its reader's light or dark
theme; it brings its own background.
"""

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

IMAGES = Path(__file__).parent.parent / "docs" / "images"
# Placeholder: what it is in a light page and in a dark one.
INK, MUTED, SURFACE, LINE, PROMPT, DECODE, WRONG = (f"#0{i}0{i}0{i}" for i in range(1, 8))
THEMES = {
    INK: ("#1b2430", "#e8edf3"),
    MUTED: ("#5c6b7c", "#9fb0c3"),
    SURFACE: ("#ffffff", "#151b23"),
    LINE: ("#c5ced8", "#3d4957"),
    PROMPT: ("#c2700c", "#e59b3c"),
    DECODE: ("#2563c9", "#6ea2f5"),
    WRONG: ("#c62f2f", "#f07a7a"),
}
SMALL = 8.5
RC = {"svg.fonttype": "none", "svg.hashsalt": "pelton", "font.size": 10, "text.color": INK}
Point = tuple[float, float]


def draw_roles(axes: Axes) -> None:
    axes.set(xlim=(-1, 101), ylim=(0, 39))
    _box(axes, (0, 15), (13, 10), "client")
    _box(axes, (26, 15), (16, 10), "frontend", "router")
    _box(axes, (60, 26), (40, 11), "decode worker", "samples every token", DECODE)
    _box(axes, (60, 2), (40, 11), "prefill worker", "computes prompts", PROMPT)
    _arrow(axes, (13, 21.5), (26, 21.5), "request", at=(19.5, 23.4))
    _arrow(axes, (26, 18.5), (13, 18.5), "text", at=(19.5, 16.6))
    _arrow(axes, (42, 23), (60, 33), "1  request, and\nwho prefills", at=(45, 33))
    _arrow(axes, (60, 29), (42, 19), "5  tokens", at=(54, 21))
    for x, is_down, text in ((63, True, "2  order"), (74, False, "3  blocks ready")):
        start, end = ((x, 26), (x, 13)) if is_down else ((x, 13), (x, 26))
        _arrow(axes, start, end, text, at=(x + 1, 19.5), align="left")
    _arrow(axes, (91, 13), (91, 26), "4  KV", at=(92, 19.5), align="left", colour=DECODE)


def draw_routing(axes: Axes) -> None:
    """Costs of a prompt of 12 blocks, by the formula of serving/router/policies.py."""
    # Of each worker: blocks of the prompt cached, blocks that others still prefill, blocks held.
    workers = [(8, 0, 30), (0, 0, 4), (10, 8, 50)]
    length, weight = 12, 4
    costs = []
    axes.set(xlim=(-34, 118), ylim=(3.6, -0.5))
    for row, (cached, queued, held) in enumerate(workers):
        left = length - cached
        parts = ((weight * (queued + left), PROMPT), (held + left, DECODE))
        axes.text(-3, row - 0.12, f"worker {row}", ha="right", va="bottom")
        note = f"{cached} of {length} blocks cached"
        axes.text(-3, row + 0.1, note, ha="right", va="top", fontsize=SMALL, color=MUTED)
        start = 0
        for cost, colour in parts:
            axes.add_patch(Rectangle((start, row - 0.26), cost, 0.52, color=colour, lw=0))
            axes.text(
                start + cost / 2, row, str(cost), ha="center", va="center", color=SURFACE,
                fontweight="bold",
            )  # fmt: skip
            start += cost
        costs.append(start)
    best = costs.index(min(costs))
    for row, cost in enumerate(costs):
        is_best = row == best
        text = f"{cost}: takes the request" if is_best else str(cost)
        axes.text(cost + 2, row, text, va="center", fontweight="bold" if is_best else "normal")
    for x, text, colour in (
        (0, f"{weight} x blocks to prefill, queued ones included", PROMPT),
        (58, "blocks held, the request's included", DECODE),
    ):
        axes.add_patch(Rectangle((x, 3.2), 3, 0.28, color=colour, lw=0))
        axes.text(x + 4.5, 3.34, text, va="center", fontsize=SMALL)


def draw_failure(axes: Axes) -> None:
    axes.set(xlim=(-16, 101), ylim=(4.35, -0.5))
    for y, name in ((0, "client"), (1.35, "worker 0"), (2.35, "worker 1")):
        axes.text(-2, y, name, ha="right", va="center")
        axes.plot([0, 100], [y, y], color=LINE, lw=1, zorder=0)
    _bar(axes, 1.35, (2, 14), "prefill", PROMPT)
    _bar(axes, 1.35, (14, 40), "decode", DECODE)
    axes.plot([40], [1.35], marker="x", color=WRONG, markersize=11, markeredgewidth=2.6)
    _note(axes, (43, 1.35), "dies, or freezes and is killed", WRONG)
    _bar(axes, 2.35, (48, 62), "prefill", PROMPT)
    _bar(axes, 2.35, (62, 95), "decode", DECODE)
    note = "prompt + tokens so far + what is left\nof limits, seed, penalties, grammar"
    _note(axes, (63, 2.98), note)
    axes.annotate(
        "", (48, 2.08), (41, 1.62), arrowprops={"arrowstyle": "->", "color": MUTED, "lw": 1.2}
    )
    _ticks(axes, 0, (14, 40))
    _ticks(axes, 0, (62, 95))
    _note(axes, (44.5, 0), "a pause, no error", INK)
    _note(axes, (3, 0), "waits")
    _note(axes, (80, 1.35), "started again")
    _note(
        axes, (0, 3.9), "With roles: a prefill worker that dies, freezes or sends what does not"
        " match costs a pause too:\nthe decode worker computes the prompt itself. Leases end; no"
        " block stays held.",
    )  # fmt: skip


def _box(
    axes: Axes, at: Point, size: Point, title: str, note: str = "", colour: str = MUTED
) -> None:
    style = "round,pad=0,rounding_size=1.6"
    axes.add_patch(FancyBboxPatch(at, *size, boxstyle=style, fc=SURFACE, ec=colour, lw=1.8))
    x, y = at[0] + size[0] / 2, at[1] + size[1] / 2
    axes.text(x, y + 1.9 * bool(note), title, ha="center", va="center", fontweight="bold")
    axes.text(x, y - 2.6, note, ha="center", va="center", fontsize=SMALL, color=MUTED)


def _arrow(
    axes: Axes,
    start: Point,
    end: Point,
    text: str,
    *,
    at: Point,
    align: str = "center",
    colour: str = MUTED,
) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.4})
    axes.text(*at, text, ha=align, va="center", fontsize=SMALL)


def _note(axes: Axes, at: Point, text: str, colour: str = MUTED) -> None:
    """It interrupts the line that it stands on."""
    box = {"facecolor": SURFACE, "edgecolor": "none", "pad": 2}
    axes.text(*at, text, va="center", fontsize=SMALL, color=colour, bbox=box)


def _bar(axes: Axes, y: float, span: Point, text: str, colour: str) -> None:
    axes.add_patch(Rectangle((span[0], y - 0.25), span[1] - span[0], 0.5, color=colour, lw=0))
    axes.text(
        sum(span) / 2, y, text, ha="center", va="center", color=SURFACE, fontsize=SMALL,
        fontweight="bold",
    )  # fmt: skip


def _ticks(axes: Axes, y: float, span: Point) -> None:
    """Tokens that arrive."""
    places = [span[0] + 2 * i for i in range(int((span[1] - span[0]) / 2) + 1)]
    axes.plot(places, [y] * len(places), "|", color=INK, markersize=9, markeredgewidth=1.6)


def render(draw: Callable[[Axes], None], size: Point, title: str) -> str:
    with mpl.rc_context(RC):
        figure = Figure(figsize=size, facecolor=SURFACE)
        axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
        axes.set_axis_off()
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    return _themed(out.getvalue())


def _themed(svg: str) -> str:
    """`svg` with its placeholder colours as variables of the reader's theme, and a font that is
    there."""

    def rules(theme: int) -> str:
        return "".join(f"--c{name[1:]}:{THEMES[name][theme]};" for name in THEMES)

    style = (
        f"<style>svg{{{rules(0)}}}@media (prefers-color-scheme:dark){{svg{{{rules(1)}}}}}</style>"
    )
    for name in THEMES:
        svg = svg.replace(name, f"var(--c{name[1:]})")
    svg = re.sub(r"font-family: '[^;]*", "font-family: sans-serif", svg)
    return re.sub(r"(<svg [^>]*>)", rf"\1{style}", svg, count=1)


PICTURES: Sequence[tuple[str, Callable[[Axes], None], Point, str]] = (
    ("roles.svg", draw_roles, (7.6, 2.9), "How a request goes through workers with roles"),
    ("routing.svg", draw_routing, (7.6, 2.5), "What a worker would cost a request"),
    ("failure.svg", draw_failure, (7.6, 2.7), "A worker dies, and its request goes on elsewhere"),
)


def main() -> None:
    for name, draw, size, title in PICTURES:
        (IMAGES / name).write_text(render(draw, size, title))


if __name__ == "__main__":
    main()
