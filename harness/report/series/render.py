"""Dated Markdown pages and their figures: filled in from templates, never over an older one."""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import date
from itertools import chain, count
from pathlib import Path

import jinja2

from harness import units
from harness.errors import HarnessError
from harness.report.markdown import code, fenced, line, table_cell


def write(
    directory: Path,
    day: date,
    subject: str,
    files: Callable[[str, str], Mapping[str, bytes]],
    mark: str = "",
) -> Path:
    """Write `<day> Test Engineer Report - <subject> <mark>.md`, or leave nothing: a HarnessError.

    A page of that name is kept, and the new one is `<mark>.1`, `<mark>.2` and so on; without a mark
    v1, v2. Two processes that write at the same time get two names. `files`: name and mark of the
    page -> each file with its content, the page last, so that its figures exist when it is read.
    """
    safe = re.sub(r'[\x00-\x1f/\\:*?"<>|]+', "-", subject).strip()
    stem = f"{day} Test Engineer Report - {safe}"
    with _explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        start = f"{mark}." if mark else "v"
        numbered = (f"{start}{n}" for n in count(_newest(directory, f"{stem} {start}") + 1))
        for own in chain(filter(None, [mark]), numbered):
            name = f"{stem} {own}.md"
            with suppress(FileExistsError):
                _write_all({directory / n: data for n, data in files(name, own).items()})
                return directory / name
    raise AssertionError("numbers do not end")


def check_writable(directory: Path) -> None:
    """Check before a long run that its report can be written, or raise a HarnessError."""
    with _explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Turn an error of the operating system into a place, a fact and a remedy."""
    try:
        yield
    except OSError as error:
        raise HarnessError(
            f"{directory}: the report cannot be written: {error.strerror or error}",
            "Choose another directory: --reports FOLDER.",
        ) from error


def rendered(template: str, values: Mapping[str, object]) -> str:
    """A template filled in, without double blank lines."""
    text = _templates.get_template(template).render(values)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _newest(directory: Path, start: str) -> int:
    """Highest number of the pages in the directory that begin so; 0 if there is none."""
    name = re.compile(re.escape(start) + r"(\d+)\.md")
    found = (name.fullmatch(path.name) for path in directory.iterdir())
    return max((int(m[1]) for m in found if m), default=0)


def _write_all(files: Mapping[Path, bytes]) -> None:
    """Create every file exclusively, or none."""
    created: list[Path] = []
    try:
        for path, data in files.items():
            path.parent.mkdir(exist_ok=True)
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
_templates.filters.update(cell=table_cell, code=code, fenced=fenced, line=line, utc=units.utc)
