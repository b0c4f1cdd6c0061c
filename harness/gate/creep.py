"""Creep: losses since the last tag, each too small for a gate, that add up.

The newest quarter of a case's runs, one a commit, is compared with the first quarter after the
tag. Runs of neighbouring days are alike, so the error of the difference is that of an
autoregressive series. Its variance and correlation come from what is off a line with a bend every
eight runs, which follows the loss itself; the correlation is at least 0.5, because a few dozen runs
cannot show less. Cards that only one of the two quarters has add the variation between cards. One
large step is not creep, because a gate finds it: what is lost without it decides. The error rates
are in reports/studies/README.md.
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
from harness.gate.calibration import CARD_CV
from harness.git.repository import run_git, try_git
from harness.records import Outcome, Suite, Thresholds
from harness.store import index
from harness.store.index import HistoryPoint, Index, RunFilter

FEWEST = 8
"""Commits with a run of a case: two in each quarter."""
MOST = 200
"""Runs of a case that a look compares; of more it takes this many, evenly spread."""
ERROR = 0.01
"""Probability that a look at a clean history names any case, and that an interval is wrong."""
CORRELATIONS = np.linspace(0.5, 0.9, 41)
"""Between one run and the next, as far as it is estimated."""
NO_TAG = "git has no tag before HEAD: git fetch --unshallow --tags, or set one: git tag v1.0 COMMIT"
NAMED = 3
"""Cases that the line of a gate names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Creep:
    """How far one case moved since a tag. Ratios are now over then: above one is slower."""

    case_id: str
    runs: int
    ratio: float
    low: float
    high: float
    p_value: float
    """One-sided, for slower; adjusted by Holm over the cases of one look."""
    rest: float
    """The ratio without its largest step."""

    @property
    def found(self) -> bool:
        return self.p_value <= ERROR and self.rest > 1 + Thresholds().practical

    @property
    def sentence(self) -> str:
        """`+3.1 % [+1.9 … +4.3] in step time; without its largest step, +2.2 %`."""
        moved = f"{units.change(self.ratio, self.low, self.high)} in step time"
        known = "" if self.found else ", which does not show creep"
        return f"{moved}{known}; without its largest step, {units.change(self.rest)}"


Release = tuple[str, Mapping[str, int]]
"""The last tag before a commit, and the place of each commit from the tag's, 0, to that one."""


def release(folder: Path, commit: str) -> Release | None:
    """Of the repository around a folder; None without a tag. A tag of the commit itself ends the
    stretch and does not start it."""
    tag = (try_git(folder, "describe", "--tags", "--abbrev=0", f"{commit}^") or "").strip()
    if not tag:
        return None
    start = run_git(folder, "rev-parse", f"refs/tags/{tag}^{{commit}}").strip()
    after = run_git(folder, "rev-list", "--reverse", "--topo-order", f"{start}..{commit}").split()
    return tag, {c: i for i, c in enumerate([start, *after])}


def of_case(case_id: str, points: Sequence[HistoryPoint], since: Release) -> Creep | int:
    """How far a case moved, or how many commits have a run if they are too few.

    Only runs that measured the same case, of committed code, on the GPU model, driver and power
    limit of the newest are compared, in the order of their commits. Of each commit the newest run
    counts: several show how the node drifts, not the code.
    """
    usable = [
        p
        for p in points
        if p.outcome == Outcome.OK and "step_s" in p.metrics
        if p.commit in since[1] and not p.dirty
    ]
    usable.sort(key=lambda p: (since[1][p.commit], p.started_at))
    kinds = [(p.device, p.node, p.digest) for p in usable]
    newest = {p.commit: p for p, kind in zip(usable, kinds, strict=True) if kind == kinds[-1]}
    if len(newest) < FEWEST:
        return len(newest)
    alike = [*newest.values()]
    alike = [alike[round(i)] for i in np.linspace(0, len(alike) - 1, min(len(alike), MOST))]
    logs = np.log([p.metrics["step_s"].value for p in alike])
    centre, half, p_value = moved(logs, [p.device_id or p.host for p in alike])
    return Creep(
        case_id=case_id,
        runs=len(alike),
        ratio=math.exp(centre),
        low=math.exp(centre - half),
        high=math.exp(centre + half),
        p_value=float(p_value),
        rest=math.exp(centre - largest_step(logs)),
    )


def largest_step(logs: Floats) -> Floats:
    """The largest rise in a series [..., runs], between the means of three runs on either side."""
    rises = [
        logs[..., i : i + 3].mean(axis=-1) - logs[..., max(0, i - 3) : i].mean(axis=-1)
        for i in range(1, logs.shape[-1])
    ]
    return np.asarray(np.max(rises, axis=0).clip(0))


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
    """The weight of each run in the difference; the matrix that leaves what is off a line with a
    bend every eight runs; and for each of CORRELATIONS the correlation of neighbours in that rest,
    the variance of the difference over the rest's sum of squares, and its degrees of freedom."""
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
    """How far a case moved since the last tag of the repository, or what is missing to tell."""
    since = release(folder, "HEAD")
    if since is None:
        here = try_git(folder, "rev-parse", "HEAD")
        return f"not known: {NO_TAG if here else f'{folder} is not in a git repository'}"
    found = of_case(case_id, points, since)
    if isinstance(found, int):
        alike = "committed code with the GPU model, driver, power limit and axes of the newest"
        return f"not known: runs at {found} of {FEWEST} needed commits since {since[0]}, of {alike}"
    return f"since {since[0]} ({found.runs} runs): {found.sentence}"


def line(
    store: Path, folder: Path, commit: str, suites: Mapping[str, Suite], say: index.Say
) -> Iterator[str]:
    """What a gate says of the cases of its suites: one line, or none."""
    if (since := release(folder, commit)) is None:
        if try_git(folder, "rev-parse", "--is-shallow-repository") == "true\n":
            yield f"not known: {NO_TAG}"
        return

    def question(known: Index) -> list[Creep | int]:
        every = [(c.case_id, RunFilter(suite=s.name)) for s in suites.values() for c in s.cases]
        return [of_case(i, known.history(i, runs, metric="step_s"), since) for i, runs in every]

    found = [c for c in index.ask(store, question, say) if isinstance(c, Creep)]
    adjusted = holm({str(i): c.p_value for i, c in enumerate(found)})  # ids repeat between suites
    slower = [c for i, p in adjusted.items() if (c := replace(found[int(i)], p_value=p)).found]
    slower.sort(key=lambda c: -c.ratio)
    said = [f"{c.case_id} ({c.runs} runs) {c.sentence}" for c in slower[:NAMED]]
    said += [f"{len(slower) - NAMED} more"] if len(slower) > NAMED else []
    if said:
        yield f"since {since[0]}: {'; '.join(said)}"
