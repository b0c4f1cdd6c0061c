"""Noise of a node, from A/A pairs, and the file that stores it.

An A/A pair is two fresh processes of the same commit, run exactly as the gate runs baseline and
candidate. Their variation sets the noise class of the node and of each case, and so the number of
pairs of a comparison. The sides are two builds that differ in nothing that matters (see aa.py). How
far their ratios are from one, beyond the noise of their pairs, is the luck of a build.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy.special import stdtr

from harness import units
from harness.analysis.comparison import holm, pair_sd, swapped, time_logs
from harness.analysis.statistics import Flags, Floats, hodges_lehmann
from harness.errors import HarnessError
from harness.gate import files
from harness.gate.files import Moment
from harness.gate.policy import CalibrationModel
from harness.records import Environment, Outcome, Pair, Thresholds
from harness.store import index
from harness.store.index import HistoryPoint, Index, RunFilter
from harness.store.writer import now

KIND = ".calibration"
MAX_DAYS_KEPT = 30


class NoiseClass(StrEnum):
    """Variation between the medians of fresh processes of the same code."""

    QUIET = "quiet"  # about 0.3 %
    TYPICAL = "typical"  # about 0.8 %
    NOISY = "noisy"  # about 2.5 %, or more


UPPER_CV: Mapping[NoiseClass, float] = {NoiseClass.QUIET: 0.005, NoiseClass.TYPICAL: 0.014}
"""Largest variation of a class: the geometric means of 0.3 %, 0.8 % and 2.5 %."""

THRESHOLDS: Mapping[NoiseClass, Thresholds] = {
    NoiseClass.QUIET: Thresholds(),
    NoiseClass.TYPICAL: Thresholds(),
    NoiseClass.NOISY: Thresholds(screen_pairs=12, confirm_pairs=32, tolerance=0.05),
}
"""Thresholds by class. On a noisy node, twenty pairs find a 5 % slowdown among 60 cases only seven
times in ten and seldom bound all clean cases by 3 %; so it needs more pairs and a wider tolerance.
"""

DAY_CV: Mapping[NoiseClass, float] = {**UPPER_CV, NoiseClass.NOISY: 0.04}
"""Variation of a case between days on one GPU, until `between_days` can measure it. Assumed: the
largest variation between processes of the class."""

CARD_CV = 0.02
"""Variation of a case between cards of one model, days included, until `between_cards` can measure
it. Over the cards of one SKU, times spread by 8 % on average (arXiv:2208.11035), four standard
deviations of 2 %. Here dense attention and training, whose code did not change, moved by 2.6 %
(root mean square) between four pairs of H200 runs: 1.8 % for one card."""
CARD_PAIRS = 4
"""Pairs of cards as which that assumption counts beside measured ones."""
MIN_CARDS = 3
"""Cards from which their measured variation enters."""
MIN_DAYS = 3
"""Days of calibration from which their measured variation replaces the assumption."""
MIN_PAIRS = 10
"""A/A pairs of a case that are needed to choose its class."""
MIN_CASES = 6
"""Cases from which the measured luck of a build replaces the prior."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseNoise:
    case_id: str
    noise: NoiseClass
    process_cv: float
    """Standard deviation of log process medians."""
    level_s: float
    """Geometric mean of the medians of all processes."""
    ratio: float
    """Candidate over baseline; one apart from chance."""
    p_value: float
    """Two-sided, that the ratio is one; adjusted by Holm over the cases."""
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Noise of a node."""

    noise: NoiseClass
    """Class of the median case."""
    process_cv: float
    """Of the median case."""
    cases: tuple[CaseNoise, ...]
    biased: tuple[str, ...]
    """Cases whose A/A pairs differ significantly and by more than `Thresholds.practical`. A node
    with such a case cannot be used for comparisons."""
    build_cv: float | None = None
    """Standard deviation between builds, over the cases; None if there was one build, or fewer
    than MIN_CASES cases."""

    def levels(self) -> Mapping[str, float]:
        return {c.case_id: c.level_s for c in self.cases}

    def thresholds(self, case_id: str) -> Thresholds:
        """Thresholds by the noise of a case, or of the node if the case was not calibrated."""
        noise = next((c.noise for c in self.cases if c.case_id == case_id), self.noise)
        found = THRESHOLDS[noise]
        return found if self.build_cv is None else replace(found, build_cv=self.build_cv)


def calibrate(pairs: Mapping[str, Sequence[Pair]], *, builds: bool = False) -> Calibration:
    """Judge a node by the A/A pairs of each case, MIN_PAIRS or more; `builds` if the sides are two
    builds."""
    build_cv = _between_builds(pairs.values()) if builds and len(pairs) >= MIN_CASES else None
    of_builds = math.sqrt(2) * (build_cv or 0.0)
    found = [_case_noise(case_id, of_case, of_builds) for case_id, of_case in pairs.items()]
    p_values = holm({c.case_id: c.p_value for c in found})
    cases = tuple(replace(c, p_value=p_values[c.case_id]) for c in found)
    middle = float(np.median([c.process_cv for c in cases]))
    noise = classify(middle)
    limits = THRESHOLDS[noise]
    return Calibration(
        noise=noise,
        process_cv=middle,
        cases=cases,
        biased=tuple(
            c.case_id
            for c in cases
            if c.p_value <= limits.alpha and abs(math.log(c.ratio)) > math.log1p(limits.practical)
        ),
        build_cv=build_cv,
    )


def _between_builds(pairs: Iterable[Sequence[Pair]]) -> float:
    """Standard deviation between builds: the variance of the cases' ratios around one, beyond what
    the noise of their pairs explains."""
    apart = []
    for of_case in pairs:
        logs, order = time_logs(of_case), swapped(of_case)
        noise = pair_sd(logs, order) ** 2 / len(order)
        apart.append(float(hodges_lehmann(logs, order) ** 2 - noise))
    return math.sqrt(max(0.0, float(np.mean(apart))) / 2)


def classify(process_cv: float) -> NoiseClass:
    """The noise class of a variation between processes."""
    return next((c for c, most in UPPER_CV.items() if process_cv <= most), NoiseClass.NOISY)


def process_cv(logs: Floats, order: Flags) -> Floats:
    """Variation between processes from log ratios of pairs, [..., pairs], two processes each.
    Around the mean of each order, which is no noise."""
    return pair_sd(logs, order) / math.sqrt(2)


def by_scatter(thresholds: Thresholds, given: Mapping[str, Any], process_cv: float) -> Thresholds:
    """The thresholds of a case that is not calibrated: its own pairs show if it is noisy. `given`
    are those that the policy sets."""
    if classify(process_cv) is not NoiseClass.NOISY or "tolerance" in given:
        return thresholds
    wider = THRESHOLDS[NoiseClass.NOISY].tolerance
    return replace(thresholds, tolerance=min(wider, thresholds.stored_tolerance))


def between_days(levels: Sequence[Mapping[str, float]], noise: NoiseClass) -> float:
    """Standard deviation of log levels between days on one GPU, root mean square over the cases
    common to all days; assumed by class for fewer than MIN_DAYS days."""
    common = set.intersection(*(set(day) for day in levels)) if levels else set()
    if len(levels) < MIN_DAYS or not common:
        return DAY_CV[noise]
    logs = np.log([[day[case_id] for case_id in sorted(common)] for day in levels])
    return float(np.sqrt(logs.var(axis=0, ddof=1).mean()))


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenCards:
    """Variation of a case between cards of one GPU model, days included."""

    cv: float = CARD_CV
    cards: int = 0
    """Cards that it was measured on; 0 if it is assumed."""

    @property
    def sentence(self) -> str:
        how = f"measured on {self.cards}" if self.cards else f"assumed; {MIN_CARDS} would show it"
        return f"cards of one model vary by {units.percent(self.cv)} ({how})"


def between_cards(histories: Iterable[Sequence[HistoryPoint]], model: str) -> BetweenCards:
    """From the history of each case, oldest first, on a GPU model.

    Where one run follows another on another card, the code often changed too, but that moves few of
    the cases far: the median of all differences is that of the cards.
    """
    moved: list[float] = []
    cards: set[str] = set()
    for points in histories:
        last: dict[tuple[object, str], HistoryPoint] = {}
        for p in points:
            if p.device != model or p.outcome != Outcome.OK or "step_s" not in p.metrics:
                continue
            before = last.get((p.node, p.digest), p)
            if before.device_id != p.device_id:
                ratio = p.metrics["step_s"].value / before.metrics["step_s"].value
                moved.append(abs(math.log(ratio)))
                cards |= {before.device_id, p.device_id}
            last[p.node, p.digest] = p
    if len(cards) < MIN_CARDS:
        return BetweenCards()
    of_one = float(np.median(moved)) / NormalDist().inv_cdf(0.75) / math.sqrt(2)
    whole = CARD_PAIRS * CARD_CV**2 + (len(cards) - 1) * of_one**2
    return BetweenCards(cv=math.sqrt(whole / (CARD_PAIRS + len(cards) - 1)), cards=len(cards))


def in_store(store: Path, here: Environment, say: index.Say) -> BetweenCards:
    """Between cards of this GPU's model, from the runs of a store."""
    model = here.device_name

    def question(known: Index) -> BetweenCards:
        every = (known.history(i, RunFilter(gpu=model), metric="step_s") for i in known.case_ids())
        return between_cards(every, model)

    return index.ask(store, question, say)


def _case_noise(case_id: str, pairs: Sequence[Pair], of_builds: float) -> CaseNoise:
    """Noise of one case; its p-value is not adjusted yet, but apart from the luck of builds."""
    logs, order = time_logs(pairs), swapped(pairs)
    centre, cv = float(hodges_lehmann(logs, order)), float(process_cv(logs, order))
    medians = [s for p in pairs for s in (p.baseline_s, p.candidate_s)]
    # Student's test: a rank test of so few pairs reaches no level that Holm asks of many cases.
    se = math.hypot(cv * math.sqrt(2 / len(order)), of_builds)
    return CaseNoise(
        case_id=case_id,
        noise=classify(cv),
        process_cv=cv,
        level_s=float(np.exp(np.mean(np.log(medians)))),
        ratio=math.exp(centre),
        p_value=float(2 * stdtr(len(order) - 2, -abs(centre) / max(se, 1e-12))),
        pairs=len(pairs),
    )


# --- on disk ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """The levels of the cases on one day."""

    at: str
    commit: str
    levels: Mapping[str, float]
    uncommitted: bool = False
    device: str = ""
    """The card; empty in older files, which are of one card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A calibration of one card by one suite, for its model."""

    suite: str
    device: str
    """See files.device_id."""
    device_name: str
    at: Moment
    """ISO 8601, UTC."""
    commit: str
    run_id: str
    answer: Calibration
    days: tuple[Day, ...] = ()
    """Of earlier calibrations and this one, oldest first."""
    uncommitted: bool = False

    @property
    def builds(self) -> str:
        found = self.answer.build_cv
        return ASSUMED if found is None else f"equal builds differ by {units.percent(found)}"

    @property
    def model(self) -> str:
        """See files.model_id."""
        return self.device if self.device_name == "cpu" else self.device_name

    def sentence(self, here: Environment) -> str:
        other = self.device != files.device_id(here)
        where = f" on another card, {self.device[:12]}" if other else ""
        return f"{self.answer.noise} node, calibrated {self.at[:10]}{where}; {self.builds}"


ASSUMED = (
    f"equal builds are assumed to differ by {units.percent(Thresholds().build_cv)}, "
    "as kernels in a CUDA graph did on an H200"
)


def day_cv(stored: Stored | None) -> float:
    """Variation between days: from the last calibration of this commit on each day, but for
    uncommitted code; that of a typical node without a calibration."""
    if stored is None:
        return DAY_CV[NoiseClass.TYPICAL]
    alike = {
        day.at[:10]: day.levels
        for day in stored.days
        if day.commit == stored.commit and stored.commit
        if not day.uncommitted and not stored.uncommitted
        if day.device in ("", stored.device)
    }
    return between_days(list(alike.values()), stored.answer.noise)


def store(
    folder: Path,
    environment: Environment,
    suite: str,
    run_id: str,
    pairs: Mapping[str, Sequence[Pair]],
    *,
    builds: bool = False,
) -> Stored:
    """Judge a node by A/A pairs and store the answer with the levels of earlier days.

    Raises:
        StoreError: The file cannot be written, or the one there is damaged.
    """
    device = files.device_id(environment)
    before = _find(folder, environment, suite)
    at = now()
    commit = environment.git.commit if environment.git else ""
    answer = calibrate(pairs, builds=builds)
    days = [replace(d, device=d.device or before.device) for d in before.days] if before else []
    levels, uncommitted = answer.levels(), environment.uncommitted
    days.append(Day(at=at, commit=commit, levels=levels, uncommitted=uncommitted, device=device))
    stored = Stored(
        suite=suite,
        device=device,
        device_name=environment.device_name,
        at=at,
        commit=commit,
        run_id=run_id,
        answer=answer,
        uncommitted=uncommitted,
        days=tuple(days[-MAX_DAYS_KEPT:]),
    )
    files.write(files.path_of(folder, stored.model, suite, KIND), stored)
    return stored


def load(
    folder: Path, environment: Environment, suite: str, limits: CalibrationModel
) -> Stored | None:
    """The calibration of this GPU model, perhaps of another card; None if there is none and none is
    required.

    Raises:
        HarnessError: It is required but absent, too old, or not usable because A/A pairs differ.
    """
    found = _find(folder, environment, suite)
    late = files.out_of_date(found.at, limits.max_age_days) if found else ""
    if found and found.device != files.device_id(environment) and (late or found.answer.biased):
        found = None  # another card's fault is not this one's
    here = f"{environment.device_name} ({files.device_id(environment)})"
    if found is None and not limits.required:
        return None
    if found is None:
        problem = f"the policy requires a calibration of {here} with {suite}, but there is none"
    elif late:
        problem = f"the calibration of {here} with {suite} {late}"
    elif found.answer.biased:
        case_id = found.answer.biased[0]
        problem = f"{here}: A/A pairs of {case_id} differ; this machine is too noisy"
    else:
        return found
    raise HarnessError(problem, f"See harness doctor. {_remedy(suite)}")


def _find(folder: Path, here: Environment, suite: str) -> Stored | None:
    path = files.path_of(folder, files.model_id(here), suite, KIND)
    return files.read(path, Stored, _remedy(suite))


def thresholds(stored: Stored | None, case_id: str, given: Mapping[str, Any]) -> Thresholds:
    """A case's thresholds: those of its noise class, overridden by those that the policy sets.

    Raises:
        HarnessError: The two contradict each other.
    """
    if stored is None:
        return Thresholds(**given)
    try:
        return replace(stored.answer.thresholds(case_id), **given)
    except ValueError as error:
        raise HarnessError(
            f"the policy's thresholds do not fit a {stored.answer.noise} node: {error}",
            "Set all thresholds under `compare` in the policy, or none.",
        ) from None


def _remedy(suite: str) -> str:
    return f"Calibrate it: harness calibrate {suite}"
