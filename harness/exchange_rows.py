"""Runs as rows, one a sample, and such rows as runs; harness.exchange_tables has them in files.

A process without samples has one row, and so has a case of which no process ran: what is absent
stays visible. A table holds what a comparison needs and no more: telemetry, counters, the census,
the suite's rules and the proof of the instrument are in JSON lines only. Of a table from elsewhere
two columns are needed, case_id and sample_s.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import HarnessError
from harness.exchange import UNKNOWN, Imported
from harness.records import (
    Case,
    Clock,
    Environment,
    Git,
    Gpu,
    Measurement,
    MeasureSettings,
    Outcome,
    Run,
    Suite,
)

NOT_RUN = "not run"
Value = str | int | float | bool | None
Row = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table."""

    name: str
    kind: type
    of: str
    """What has one value of it: run, case, process or sample."""
    means: str


COLUMNS = (
    Column("run_id", str, "run", "the run it was exported from"),
    Column("suite", str, "run", "name of the suite"),
    Column("started_at", str, "run", "ISO 8601, UTC"),
    Column("host", str, "run", ""),
    Column("device", str, "run", "name of the GPU, or `cpu`"),
    Column("device_id", str, "run", "UUID of the GPU"),
    Column("driver", str, "run", ""),
    Column("torch", str, "run", "version"),
    Column("commit", str, "run", "empty outside a repository"),
    Column("branch", str, "run", ""),
    Column("uncommitted", str, "run", "hash of uncommitted changes; empty without"),
    Column("case_id", str, "case", ""),
    Column("workload", str, "case", ""),
    Column("provider", str, "case", ""),
    Column("axes", str, "case", "a JSON object"),
    Column("min_samples", int, "case", "undisturbed samples below which a process says nothing"),
    Column("process", int, "process", "from 0; empty where no process ran"),
    Column("outcome", str, "process", "`ok`, `crash`, ...; `not run`"),
    Column("detail", str, "process", "why it is not ok"),
    Column("clock", str, "process", "`cuda_event` or `host`"),
    Column("steady", bool, "process", "empty where unknown"),
    Column("tokens", int, "process", "of one run"),
    Column("flops", int, "process", "of one run"),
    Column("bytes", int, "process", "of one run"),
    Column("peak_memory_bytes", int, "process", ""),
    Column("lower_bound_s", float, "process", "of a timeout or a hang: one run takes longer"),
    Column("wall_s", float, "process", "life of the process"),
    Column("sample", int, "sample", "from 0, in the order taken; empty where there is none"),
    Column("sample_s", float, "sample", "time of one run on `clock`"),
    Column("host_sample_s", float, "sample", "the same on the host's clock"),
    Column("sample_at_s", float, "sample", "when it began, since the process was launched"),
    Column("discarded", str, "sample", "why it counts for nothing: `throttled`, `shared`, ..."),
)
NEEDED = ("case_id", "sample_s")
KINDS = {column.name: column.kind for column in COLUMNS}
_LEVELS = {
    level: tuple(c.name for c in COLUMNS if c.of == level) for level in ("run", "case", "process")
}


# --- runs to rows ------------------------------------------------------------------------


def rows_of(run: Run) -> Iterator[Row]:
    """A run's rows, in the order of its cases."""
    here, git = run.environment, run.environment.git
    whole: dict[str, Value] = {
        "run_id": run.run_id,
        "suite": run.suite.name,
        "started_at": run.started_at,
        "host": here.hostname,
        "device": here.device_name,
        "device_id": here.gpu.uuid if here.gpu else "",
        "driver": here.gpu.driver if here.gpu else "",
        "torch": here.versions.get("torch") or "",
        "commit": git.commit if git else "",
        "branch": git.branch if git else "",
        "uncommitted": git.dirty_sha256 if git else "",
    }
    for case in run.suite.cases:
        of_case: dict[str, Value] = {
            **whole,
            "case_id": case.case_id,
            "workload": case.workload,
            "provider": case.provider,
            "axes": json.dumps(dict(case.axes), ensure_ascii=False),
            "min_samples": case.settings.min_samples,
        }
        measured = run.of(case.case_id)
        if not measured:
            yield {**of_case, "outcome": NOT_RUN}
        for m in measured:
            yield from _process_rows(of_case, m)


def _process_rows(of_case: Row, m: Measurement) -> Iterator[Row]:
    process: dict[str, Value] = {
        **of_case,
        "process": m.process,
        "outcome": str(m.outcome),
        "detail": m.detail,
        "clock": str(m.clock) if m.clock else None,
        "steady": m.steady,
        "tokens": m.tokens,
        "flops": m.flops,
        "bytes": m.bytes,
        "peak_memory_bytes": m.peak_memory_bytes,
        "lower_bound_s": m.lower_bound_s,
        "wall_s": m.wall_s,
    }
    if not m.samples_s:
        yield process
    count = len(m.samples_s)
    for i, sample_s in enumerate(m.samples_s):
        yield {
            **process,
            "sample": i,
            "sample_s": sample_s,
            "host_sample_s": m.host_samples_s[i] if len(m.host_samples_s) == count else None,
            "sample_at_s": m.samples_at_s[i] if len(m.samples_at_s) == count else None,
            "discarded": " ".join(r for r, bad in m.discarded.items() if i in bad) or None,
        }


# --- rows to runs ------------------------------------------------------------------------


def runs_of(file: Path, data: bytes, rows: Sequence[tuple[str, Row]]) -> tuple[Imported, ...]:
    """The runs in a table.

    Args:
        file: Where it was read from, and `data` all that stood there.
        rows: Each with its place in the file.

    Raises:
        HarnessError: With the place of what is missing, or contradicts itself.
    """
    if not rows:
        raise HarnessError(f"{file}: there is no row in it")
    runs: dict[Value, list[tuple[str, Row]]] = {}
    for place, row in rows:
        runs.setdefault(row.get("run_id") or "", []).append((place, row))
    sha256 = hashlib.sha256(data).hexdigest()
    return tuple(_run(file, sha256, of_run) for of_run in runs.values())


def _run(file: Path, sha256: str, rows: Sequence[tuple[str, Row]]) -> Imported:
    """One run. What a run, a case or a process has once must be the same in all its rows."""
    (whole,) = _grouped(rows, "run", "run_id").values()
    first, place = whole[0][1], whole[0][0]
    cases, measured = [], []
    for case_rows in _grouped(rows, "case", "case_id").values():
        case = _case(case_rows)
        cases.append(case)
        ran = [
            (p, {**r, "process": r.get("process") or 0})
            for p, r in case_rows
            if r.get("outcome") != NOT_RUN
        ]
        for process_rows in _grouped(ran, "process", "process").values():
            measured.append(_measurement(case, process_rows))
    name = _text(first, "suite") or file.stem
    return Imported(
        suite=Suite(
            name=name,
            title=f"{name}, from {file.name}",
            subject=name,
            question=f"What does {file.name} hold?",
            path=str(file),
            text=f"# {len(cases)} cases of {file.name}, no suite of ours\n",
            sha256=sha256,
            cases=tuple(cases),
        ),
        environment=_environment(first, file),
        measurements=tuple(measured),
        started_at=_moment(_text(first, "started_at"), place),
    )


def _grouped(
    rows: Sequence[tuple[str, Row]], level: str, key: str
) -> Mapping[Value, list[tuple[str, Row]]]:
    found: dict[Value, list[tuple[str, Row]]] = {}
    for place, row in rows:
        known = found.setdefault(row.get(key), [])
        for name in _LEVELS[level] if known else ():
            then, now = known[0][1].get(name), row.get(name)
            if then != now:
                raise HarnessError(
                    f"{place}: {name} is {now!r}, and {then!r} at {known[0][0]}",
                    f"One {level} has one value of it.",
                )
        known.append((place, row))
    return found


def _case(rows: Sequence[tuple[str, Row]]) -> Case:
    place, row = rows[0]
    if not (case_id := _text(row, "case_id")):
        raise HarnessError(f"{place}: case_id is empty", "It is what joins runs.")
    try:
        axes = json.loads(_text(row, "axes") or "{}")
        if not isinstance(axes, dict) or not all(
            isinstance(value, bool | int | float | str) for value in axes.values()
        ):
            raise ValueError("it must be an object of numbers and words")
    except (ValueError, RecursionError) as error:
        raise HarnessError(f"{place}: axes: {error}", 'For example {"seq_len": 512}.') from None
    return Case(
        case_id=case_id,
        workload=_text(row, "workload") or case_id.partition("/")[0],
        factory="imported:table",
        provider=_text(row, "provider") or "imported",
        axes=axes,
        swept=tuple(axes),
        settings=MeasureSettings(
            processes=max(1, len({r.get("process") for _, r in rows})),
            min_samples=_number(row, "min_samples") or 1,
            accuracy=False,
        ),
    )


def _measurement(case: Case, rows: Sequence[tuple[str, Row]]) -> Measurement:
    place, row = rows[0]
    timed = [(p, r) for p, r in rows if r.get("sample_s") is not None]
    said = _text(row, "outcome") or ("ok" if timed else "")
    if said not in [*Outcome]:
        raise HarnessError(
            f"{place}: outcome {said!r} of a row without sample_s"
            if not said
            else f"{place}: no process ends {said!r}",
            f"One of {', '.join((*Outcome, NOT_RUN))}.",
        )
    for where, sample in timed:
        value = sample["sample_s"]
        if not (isinstance(value, float) and value > 0):
            raise HarnessError(f"{where}: sample_s is {value}, which is no time")
    numbers = [r.get("sample") for _, r in timed]
    if any(n is not None for n in numbers) and numbers != [*range(len(timed))]:
        raise HarnessError(
            f"{place}: the samples of {case.case_id}, process {row.get('process')}, are not"
            f" numbered 0 to {len(timed) - 1} in order",
            "Sort the rows, or leave the column sample out.",
        )
    clock = _text(row, "clock")
    if clock not in ("", *Clock):
        raise HarnessError(f"{place}: no clock is called {clock!r}", f"One of {', '.join(Clock)}.")
    try:
        return Measurement(
            case_id=case.case_id,
            process=_number(row, "process") or 0,
            outcome=Outcome(said),
            detail=_text(row, "detail"),
            clock=Clock(clock) if clock else Clock.HOST if timed else None,
            samples_s=_series(timed, "sample_s"),
            host_samples_s=_series(timed, "host_sample_s"),
            samples_at_s=_series(timed, "sample_at_s"),
            discarded=_discarded(timed),
            steady=None if row.get("steady") is None else bool(row["steady"]),
            tokens=_number(row, "tokens"),
            flops=_number(row, "flops"),
            bytes=_number(row, "bytes"),
            peak_memory_bytes=_number(row, "peak_memory_bytes"),
            lower_bound_s=_real(row, "lower_bound_s"),
            wall_s=_real(row, "wall_s") or 0.0,
        )
    except ValueError as error:
        raise HarnessError(f"{place}: {error}") from None


def _series(timed: Sequence[tuple[str, Row]], name: str) -> tuple[float, ...]:
    """A value for each sample, or none at all."""
    found = tuple(value for _, r in timed if isinstance(value := r.get(name), float))
    if found and len(found) < len(timed):
        raise HarnessError(f"{timed[0][0]}: {name} is there for some samples only")
    return found


def _discarded(timed: Sequence[tuple[str, Row]]) -> Mapping[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for i, (_, row) in enumerate(timed):
        for reason in _text(row, "discarded").split():
            found.setdefault(reason, []).append(i)
    return {reason: tuple(samples) for reason, samples in found.items()}


def _environment(row: Row, file: Path) -> Environment:
    device, commit = _text(row, "device") or "cpu", _text(row, "commit")
    gpu = None
    if device != "cpu":
        gpu = Gpu(
            name=device,
            uuid=_text(row, "device_id") or UNKNOWN,
            index=0,
            memory_bytes=0,
            driver=_text(row, "driver") or UNKNOWN,
            cuda_driver=UNKNOWN,
            compute_capability=UNKNOWN,
        )
    return Environment(
        captured_at=_text(row, "started_at"),
        hostname=_text(row, "host") or UNKNOWN,
        os=UNKNOWN,
        cpu=UNKNOWN,
        cpu_count=0,
        memory_bytes=0,
        gpu=gpu,
        gpu_unavailable="" if gpu else f"{file.name} names no GPU",
        versions={"torch": _text(row, "torch")} if row.get("torch") else {},
        git=Git(
            commit=commit,
            branch=_text(row, "branch") or UNKNOWN,
            dirty_sha256=_text(row, "uncommitted"),
        )
        if commit
        else None,
        command=("harness", "import", str(file)),
    )


def _moment(text: str, place: str) -> datetime | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise HarnessError(
            f"{place}: started_at is {text!r}, which is no date", "Write ISO 8601."
        ) from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    return "" if value is None else str(value)


def _number(row: Row, name: str) -> int | None:
    value = row.get(name)
    return value if isinstance(value, int) else None


def _real(row: Row, name: str) -> float | None:
    value = row.get(name)
    return value if isinstance(value, float) else None
