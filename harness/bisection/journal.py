"""A bisection on disk: a folder, and in it one JSON line for each thing that was learnt.

    reports/bisects/20261121-161530-train-5f0c/
        state.jsonl   the request, then every reading, every commit left out, every merge entered
        log.txt       the same for a person, with times
        logs/         output of the worker processes and of builds

A line is on the disk before the next process starts. A kill at any moment loses the measurement
in flight, and the search goes on from what stands here.
"""

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from harness import store
from harness.analysis.search import Stage
from harness.bisection.causes import Cause
from harness.bisection.criteria import Criterion
from harness.bisection.history import Commit
from harness.errors import StoreError
from harness.records import Case, Environment, Measurement, Suite

DEFAULT_ROOT = Path("reports/bisects")
STATE = "state.jsonl"
LOG = "log.txt"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """How a commit is made ready to be measured."""

    command: str = ""
    """For a shell, in the commit's worktree; empty where nothing is to be built."""
    key: tuple[str, ...] = ()
    """Patterns of the files that what is built depends on. Commits in which these are the same
    share what was built; without any, every commit is built for itself."""
    timeout_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The first line: all that a resumed search must know."""

    schema: int = SCHEMA_VERSION
    started_at: str
    suite: Suite
    """With the one case."""
    case: Case
    """As it is measured."""
    criterion: Criterion
    effect: float
    build: Build = field(default_factory=Build)
    roots: tuple[str, ...] = (".",)
    """Folders of a tree that its code is imported from."""
    environment: Environment | None = None
    """Where it was begun."""
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun(Request):
    """Which commit was it?"""

    repository: str
    history: tuple[Commit, ...]
    """First the good commit, last the bad one."""
    enter_merges: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CausesBegun(Request):
    """Which difference of two runs was it? The case is the first run's."""

    runs: tuple[str, str]
    """Their ids, the first one's first."""
    other: Case
    """The second run's case, as it is measured."""
    causes: tuple[Cause, ...]
    """What is varied, the most suspect first."""
    environments: tuple[Environment, Environment]
    """In which they were made."""
    inherited: Mapping[str, str] = field(default_factory=dict)
    """Variables that both runs and this machine have alike."""
    commit: str = ""
    """Of both runs; empty where the code is measured as it lies in the working tree."""
    repository: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One process."""

    level: int
    """0 is the history asked for, 1 the merged side of its culprit, and so on."""
    block: int
    stage: Stage
    position: int
    commit: str
    measurement: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A commit that cannot be measured."""

    level: int
    position: int
    commit: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """The merged side of a culprit is searched in its turn."""

    merge: str
    history: tuple[Commit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Something a reader of the result must know: it was resumed, the machine has changed."""

    at: str
    text: str


Line = Begun | CausesBegun | Taken | LeftOut | Entered | Noted
KINDS: dict[str, type[Any]] = {
    "begun": Begun,
    "causes_begun": CausesBegun,
    "taken": Taken,
    "left_out": LeftOut,
    "entered": Entered,
    "noted": Noted,
}
_ADAPTERS = {kind: TypeAdapter(record) for kind, record in KINDS.items()}


class Journal:
    """One bisection's folder, and its only writer. Where workers' logs go, too."""

    def __init__(self, folder: Path, fd: int, lines: tuple[Line, ...]) -> None:
        self.folder = folder
        self.lines = list(lines)
        self._fd = fd

    @classmethod
    def create(cls, root: Path, begun: Begun | CausesBegun) -> "Journal":
        """Begin a bisection in a new folder.

        Raises:
            StoreError: It cannot be made or written.
        """
        what = re.sub(r"[^a-z0-9]+", "-", begun.case.case_id.lower()).strip("-")[:32].rstrip("-")
        name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{what}-{secrets.token_hex(2)}"
        folder = root / name
        try:
            (folder / "logs").mkdir(parents=True)
            fd = os.open(folder / STATE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(
                f"cannot begin a bisection in {folder}: {error.strerror}",
                "Name a folder that can be written with --state.",
            ) from error
        journal = cls(folder, fd, ())
        journal.write(begun)
        for directory in (folder, root):
            store.sync_directory(directory)
        return journal

    @classmethod
    def resume(cls, root: Path, name: str) -> "Journal":
        """Go on with one; a last line that was cut short is removed.

        Raises:
            StoreError: There is none of that name, it is damaged, or another process has it.
        """
        folder = find(root, name)
        try:
            fd = os.open(folder / STATE, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise StoreError(f"cannot write {folder / STATE}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = (folder / STATE).read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            os.ftruncate(fd, len(whole))
            lines = tuple(_decoded(whole, folder / STATE))
        except BlockingIOError:
            os.close(fd)
            raise StoreError(
                f"bisection {folder.name} is carried on by another process", "Stop it first."
            ) from None
        except BaseException:  # Ctrl-C included: the descriptor holds the lock
            os.close(fd)
            raise
        return cls(folder, fd, lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def request(self) -> Begun | CausesBegun:
        first = self.lines[0]
        assert isinstance(first, Begun | CausesBegun)
        return first

    def write(self, line: Line) -> None:
        """Keep a line; it is on the disk when this returns.

        Raises:
            StoreError: It could not be written; the lines before it stay.
        """
        kind = next(k for k, record in KINDS.items() if isinstance(line, record))
        fields = _ADAPTERS[kind].dump_python(line, mode="json")
        text = json.dumps({"kind": kind, **fields}, ensure_ascii=False, allow_nan=False)
        try:
            store.append_synced(self._fd, text.encode("utf-8", "replace") + b"\n")
        except OSError as error:
            raise StoreError(
                f"cannot write {self.folder / STATE}: {error.strerror}",
                f"Make room, then: harness bisect --resume {self.folder.name}",
            ) from error
        self.lines.append(line)

    def log(self, text: str) -> None:
        """Keep a sentence for a person."""
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC):%H:%M:%S} {text}\n")

    # --- harness.execution.runner.Writer ---

    def append(self, measurement: Measurement) -> None:
        """Nothing: `write` keeps a measurement, with its commit."""

    def log_path(self, case_id: str, process: int) -> Path:
        path = self.folder / "logs" / f"{process}.log"
        path.touch()
        return path


def find(root: Path, name: str) -> Path:
    """The folder of a bisection by its name, the start of one, `latest`, or its path.

    Raises:
        StoreError: There is none, or several.
    """
    if (Path(name) / STATE).is_file():
        return Path(name)
    folders = sorted(path.parent for path in root.glob(f"*/{STATE}"))
    fits = [f for f in folders if f.name.startswith(name)]
    if name == "latest":
        fits = folders[-1:]
    if len(fits) == 1:
        return fits[0]
    known = ", ".join(f.name for f in folders[-3:]) or "none yet"
    raise StoreError(f"{name!r} fits {len(fits)} bisections of {root}", f"There are: {known}.")


def _decoded(data: bytes, path: Path) -> Iterator[Line]:
    lines = data.split(b"\n")[:-1]
    if not lines:
        raise StoreError(f"{path} holds no whole line", f"Delete {path.parent}.")
    for number, text in enumerate(lines, 1):
        remedy = "The file is damaged; begin anew."
        try:
            fields = json.loads(text)
            kind = fields.pop("kind")
            if kind.endswith("begun") and fields["schema"] != SCHEMA_VERSION:
                remedy = f"This harness reads schema {SCHEMA_VERSION}."
                raise ValueError(f"schema {fields['schema']}")
            line: Line = _ADAPTERS[kind].validate_python(fields)
            if (number == 1) != isinstance(line, Begun | CausesBegun):
                raise ValueError("the request stands on the first line, and there alone")
        except (ValueError, KeyError, AttributeError, ValidationError) as error:
            problem = str(error).partition("\n")[0]
            raise StoreError(f"{path}:{number}: {problem}", remedy) from None
        yield line
