"""How noisy a node is, from A/A pairs: measured, judged, and kept on disk until it is too old.

An A/A pair is two fresh processes of the same code, run exactly as the gate runs the baseline and
the candidate. Their scatter sets the noise class of the node and of each case, and with it how many
pairs a comparison takes; their centre must be zero, else the order of running makes a difference.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from harness.analysis.comparison import holm, time_logs
from harness.analysis.statistics import Floats, hodges_lehmann, signed_rank_p
from harness.errors import HarnessError
from harness.gate import files
from harness.records import Environment, Pair, Thresholds

KIND = ".calibration"
MAX_DAYS_KEPT = 30


class NoiseClass(StrEnum):
    """How far the medians of fresh processes of the same code scatter."""

    QUIET = "quiet"  # about 0.3 %
    TYPICAL = "typical"  # about 0.8 %
    NOISY = "noisy"  # about 2.5 %, or more


UPPER_CV: Mapping[NoiseClass, float] = {NoiseClass.QUIET: 0.005, NoiseClass.TYPICAL: 0.014}
"""Largest scatter of a class: the geometric means between 0.3 %, 0.8 % and 2.5 %."""

THRESHOLDS: Mapping[NoiseClass, Thresholds] = {
    NoiseClass.QUIET: Thresholds(),
    NoiseClass.TYPICAL: Thresholds(),
    NoiseClass.NOISY: Thresholds(screen_pairs=12, confirm_pairs=32, tolerance=0.05),
}
"""Thresholds by class. In the noise of the last, twenty pairs find a 5 % slowdown among 60 cases
seven times in ten and seldom bound all clean cases by 3 %: it takes more pairs, and asks less."""

DAY_CV: Mapping[NoiseClass, float] = {
    NoiseClass.QUIET: 0.005,
    NoiseClass.TYPICAL: 0.014,
    NoiseClass.NOISY: 0.04,
}
"""How far one GPU's level of a case scatters from day to day, until `between_days` has measured it.
An assumption: as much as the processes of the class at most do within a day."""

MIN_DAYS = 3
"""Calibrations of different days before their scatter is believed over the assumption."""
MIN_PAIRS = 10
"""A/A pairs of a case under which its scatter is too uncertain to choose a class by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseNoise:
    """What A/A pairs say of one case."""

    case_id: str
    noise: NoiseClass
    process_cv: float
    """Standard deviation of log process medians."""
    level_s: float
    """Geometric mean of all processes' medians: what is compared between days."""
    ratio: float
    """Candidate over baseline, which are the same code: one, but for chance."""
    p_value: float
    """Two-sided, that the ratio is one; adjusted by Holm over the cases."""
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How a node measures the same code twice."""

    noise: NoiseClass
    """Of the node: the class of its median case."""
    process_cv: float
    """Of the median case."""
    cases: tuple[CaseNoise, ...]
    biased: tuple[str, ...]
    """Cases whose A/A pairs differ by more than the practical floor, and not by chance. A node with
    any is not fit to compare on."""

    def thresholds(self, case_id: str) -> Thresholds:
        """Thresholds by the noise of a case; by the node's for one that was not calibrated."""
        noise = next((c.noise for c in self.cases if c.case_id == case_id), self.noise)
        return THRESHOLDS[noise]

    def levels(self) -> Mapping[str, float]:
        """The level of every case, for `between_days`."""
        return {c.case_id: c.level_s for c in self.cases}


def calibrate(pairs: Mapping[str, Sequence[Pair]]) -> Calibration:
    """Judge a node by A/A pairs of each case.

    Raises:
        ValueError: No case, or one with fewer than MIN_PAIRS pairs.
    """
    if not pairs:
        raise ValueError("no case to calibrate by")
    for case_id, of_case in pairs.items():
        if len(of_case) < MIN_PAIRS:
            raise ValueError(
                f"{case_id}: {len(of_case)} A/A pairs say too little of its noise; "
                f"take at least {MIN_PAIRS}"
            )
    logs = {case_id: time_logs(of_case) for case_id, of_case in pairs.items()}
    p_values = holm({c: _two_sided(x) for c, x in logs.items()})
    cases = tuple(
        _case_noise(case_id, of_case, logs[case_id], p_values[case_id])
        for case_id, of_case in pairs.items()
    )
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
    )


def classify(process_cv: float) -> NoiseClass:
    """The class of a scatter."""
    return next((c for c, most in UPPER_CV.items() if process_cv <= most), NoiseClass.NOISY)


def process_cv(logs: Floats) -> Floats:
    """Scatter of one process from log ratios of A/A pairs, [..., pairs]: a pair holds two. Around
    zero, not around their mean: both sides are the same code."""
    return np.asarray(np.sqrt((logs**2).mean(axis=-1) / 2))


def between_days(levels: Sequence[Mapping[str, float]], noise: NoiseClass) -> float:
    """How far the level of a case scatters from day to day on one GPU.

    Args:
        levels: `Calibration.levels` of the same commit on different days.
        noise: The node's class; it decides while the days are fewer than MIN_DAYS.

    Returns:
        The standard deviation of log levels, root mean square over the cases common to all days.
    """
    common = set.intersection(*(set(day) for day in levels)) if levels else set()
    if len(levels) < MIN_DAYS or not common:
        return DAY_CV[noise]
    logs = np.log([[day[case_id] for case_id in sorted(common)] for day in levels])
    return float(np.sqrt(logs.var(axis=0, ddof=1).mean()))


def _case_noise(case_id: str, pairs: Sequence[Pair], logs: Floats, p_value: float) -> CaseNoise:
    cv = float(process_cv(logs))
    medians = [s for p in pairs for s in (p.baseline_s, p.candidate_s)]
    return CaseNoise(
        case_id=case_id,
        noise=classify(cv),
        process_cv=cv,
        level_s=float(np.exp(np.mean(np.log(medians)))),
        ratio=float(np.exp(hodges_lehmann(logs))),
        p_value=p_value,
        pairs=len(pairs),
    )


def _two_sided(logs: Floats) -> float:
    return min(1.0, 2 * float(min(signed_rank_p(logs), signed_rank_p(-logs))))


# --- on disk ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """The level of every case on one day."""

    at: str
    commit: str
    levels: Mapping[str, float]
    uncommitted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A calibration of one device with one suite."""

    suite: str
    device: str
    """GPU UUID; see files.device_id."""
    device_name: str
    at: str
    """ISO 8601, UTC."""
    commit: str
    run_id: str
    answer: Calibration
    days: tuple[Day, ...] = ()
    """Of earlier calibrations and this one, oldest first."""
    uncommitted: bool = False
    """The code had uncommitted changes."""

    def __post_init__(self) -> None:
        files.moment(self.at)

    @property
    def day_cv(self) -> float:
        """How far a level scatters between days, from those on which this commit was measured: the
        last calibration of each, for two an hour apart do not tell what a night does. What is not
        committed is of no commit."""
        alike = {
            day.at[:10]: day.levels
            for day in self.days
            if day.commit == self.commit and self.commit
            if not day.uncommitted and not self.uncommitted
        }
        return between_days(list(alike.values()), self.answer.noise)

    @property
    def sentence(self) -> str:
        return f"{self.answer.noise} node, calibrated {self.at[:10]}"


def store(
    folder: Path,
    environment: Environment,
    suite: str,
    run_id: str,
    pairs: Mapping[str, Sequence[Pair]],
) -> Stored:
    """Judge a node by A/A pairs and keep the answer, with the levels of earlier days.

    Raises:
        StoreError: It cannot be written, or what is there is damaged.
        ValueError: Too few pairs.
    """
    device = files.device_id(environment)
    before = files.read(files.path_of(folder, device, suite, KIND), Stored, _remedy(suite))
    at = datetime.now(UTC).isoformat(timespec="seconds")
    commit = environment.git.commit if environment.git else ""
    answer = calibrate(pairs)
    today = Day(at=at, commit=commit, levels=answer.levels(), uncommitted=environment.uncommitted)
    stored = Stored(
        suite=suite,
        device=device,
        device_name=environment.device_name,
        at=at,
        commit=commit,
        run_id=run_id,
        answer=answer,
        uncommitted=environment.uncommitted,
        days=(*(before.days if before else ()), today)[-MAX_DAYS_KEPT:],
    )
    files.write(files.path_of(folder, device, suite, KIND), stored)
    return stored


def load(
    folder: Path, environment: Environment, suite: str, *, max_age_days: int, required: bool
) -> Stored | None:
    """The calibration of this device, if it is good.

    Returns:
        None where the device was never calibrated and the policy does not ask for it.

    Raises:
        HarnessError: It is of another device, too old, or finds A/A pairs that differ; or it is
            required and there is none.
    """
    device = files.device_id(environment)
    path = files.path_of(folder, device, suite, KIND)
    found = files.read(path, Stored, _remedy(suite))
    if found is None:
        if not required:
            return None
        raise HarnessError(
            f"{environment.device_name} ({device}) was never calibrated with {suite}, and the "
            "policy requires it",
            _remedy(suite),
        )
    if found.device != device:
        raise HarnessError(
            f"{path} is a calibration of {found.device_name} ({found.device}), and this is "
            f"{environment.device_name} ({device})",
            _remedy(suite),
        )
    if problem := files.out_of_date(found.at, max_age_days):
        raise HarnessError(f"{path} {problem}", _remedy(suite))
    if found.answer.biased:
        raise HarnessError(
            f"{found.answer.biased[0]}: two runs of the same code differ, by {path}; this machine "
            "is too noisy",
            f"Look for what disturbs it with `harness doctor`. {_remedy(suite)}",
        )
    return found


def thresholds(
    stored: Stored | None, case_id: str, default: Thresholds, given: Mapping[str, Any]
) -> Thresholds:
    """A case's thresholds: by its calibrated noise, with what the policy itself sets on top.

    Raises:
        HarnessError: The two contradict each other.
    """
    if stored is None:
        return default
    try:
        return replace(stored.answer.thresholds(case_id), **given)
    except ValueError as error:
        raise HarnessError(
            f"the policy's thresholds do not fit a {stored.answer.noise} node: {error}",
            "Leave out what the policy sets under `compare`, or set all of it.",
        ) from None


def _remedy(suite: str) -> str:
    return f"Calibrate it: harness calibrate {suite}"
