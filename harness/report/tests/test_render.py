"""Where a report is written, and what remains if it cannot be."""

import errno
import os
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import jinja2
import pytest

from harness.errors import ReportError
from harness.report import context, markdown, render
from harness.report.tests.test_report import small

NAME = "2026-11-21 Test Engineer Report - Small v{}.md"
"""With the date of the run, not of the day it is rendered on."""


def test_a_second_report_is_the_second_version(tmp_path: Path) -> None:
    first = render.write(small(), tmp_path)
    before = first.markdown.read_bytes()

    second = render.write(small(), tmp_path)

    assert [p.markdown.name for p in (first, second)] == [NAME.format(1), NAME.format(2)]
    assert first.markdown.read_bytes() == before
    assert set(first.figures).isdisjoint(second.figures)


def test_versions_continue_after_the_highest(tmp_path: Path) -> None:
    (tmp_path / NAME.format(7)).write_text("kept")
    (tmp_path / NAME.format("9 draft")).write_text("not a version")

    paths = render.write(small(), tmp_path)

    assert paths.markdown.name == NAME.format(8)


def test_two_that_write_at_once_get_two_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked for the newest version before either has written."""
    contents = [context.analyse(small()) for _ in range(2)]
    monkeypatch.setattr(context, "analyse", lambda _: contents.pop())
    both_looked = Barrier(2, timeout=20)
    newest = render._newest

    def look(*args: Any) -> int:
        found = newest(*args)
        both_looked.wait()
        return found

    monkeypatch.setattr(render, "_newest", look)
    threads = [Thread(target=render.write, args=(small(), tmp_path)) for _ in "ab"]
    for t in threads:
        t.start()
    for t in threads:
        t.join()

    assert sorted(p.name for p in tmp_path.glob("*.md")) == [NAME.format(1), NAME.format(2)]
    assert len(list(tmp_path.glob("figures/*.png"))) == 2


def test_a_subject_cannot_leave_the_directory(tmp_path: Path) -> None:
    paths = render.write(small(subject="../a/b: c"), tmp_path / "in")

    assert paths.markdown.parent == tmp_path / "in"
    assert paths.markdown.name == "2026-11-21 Test Engineer Report - ..-a-b- c v1.md"


def test_a_full_disk_is_one_message_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figure fits, the report does not."""
    synced: list[int] = []

    def fsync(fd: int) -> None:
        synced.append(fd)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)

    with pytest.raises(ReportError, match=r"No space left.*\n  Free some space"):
        render.write(small(), tmp_path)

    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOTDIR])
def test_a_refused_directory_is_one_message(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permission bits do not bind root, so mkdir is made to refuse."""

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)

    for write in (lambda: render.write(small(), tmp_path), lambda: render.check_writable(tmp_path)):
        with pytest.raises(ReportError, match=rf"{os.strerror(number)}\n  Choose a"):
            write()


def test_check_writable_leaves_no_file(tmp_path: Path) -> None:
    render.check_writable(tmp_path / "new")

    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_records_beside_the_report_are_linked(tmp_path: Path) -> None:
    paths = render.write(small(folder=str(tmp_path / "runs" / "x y")), tmp_path)

    text = paths.markdown.read_text(encoding="utf-8")
    assert "[`runs/x y/run.jsonl`](runs/x%20y/run.jsonl)" in text
    assert str(tmp_path) not in text


def test_a_misspelt_name_in_a_template_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = jinja2.DictLoader({"report.md.j2": "{{ verdct }}"})
    monkeypatch.setattr(render._templates, "loader", loader)
    monkeypatch.setattr(render._templates, "cache", None)

    with pytest.raises(jinja2.UndefinedError, match="verdct"):
        render.rendered("report.md.j2", {})


@pytest.mark.parametrize(
    ("raw", "safe"),
    [
        ("a|b", r"a\|b"),
        ("a\nb\r\n c", "a b c"),
        ("`open", "'open"),
        ("`x|y`", r"`x\|y`"),
        ("\\|", r"\|"),
        ("<script>", "&lt;script>"),
        ("`f<int>` <b>", "`f<int>` &lt;b>"),
        ("`a` <b> `c", "'a' &lt;b> 'c"),
        ("\\`<b>`", "\\`&lt;b>`"),
        ("```<b>`", "```&lt;b>`"),
    ],
)
def test_a_cell_cannot_break_its_table_or_open_a_tag(raw: str, safe: str) -> None:
    assert markdown.table_cell(raw) == safe
