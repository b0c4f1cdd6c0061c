"""What each stored run says, in brief: its header, and the outcome and metrics of its cases.

    reports/runs/RUN/summary.jsonl   made from run.jsonl when it is first asked for

Its first line has the header and the ids of the cases, its second one the cases: a list of runs
reads no more than the first. It also has the size and time of the run.jsonl that it was made from.
If they differ, or if a summary is unreadable or of another version, it is made again. It may be
deleted at any time.
"""

import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from harness.analysis import summary
from harness.errors import HarnessError, StoreError
from harness.records import CaseSummary, Estimate, Outcome, gpu_matches
from harness.store import reader
from harness.store.reader import RunHeader

SUMMARY = "summary.jsonl"
VERSION = 12
"""Of the summaries: raise it when their content changes."""
MANY = 64
"""Number of runs to read from which a note explains the delay."""
NOT_RUN = "not run"

Say = Callable[[str], None]
Found = TypeVar("Found")
Fields = Mapping[str, Any]
"""As JSON has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Selects runs: those that match every field that is set."""

    suite: str = ""
    gpu: str = ""
    """Pattern of the device's name, as in a suite: `A100` is `*A100*`; `cpu` for no GPU."""
    commit: str = ""
    """Prefix of the commit's hash."""
    since: str = ""
    until: str = ""
    """A day (included) or a time; ISO 8601, UTC without a zone."""
    outcome: str = ""
    """Runs with a case of this outcome, or `not run`."""
    limit: int | None = None
    """At most this many runs, the latest."""

    def __post_init__(self) -> None:
        if self.outcome and self.outcome not in (*Outcome, NOT_RUN):
            raise HarnessError(
                f"{self.outcome!r} is not an outcome", f"Use {', '.join((*Outcome, NOT_RUN))}."
            )
        for name, value in (("since", self.since), ("until", self.until)):
            try:
                datetime.fromisoformat(value or "2026-11-21")
            except ValueError:
                raise HarnessError(
                    f"--{name} {value!r} is not a date", "Write 2026-11-21 or 2026-11-21T09:30."
                ) from None

    def accepts(self, run: RunHeader) -> bool:
        """Whether a run matches, apart from outcome and limit."""
        # A day has at most ten characters, a time more.
        step = timedelta(days=1) if len(self.until) <= 10 else timedelta(seconds=1)
        return (
            self.suite in ("", run.suite)
            and run.commit.startswith(self.commit.lower())
            and (not self.gpu or gpu_matches(self.gpu, run.device))
            and (not self.since or run.started_at >= _utc(self.since))
            and (not self.until or run.started_at < _utc(self.until, step))
        )


def _utc(text: str, later: timedelta = timedelta()) -> str:
    moment = datetime.fromisoformat(text)
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return (moment + later).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint(RunHeader):
    """One case in one run."""

    outcome: str
    """A value of Outcome, or `not run`."""
    detail: str
    metrics: Mapping[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Summary:
    header: RunHeader
    case_ids: Sequence[str]
    cases: str
    """JSON: by case id, the fields of a HistoryPoint beside those of the header."""


class Summaries:
    """The summaries of all runs in a store, in the order of their folders."""

    def __init__(self, found: tuple[_Summary, ...]) -> None:
        self._found = found

    def runs(self, runs: RunFilter | None = None) -> tuple[RunHeader, ...]:
        """The selected runs; an unreadable one with its problem."""
        runs = runs or RunFilter()
        headers = (one.header for one in self._found)
        wanted = [h for h in headers if runs.accepts(h) and runs.outcome in ("", *h.outcomes)]
        return _latest(wanted, runs.limit)

    def case_ids(self) -> tuple[str, ...]:
        return tuple(sorted({case_id for one in self._found for case_id in one.case_ids}))

    def history(self, case_id: str, runs: RunFilter | None = None) -> tuple[HistoryPoint, ...]:
        """One case in the selected runs, oldest first."""
        runs = runs or RunFilter()
        points = []
        for one in self._found:
            if case_id not in one.case_ids or not runs.accepts(one.header):
                continue
            case = json.loads(one.cases)[case_id]
            case["metrics"] = {name: _estimate(e) for name, e in case["metrics"].items()}
            points.append(HistoryPoint(**asdict(one.header), **case))
        return _latest(sorted(points, key=lambda p: (p.started_at, p.folder)), runs.limit)


def _latest(found: Sequence[Found], limit: int | None) -> tuple[Found, ...]:
    return tuple(found if limit is None else found[max(0, len(found) - limit) :])


def _estimate(fields: Fields) -> Estimate:
    several = {name: tuple(x) for name, x in fields.items() if isinstance(x, list)}
    return Estimate(**{"low": None, "high": None, **fields, **several})


# --- the files ---------------------------------------------------------------------------


def read(root: Path, say: Say) -> Summaries:
    """The summaries of a store. New and changed runs are read first.

    Args:
        root: The folder of the runs.
        say: Receives a note if that takes long, or if summaries cannot be written.
    """
    folders = sorted(path.parent for path in root.glob(f"*/{reader.RUN_FILE}"))
    found = {folder: _kept(folder) for folder in folders}
    new = [folder for folder, one in found.items() if one is None]
    if len(new) >= MANY:
        say(f"reading {len(new):,} runs of {root}")
    problem = ""
    for folder in new:
        if stamp := _stamp(folder):  # else it was just removed
            found[folder] = one = _summarised(folder)
            try:
                _write(folder, stamp, one)
            except OSError as error:
                problem = f"{folder / SUMMARY} ({error.strerror})"
    if problem:
        say(f"note: cannot write {problem}; every question reads the run again")
    return Summaries(tuple(one for one in found.values() if one))


def _stamp(folder: Path) -> list[int]:
    """Size and modification time of a record, by which a summary knows it."""
    try:
        stat = (folder / reader.RUN_FILE).stat()
    except OSError:
        return []
    return [VERSION, stat.st_size, stat.st_mtime_ns]


def _kept(folder: Path) -> _Summary | None:
    """The summary beside a record; None if it is absent, damaged or of another record."""
    try:
        first, cases, _ = (folder / SUMMARY).read_text(encoding="utf-8").split("\n")
        known = json.loads(first)
        if known["of"] != _stamp(folder):
            return None
        header = RunHeader(**known["header"], folder=str(folder))
        return _Summary(header, known["case_ids"], cases)
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _write(folder: Path, stamp: list[int], one: _Summary) -> None:
    """Write a summary in one step, so that no reader sees half of it."""
    header = {name: value for name, value in asdict(one.header).items() if name != "folder"}
    first = json.dumps({"of": stamp, "header": header, "case_ids": one.case_ids})
    draft = folder / f".{SUMMARY}.{secrets.token_hex(4)}"
    try:
        draft.write_text(f"{first}\n{one.cases}\n", encoding="utf-8")
        draft.replace(folder / SUMMARY)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _summarised(folder: Path) -> _Summary:
    """The summary of one run; of an unreadable one, its problem."""
    try:
        run = reader.load(folder.parent, folder)
        fields = {case.case.case_id: _fields(case) for case in summary.summarise(run)}
        cases = json.dumps(fields, allow_nan=False)
    except Exception as error:  # noqa: BLE001 - listed with the run; one record must not stop others
        reason = "" if isinstance(error, StoreError) else f"its summary fails: {error!r}"
        problem = reason or str(error).partition("\n")[0]
        return _Summary(
            RunHeader(run_id=folder.name, folder=str(folder), problem=problem), (), "{}"
        )
    outcomes = Counter(case["outcome"] for case in fields.values())
    header = replace(reader.header_of(run), outcomes=dict(outcomes))
    return _Summary(header, tuple(fields), cases)


def _fields(case: CaseSummary) -> Fields:
    return {
        "outcome": str(case.outcome or NOT_RUN),
        "detail": case.detail.partition("\n")[0],
        "metrics": {
            name: {key: x for key, x in asdict(e).items() if x not in (None, ())}
            for name, e in case.metrics.items()
        },
    }
