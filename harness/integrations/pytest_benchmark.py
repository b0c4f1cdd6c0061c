"""JSON of pytest-benchmark, imported as a run and exported from one.

Each benchmark becomes a case, and its rounds the samples of one process on the host clock. Such a
run can be shown and reported, but a comparison needs two processes.
"""

import hashlib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness import __version__, units
from harness.errors import HarnessError
from harness.records import (
    Case,
    Clock,
    Environment,
    Git,
    Measurement,
    MeasureSettings,
    Outcome,
    Run,
    Scalar,
    Suite,
)
from harness.store import reader

NOT_RECORDED = "imported from pytest-benchmark, which records no GPU"
UNKNOWN = "unknown"


# --- in ----------------------------------------------------------------------------------


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Stats(_Model):
    data: tuple[float, ...] = ()
    rounds: int
    iterations: int = 1


class _Benchmark(_Model):
    name: str
    fullname: str = Field(min_length=1)
    group: str | None = None
    params: dict[str, Any] | None = None
    options: dict[str, Any] = {}
    stats: _Stats


class _Commit(_Model):
    id: str = UNKNOWN
    branch: str = UNKNOWN
    dirty: bool = False


class _Machine(_Model):
    node: str = UNKNOWN
    system: str = ""
    release: str = ""
    machine: str = ""
    python_version: str | None = None
    cpu: dict[str, Any] = {}


class _Document(_Model):
    machine_info: _Machine
    commit_info: _Commit
    benchmarks: tuple[_Benchmark, ...]
    datetime: str
    version: str


def read_benchmarks(path: Path) -> Run:
    """The run that a JSON file of pytest-benchmark describes; it has no id and no folder yet.

    Raises:
        HarnessError: It is not such a file, has no rounds, or a round is not a positive time.
    """
    data = reader.read_limited(path)
    try:
        document = _Document.model_validate(json.loads(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise _foreign(path, f"{where}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise _foreign(path, f"not JSON: {error}") from None
    try:
        measured_at = datetime.fromisoformat(document.datetime)
        measured_at = measured_at.replace(tzinfo=measured_at.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):  # in UTC it may be before year 1
        raise _foreign(path, f"datetime is {document.datetime!r}") from None
    if not document.benchmarks:
        raise HarnessError(f"{path}: contains no benchmarks", "Check whether its session failed.")
    names = [b.fullname for b in document.benchmarks]
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise HarnessError(f"{path}: two benchmarks are named {twice[0]}", "Keep one of them.")
    cases = tuple(_case(b) for b in document.benchmarks)
    text = f"# {len(cases)} benchmarks of pytest-benchmark {document.version}, imported\n"
    return Run(
        run_id="",
        folder="",
        suite=Suite(
            name=path.stem,
            title=f"pytest-benchmark: {path.name}",
            subject=f"Benchmarks {re.sub(r'[^A-Za-z0-9 ]+', ' ', path.stem).strip()}".strip(),
            question="What did pytest-benchmark measure?",
            path=str(path),
            text=text,
            sha256=hashlib.sha256(data).hexdigest(),
            cases=cases,
        ),
        environment=_environment(document),
        measurements=tuple(_measurement(path, b, document) for b in document.benchmarks),
        started_at=measured_at.isoformat(),
    )


def _foreign(path: Path, problem: str) -> HarnessError:
    return HarnessError(
        f"{path}: not a JSON file of pytest-benchmark: {problem}",
        "Write one with `pytest --benchmark-json FILE`.",
    )


def _case(benchmark: _Benchmark) -> Case:
    axes = {name: _scalar(value) for name, value in (benchmark.params or {}).items()}
    return Case(
        case_id=benchmark.fullname,
        workload=benchmark.group or benchmark.name.partition("[")[0],
        factory=f"pytest-benchmark:{benchmark.fullname}",
        provider="pytest-benchmark",
        axes=axes,
        swept=tuple(axes),
        settings=MeasureSettings(processes=1, min_samples=1, accuracy=False),
    )


def _scalar(value: Any) -> Scalar:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str) else json.dumps(value)


def _measurement(path: Path, benchmark: _Benchmark, document: _Document) -> Measurement:
    stats = benchmark.stats
    if not stats.data:
        raise HarnessError(
            f"{path}: {benchmark.fullname} has statistics but no rounds",
            "Keep the rounds: `pytest --benchmark-json FILE`, or --benchmark-save-data.",
        )
    if len(stats.data) != stats.rounds:
        raise HarnessError(
            f"{path}: {benchmark.fullname} has {len(stats.data)} of {stats.rounds} rounds",
            "The file was modified.",
        )
    try:
        return Measurement(
            case_id=benchmark.fullname,
            process=0,
            outcome=Outcome.OK,
            clock=Clock.HOST,
            samples_s=stats.data,
            host_samples_s=stats.data,
            effective={
                "timer": str(benchmark.options.get("timer", UNKNOWN)),
                "iterations": stats.iterations,
            },
            started_at=document.datetime,
            wall_s=sum(stats.data) * stats.iterations,
        )
    except ValueError as error:
        raise HarnessError(
            f"{path}: {benchmark.fullname}: {error}",
            "The timer was too coarse, or the file was modified.",
        ) from None


def _environment(document: _Document) -> Environment:
    machine, commit = document.machine_info, document.commit_info
    count = machine.cpu.get("count")
    return Environment(
        captured_at=document.datetime,
        hostname=machine.node,
        os=" ".join(filter(None, (machine.system, machine.release, machine.machine))),
        cpu=str(machine.cpu.get("brand_raw", UNKNOWN)),
        cpu_count=count if isinstance(count, int) else 0,
        memory_bytes=0,
        gpu=None,
        gpu_unavailable=NOT_RECORDED,
        versions={
            "python": machine.python_version,
            "harness": __version__,
            "pytest-benchmark": document.version,
        },
        git=Git(
            commit=commit.id, branch=commit.branch, dirty_sha256=UNKNOWN if commit.dirty else ""
        ),
        command=("pytest",),
    )


# --- out ---------------------------------------------------------------------------------


def benchmarks(run: Run) -> dict[str, object]:
    """A run as a document for `pytest-benchmark compare`.

    Each case that ended ok is a benchmark with the samples of all its processes. The format has no
    place for processes and failures: they are in extra_info and `harness`, which its tools ignore.
    """
    here, git = run.environment, run.environment.git
    left = left_out(run)
    return {
        "machine_info": {
            "node": here.hostname,
            "processor": here.cpu,
            "machine": here.os.rpartition(" ")[2],
            "python_compiler": UNKNOWN,
            "python_implementation": "CPython",
            "python_implementation_version": here.versions.get("python") or UNKNOWN,
            "python_version": here.versions.get("python") or UNKNOWN,
            "python_build": [UNKNOWN, UNKNOWN],
            "release": here.os,
            "system": here.os.partition(" ")[0],
            "cpu": {"brand_raw": here.cpu, "count": here.cpu_count},
            "gpu": here.gpu.name if here.gpu else None,
        },
        "commit_info": {
            "id": git.commit if git else "unversioned",
            "time": None,
            "author_time": None,
            "dirty": bool(git and git.dirty_sha256),
            "project": run.suite.name,
            "branch": git.branch if git else "(unknown)",
        },
        "benchmarks": [
            _benchmark(run, case, run.of(case.case_id))
            for case in run.suite.cases
            if case.case_id not in left
        ],
        "datetime": run.started_at,
        "version": f"nsa-harness {__version__}",
        "harness": {"run": run.run_id, "left_out": left},
    }


def left_out(run: Run) -> dict[str, str]:
    """The cases that are left out, and how they ended."""
    why = units.stop_text(run.stopped) if run.stopped else ""
    absent = {units.ending_text(None, why)}
    ends = {
        case.case_id: {str(m.outcome) for m in run.of(case.case_id)} or absent
        for case in run.suite.cases
    }
    return {
        case_id: ", ".join(sorted(outcomes - {Outcome.OK}))
        for case_id, outcomes in ends.items()
        if outcomes != {Outcome.OK}
    }


def _benchmark(run: Run, case: Case, measured: Sequence[Measurement]) -> dict[str, object]:
    data = [sample for m in measured for sample in m.samples_s]
    return {
        "group": case.workload,
        "name": case.case_id,
        "fullname": case.case_id,
        "params": dict(case.axes) or None,
        "param": None,
        "extra_info": {
            "run": run.run_id,
            "provider": case.provider,
            "processes": len(measured),
            "tokens": measured[0].tokens,
        },
        "options": {
            "disable_gc": False,
            "timer": str(measured[0].clock),
            "min_rounds": case.settings.min_samples,
            "max_time": case.settings.sample_s,
            "min_time": 0.0,
            "warmup": True,
        },
        "stats": {**statistics_of(data), "data": data, "iterations": 1},
    }


def statistics_of(data: Sequence[float]) -> dict[str, object]:
    """The statistics of pytest-benchmark, by its definitions."""
    ordered = sorted(data)
    mean, spread = statistics.mean(data), statistics.stdev(data) if len(data) > 1 else 0.0
    q1, q3 = map(float, np.quantile(data, (0.25, 0.75), method="hazen"))
    low, high = q1 - 1.5 * (q3 - q1), q3 + 1.5 * (q3 - q1)
    within = [x for x in ordered if low <= x <= high]
    far = sum(abs(x - mean) > spread for x in data)
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": spread,
        "rounds": len(data),
        "median": statistics.median(data),
        "iqr": q3 - q1,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": len(data) - len(within),
        "stddev_outliers": far,
        "outliers": f"{far};{len(data) - len(within)}",
        "ld15iqr": within[0],
        "hd15iqr": within[-1],
        "ops": len(data) / sum(data),
        "total": sum(data),
    }
