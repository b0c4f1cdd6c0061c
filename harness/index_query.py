"""The questions that an index answers, and their answers."""

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from harness.errors import HarnessError
from harness.records import Estimate, Outcome, gpu_matches
from harness.store import RunHeader

NOT_RUN = "not run"
_HEADER = (
    "runs.run, folder, run_id, suite, title, device, commit_id, runs.cases, measurements,"
    " started_at, ended_at, problem"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which runs are meant. Empty fields choose all; several must all hold."""

    suite: str = ""
    gpu: str = ""
    """Pattern of the device's name, as in a suite: `A100` is `*A100*`; `cpu` for none."""
    commit: str = ""
    """The beginning of the commit's hash."""
    since: str = ""
    until: str = ""
    """A day, which is included, or a moment; ISO 8601, UTC where no zone is named."""
    outcome: str = ""
    """Runs in which a case ended so; of a history, those in which this case did. `not run` too."""
    limit: int | None = None
    """The latest so many."""

    def __post_init__(self) -> None:
        if self.outcome and self.outcome not in (*Outcome, NOT_RUN):
            raise HarnessError(
                f"no case ends {self.outcome!r}", f"One of {', '.join((*Outcome, NOT_RUN))}."
            )
        for name, value in (("since", self.since), ("until", self.until)):
            if value and _moment(value) is None:
                raise HarnessError(
                    f"--{name} {value!r} is no date", "For example 2026-11-21, or 2026-11-21T09:30."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One case in one run."""

    run_id: str
    folder: str
    suite: str
    started_at: str
    commit: str
    branch: str
    dirty: bool
    device: str
    device_id: str
    """UUID of the GPU; empty without one."""
    host: str
    outcome: str
    """As Outcome says it, or `not run`."""
    detail: str
    metrics: Mapping[str, Estimate] = field(default_factory=dict)


class Index:
    """A connection, as the answers to questions."""

    def __init__(self, connection: sqlite3.Connection, root: Path) -> None:
        self._connection = connection
        self._prefix = str(root / "_").removesuffix(
            "_"
        )  # a Path a row would cost as much as SQLite
        connection.create_function("gpu_matches", 2, gpu_matches, deterministic=True)

    def runs(self, choice: Choice | None = None) -> tuple[RunHeader, ...]:
        """The chosen runs in the order of their folders, as `store.headers`; one that cannot be
        read has its problem."""
        choice = choice or Choice()
        where, values = _conditions(choice)
        if choice.outcome:
            where.append("run IN (SELECT run FROM outcomes WHERE outcome = ?)")
            values.append(choice.outcome)
        rows = self._connection.execute(
            f"SELECT {_HEADER} FROM runs {_where(where)} ORDER BY folder DESC LIMIT ?",
            (*values, -1 if choice.limit is None else choice.limit),
        ).fetchall()[::-1]
        outcomes = self._outcomes([row[0] for row in rows])
        return tuple(
            RunHeader(
                run_id=run_id,
                folder=self._prefix + folder,
                suite=suite,
                title=title,
                device=device,
                commit=commit,
                cases=cases,
                measurements=measurements,
                started_at=started_at,
                ended_at=ended_at,
                problem=problem,
                outcomes=outcomes.get(row, {}),
            )
            for row, folder, run_id, suite, title, device, commit, cases, measurements, started_at,
            ended_at, problem in rows
        )  # fmt: skip

    def latest(self, suite: str) -> RunHeader | None:
        """The latest run of a suite; None where there is none."""
        return next(iter(self.runs(Choice(suite=suite, limit=1))), None)

    def case_ids(self) -> tuple[str, ...]:
        """The id of every case that a run has."""
        found = self._connection.execute(
            "SELECT case_id FROM names WHERE EXISTS"
            " (SELECT 1 FROM cases WHERE cases.name = names.name) ORDER BY case_id"
        )
        return tuple(case_id for (case_id,) in found)

    def history(
        self, case_id: str, choice: Choice | None = None, *, metric: str | None = None
    ) -> tuple[Point, ...]:
        """One case over the chosen runs, oldest first.

        Args:
            metric: The only one that is wanted; None for all.
        """
        choice = choice or Choice()
        where, values = _conditions(choice)
        where.append("name = (SELECT name FROM names WHERE case_id = ?)")
        values.append(case_id)
        if choice.outcome == NOT_RUN:
            where.append("outcome IS NULL")
        elif choice.outcome:
            where.append("outcome = ?")
            values.append(choice.outcome)
        rows = self._connection.execute(
            "SELECT run_id, folder, suite, started_at, commit_id, branch, dirty, device, device_id,"
            " host, outcome, detail, metrics FROM cases JOIN runs USING (run)"
            f" {_where(where)} ORDER BY started_at DESC, folder DESC LIMIT ?",
            (*values, -1 if choice.limit is None else choice.limit),
        ).fetchall()[::-1]
        return tuple(
            Point(
                run_id=run_id,
                folder=self._prefix + folder,
                suite=suite,
                started_at=started_at,
                commit=commit,
                branch=branch,
                dirty=bool(dirty),
                device=device,
                device_id=device_id,
                host=host,
                outcome=outcome or NOT_RUN,
                detail=detail,
                metrics=_metrics(metrics, metric),
            )
            for run_id, folder, suite, started_at, commit, branch, dirty, device, device_id, host,
            outcome, detail, metrics in rows
        )  # fmt: skip

    def _outcomes(self, rows: list[int]) -> dict[int, dict[str, int]]:
        """How many cases ended how, by run."""
        wanted, found = set(rows), dict[int, dict[str, int]]()
        query, values = "SELECT run, outcome, cases FROM outcomes", list[int]()
        if len(rows) <= 100:
            query += f" WHERE run IN ({','.join('?' * len(rows))})"
            values = rows
        for row, outcome, cases in self._connection.execute(query, values):
            if row in wanted:
                found.setdefault(row, {})[outcome] = cases
        return found


def _metrics(text: str, only: str | None) -> dict[str, Estimate]:
    told = json.loads(text)
    names = told if only is None else (only,) if only in told else ()
    return {name: _estimate(*told[name]) for name in names}


def _estimate(
    value: float, low: float | None, high: float | None, processes: int, samples: int
) -> Estimate:
    return Estimate(value=value, low=low, high=high, processes=processes, samples=samples)


def _where(conditions: list[str]) -> str:
    return f"WHERE {' AND '.join(conditions)}" if conditions else ""


def _conditions(choice: Choice) -> tuple[list[str], list[str]]:
    """What a choice asks of the row of a run, and the values for its question marks."""
    where: list[str] = []
    values: list[str] = []
    for condition, value in (
        ("suite = ?", choice.suite),
        ("gpu_matches(?, device)", choice.gpu),
        ("instr(commit_id, ?) = 1", choice.commit.lower()),
        ("started_at >= ?", _from(choice.since)),
        ("started_at < ?", _to(choice.until)),
    ):
        if value:
            where.append(condition)
            values.append(value)
    return where, values


def _from(text: str) -> str:
    moment = _moment(text)
    return moment.isoformat(timespec="seconds") if moment else ""


def _to(text: str) -> str:
    """The first moment that is too late."""
    moment = _moment(text)
    if moment is None:
        return ""
    step = timedelta(days=1) if _is_day(text) else timedelta(seconds=1)
    return (moment + step).isoformat(timespec="seconds")


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True
