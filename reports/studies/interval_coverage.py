"""How often the intervals that reports print contain the typical process, and how wide they are.

Simulated runs of one clock: each case has its own time, and its processes scatter as a noise model
says. The intervals are those of `harness.analysis.statistics`: the moderated one, and the plain t.
A modelled typical process is the median of fresh processes.

    python -m reports.studies.interval_coverage --runs 2000 --seed 1

With --looks: how often a run of 30 rules that are all met ends NO-GO, or open, if each case of an
open rule gets more processes, and the run is judged after each round.

    python -m reports.studies.interval_coverage --looks --runs 1000 --seed 1
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness import units
from harness.analysis.statistics import Flags, Floats, geometric, usual_scatter, variance_prior
from harness.analysis.summary import APART
from harness.analysis.verdict import judge_case
from harness.records import Case, CaseSummary, Decision, Outcome, Rule
from harness.runner.undecided import doubted
from reports.studies.noise import NOISY, TYPICAL, by_case

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


LOOKED: Mapping[str, Draw] = {
    "typical": lambda rng, shape: TYPICAL.sequence(rng, *shape),
    "noisy": lambda rng, shape: NOISY.sequence(rng, *shape),
    "normal 20 %": _normal(0.2),
    **{name: NOISES[name] for name in [*NOISES][2:]},
}
RULES = 30
CASE = Case(case_id="a", workload="a", factory="a:a", provider="a", axes={})


@dataclass(frozen=True, slots=True)
class Looks:
    """Of all simulated runs."""

    wrong: float
    """Share of runs in which some rule is NO-GO; every rule is met by the typical process."""
    open: float
    """Share of runs in which some rule ends undecided, and none is NO-GO."""
    processes: float
    """Per case, mean."""


def looks(
    noise: str, margin: float, *, first: int = 2, most: int = 6, runs: int, seed: int
) -> Looks:
    """Simulate runs of rules that are met by a margin; open ones get processes up to `most`."""
    rng = np.random.default_rng([seed, most, int(1e4 * margin), *noise.encode()])
    typical = float(np.median(LOOKED[noise](rng, (100_001, 1))))
    rule = Rule(name="r", metric="step_s", go=1 + margin)
    wrong, undecided, taken = 0, 0, 0
    for _ in range(runs):
        drawn = np.exp(LOOKED[noise](rng, (RULES, most)) - typical)
        count = np.full(RULES, first)
        for look in range(first, most + 1):
            values = [row[:n].tolist() for row, n in zip(drawn, count, strict=True)]
            decisions, left = _judged(rule, values)
            count += left & (look < most)
            if not left.any():
                break
        wrong += Decision.NO_GO in decisions
        undecided += Decision.INCONCLUSIVE in decisions and Decision.NO_GO not in decisions
        taken += int(count.sum())
    return Looks(wrong / runs, undecided / runs, taken / runs / RULES)


def _judged(rule: Rule, cases: Sequence[Sequence[float]]) -> tuple[list[Decision], Flags]:
    """The decision of each case, and whether it gets one more process."""
    apart = [max(values) > APART * min(values) for values in cases]
    prior = variance_prior([values for values, far in zip(cases, apart, strict=True) if not far])
    made = [geometric(values, samples=len(values), prior=prior) for values in cases]
    usual = usual_scatter(made)
    found = []
    for e, far in zip(made, apart, strict=True):
        known = replace(e, usual=usual)
        summary = CaseSummary(case=CASE, outcome=Outcome.OK, metrics={"step_s": known})
        if far:
            known = replace(known, low=None, high=None)
            summary = replace(summary, metrics={}, apart={"step_s": known})
        found.append(judge_case(rule, summary))
    decisions = [f.decision for f in found]
    doubts = [doubted(f, rule) for f in found]
    left = [d is Decision.INCONCLUSIVE for d in decisions]
    return decisions, np.logical_or(left, doubts)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--looks", action="store_true")
    args = parser.parse_args()
    if args.looks:
        say(
            "| noise | margin | 2 wrong | open | 6 wrong | open | 2 to 6 wrong | open | processes |"
        )
        say("|:--|--:|--:|--:|--:|--:|--:|--:|--:|")
        for noise in LOOKED:
            for margin in (0.02, 0.1, 0.5):
                two, six, looked = (
                    looks(noise, margin, first=first, most=most, runs=args.runs, seed=args.seed)
                    for first, most in ((2, 2), (6, 6), (2, 6))
                )
                rates = [s for one in (two, six, looked) for s in (one.wrong, one.open)]
                cells = " | ".join([*map(units.percent, rates), f"{looked.processes:.1f}"])
                say(f"| {noise} | {units.percent(margin)} | {cells} |")
        return
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
