"""Turn a run into a dated Markdown file and its figures, never over an older one."""

import datetime
import errno
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import jinja2

from harness import units
from harness.errors import ReportError
from harness.records import Run, Verdict
from harness.report import context
from harness.report.context import Content, ReportContext
from harness.report.figures import slug
from harness.report.markdown import line, table_cell
from harness.report.text import verdict_sentence

_REMEDIES = {
    errno.ENOSPC: "Free some space, or name another directory.",
    errno.EDQUOT: "Free some space, or name another directory.",
    errno.EACCES: "Name a directory that you may write to.",
    errno.EPERM: "Name a directory that you may write to.",
    errno.EROFS: "Name a directory that you may write to.",
    errno.ENOTDIR: "Name a directory; a file stands in its place.",
    errno.EEXIST: "Name a directory; a file stands in its place.",
    errno.ENAMETOOLONG: "Shorten the suite's subject; it is part of the file name.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPaths:
    """What was written."""

    markdown: Path
    figures: tuple[Path, ...]
    verdict: Verdict


def write(
    run: Run, directory: Path, *, date: datetime.date, author: str = "Test Engineer"
) -> ReportPaths:
    """Analyse, judge and draw a run; write its report and figures.

    The file is `<date> Test Engineer Report - <Subject> v<N>.md`, with the first N that is
    free; two processes that write at once get two versions. The figures lie in `figures/`.

    Raises:
        ReportError: The directory cannot be written to. Nothing partial is left behind.
    """
    content = context.analyse(run)
    with _explained(directory):
        (directory / "figures").mkdir(parents=True, exist_ok=True)
        version = _newest(directory, run.suite.subject, date) + 1
        while True:
            try:
                return _write_version(content, directory, date, author, version)
            except FileExistsError:
                version += 1


def check_writable(directory: Path) -> None:
    """Find out before a long run, not after it, that its report can be written.

    Raises:
        ReportError: The directory cannot be made or written to.
    """
    with _explained(directory):
        (directory / "figures").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Turn an operating system's refusal into a place, a fact and a remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "Name another directory.")
        reason = error.strerror or str(error)
        raise ReportError(f"{directory}: the report cannot be written: {reason}", remedy) from error


def markdown(report: ReportContext) -> str:
    """The report as text."""
    return rendered("report.md.j2", {f.name: getattr(report, f.name) for f in fields(report)})


def rendered(template: str, values: Mapping[str, object]) -> str:
    """A template filled in, without double blank lines."""
    text = _templates.get_template(template).render(values)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _newest(directory: Path, subject: str, date: datetime.date) -> int:
    """Highest version of a report of that date and subject; 0 where there is none."""
    name = re.compile(re.escape(_stem(subject, date)) + r" v(\d+)\.md")
    found = (name.fullmatch(path.name) for path in directory.iterdir())
    return max((int(m[1]) for m in found if m), default=0)


def _stem(subject: str, date: datetime.date) -> str:
    safe = re.sub(r'[\x00-\x1f/\\:*?"<>|]+', "-", subject).strip()
    return f"{date:%Y-%m-%d} Test Engineer Report - {safe}"


def _write_version(
    content: Content, directory: Path, date: datetime.date, author: str, version: int
) -> ReportPaths:
    """Write one version, or raise FileExistsError and leave nothing behind."""
    subject = content.run.suite.subject
    report = directory / f"{_stem(subject, date)} v{version}.md"
    start = f"figures/{date:%Y-%m-%d}-{slug(subject)}-v{version}"
    links = {p.name: f"{start}-{p.name}.png" for p in content.pictures}
    built = context.build(
        content, date=date, author=author, version=version, directory=directory, links=links
    )
    text = markdown(built)
    files = {directory / links[p.name]: p.png for p in content.pictures}
    # The report comes last: who sees it finds its figures.
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
        _remove(created)
        raise


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


_templates = jinja2.Environment(
    loader=jinja2.PackageLoader("harness.report"),
    undefined=jinja2.StrictUndefined,  # a misspelt field is an error, not an empty cell
    autoescape=False,  # Markdown, not HTML
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_templates.filters.update(cell=table_cell, line=line, reason=verdict_sentence, utc=units.utc)
