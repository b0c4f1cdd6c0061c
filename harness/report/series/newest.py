"""The newest report of each suite and GPU model, as a table in the README of the reports."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import ReportError
from harness.git.repository import try_git
from harness.report.context import written
from harness.report.markdown import table_cell
from harness.report.text import plural
from harness.store import index
from harness.store.reader import RunHeader

START = re.compile(r"<!-- newest reports(?:, and whether (?P<code>\S+) changed)? -->\n")
END = "<!-- end of newest reports -->"
MISSING = "add the lines `<!-- newest reports, and whether FOLDER changed -->` and `{}` to it"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    path: Path
    mark: str
    """`v2`, `v2.1`, `partial 6ffe`."""
    status: str
    run: RunHeader

    @property
    def age(self) -> tuple[str, int]:
        return self.run.started_at, int(self.mark.partition(".")[2] or 0)


def write(directory: Path, store: Path, say: Callable[[str], None]) -> None:
    """Write the table between the two comments of README.md; the first one may name the folder of
    the code whose changes make a report old.

    Raises:
        ReportError: The README, or a comment in it, is absent.
    """
    readme = directory / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    start, end = START.search(text), text.find(END)
    if start is None or end < start.end():
        remedy = f"To have one, {MISSING.format(END)}."
        raise ReportError(f"{readme} has no place for a list of reports", remedy)
    runs = {h.run_id: h for h in index.ask(store, lambda known: known.runs(), say)}
    rows = "\n".join(_rows(directory, runs, start["code"] or ""))
    readme.write_text(f"{text[: start.end()]}\n{rows}\n\n{text[end:]}", encoding="utf-8")


def _rows(directory: Path, runs: Mapping[str, RunHeader], code: str) -> Iterator[str]:
    yield f"| suite | GPU | report | status |{f' `{code}` since |' if code else ''}"
    yield f"|:--|:--|:--|:--|{':--|' if code else ''}"
    groups: dict[tuple[str, str], list[_Page]] = {}
    for page in _pages(directory, runs):
        groups.setdefault((page.run.suite, page.run.device), []).append(page)
    for (suite, device), pages in sorted(groups.items()):
        for page in _newest(pages):
            link = f"[{page.run.started_at[:10]} {page.mark}](<{page.path.name}>)"
            changes = f" {_changes(directory, page.run.commit, code)} |" if code else ""
            said = table_cell(page.status)
            yield f"| `{suite}` | {table_cell(device)} | {link} | {said} |{changes}"


def _pages(directory: Path, runs: Mapping[str, RunHeader]) -> Iterator[_Page]:
    for path in sorted(directory.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        made = written(text)
        if made is not None and made.run_id in runs:
            status = re.search(r"^\*\*Status\*\*: (.+?) \| ", text, re.MULTILINE)
            said = status[1] if status else ""
            yield _Page(path=path, mark=made.mark, status=said, run=runs[made.run_id])


def _newest(pages: list[_Page]) -> list[_Page]:
    """The newest report of a full run, and those of later partial runs and studies."""
    full = max((p for p in pages if p.mark.startswith("v")), key=lambda p: p.age, default=None)
    others = [p for p in pages if not p.mark.startswith("v")]
    later = [p for p in others if full is None or p.age > full.age]
    return [*([full] if full else []), *sorted(later, key=lambda p: p.age)]


def _changes(directory: Path, commit: str, code: str) -> str:
    """How many commits changed the code after the run's."""
    place = directory.resolve()
    root = (try_git(place, "rev-parse", "--show-toplevel") or "").strip()
    paths = code, ":(exclude,glob)**/tests/**", ":(exclude)*.md"
    count = try_git(Path(root or place), "rev-list", "--count", f"{commit}..HEAD", "--", *paths)
    if not commit or count is None:
        return "not known"
    return f"**older**: {plural('commit', int(count))}" if int(count) else "unchanged"
