"""Creep: losses since the last tag, each too small for a gate, that add up.

The newest quarter of a case's runs is compared with the first quarter after the tag. Runs of
neighbouring days are alike, so the error of the difference is that of an autoregressive series. Its
variance and correlation come from what is off a line with a bend every eight runs, which follows
the loss itself; the correlation is at least 0.5, because a few dozen runs cannot show less. Cards
that only one of the two quarters has add the variation between cards. reports/studies/README.md has
the error rates. One large step is not creep: a gate finds it, and here it widens the interval.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from scipy.special import stdtr, stdtrit

from harness import units
from harness.analysis.comparison import holm
from harness.analysis.statistics import Floats
from harness.gate.compare import CARD_CV
from harness.git.repository import run_git, try_git
from harness.records import Outcome, Suite, Thresholds
from harness.store import index
from harness.store.index import HistoryPoint, Index, RunFilter

FEWEST = 8
"""Runs of a case: two in each quarter."""
ERROR = 0.01
"""Probability that a look at a clean history names any case, and that an interval is wrong."""
CORRELATIONS = np.linspace(0.5, 0.9, 41)
"""Between one run and the next, as far as it is estimated."""
NAMED = 3
"""Cases that the line of a gate names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The last tag before a commit."""

    tag: str
    order: Mapping[str, int]
    """Commit -> its place: the tag's is 0, then those after it up to the commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Creep:
    """How far one case moved since the tag. Ratios are now over then: above one is slower."""

    case_id: str
    tag: str
    runs: int
    ratio: float
    low: float
    high: float
    p_value: float
    """One-sided, for slower; adjusted by Holm over the cases of one look."""
    step: float
    """The largest ratio of a run over the one before it."""
    step_commit: str
    """Where that is."""

    @property
    def found(self) -> bool:
        return self.p_value <= ERROR and self.ratio > 1 + Thresholds().practical

    @property
    def sentence(self) -> str:
        """`+3.1 % [+1.9 … +4.3] in step time; no single step exceeds +0.9 %`."""
        text = f"{units.change(self.ratio, self.low, self.high)} in step time"
        text += "" if self.found else ", which does not show creep"
        step = units.change(self.step)
        if 2 * math.log(self.step) < math.log(self.ratio):
            return f"{text}; no single step exceeds {step}"
        return f"{text}; the largest step is {step} at {self.step_commit[:10]}"


def release(folder: Path, commit: str) -> Release | None:
    """The last tag before a commit of the repository around a folder; None if there is none. A tag
    of the commit itself ends the stretch and does not start it."""
    described = try_git(folder, "describe", "--tags", "--abbrev=0", f"{commit}^")
    if described is None:
        return None
    tag = described.strip()
    start = run_git(folder, "rev-parse", f"refs/tags/{tag}^{{commit}}").strip()
    after = run_git(folder, "rev-list", "--reverse", "--topo-order", f"{start}..{commit}").split()
    return Release(tag=tag, order={c: i for i, c in enumerate([start, *after])})


def of_case(case_id: str, points: Sequence[HistoryPoint], since: Release) -> Creep | int:
    """How far a case moved, or how many runs there are if they are too few.

    Only runs that measured the same case, of committed code, on the GPU model, driver and power
    limit of the newest are compared, in the order of their commits.
    """
    usable = [
        p
        for p in points
        if p.outcome == Outcome.OK and not p.dirty and p.commit in since.order
        if "step_s" in p.metrics
    ]
    usable.sort(key=lambda p: (since.order[p.commit], p.started_at))
    alike = [p for p in usable if _conditions(p) == _conditions(usable[-1])]
    if len(alike) < FEWEST:
        return len(alike)
    logs = np.log([p.metrics["step_s"].value for p in alike])
    centre, half, p_value = moved(logs, [p.device_id or p.host for p in alike])
    at = int(np.argmax(np.diff(logs))) + 1
    return Creep(
        case_id=case_id,
        tag=since.tag,
        runs=len(alike),
        ratio=math.exp(centre),
        low=math.exp(centre - half),
        high=math.exp(centre + half),
        p_value=float(p_value),
        step=math.exp(logs[at] - logs[at - 1]),
        step_commit=alike[at].commit,
    )


def _conditions(p: HistoryPoint) -> tuple[str, ...]:
    return (p.device, p.node, p.digest)


def moved(logs: Floats, cards: Sequence[str]) -> tuple[Floats, Floats, Floats]:
    """The newest quarter of a series less the first one.

    Args:
        logs: Logarithms of step times in order, [..., runs].
        cards: The card of each run.

    Returns:
        The difference, half its interval, and the one-sided p-value for a positive one: [...].
    """
    weights, rest, expected, share, freedom = _model(logs.shape[-1])
    off = logs @ rest
    squares = np.maximum((off**2).sum(axis=-1), 1e-30)
    seen = (off[..., 1:] * off[..., :-1]).sum(axis=-1) / squares
    found = np.searchsorted(expected, seen).clip(0, len(expected) - 1)
    variance, names = squares * share[found], np.array(cards)
    known = CARD_CV**2 * sum(weights[names == c].sum() ** 2 for c in np.unique(names))
    whole = freedom[found] * ((variance + known) / variance) ** 2  # Satterthwaite
    error, centre = np.sqrt(variance + known), logs @ weights
    return centre, stdtrit(whole, 1 - ERROR / 2) * error, stdtr(whole, -centre / error)


@lru_cache(maxsize=64)
def _model(runs: int) -> tuple[Floats, ...]:
    """What `moved` needs to know of so many runs.

    Returns:
        The weight of each run in the difference; the matrix that leaves what is off a line with a
        bend every eight runs; and for each of CORRELATIONS the correlation of neighbours in that
        rest, the variance of the difference over the rest's sum of squares, and its degrees of
        freedom.
    """
    quarter, places = runs // 4, np.arange(runs)
    weights = ((places >= runs - quarter).astype(float) - (places < quarter)) / quarter
    bends = np.linspace(0, runs - 1, runs // 8 + 2)[:-1]
    line = np.stack([np.ones(runs), *(np.maximum(0, places - bend) for bend in bends)], axis=1)
    rest = np.eye(runs) - line @ np.linalg.pinv(line)
    apart = np.abs(places[:, None] - places)
    of = []
    for rho in CORRELATIONS:
        spread = rest @ rho**apart @ rest
        whole = np.trace(spread)
        seen = spread[apart == 1].sum() / 2 / whole
        of.append((seen, weights @ rho**apart @ weights / whole, whole**2 / (spread**2).sum()))
    return weights, rest, *np.array(of).T


def since_tag(case_id: str, points: Sequence[HistoryPoint], folder: Path) -> str:
    """How far one case moved since the last tag of the repository around a folder, or what is
    missing to tell."""
    since = release(folder, "HEAD")
    if since is None:
        return "not known: git has no tag before HEAD; set one: git tag v1.0 COMMIT"
    found = of_case(case_id, points, since)
    if isinstance(found, int):
        alike = "committed code with the GPU model, driver, power limit and axes of the newest"
        return f"not known: {found} of {FEWEST} needed runs since {since.tag}, of {alike}"
    return f"since {since.tag} ({found.runs} runs): {found.sentence}"


def line(
    store: Path, folder: Path, commit: str, suites: Mapping[str, Suite], say: index.Say
) -> Iterator[str]:
    """What a gate says of the cases of its suites: one line, or none."""
    since = release(folder, commit)
    if since is None:
        return

    def question(known: Index) -> list[Creep | int]:
        return [
            of_case(
                case.case_id,
                known.history(case.case_id, RunFilter(suite=suite.name), metric="step_s"),
                since,
            )
            for suite in suites.values()
            for case in suite.cases
        ]

    found = {c.case_id: c for c in index.ask(store, question, say) if isinstance(c, Creep)}
    adjusted = holm({i: c.p_value for i, c in found.items()})
    slower = [c for i, p in adjusted.items() if (c := replace(found[i], p_value=p)).found]
    slower.sort(key=lambda c: -c.ratio)
    if slower:
        said = [f"{c.case_id} ({c.runs} runs) {c.sentence}" for c in slower[:NAMED]]
        said += [f"{len(slower) - NAMED} more"] if len(slower) > NAMED else []
        yield f"since {since.tag}: {'; '.join(said)}"
