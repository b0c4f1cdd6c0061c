"""How often a bisection names the right commit, and what that costs: simulated whole.

    python -m reports.studies.bisect_errors --histories 500 --seed 1

Every simulated history has one commit that plants a slowdown, at a place drawn anew. The very
search that carries a real bisection out asks for its processes, which a model of a node answers:
anchors, probes, confirmation, all counted. README.md here has the table.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from harness import units
from harness.analysis.statistics import Floats
from harness.bisect.posterior import ProcessReading
from harness.bisect.search import CommitsConclusion, ExactSearch, NextBlock, NoisySearch
from reports.studies.gate_errors import clopper_pearson, percent, unshown
from reports.studies.noise import NOISY, QUIET, TYPICAL, ModelledNoise

COMMITS = 64
EFFECTS = (0.03, 0.05, 0.10)
WANTED = {0.03: 0.90, 0.05: 0.95, 0.10: 0.95}
"""Share of histories whose culprit must be named right on a typical node."""
LONGEST = 4000
"""Processes after which a search counts as endless; none has come near."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisected:
    """What became of one simulated bisection."""

    right: bool
    """The planted commit was named and confirmed."""
    wrong: bool
    """Another was."""
    processes: int
    commits: int
    """Commits that were measured: each is built once."""


def carried_out(
    search: ExactSearch | NoisySearch,
    value: Callable[[int], float],
    logs: Sequence[float] | Floats,
    cannot: Callable[[int], bool] = lambda position: False,
) -> tuple[CommitsConclusion, list[NextBlock]]:
    """The conclusion of a fresh search, and the blocks that it asked for. `value` is that of a
    position without noise, `logs` the noise of each process; `cannot`: be measured."""
    asked, taken = list[NextBlock](), 0
    while isinstance(block := search.next(), NextBlock):
        if broken := set(filter(cannot, block.positions)):
            search.skipped |= broken
            continue
        if taken + len(block.positions) > len(logs):
            raise RuntimeError(f"no end after {taken} processes")
        noise = logs[taken : taken + len(block.positions)]
        read = [
            ProcessReading(position=p, value=value(p) * math.exp(x))
            for p, x in zip(block.positions, noise, strict=True)
        ]
        search.add(block.stage, read)
        asked.append(block)
        taken += len(read)
    return block, asked


def bisect(
    search: ExactSearch | NoisySearch,
    culprit: int,
    factor: float,
    noise: ModelledNoise,
    rng: np.random.Generator,
) -> Bisected:
    """Carry one bisection out: the first bad commit takes `factor` times as long as the one
    before."""
    logs = noise.sequence(rng, 1, LONGEST)[0]
    if isinstance(search, ExactSearch):
        found, asked = carried_out(search, lambda p: float(p >= culprit), np.zeros(LONGEST))
    else:
        found, asked = carried_out(search, lambda p: factor if p >= culprit else 1.0, logs)
    named = found.culprits if found.found else ()
    return _bisected(asked, right=named == (culprit,), wrong=bool(named) and named != (culprit,))


def _bisected(asked: Sequence[NextBlock], *, right: bool, wrong: bool) -> Bisected:
    places = [p for block in asked for p in block.positions]
    return Bisected(right=right, wrong=wrong, processes=len(places), commits=len({*places}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisections:
    """One line of the table."""

    noise: str
    effect: str
    bisections: tuple[Bisected, ...]
    wanted: float | None

    @property
    def right(self) -> int:
        return sum(t.right for t in self.bisections)

    @property
    def wrong(self) -> int:
        return sum(t.wrong for t in self.bisections)

    @property
    def met(self) -> bool | None:
        """Whether the whole interval of the share named right is above the target."""
        if self.wanted is None:
            return None
        return clopper_pearson(self.right, len(self.bisections))[0] >= self.wanted

    def __str__(self) -> str:
        processes = np.array([t.processes for t in self.bisections])
        commits = np.mean([t.commits for t in self.bisections])
        cells = [
            self.noise,
            self.effect,
            percent(self.right, len(self.bisections), 1),
            percent(self.wrong, len(self.bisections), 1),
            f"{np.median(processes):.0f} ({np.quantile(processes, 0.9):.0f})",
            f"{commits:.1f}",
        ]
        if self.met is False:
            cells[2] = unshown(cells[2], at_least=self.wanted)
        return f"| {' | '.join(cells)} |"


def _history(
    commits: int, effect: float, noise: ModelledNoise, rng: np.random.Generator
) -> Bisected:
    """One whose planted commit lies at a place that is drawn."""
    search, culprit = NoisySearch(commits, min(effect, 0.03)), int(rng.integers(1, commits + 1))
    return bisect(search, culprit, 1 + effect, noise, rng)


def study(histories: int, seed: int, commits: int = COMMITS) -> tuple[Bisections, ...]:
    """All rows: three nodes and three slowdowns, and a counter."""
    rows = []
    for n, noise in enumerate((QUIET, TYPICAL, NOISY)):
        for e, effect in enumerate(EFFECTS):
            rng = np.random.default_rng([seed, n, e])
            bisections = tuple(_history(commits, effect, noise, rng) for _ in range(histories))
            wanted = WANTED[effect] if noise is not NOISY else None
            size = f"+{units.percent(effect)}"
            rows.append(
                Bisections(noise=noise.name, effect=size, bisections=bisections, wanted=wanted)
            )
    rng = np.random.default_rng([seed, 9])
    bisections = tuple(
        bisect(ExactSearch(commits), k, 1.0, TYPICAL, rng) for k in range(1, commits + 1)
    )
    rows.append(Bisections(noise="any", effect="a counter", bisections=bisections, wanted=None))
    return tuple(rows)


HEAD = (
    "| noise | step | named right | named wrong | processes (nine in ten) | commits built |\n"
    "|:--|:--|--:|--:|--:|--:|"
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Simulate bisections and state how often they err."
    )
    parser.add_argument("--histories", type=int, default=400, help="simulated histories a row")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    rows = study(options.histories, options.seed)
    missed = sum(row.met is False for row in rows)
    sys.stdout.write("\n".join([HEAD, *map(str, rows)]) + "\n\n")
    sys.stdout.write(
        f"{COMMITS} commits, {options.histories} histories a row, seed {options.seed}; "
        f"{missed} targets not shown to be met.\n"
    )
    sys.stderr.write(f"{time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
