"""The figures of a report, made of records; None if there is nothing to draw.

Matplotlib is used through its objects (Figure, Axes): no pyplot, global state or display.
"""

import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from harness import units
from harness.analysis.overhead import course, speeds_of
from harness.analysis.recorded import LAG_S, readings
from harness.analysis.roofline import OTHER, OUTSIDE, REST, Stack
from harness.analysis.scaling import ScalingFit, ScalingPoint
from harness.records import (
    Measurement,
)
from harness.report.markdown import clipped
from harness.report.tables import growth

# Okabe & Ito 2008, "Color universal design": distinct under the common colour deficiencies.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
VERMILLION, SKY, BLACK = "#D55E00", "#56B4E9", "#000000"
COLOURS = (BLUE, VERMILLION, PURPLE, ORANGE, SKY, BLACK)  # green is kept for `go`
MARKERS = "os^Dv<>"
INK, MUTED, FAINT = "#222222", "#6B6B6B", "#E4E4E4"

DPI = 160
WIDTH_IN, HEIGHT_IN = 1296 / DPI, 656 / DPI
"""No figure is larger than a screen."""
LETTER_IN, HANDLE_IN = 0.062, 0.55
"""Width of a letter in a legend, and of the line or mark in front of a text, in inches."""
LONG_TITLE = 92
MIN_CURVE = 4
"""Fewest steps that are drawn as a curve."""
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
    """Step time along an axis, both logarithmic, one line per group; None with more lines than
    colours.

    Args:
        fits: Of one workload along one axis.
        labels: Group -> its short name in the legend.
        axis: As people read it.
    """
    drawn = [f for f in fits if any(p.step_s or p.lower_bound_s for p in f.points)]
    if not any(f.exponent for f in drawn) or len(drawn) > len(COLOURS):
        return None
    figure, axes = _canvas(HEIGHT_IN)
    axes.set_xscale("log")
    axes.set_yscale("log")
    handles = []
    for i, f in enumerate(drawn):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        _curve(axes, f, colour, marker)
        handles.append(Line2D([], [], color=colour, marker=marker, ms=5, lw=1.2))
    xs = sorted({p.x for f in drawn for p in f.points})
    margin = (xs[-1] / xs[0]) ** 0.05
    axes.set_xlim(xs[0] / margin, xs[-1] * margin)
    axes.xaxis.set_minor_locator(NullLocator())
    _lengths(axes, xs)
    bottom, top = axes.get_ylim()
    if any(f.censored for f in drawn):
        axes.set_ylim(bottom, top * (top / bottom) ** 0.1)  # room for the arrows
    _log_ticks(axes.yaxis, axes.get_ylim())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: units.plain("step_s", y)))
    late = "   (arrow: timed out, at least this long)" if any(f.censored for f in drawn) else ""
    axes.set_xlabel(f"{axis}; in parentheses: exponent of each part{late}", color=MUTED)
    axes.set_ylabel("step time", color=MUTED)
    names = _folded(f"{labels[f.group]}{_exponents(f)}" for f in drawn)
    _legend(figure, handles, names, 2)
    first = next(f for f in drawn if f.segments)
    said = f"exponent of {axis}: {growth(first)}"
    name = f"scaling-{slug(first.workload)}-{slug(first.axis)}"
    return _picture(name, figure, labels[first.group], said)


def where(found: Sequence[Stack], names: Mapping[str, str]) -> Picture | None:
    """A bar a case: the length of a part is its share of the step, its time is printed. The
    smallest parts, for which there is no colour, are among the other kernels.

    Args:
        names: Case id -> its short name.
    """
    if not found:
        return None
    figure, axes = _canvas(min(HEIGHT_IN, 1.3 + 0.3 * len(found)))
    palette = (*COLOURS[:3], GREEN, *COLOURS[3:])
    most_of = dict[str, float]()
    for stack in found:
        for name, seconds in stack.parts.items():
            most_of[name] = max(most_of.get(name, 0.0), seconds / stack.step_s)
    own = sorted((n for n in most_of if n not in (OTHER, OUTSIDE, REST)), key=lambda n: -most_of[n])
    small = own[len(palette) :]
    greys = [n for n in (OTHER, OUTSIDE, REST) if n in most_of or (n == OTHER and small)]
    parts = [*own[: len(palette)], *greys]
    colours = {**dict(zip(own, palette, strict=False)), OTHER: "#BBBBBB", OUTSIDE: "white"}
    colours |= {REST: "#E4E4E4"}
    style: dict[str, Any] = {"edgecolor": "#888888", "lw": 0.4}
    for row, stack in enumerate(found):
        left, rest = 0.0, sum(stack.parts.get(name, 0.0) for name in small)
        times = {**stack.parts, OTHER: stack.parts.get(OTHER, 0.0) + rest}
        for name in parts:
            share = max(0.0, times.get(name, 0.0)) / stack.step_s
            dark = colours[name] in (BLUE, VERMILLION, GREEN, BLACK)
            hatch = "////" if name == OUTSIDE else None
            axes.barh(row, share, left=left, color=colours[name], hatch=hatch, height=0.7, **style)
            if share > 0.09:
                text, ink = units.duration(times[name]), "white" if dark else INK
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8} if hatch else None
                at = left + share / 2, row
                axes.text(*at, text, ha="center", va="center", fontsize=7.5, color=ink, bbox=box)
            left += share
        total = units.duration(stack.step_s) + (" (parts timed alone)" if stack.alone else "")
        axes.text(max(left, 1.0) + 0.008, row, total, va="center", fontsize=8, color=INK)
    axes.set_xlim(0, 1.2)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.xaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.0f} %"))
    axes.set_xlabel("share of the step, whose time is on the right", color=MUTED)
    axes.yaxis.set_major_locator(FixedLocator(range(len(found))))
    axes.set_yticklabels(_folded(names[stack.case.case_id] for stack in found))
    handles = [
        Patch(fc=colours[n], ec="#888888", lw=0.4, hatch="////" if n == OUTSIDE else None)
        for n in parts
    ]
    _legend(figure, handles, parts, 5)
    named = {n: t for n, t in found[0].parts.items() if n != REST}
    most, seconds = max(named.items(), key=lambda part: part[1])
    name, step = names[found[0].case.case_id], units.duration(found[0].step_s)
    part = units.percent(round(seconds / found[0].step_s, 2))
    return _picture("where", figure, f"{name}: {part} of {step} are {most}")


def over_steps(found: Sequence[tuple[str, Measurement]]) -> Picture | None:
    """Loss and tokens/s over the steps: two panels, one curve a case, of the longest runs.

    Args:
        found: Short name of a case, and the process that is drawn.
    """
    drawn = [(n, m, s) for n, m in found if (s := m.over_steps) and len(s.step) >= MIN_CURVE]
    longest = max((s.step[-1] for *_, s in drawn), default=0)
    drawn = [one for one in drawn if 2 * one[2].step[-1] > longest][: 2 * len(COLOURS)]
    if not drawn:
        return None
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN * 0.8), layout="constrained")
    panels = figure.subplots(1, 2, squeeze=False)[0]
    for axes, name in zip(panels, ("loss, nats", "tokens/s"), strict=True):
        _plain(axes)
        axes.set_title(name, fontsize=9, color=INK, loc="left")
        axes.set_xlabel("step", color=MUTED)
        axes.grid(axis="y", color=FAINT, lw=0.8)
    handles = []
    for i, (_, m, s) in enumerate(drawn):
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "ls": "--" if i >= len(COLOURS) else "-",
        }
        losses = [math.nan if v is None else v for v in s.values.get("loss", ())]
        if losses:
            panels[0].plot(s.step, losses, lw=1.1, **style)
        if speeds := [math.nan if v is None else v for v in speeds_of(m)]:
            panels[1].plot(s.step, speeds, lw=1.1, **style)
        handles.append(Line2D([], [], lw=1.5, **style))
    panels[1].set_ylim(bottom=0)
    panels[1].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    names = _folded(n for n, _, _ in drawn)
    _legend(figure, handles, names, 3)
    went = course([drawn[0][1]])
    ends = went and went.last.get("loss")
    said = f"loss {went.first['loss']:.3f} to {ends:.3f}" if went and ends else "tokens/s"
    said += f" in {drawn[0][2].step[-1]:,} steps"
    return _picture("over-steps", figure, drawn[0][0], said)


def telemetry(measurement: Measurement, label: str) -> Picture | None:
    """GPU and CPU of one process while it was sampled; None if that was too short for the GPU's
    counter."""
    seen = measurement.telemetry
    phase = next((p for p in measurement.phases if p.name == "sampling"), None)
    if seen is None or phase is None:
        return None
    panels = [(p, v) for p in _PANELS if len(v := readings(measurement, p[0], [phase.name])) > 1]
    lagging = seen.channels.keys() & LAG_S.keys()
    if not panels or lagging - {p[0] for p, _ in panels}:
        return None
    figure = Figure(figsize=(WIDTH_IN, 0.9 + 0.8 * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    said = []
    for axes, ((channel, name, size, top), found), colour in zip(
        rows, panels, COLOURS, strict=False
    ):
        _plain(axes)
        values = [math.nan if v is None else v / size for v in seen.channels[channel]]
        axes.step([t - phase.start_s for t in seen.t_s], values, where="post", color=colour, lw=1.2)
        axes.set_ylim(0, top or max(found) / size * 1.15 or 1)
        axes.set_ylabel(name.replace(", ", "\n"), color=MUTED)
        axes.grid(axis="y", color=FAINT, lw=0.8)
        what, _, unit = name.partition(", ")
        said.append(f"{what} {units.number(sum(found) / len(found) / size)} {unit}".strip())
    rows[-1].set_xlim(0, phase.end_s - phase.start_s)
    rows[-1].set_xlabel("seconds since sampling began", color=MUTED)
    who = f"Process {measurement.process}, on average"
    return _picture("utilisation", figure, label, f"{who}: {', '.join(said)}")


def slug(text: str) -> str:
    """The text as part of a file name, without characters that need quoting."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


# --- parts -------------------------------------------------------------------------------

_PANELS = (
    ("gpu_utilisation", "GPU busy, %", 0.01, 105.0),
    ("cpu_utilisation", "CPU cores", 1.0, None),
    ("gpu_sm_clock_hz", "SM clock, MHz", 1e6, None),
    ("gpu_power_w", "GPU power, W", 1.0, None),
)
"""Channel, title, unit in SI, top of the axis."""


def _legend(
    figure: Figure, handles: Sequence[Line2D | Patch], texts: Sequence[str], columns: int
) -> None:
    """Below the panels, in so many columns, or fewer where the texts are long."""
    fit = int(WIDTH_IN / (LETTER_IN * max(map(len, texts)) + HANDLE_IN))
    columns = max(1, min(columns, fit))
    figure.legend(
        handles, texts, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )


def _picture(name: str, figure: Figure, *message: str) -> Picture:
    """The finished figure; its message is title and alternative text."""
    text = "\n".join(clipped(" ".join(line.split()), LONG_TITLE) for line in message)
    figure.suptitle(text, x=0.008, ha="left", fontsize=10, fontweight="bold", color=INK)
    return Picture(name=name, alt="; ".join(message), figure=figure)


def _folded(names: Iterable[str]) -> list[str]:
    """Names of rows in short lines, so that more than half of the figure is left for numbers."""
    return [textwrap.fill(name, LONG_ROW, break_on_hyphens=False) for name in names]


def _lengths(axes: Axes, xs: Sequence[float]) -> None:
    """Ticks at these values: 64k for 65,536."""
    axes.xaxis.set_major_locator(FixedLocator(xs))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 8192 and x % 1024 == 0 else f"{x:,g}")
    )


def _canvas(height_in: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.subplots()
    _plain(axes)
    return figure, axes


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#BBBBBB")
    axes.tick_params(colors=INK, labelsize=8.5, length=3, color="#BBBBBB")


def _log_ticks(axis: Axis, limits: tuple[float, float]) -> None:
    wide = limits[1] / limits[0] > 50
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def _curve(axes: Axes, fit: ScalingFit, colour: str, marker: str) -> None:
    """Draw one group: its times, and its timeouts as arrows."""
    timed = [p for p in fit.points if p.step_s is not None]
    bounds = [p for p in fit.points if p.step_s is None and p.lower_bound_s is not None]
    for p in timed:
        e = p.step_s
        ends = e.both if e else ()
        if e and e.low is not None and e.high is not None and units.informs("step_s", e):
            ends = e.low, e.high
        if ends:
            axes.plot([p.x, p.x], ends, color=colour, lw=2, alpha=0.4)
    xs, ys = [p.x for p in timed], [_time(p) for p in timed]
    axes.plot(xs, ys, marker, color=colour, ms=5, ls="-", lw=1.2)
    for p in bounds:
        axes.plot(p.x, _time(p), marker, color=colour, ms=5, mfc="white")
        axes.annotate(
            "",
            (p.x, _time(p)),
            xytext=(0, 20),
            textcoords="offset points",
            arrowprops={"arrowstyle": "<-", "color": colour, "lw": 1.2},
        )


def _exponents(fit: ScalingFit) -> str:
    """` (flat, 0.39, 0.55)`: of each segment of a curve."""
    each = ["flat" if s.flat else units.number(s.exponent.value, 2) for s in fit.segments]
    return f" ({', '.join(each)})" if each else ""


def _time(point: ScalingPoint) -> float:
    """The time of a point or its bound; a drawn point has one of them."""
    return point.step_s.value if point.step_s else point.lower_bound_s or math.nan
