"""How often a gate names creep where there is none, and finds it where there is some.

    python -m reports.studies.creep_errors --looks 2000 --seed 1

A look is one gate or one `harness history`: the runs of some cases since a tag. The level of a run
scatters, and the next run shares part of that (an autoregressive series). The decision is that of
`harness.gate.creep`. README.md here has the tables.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator

import numpy as np

from harness.analysis.comparison import holm
from harness.analysis.statistics import Flags, Floats
from harness.gate.creep import ERROR, FEWEST, largest_step, moved
from harness.records import Thresholds

STEP = math.log(1.003)
"""A loss of one run over the one before it, 0.3 %."""
CORRELATIONS = (0.0, 0.5, 0.7)


def histories(
    sd: float, rho: float, step: float, *, shape: tuple[int, int, int], seed: int
) -> Floats:
    """Logarithms of step times, [looks, cases, runs]; the first case loses one step in every run
    up to the twentieth after the tag."""
    noise = np.random.default_rng(seed).normal(0, sd, size=shape)
    for i in range(1, shape[-1]):
        noise[..., i] = rho * noise[..., i - 1] + math.sqrt(1 - rho**2) * noise[..., i]
    noise[:, 0] += step * np.minimum(np.arange(shape[-1]), 20)
    return noise


def named(logs: Floats, *, least: float = Thresholds().practical) -> Flags:
    """The cases that each look names, [looks, cases]; `least` as a fraction, the smallest loss
    without the largest step."""
    centre, _, p_values = moved(logs, ["one card"] * logs.shape[-1])
    names = [f"case {i}" for i in range(logs.shape[1])]
    adjusted = [holm(dict(zip(names, look, strict=True))) for look in p_values]
    joint = np.array([[look[name] for name in names] for look in adjusted])
    return np.asarray((joint <= ERROR) & (centre - largest_step(logs) > math.log1p(least)))


def _rates(looks: int, seed: int) -> Iterator[str]:
    yield "| runs | cases | " + " | ".join(f"correlation {rho:g}" for rho in CORRELATIONS) + " |"
    yield "|--:|--:|" + "--:|" * len(CORRELATIONS)
    for runs in (FEWEST, 14, 21, 40):
        for cases in (1, 12):
            shape = (looks, cases, runs)
            of = [histories(0.008, rho, 0, shape=shape, seed=seed) for rho in CORRELATIONS]
            rates = [100 * named(logs, least=-0.9).any(axis=1).mean() for logs in of]
            yield f"| {runs} | {cases} | " + " | ".join(f"{rate:.1f}" for rate in rates) + " |"


def _found(looks: int, seed: int) -> Iterator[str]:
    yield "| scatter of a run, % | runs | " + " | ".join(f"{rho:g}" for rho in CORRELATIONS) + " |"
    yield "|--:|--:|" + "--:|" * len(CORRELATIONS)
    for sd in (0.005, 0.008, 0.015):
        for runs in (21, 40):
            shape = (looks, 12, runs)
            of = [histories(sd, rho, STEP, shape=shape, seed=seed) for rho in CORRELATIONS]
            rates = [100 * named(logs)[:, 0].mean() for logs in of]
            yield f"| {100 * sd:g} | {runs} | " + " | ".join(f"{r:.0f}" for r in rates) + " |"


def _steps(looks: int, seed: int) -> Iterator[str]:
    """One case loses 5 % in one step, whose place changes from look to look."""
    yield "| scatter of a run, % | runs | named |\n|--:|--:|--:|"
    for sd, runs in itertools.product((0.0005, 0.005, 0.008), (13, 40)):
        logs = histories(sd, 0.5, 0, shape=(looks, 1, runs), seed=seed)
        places = 1 + np.arange(looks)[:, None, None] % (runs - 1)
        rate = 100 * named(logs + math.log(1.05) * (np.arange(runs) >= places)).mean()
        yield f"| {100 * sd:g} | {runs} | {rate:.1f} |"


def _ever(looks: int, seed: int) -> Iterator[str]:
    """One gate after each run from the eighth to the fortieth, over one history."""
    for rho in CORRELATIONS:
        logs = histories(0.008, rho, 0, shape=(looks, 12, 40), seed=seed)
        each = [named(logs[..., :runs]).any(axis=1) for runs in range(FEWEST, 41)]
        yield f"correlation {rho:g}: {100 * np.any(each, axis=0).mean():.1f} %"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--looks", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    for title, lines in (
        ("Clean histories of which a look names any case, whatever its size, %", _rates),
        ("Found: 20 steps of 0.3 % in one of 12 cases, %", _found),
        ("Named: 5 % in one step, correlation 0.5, %", _steps),
        ("Clean histories of which any of 33 looks names a case", _ever),
    ):
        sys.stdout.write("\n".join(("", title, "", *lines(asked.looks, asked.seed), "")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
