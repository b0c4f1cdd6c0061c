"""The newest report of each suite and GPU model, as a table in the README of the reports."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from harness.errors import ReportError
from harness.git.repository import try_git
from harness.report.context import written
from harness.report.markdown import table_cell
from harness.report.text import plural
from harness.store import summaries
from harness.store.reader import RunHeader

START = re.compile(r"<!-- newest reports(?:, and whether (?P<code>\S+) changed)? -->\n")
END = "<!-- end of newest reports -->"


class _Page(NamedTuple):
    started_at: str
    revision: int
    """1 in `v2.1`."""
    mark: str
    name: str
    status: str
    run: RunHeader


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
        places = f"`<!-- newest reports, and whether FOLDER changed -->` and `{END}`"
        raise ReportError(f"{readme} has no place for the list", f"Add the lines {places} to it.")
    groups: dict[tuple[str, str], list[_Page]] = {}
    for page in _pages(directory, summaries.read(store, say).runs()):
        groups.setdefault((page.run.suite, page.run.device), []).append(page)
    code = start["code"] or ""
    rows = [f"| suite | GPU | report | status |{f' `{code}` since |' if code else ''}"]
    rows.append(f"|:--|:--|:--|:--|{':--|' if code else ''}")
    for (suite, device), pages in sorted(groups.items()):
        for p in _newest(pages):
            link, said = f"[{p.started_at[:10]} {p.mark}](<{p.name}>)", table_cell(p.status)
            changes = f" {_changes(directory.resolve(), p.run.commit, code)} |" if code else ""
            rows.append(f"| `{suite}` | {table_cell(device)} | {link} | {said} |{changes}")
    table = "\n".join(rows)
    readme.write_text(f"{text[: start.end()]}\n{table}\n\n{text[end:]}", encoding="utf-8")


def _pages(directory: Path, headers: tuple[RunHeader, ...]) -> Iterator[_Page]:
    runs = {h.run_id: h for h in headers}
    for path in sorted(directory.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (made := written(text)) and (run := runs.get(made.run_id)):
            status = re.search(r"^\*\*Status\*\*: (.+?) \| ", text, re.MULTILINE)
            revision = int(made.mark.partition(".")[2] or 0)
            said = status[1] if status else ""
            yield _Page(run.started_at, revision, made.mark, path.name, said, run)


def _newest(pages: list[_Page]) -> Iterator[_Page]:
    """The newest report of a full run, and those of later partial runs and studies."""
    full = max((p for p in pages if p.mark.startswith("v")), key=lambda p: p[:2], default=None)
    for p in sorted(pages, key=lambda p: p[:2]):
        if p is full or (not p.mark.startswith("v") and (full is None or p[:2] > full[:2])):
            yield p


def _changes(place: Path, commit: str, code: str) -> str:
    """How many commits changed the code after the run's."""
    paths = f":(top){code}", ":(top,exclude,glob)**/tests/**", ":(top,exclude)*.md"
    count = try_git(place, "rev-list", "--count", f"{commit}..HEAD", "--", *paths)
    if not commit or count is None:
        return "not known"
    return f"**older**: {plural('commit', int(count))}" if int(count) else "unchanged"
