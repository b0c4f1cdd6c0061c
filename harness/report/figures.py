"""The figures of a report, made of records; None if there is nothing to draw.

Matplotlib is used through its objects (Figure, Axes): no pyplot, global state or display.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from harness import units
from harness.analysis.roofline import OTHER, OUTSIDE, Stack
from harness.analysis.scaling import ScalingFit, ScalingPoint
from harness.records import Interval
from harness.report.markdown import clipped
from harness.report.profile import SMALL as SMALL_PART
from harness.report.tables import growth

# Okabe & Ito 2008, "Color universal design": distinct under the common colour deficiencies.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
VERMILLION, SKY, YELLOW = "#D55E00", "#56B4E9", "#F0E442"
LINES = ((BLUE, "o"), (VERMILLION, "s"), (ORANGE, "^"), (PURPLE, "D"))
"""Colour and marker of each curve."""
PARTS = {
    "select": (BLUE, ""),
    "compress": (ORANGE, ""),
    "window": (GREEN, ""),
    "scores": (PURPLE, ""),
    "phi": (SKY, ""),
    "gate": (YELLOW, ""),
    "attention": (VERMILLION, ""),
    "feed forward": (SKY, "...."),
    "projections": (YELLOW, "xxxx"),
    "optimiser": (PURPLE, "...."),
    "communication": (VERMILLION, "xxxx"),
    OTHER: ("#BBBBBB", ""),
    OUTSIDE: ("white", "////"),
}
"""Colour and hatch of each part of a step, the same on all pages; any other is among the others."""
MAX_DOTS = 22
"""Rows of a figure of dots."""
INK, MUTED, GREY, FAINT = "#222222", "#6B6B6B", "#8A8A8A", "#E4E4E4"
MARKS, DASHES = "|s^Dv", ("-", "--", ":")
"""Marks beside a dot, and dashes of runs in one panel."""

SMALL: dict[str, Any] = {"fontsize": 7.5, "color": INK}

DPI = 160
WIDTH_IN, HEIGHT_IN = 1296 / DPI, 656 / DPI
"""No figure is larger than a screen."""
LETTER_IN, TITLE_IN, HANDLE_IN = 0.062, 0.1, 0.55
"""Width of a letter in a legend and in the title of a panel, and of a handle, in inches."""
BAR_LETTERS = 62
"""Letters that fit into a bar of the whole step."""
LONG_TITLE = 92
LONG_ROW = 50
"""Letters from which the name of a row is folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One figure: the end of its file name, its alternative text, what is drawn."""

    name: str
    alt: str
    figure: Figure

    def png(self) -> bytes:
        """Drawing takes longer than all else on a page, and only a written page needs it."""
        out, plain = io.BytesIO(), {"Software": None}
        self.figure.savefig(out, format="png", dpi=DPI, facecolor="white", metadata=plain)
        return out.getvalue()


def scaling(fits: Sequence[ScalingFit], labels: Mapping[str, str], axis: str) -> Picture | None:
    """Step time along an axis, both logarithmic, one line per group, the first one in colour and
    with guides of slope 1 and 2; None with more lines than colours or two lines of one name.
    """
    drawn = [f for f in fits if any(p.step_s or p.lower_bound_s for p in f.points)]
    names = [labels[f.group] for f in drawn]
    clear = len({*names}) == len(drawn) <= len(LINES)
    if not clear or not any(f.exponent for f in drawn):
        return None
    figure, (axes,) = _canvas(HEIGHT_IN)
    axes.loglog()
    for f, (colour, marker) in zip(drawn, LINES, strict=False):
        _curve(axes, f, colour, marker)
    xs = sorted({p.x for f in drawn for p in f.points})
    margin = (xs[-1] / xs[0]) ** 0.05
    axes.set_xlim(xs[0] / margin, xs[-1] * margin)
    axes.xaxis.set_minor_locator(NullLocator())
    texts = [f"{x / 1024:g}k" if x >= 8192 and x % 1024 == 0 else f"{x:,g}" for x in xs]
    axes.set_xticks(xs, texts)
    late = any(f.censored for f in drawn)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top * (top / bottom) ** (0.1 * late))  # room for the arrows
    _guides(axes, drawn[0])
    _log_ticks(axes.yaxis, axes.get_ylim())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: units.plain("step_s", y)))
    arrow = "   (arrow: timed out, at least this long)" if late else ""
    axes.set_xlabel(f"{axis}{arrow}", color=MUTED)
    axes.set_ylabel("step time", color=MUTED)
    handles = [Line2D([], [], color=c, marker=m, ms=5, lw=1.2) for c, m in LINES[: len(drawn)]]
    _legend(figure, handles, _folded(names), 2)
    first = next(f for f in drawn if f.segments)
    name = f"scaling-{slug(first.workload)}-{slug(first.axis)}"
    return _picture(name, figure, f"{labels[first.group]}: exponent of {axis} {growth(first)}")


def where(
    found: Sequence[Stack], names: Mapping[str, str], asked: Collection[str] = ()
) -> Picture | None:
    """A bar a case: the length of a part is its share of the step. Those asked about come first."""
    found = sorted(found, key=lambda stack: stack.case.case_id not in asked)
    if not found:
        return None
    figure, (axes,) = _canvas(min(HEIGHT_IN, 1.3 + 0.3 * len(found)))
    bars = [_shown_parts(stack) for stack in found]
    drawn = [name for name in PARTS if any(name in bar for bar in bars)]
    styles: dict[str, dict[str, Any]] = {
        n: {"fc": PARTS[n][0], "hatch": PARTS[n][1], "ec": "#888888", "lw": 0.4} for n in drawn
    }
    for row, (stack, bar) in enumerate(zip(found, bars, strict=True)):
        left = 0.0
        for name in (name for name in drawn if name in bar):
            share = bar[name] / stack.step_s
            axes.barh(row, share, left=left, height=0.7, **styles[name])
            took, part = units.duration(bar[name]), f"{100 * share:.0f} %"
            fits = [t for t in (f"{took}, {part}", part) if len(t) < BAR_LETTERS * share]
            dark = PARTS[name] in ((BLUE, ""), (GREEN, ""), (VERMILLION, ""))
            text = axes.text(left + share / 2, row, fits[0] if fits else "", ha="center", **SMALL)
            text.set(va="center", color="white" if dark else INK)
            text.set_path_effects([] if dark else [withStroke(linewidth=3, foreground="white")])
            left += share
        axes.text(1.01, row, units.duration(stack.step_s), va="center", **SMALL)
    axes.set_xlim(0, 1.1)
    axes.xaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.0f} %"))
    axes.set_xlabel("share of the step, whose time is on the right", color=MUTED)
    ids = [stack.case.case_id for stack in found]
    _name_rows(axes, _folded(names[i] for i in ids), [i in asked for i in ids])
    _legend(figure, [Patch(**styles[name]) for name in drawn], drawn, 6)
    most, seconds = max(bars[0].items(), key=lambda part: part[1])
    share, step = seconds / found[0].step_s, units.duration(found[0].step_s)
    what = f"{'no kernel' if most == OUTSIDE else most} runs for {units.duration(seconds)}"
    said = f"{names[ids[0]]}: {what} of {step} ({units.percent(round(share, 2))})"
    return _picture("where", figure, said)


class Row(NamedTuple):
    """A case in a figure of dots: a value for each panel, and others beside the first by name."""

    name: str
    values: tuple[Interval, ...]
    asked: bool
    marks: Mapping[str, float]


class Panel(NamedTuple):
    """A quantity in a figure of dots, with named lines at some values."""

    title: str
    text: Callable[[float], str]
    lines: Mapping[str, float]
    log: bool = False


def dots(name: str, rows: Sequence[Row], panels: Sequence[Panel], message: str) -> Picture:
    """A row a case, a panel a quantity; the asked case is in colour."""
    figure, every = _canvas(min(HEIGHT_IN, 1.15 + 0.17 * max(len(rows), 5)), len(panels), True)
    marks = [*dict.fromkeys(mark for row in rows for mark in row.marks)]
    for i, (axes, panel) in enumerate(zip(every, panels, strict=True)):
        axes.grid(axis="y", color=FAINT, lw=0.8)
        axes.set_xscale("log" if panel.log else "linear")
        axes.set_xlabel(panel.title, color=MUTED)
        for y, row in enumerate(rows):
            value = row.values[i]
            colour, marker = (VERMILLION, "D") if row.asked else (GREY, "o")
            axes.plot(_ends(value), (y, y), color=colour, lw=3, alpha=0.4, solid_capstyle="butt")
            axes.plot(value.value, y, marker, color=colour, ms=5)
            said, at = panel.text(value.value), axes.get_yaxis_transform()
            axes.text(1.01, y, said, transform=at, va="center", **SMALL)
            for mark, x in row.marks.items() if i == 0 else ():
                axes.plot(x, y, MARKS[marks.index(mark)], ms=6, mew=1.3, color=INK, mfc="none")
        sides = ("right", "left") if len(panel.lines) > 1 else ("center",)
        for (text, x), side in zip(panel.lines.items(), sides, strict=True):
            axes.axvline(x, color=INK, lw=1, ls=(0, (4, 3)), zorder=0)
            axes.text(x, 1.01, text, transform=axes.get_xaxis_transform(), ha=side, **SMALL)
        if panel.log:
            _log_ticks(axes.xaxis, axes.get_xlim())
        else:
            axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _, panel=panel: panel.text(x)))
    names = [clipped(row.name, LONG_ROW + 20) for row in rows]
    _name_rows(every[0], names, [row.asked for row in rows])
    if marks:
        handles = [Line2D([], [], color=INK, marker=m, mfc="none", ls="") for m in MARKS]
        _legend(figure, handles[: len(marks)], marks, 3)
    return _picture(name, figure, message)


class Line(NamedTuple):
    """A run over its steps: each value, their running mean, and what happened."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    mean: Sequence[float]
    events: Mapping[int, str]


Curves = tuple[str, str, Sequence[Line]]
"""A panel of runs: its message, its unit, the runs."""


def over_steps(panels: Sequence[Curves]) -> Picture:
    """A panel a question."""
    figure, every = _canvas(HEIGHT_IN * 0.85, len(panels))
    letters = int(WIDTH_IN / len(panels) / TITLE_IN)
    for axes, (message, unit, lines) in zip(every, panels, strict=True):
        title = textwrap.fill(message, letters, break_on_hyphens=False)
        axes.set_title(title, fontsize=9, fontweight="bold", color=INK, loc="left")
        axes.set_ylabel(unit, color=MUTED)
        axes.grid(axis="y", color=FAINT, lw=0.8)
        for line, (colour, _), dash in zip(lines, LINES, DASHES, strict=False):
            axes.plot(line.steps, line.values, color=colour, lw=0.8, alpha=0.25)
            axes.plot(line.steps, line.mean, color=colour, lw=1.6, ls=dash, label=line.name)
            for step, text in line.events.items():
                side, gap = ("right", " ") if step > line.steps[-1] / 2 else ("left", "")
                axes.axvline(step, color=INK, lw=0.8, ls=":")
                at: dict[str, Any] = {
                    "xycoords": ("data", "axes fraction"),
                    "ha": side,
                    "va": "top",
                }
                axes.annotate(f" {text}{gap}", (step, 0.98), **at, **SMALL)
        shown = [v for line in lines for v in line.mean]
        room = max(0.5 * (max(shown) - min(shown)), 0.1 * max(map(abs, shown)))
        low = min(shown) - room
        axes.set_ylim(max(low, 0) if min(shown) > 0 else low, max(shown) + room)
        if lines[1:]:
            axes.legend(loc="lower right", frameon=False, fontsize=8)
    figure.supxlabel("step (light: each step, dark: running mean)", fontsize=8, color=MUTED)
    said = (message for message, *_ in panels)
    return Picture(name="over-steps", alt="; ".join(said), figure=figure)


def slug(text: str) -> str:
    """The text as part of a file name, without characters that need quoting."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


# --- parts -------------------------------------------------------------------------------


def _shown_parts(stack: Stack) -> dict[str, float]:
    """The parts of a bar: the small ones, and those without a colour, are among the others."""
    shown: dict[str, float] = {}
    for name, seconds in stack.parts.items():
        own = name in PARTS and seconds >= SMALL_PART * stack.step_s
        shown[name if own else OTHER] = shown.get(name if own else OTHER, 0.0) + max(0.0, seconds)
    return {name: seconds for name, seconds in shown.items() if seconds}


def _name_rows(axes: Axes, names: Sequence[str], asked: Sequence[bool]) -> None:
    """The names of rows, in colour those that are asked about."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.yaxis.set_major_locator(FixedLocator(range(len(names))))
    for label, is_asked in zip(axes.set_yticklabels(names, fontsize=8), asked, strict=True):
        label.set_color(VERMILLION if is_asked else INK)


def _ends(e: Interval) -> tuple[float, float]:
    """The interval, or the range of two processes."""
    if e.low and e.high and units.informs("step_s", e):
        return e.low, e.high
    return e.ends or (e.value, e.value)


def _guides(axes: Axes, fit: ScalingFit) -> None:
    """Slopes 1 and 2 from the first point of a curve, as far as the axes reach."""
    start = next(p for p in fit.points if p.step_s or p.lower_bound_s)
    y, (_, right), limits = _time(start), axes.get_xlim(), axes.get_ylim()
    for slope in (1, 2):
        reach = min(right / start.x, (limits[1] / y) ** (1 / slope))
        xs, ys = ((of, of * reach**n) for of, n in ((start.x, 1), (y, slope)))
        axes.plot(xs, ys, color="#AAAAAA", lw=1, ls=(0, (2, 3)), zorder=0)
        at = start.x * reach**0.78, y * reach ** (0.78 * slope)
        axes.text(*at, f"  slope {slope}", ha="left", va="top", **SMALL)
    axes.set_ylim(limits)


def _legend(figure: Figure, of: Sequence[Line2D | Patch], texts: Sequence[str], most: int) -> None:
    """Below the panels, in so many columns, or fewer where the texts are long."""
    columns = max(1, min(most, int(WIDTH_IN / (LETTER_IN * max(map(len, texts)) + HANDLE_IN))))
    figure.legend(of, texts, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _picture(name: str, figure: Figure, message: str) -> Picture:
    """The finished figure; its message is title and alternative text."""
    text = textwrap.fill(message.replace(" %", "\xa0%"), LONG_TITLE, break_on_hyphens=False)
    figure.suptitle(text, x=0.008, ha="left", fontsize=10, fontweight="bold", color=INK)
    return Picture(name=name, alt=message, figure=figure)


def _folded(names: Iterable[str]) -> list[str]:
    """Names of rows in short lines, so that more than half of the figure is left for numbers."""
    return [textwrap.fill(name, LONG_ROW, break_on_hyphens=False) for name in names]


def _canvas(height_in: float, panels: int = 1, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    every = [*figure.subplots(1, panels, squeeze=False, sharey=sharey)[0]]
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#BBBBBB")
        axes.tick_params(colors=INK, labelsize=8.5, length=3, color="#BBBBBB")
    return figure, every


def _log_ticks(axis: Axis, limits: tuple[float, float]) -> None:
    wide = limits[1] / limits[0]
    few = (1.0,) if wide > 50 else (1.0, 2.0, 5.0) if wide > 5 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=few))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def _curve(axes: Axes, fit: ScalingFit, colour: str, marker: str) -> None:
    """Draw one group: its times, and its timeouts as arrows."""
    timed = [(p.x, p.step_s) for p in fit.points if p.step_s]
    for x, e in timed:
        axes.plot([x, x], _ends(e), color=colour, lw=2, alpha=0.4)
    xs, ys = [x for x, _ in timed], [e.value for _, e in timed]
    axes.plot(xs, ys, marker, color=colour, ms=5, ls="-", lw=1.2)
    for p in (p for p in fit.points if not p.step_s and p.lower_bound_s):
        arrow = {"arrowstyle": "<-", "color": colour, "lw": 1.2}
        axes.plot(p.x, _time(p), marker, color=colour, ms=5, mfc="white")
        axes.annotate("", (p.x, _time(p)), (0, 20), textcoords="offset points", arrowprops=arrow)


def _time(point: ScalingPoint) -> float:
    """The time of a point or its bound; a drawn point has one of them."""
    return point.step_s.value if point.step_s else point.lower_bound_s or math.nan
