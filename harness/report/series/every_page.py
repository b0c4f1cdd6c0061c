"""Every page of a folder, rendered again from its record, and the list of the newest ones."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.analysis.study import Study
from harness.report.figures import Picture
from harness.report.markdown import table_cell
from harness.report.series import pages
from harness.report.series.pages import Made
from harness.report.series.rules import judged_by
from harness.store import reader

START, END = "<!-- newest reports -->\n", "<!-- end of newest reports -->"
"""Between these two comments the README of the reports has the list."""
STATUS = "**Status**: "
"""Beginning of the line of a page that the list repeats, up to the first bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report with its run, which is judged by the rules that the page names."""

    path: Path
    made: Made
    of: Study
    against: Study | None = None

    @property
    def full(self) -> bool:
        """Whether it is of a full run."""
        return self.made.mark.startswith("v")

    @property
    def order(self) -> tuple[str, int]:
        """By the run, then by how often it was reported: `v2.1` is after `v2`."""
        return self.of.run.started_at, int(self.made.mark.partition(".")[2] or 0)


def rendered(directory: Path, store: Path) -> tuple[dict[Path, str], dict[Path, Picture]]:
    """The texts of every report in a folder as they would be written now, with the README that
    lists the newest of each suite and GPU, if it has a place for the list; and their figures. A
    HarnessError if a report names a run that is not in the store."""
    found, texts, figures = [*_pages(directory, store)], dict[Path, str](), dict[Path, Picture]()
    for page in found:
        said, drawn = pages.again(page.of, page.path, page.made, page.against)
        texts |= {directory / to: text for to, text in said.items()}
        figures |= {directory / to: picture for to, picture in drawn.items()}
    readme = directory / "README.md"
    if readme.is_file() and START in (whole := readme.read_text(encoding="utf-8")):
        before, _, rest = whole.partition(START)
        texts[readme] = f"{before}{START}\n{_table(found, texts)}\n\n{END}{rest.partition(END)[2]}"
    return texts, figures


def write(directory: Path, store: Path) -> list[Path]:
    """Write what is rendered, draw figures that are absent, and return the files that changed.

    A figure that exists is kept: another version of matplotlib draws other bytes.
    """
    texts, figures = rendered(directory, store)
    changed = {
        path: text.encode()
        for path, text in texts.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    changed |= {path: p.png() for path, p in figures.items() if not path.is_file()}
    for path, data in changed.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return [*changed]


def _pages(directory: Path, store: Path) -> Iterator[Page]:
    for path in sorted(directory.glob("*.md")):
        if made := pages.made(path.read_text(encoding="utf-8")):
            of = Study(judged_by(made.rules, reader.load(store, made.run)))
            against = Study(reader.load(store, made.against)) if made.against else None
            yield Page(path=path, made=made, of=of, against=against)


def _table(every: list[Page], texts: Mapping[Path, str]) -> str:
    groups: dict[tuple[str, str], list[Page]] = {}
    for page in every:
        key = page.of.run.suite.name, page.of.run.environment.device_name
        groups.setdefault(key, []).append(page)
    rows = ["| suite | GPU | report | status | commit |", "|:--|:--|:--|:--|:--|"]
    for (suite, device), found in sorted(groups.items()):
        for p in _newest(found):
            git = p.of.run.environment.git
            commit = f"`{git.commit[:10]}`" if git else "unknown"
            link = f"[{p.of.run.started_at[:10]} {p.made.mark}](<{p.path.name}>)"
            after = texts[p.path].partition(f"\n{STATUS}")[2]
            status = after.partition(" | ")[0]
            cells = f"`{suite}`", table_cell(device), link, status, commit
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _newest(found: list[Page]) -> Iterator[Page]:
    """The newest report of a full run, and those of later partial runs and studies."""
    ordered = sorted(found, key=lambda p: p.order)
    full = next((p for p in reversed(ordered) if p.full), None)
    for p in ordered:
        if p is full or (not p.full and (full is None or p.order > full.order)):
            yield p
