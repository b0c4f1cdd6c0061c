"""The learning curves of two models, drawn from the records of their training.

    python -m reports.studies.learning_curve

The unigram entropy is that of the files held out, as both curves are.
"""

import csv
from pathlib import Path

from matplotlib.figure import Figure

FIGURES = Path(__file__).parents[1] / "figures"
START = "2026-11-21-learning-curve"
UNIGRAM = 4.69
RUNS = (("NSA", "nsa", "#0072B2", "-"), ("dense", "dense", "#D55E00", "--"))
"""Name, end of the record's name, colour and dash."""


def curve(name: str) -> tuple[list[int], list[float]]:
    """Steps, and bits per byte on files held out."""
    with (FIGURES / f"{START}-{name}.csv").open(newline="") as record:
        rows = [*csv.DictReader(record)]
    return [int(r["step"]) for r in rows], [float(r["held_out_bits_per_byte"]) for r in rows]


def draw() -> Figure:
    """Both curves; the title has the last point of each."""
    figure = Figure(figsize=(8.1, 4.1), layout="constrained")
    axes = figure.subplots()
    ends = []
    for label, name, colour, dash in RUNS:
        steps, bits = curve(name)
        axes.plot(steps, bits, dash, color=colour, lw=1.8, label=f"{label}, held out")
        ends.append(f"{label} {bits[-1]:.2f}")
    axes.axhline(UNIGRAM, color="#222222", lw=1, ls=":")
    axes.annotate(
        f"unigram entropy {UNIGRAM}",
        (steps[-1], UNIGRAM),
        (0, 4),
        ha="right",
        textcoords="offset points",
    )
    said = f"Both models learn: {' and '.join(ends)} bits per byte on unseen files"
    axes.set_title(said, loc="left", fontsize=11, fontweight="bold")
    axes.set(xlabel="optimiser step", ylabel="bits per byte", ylim=(0, 8.5))
    axes.grid(axis="y", color="#E4E4E4")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    draw().savefig(FIGURES / f"{START}.png", dpi=160, metadata={"Software": None})
