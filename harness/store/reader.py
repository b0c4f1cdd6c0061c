"""Reads runs: append-only JSON lines, one folder per run.

    reports/runs/20261121-073012-smoke-h200-3f2a/
        run.jsonl       {"kind": "run", ...} with the whole suite and the environment,
                        {"kind": "self_test", ...} after the self-test,
                        {"kind": "environment", ...} before the measurements of each GPU, if Ray
                        used several,
                        {"kind": "measurement", ...} as each worker process ends,
                        {"kind": "resumed", ...} when an interrupted run is resumed,
                        {"kind": "end", ...} when everything is measured, or the run is stopped
        suite.yaml      the suite file as it was read
        logs/           output of the worker processes

A line counts once its newline is on the disk: a crash loses at most the case that was running.
"""

import difflib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from harness.errors import StoreError
from harness.records import Environment, Measurement, Run, SelfTest, joined
from harness.store import lines

DEFAULT_ROOT = Path("reports/runs")
RUN_FILE = "run.jsonl"
SUITE_FILE = "suite.yaml"


def load(root: Path, run_id: str | Path) -> Run:
    """The run of an id, a unique prefix of one, `latest`, or the path of its folder; a StoreError
    if it is absent or damaged, or has another schema."""
    return read(find(root, run_id))


def stored(
    root: Path, say: Callable[[str], None], wanted: Callable[[Run], bool] = lambda _: True
) -> Iterator[Run]:
    """The runs of a store, oldest first; a note on each that cannot be read. `wanted` sees a run
    before its measurements are read: with the suite and the environment of its first line."""
    for path in sorted(root.glob(f"*/{RUN_FILE}")):
        try:
            with path.open("rb") as file:
                begun = parse(file.readline(), path.parent, path)
            if wanted(begun):
                yield read(path.parent)
        except (OSError, StoreError) as error:
            say(f"note: {path.parent} cannot be read: {str(error).partition(chr(10))[0]}")


def is_full(run: Run) -> bool:
    """Whether `harness run` measured every case of its suite, with the suite's axes, to the end.

    A record need not count the cases that a filter left out; its command has the filter.
    """
    _, what, *options = (*run.environment.command, "", "")
    if what not in ("run", "") or run.suite.left_out or run.stopped or not run.ended_at:
        return False
    for option, value in pairwise(options):
        short = option[:2] in ("-f", "-s") and option[2:]  # -sseq_len=512
        name, _, joined = (option[:2], "", short) if short else option.partition("=")
        sets_axis = not (joined or value).startswith("measure.")
        if name in ("-f", "--filter") or (name in ("-s", "--set") and sets_axis):
            return False
    return True


def read(folder: Path) -> Run:
    """The run in a folder."""
    path = folder / RUN_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    return parse(data, folder, path)


def parse(data: bytes, folder: Path, path: Path) -> Run:
    """The run that the content of a run.jsonl describes; `path` is the file, for errors."""
    whole, newline, cut_short = data.rpartition(b"\n")
    if not newline:
        problem = f"{path} has no complete line: the run stopped before its first measurement"
        raise StoreError(problem, f"Delete {path.parent}.")
    started, *later = (
        lines.decode(line, f"{path}:{number}") for number, line in enumerate(whole.split(b"\n"), 1)
    )
    if not isinstance(started, lines.Started):
        raise lines.damaged(f"{path}:1", "the first line is not of kind 'run'")

    measurements: dict[tuple[str, int], Measurement] = {}
    notes: list[str] = []
    self_tests: list[SelfTest] = []
    cards: list[Environment] = []
    ended: lines.Ended | None = None
    for number, line in enumerate(later, 2):
        if ended and not (ended.stopped and isinstance(line, lines.Resumed)):
            raise lines.damaged(f"{path}:{number}", "a line follows the end of the run")
        match line:
            case Measurement(case_id=case_id, process=process):
                if (case_id, process) in measurements:
                    notes.append(
                        f"{case_id}, process {process}, was recorded again on line {number}; "
                        "the first record counts."
                    )
                measurements.setdefault((case_id, process), line)
            case SelfTest():
                self_tests.append(line)
            case lines.MeasuredIn():
                cards.append(line.environment)
            case lines.Resumed():
                ended = None
                notes.append(f"Resumed at {line.at} after {len(measurements)} measurements.")
                notes.extend(line.notes)
            case lines.Ended():
                ended = line
            case lines.Started():
                raise lines.damaged(f"{path}:{number}", "a second run starts in the same file")
    notes += cut_notes(len(cut_short))
    here = joined(cards) if cards else started.environment
    kind, where = ("GPUs", f"{here.card}, on ") if here.gpu else ("hosts", "")
    if (used := len({m.card for m in measurements.values() if m.card})) > 1:
        several = f"{used} {kind} measured this run: {where}{here.hostname}."
        notes.append(f"{several} Cases of different {kind} are not compared with each other.")
    return Run(
        run_id=started.run_id,
        folder=str(folder),
        suite=started.suite,
        environment=here,
        environments=tuple(cards),
        measurements=tuple(measurements.values()),
        started_at=started.started_at,
        ended_at=ended.at if ended else "",
        elapsed_s=ended.elapsed_s if ended else None,
        notes=tuple(notes),
        self_tests=tuple(self_tests),
        wall_s=ended.wall_s if ended else None,
        stopped=ended.stopped if ended else None,
    )


def cut_notes(cut_bytes: int) -> tuple[str, ...]:
    """The note on an incomplete last line; empty without one."""
    note = f"An incomplete last line ({cut_bytes} bytes) was dropped: the case that was running."
    return (note,) if cut_bytes else ()


def find(
    root: Path,
    run_id: str | Path,
    file: str = RUN_FILE,
    kind: str = "run",
    start: str = "harness run SUITE",
) -> Path:
    """The folder of a run, `run_id` as for `load`; or of what else has a folder with this file."""
    path = Path(run_id)
    if path.name == file:
        path = path.parent
    if (path / file).is_file():
        return path
    folders = sorted(path.parent for path in root.glob(f"*/{file}"))  # oldest first
    if not folders:
        raise StoreError(f"{root} has no {kind}s", f"Make one: {start}")
    if run_id == "latest":
        return folders[-1]
    name = str(run_id)
    fits = [f for f in folders if f.name == name] or [f for f in folders if f.name.startswith(name)]
    if len(fits) == 1:
        return fits[0]
    names = [f.name for f in folders]
    near = [f.name for f in fits] or difflib.get_close_matches(name, names, 3, 0.3) or names[-3:]
    several = f"{name!r} matches {len(fits)} {kind}s of {root}"
    problem = several if fits else f"{root} has no {kind} {name!r}"
    raise StoreError(problem, f"Name one of its {kind}s: {', '.join(near)}.")
