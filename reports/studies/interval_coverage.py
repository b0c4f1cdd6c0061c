"""How often the intervals that reports print contain the typical process, and how wide they are.

Simulated runs of one clock: each case has its own time, and its processes scatter as a noise model
says. The intervals are those of `harness.analysis.statistics`: the moderated one, and the plain t.
A modelled typical process is the median of fresh processes.

    python -m reports.studies.interval_coverage --runs 2000 --seed 1
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from harness import units
from harness.analysis.statistics import Floats, geometric, variance_prior
from reports.studies.noise import by_case

Draw = Callable[[np.random.Generator, tuple[int, int]], Floats]
"""Logarithms of the processes' step times over the typical one, [cases, processes]."""


def _normal(cv: float) -> Draw:
    return lambda rng, shape: rng.normal(0.0, cv, shape)


def _bimodal(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    slow = rng.random(shape) < 0.15
    return np.asarray(0.003 * rng.normal(size=shape) + math.log(1.04) * slow)


def _disturbed(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    hit = rng.random(shape) < 0.1
    return np.asarray(0.008 * rng.normal(size=shape) + np.log1p(rng.exponential(0.3, shape)) * hit)


def _heavy(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return np.asarray(0.0061 * rng.standard_t(2, shape))


NOISES: Mapping[str, Draw] = {
    "normal 0.8 %": _normal(0.008),
    "normal 5 %": _normal(0.05),
    "CV 0.2 to 5 % by case": by_case,
    "bimodal, 15 % are 4 % slower": _bimodal,
    "10 % disturbed, mean +30 %": _disturbed,
    "t, 2 degrees of freedom": _heavy,
}


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of all cases of all simulated runs."""

    noise: str
    cases: int
    processes: int
    plain: float
    """Share of plain t intervals that contain the typical process."""
    plain_width: float
    """Median of high / low - 1."""
    moderated: float
    moderated_width: float
    widest: float
    """The moderated width that one case in twenty exceeds."""


def coverage(noise: str, cases: int, processes: int, *, runs: int, seed: int) -> Coverage:
    """Simulate runs of so many cases and processes."""
    rng = np.random.default_rng([seed, cases, processes, *noise.encode()])
    typical = float(np.median(NOISES[noise](rng, (1, 100_001))))
    covered: dict[bool, list[bool]] = {False: [], True: []}
    width: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(runs):
        values = np.exp(NOISES[noise](rng, (cases, processes)) - typical).tolist()
        prior = variance_prior(values)
        for own in values:
            for moderated in (False, True):
                e = geometric(own, samples=processes, prior=prior if moderated else None)
                assert e.low is not None
                assert e.high is not None
                covered[moderated].append(e.low <= 1 <= e.high)
                width[moderated].append(min(e.high / e.low, 1e9) - 1)
    return Coverage(
        noise=noise,
        cases=cases,
        processes=processes,
        plain=float(np.mean(covered[False])),
        plain_width=float(np.median(width[False])),
        moderated=float(np.mean(covered[True])),
        moderated_width=float(np.median(width[True])),
        widest=float(np.quantile(width[True], 0.95)),
    )


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    say("| noise | cases | n | t covers | width | moderated covers | width | one in 20 wider |")
    say("|:--|--:|--:|--:|--:|--:|--:|--:|")
    for noise in NOISES:
        for cases, processes in ((6, 2), (12, 2), (60, 2), (12, 3), (12, 5)):
            c = coverage(noise, cases, processes, runs=args.runs * 12 // cases, seed=args.seed)
            shares = (c.plain, c.plain_width, c.moderated, c.moderated_width, c.widest)
            cells = " | ".join(map(units.percent, shares))
            say(f"| {c.noise} | {c.cases} | {c.processes} | {cells} |")


if __name__ == "__main__":
    main()
