"""Runs on disk: append-only JSON lines, one folder a run.

    reports/runs/20261121-073012-smoke-h200-3f2a/
        run.jsonl       {"kind": "run", ...} with the suite in full and the environment,
                        {"kind": "proof", ...} once the instrument has proved itself,
                        {"kind": "measurement", ...} as each worker process ends,
                        {"kind": "resumed", ...} where an interrupted run went on,
                        {"kind": "end", ...} once nothing is left to measure
        suite.yaml      the suite file as it was read
        logs/           output of the worker processes

Every line is flushed and synced before `append` returns, and counts once its newline is on the
disk: a crash at any byte loses at most the case in flight.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import AmbiguousRun, StoreError
from harness.records import Measurement, Proof, Run
from harness.store import lines

DEFAULT_ROOT = Path("reports/runs")
RUN_FILE = "run.jsonl"
SUITE_FILE = "suite.yaml"
LOG_FOLDER = "logs"


# --- reading -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What a list of runs shows of each."""

    run_id: str
    folder: str
    suite: str = ""
    title: str = ""
    device: str = ""
    commit: str = ""
    """Empty outside a repository."""
    cases: int = 0
    measurements: int | None = None
    """None while the run is unfinished."""
    started_at: str = ""
    ended_at: str = ""
    """Empty while the run is unfinished."""
    problem: str = ""
    """Why the run cannot be read; most other fields are then empty."""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """How many cases had each outcome; empty unless the index filled it in."""

    @property
    def state(self) -> str:
        """In one word: complete, unfinished or unreadable."""
        if self.problem:
            return "unreadable"
        return "complete" if self.ended_at else "unfinished"


def load(root: Path, run_id: str | Path) -> Run:
    """Read one run.

    Args:
        root: The folder of the runs.
        run_id: An id, a prefix that fits one run only, `latest`, or the path of a run's folder.

    Raises:
        StoreError: The run is absent or damaged, or has a later schema.
    """
    return read(find(root, run_id))[0]


def header_of(run: Run) -> RunHeader:
    """The header of a run."""
    git = run.environment.git
    return RunHeader(
        run_id=run.run_id,
        folder=run.folder,
        suite=run.suite.name,
        title=run.suite.title,
        device=run.environment.device_name,
        commit=git.commit if git else "",
        cases=len(run.suite.cases),
        measurements=len(run.measurements) if run.ended_at else None,
        started_at=run.started_at,
        ended_at=run.ended_at,
    )


def read(folder: Path) -> tuple[Run, int]:
    """The run, and how many bytes of its file are whole lines."""
    path = folder / RUN_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    whole, newline, cut_short = data.rpartition(b"\n")
    if not newline:
        raise _never_began(path)
    started, *later = (
        lines.decode(line, f"{path}:{number}") for number, line in enumerate(whole.split(b"\n"), 1)
    )
    if not isinstance(started, lines.Started):
        raise lines.damaged(f"{path}:1", "the first line must be the run's")

    measurements: dict[tuple[str, int], Measurement] = {}
    notes: list[str] = []
    proofs: list[Proof] = []
    ended_at, elapsed_s, wall_s = "", None, None
    for number, line in enumerate(later, 2):
        if ended_at:
            raise lines.damaged(f"{path}:{number}", "nothing may follow the end of the run")
        match line:
            case Measurement(case_id=case_id, process=process):
                if (case_id, process) in measurements:
                    notes.append(
                        f"{case_id}, process {process}, was recorded again on line {number}; "
                        "the first record counts."
                    )
                measurements.setdefault((case_id, process), line)
            case Proof():
                proofs.append(line)
            case lines.Resumed():
                notes.append(f"Resumed at {line.at} after {len(measurements)} measurements.")
                notes.extend(line.notes)
            case lines.Ended():
                ended_at, elapsed_s, wall_s = line.at, line.elapsed_s, line.wall_s
            case lines.Started():
                raise lines.damaged(f"{path}:{number}", "a second run begins in the same file")
    run = Run(
        run_id=started.run_id,
        folder=str(folder),
        suite=started.suite,
        environment=started.environment,
        measurements=tuple(measurements.values()),
        started_at=started.started_at,
        ended_at=ended_at,
        elapsed_s=elapsed_s,
        notes=(*notes, *cut_notes(len(cut_short))),
        proofs=tuple(proofs),
        wall_s=wall_s,
    )
    return run, len(data) - len(cut_short)


def cut_notes(cut_bytes: int) -> tuple[str, ...]:
    if not cut_bytes:
        return ()
    return (f"A last line cut short ({cut_bytes} bytes) was dropped: the case then in flight.",)


def _never_began(path: Path) -> StoreError:
    return StoreError(
        f"{path} has no complete line: the run was stopped before it measured anything",
        f"Delete {path.parent}.",
    )


def _folders(root: Path) -> list[Path]:
    """Folders of runs, oldest first."""
    return sorted(path.parent for path in root.glob(f"*/{RUN_FILE}"))


def find(root: Path, run_id: str | Path) -> Path:
    """The folder of the run that an id, a unique prefix, `latest` or a path names."""
    path = Path(run_id)
    if path.name == RUN_FILE:
        path = path.parent
    if (path / RUN_FILE).is_file():
        return path
    folders = _folders(root)
    if not folders:
        raise StoreError(f"{root} has no runs", "Make one with `harness run SUITE`.")
    if run_id == "latest":
        return folders[-1]
    name = str(run_id)
    fits = [f for f in folders if f.name == name] or [f for f in folders if f.name.startswith(name)]
    if len(fits) == 1:
        return fits[0]
    names = [f.name for f in folders]
    near = [f.name for f in fits] or difflib.get_close_matches(name, names, 3, 0.3) or names[-3:]
    raise (AmbiguousRun if fits else StoreError)(
        f"{name!r} fits {len(fits)} runs of {root}" if fits else f"{root} has no run {name!r}",
        f"Name one of its runs: {', '.join(near)}.",
    )


# --- writing -----------------------------------------------------------------------------
