"""Turn a run into a dated Markdown file and its figures, never over an older one."""

import errno
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jinja2

from harness import units
from harness.errors import ReportError
from harness.records import Run, Verdict
from harness.report import context
from harness.report.context import Content
from harness.report.figures import slug
from harness.report.markdown import line, table_cell

_ROOM = "Free some space, or choose another directory."
_ACCESS = "Choose a directory that you may write to."
_NO_FOLDER = "Choose another directory; this path is a file."
_REMEDIES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EROFS: _ACCESS,
    errno.ENOTDIR: _NO_FOLDER,
    errno.EEXIST: _NO_FOLDER,
    errno.ENAMETOOLONG: "Shorten the suite's subject; it is part of the file name.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPaths:
    """What was written."""

    markdown: Path
    figures: tuple[Path, ...]
    verdict: Verdict


def write(run: Run, directory: Path, *, author: str = "Test Engineer") -> ReportPaths:
    """Analyse, judge and draw a run; write its report and figures.

    The file is `<date of the run> Test Engineer Report - <Subject> v<N>.md` with the first free N;
    two processes that write at the same time get two versions. The figures are in `figures/`.

    Raises:
        ReportError: The directory cannot be written to. Nothing partial remains.
    """
    content = context.analyse(run)
    with _explained(directory):
        (directory / "figures").mkdir(parents=True, exist_ok=True)
        version = _newest(directory, _stem(content)) + 1
        while True:
            try:
                return _write_version(content, directory, author, version)
            except FileExistsError:
                version += 1


def check_writable(directory: Path) -> None:
    """Check before a long run that its report can be written.

    Raises:
        ReportError: The directory cannot be made or written to.
    """
    with _explained(directory):
        (directory / "figures").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Turn an error of the operating system into a place, a fact and a remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "Choose another directory.")
        reason = error.strerror or str(error)
        raise ReportError(f"{directory}: the report cannot be written: {reason}", remedy) from error


def rendered(template: str, values: Mapping[str, object]) -> str:
    """A template filled in, without double blank lines."""
    text = _templates.get_template(template).render(values)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _stem(content: Content) -> str:
    safe = re.sub(r'[\x00-\x1f/\\:*?"<>|]+', "-", content.run.suite.subject).strip()
    return f"{content.date} Test Engineer Report - {safe}"


def _newest(directory: Path, stem: str) -> int:
    """Highest version of that report in the directory; 0 if there is none."""
    name = re.compile(re.escape(stem) + r" v(\d+)\.md")
    found = (name.fullmatch(path.name) for path in directory.iterdir())
    return max((int(m[1]) for m in found if m), default=0)


def _write_version(content: Content, directory: Path, author: str, version: int) -> ReportPaths:
    """Write one version, or raise FileExistsError and leave nothing behind."""
    report = directory / f"{_stem(content)} v{version}.md"
    start = f"figures/{content.date}-{slug(content.run.suite.subject)}-v{version}"
    links = {p.name: f"{start}-{p.name}.png" for p in content.pictures}
    values = context.build(
        content, author=author, version=version, directory=directory, links=links
    )
    text = rendered("report.md.j2", values)
    files = {directory / links[p.name]: p.png for p in content.pictures}
    # The report is written last, so that its figures exist when a reader sees it.
    _write_all({**files, report: text.encode()})
    return ReportPaths(markdown=report, figures=tuple(files), verdict=content.verdict)


def _write_all(files: Mapping[Path, bytes]) -> None:
    """Create every file exclusively, or none."""
    created: list[Path] = []
    try:
        for path, data in files.items():
            with path.open("xb") as out:
                created.append(path)
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
    except BaseException:  # Ctrl-C included: all files or none
        for path in created:
            path.unlink(missing_ok=True)
        raise


_templates = jinja2.Environment(
    loader=jinja2.PackageLoader("harness.report"),
    undefined=jinja2.StrictUndefined,  # a misspelt name is an error, not an empty cell
    autoescape=False,  # Markdown, not HTML
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_templates.filters.update(cell=table_cell, line=line, utc=units.utc)
