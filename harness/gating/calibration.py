"""Calibrations on disk: what a node makes of the same code twice, and for how long that is good."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.analysis.calibrate import Calibration, between_days, calibrate
from harness.analysis.compare import Pair, Thresholds
from harness.errors import HarnessError
from harness.gating import files
from harness.records import Environment

KIND = ".calibration"
MAX_DAYS_KEPT = 30


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
        HarnessError: It is of another device, too old, or the node differed from itself; or it is
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
            f"{path} says that {found.answer.biased[0]} differs from itself on this node: nothing "
            "can be compared here",
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
