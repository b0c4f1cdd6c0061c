"""A bisection on disk: a folder with a file of JSON lines.

    reports/bisects/20261121-161530-train-5f0c/
        state.jsonl   the request, then every process, every skipped commit
        logs/         output of the worker processes and of builds

Each line is on the disk before the next process starts. A kill loses only the process that is
running; the search resumes from these lines.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from harness.bisect.criteria import Criterion
from harness.bisect.history import Commit
from harness.bisect.search import BisectStage
from harness.errors import StoreError
from harness.records import Case, Environment, Measurement, Suite
from harness.store import reader
from harness.store.lines import LOG_FOLDER, LineFile, dated

DEFAULT_ROOT = Path("reports/bisects")
STATE = "state.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectRequest:
    """The first line: everything that a search and its resumption need."""

    kind: Literal["begun"] = "begun"
    schema: Literal[4] = 4
    started_at: str
    suite: Suite
    """With only the one case."""
    case: Case
    """With the settings that it is measured with."""
    criterion: Criterion
    effect: float
    build: str = ""
    """Command for a shell, in the worktree of each commit; empty if nothing is to be built."""
    roots: tuple[str, ...] = (".",)
    """Folders of a tree that its code is imported from."""
    environment: Environment | None = None
    """Of the machine that it started on."""
    repository: str
    history: tuple[Commit, ...]
    """First the good commit, last the bad one."""
    command: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{len(self.history) - 1} commits, by {self.criterion}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    kind: Literal["taken"] = "taken"
    block: int
    stage: BisectStage
    position: int
    commit: str
    measurement: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A commit that cannot be measured."""

    kind: Literal["left_out"] = "left_out"
    position: int
    commit: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A fact for the reader of the result: the search was resumed, the machine has changed."""

    kind: Literal["noted"] = "noted"
    text: str


JournalLine = BisectRequest | Measured | Skipped | Note
_LINE: TypeAdapter[JournalLine] = TypeAdapter(Annotated[JournalLine, Field(discriminator="kind")])


class Journal(LineFile):
    """The folder of one bisection, and its only writer. Workers' logs are stored there, too."""

    def __init__(self, folder: Path, first: bytes = b"") -> None:
        remedy = f"Free some space, then: harness bisect --resume {folder.name}"
        super().__init__(folder / STATE, remedy, first)
        self.lines: list[JournalLine] = []

    @classmethod
    def create(cls, root: Path, begun: BisectRequest) -> "Journal":
        """Start a bisection in a new folder; a StoreError if it cannot be created or written."""
        folder = root / dated(datetime.now(UTC), begun.case.case_id[:32])
        try:
            (folder / LOG_FOLDER).mkdir(parents=True)
            journal = cls(folder, _encoded(begun))
        except OSError as error:
            raise StoreError(
                f"cannot start a bisection in {folder}: {error.strerror}",
                "Give a writable folder with --state.",
            ) from error
        journal.lines.append(begun)
        return journal

    @classmethod
    def resume(cls, root: Path, name: str) -> "Journal":
        """Open the journal of a bisection; an incomplete last line is removed. A StoreError if it
        does not exist or is damaged, or if another process uses it."""
        start = "harness bisect SUITE --case CASE --good COMMIT"
        folder = reader.find(root, name, STATE, "bisection", start)
        try:
            journal = cls(folder)
        except BlockingIOError:
            raise StoreError(
                f"another process runs bisection {folder.name}", "Stop that process first."
            ) from None
        except OSError as error:
            raise StoreError(f"cannot write {folder / STATE}: {error.strerror}") from error
        try:
            journal.cut()
            journal.lines.extend(_decoded(folder / STATE))
        except BaseException:  # Ctrl-C included: the descriptor holds the lock
            journal.close()
            raise
        return journal

    @property
    def request(self) -> BisectRequest:
        first = self.lines[0]
        assert isinstance(first, BisectRequest)
        return first

    def write(self, line: JournalLine) -> None:
        """Add a line, as `add` does."""
        self.add(_encoded(line))
        self.lines.append(line)


def _encoded(line: JournalLine) -> bytes:
    fields = _LINE.dump_python(line, mode="json")
    text = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace") + b"\n"


def _decoded(path: Path) -> Iterator[JournalLine]:
    lines = path.read_bytes().split(b"\n")[:-1]
    if not lines:
        raise StoreError(f"{path} has no complete line", f"Delete {path.parent}.")
    for number, text in enumerate(lines, 1):
        try:
            line = _LINE.validate_json(text)
            if (number == 1) != isinstance(line, BisectRequest):
                raise ValueError("only the first line can be the request, and it must be")
        except ValueError as error:
            problem = " ".join(str(error).split("\n")[:3])
            remedy = "It is damaged or of another version; start a new bisection."
            raise StoreError(f"{path}:{number}: {problem}", remedy) from None
        yield line
