"""Where a report is written, and what remains if it cannot be."""

import errno
import os
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
import pytest

from harness.errors import HarnessError
from harness.report import markdown
from harness.report.series import render

DAY = date(2026, 11, 21)
NAME = "2026-11-21 Test Engineer Report - Small v{}.md"


def write(folder: Path, subject: str = "Small") -> Path:
    """A page with one figure."""
    return render.write(
        folder,
        DAY,
        subject,
        lambda name, mark: {f"figures/{mark}.png": b"png", name: mark.encode()},
    )


def test_a_second_report_is_the_next_version(tmp_path: Path) -> None:
    (tmp_path / NAME.format(7)).write_text("kept")
    (tmp_path / NAME.format("9 draft")).write_text("not a version")

    assert [write(tmp_path).read_text() for _ in range(2)] == ["v8", "v9"]


def test_two_that_write_at_once_get_two_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked for the newest version before either has written."""
    monkeypatch.setattr(render, "_newest", lambda *_: 0)

    write(tmp_path)
    second = write(tmp_path)

    assert second.read_text() == "v2"
    assert (tmp_path / NAME.format(1)).read_text() == "v1"
    assert len(list(tmp_path.glob("figures/*.png"))) == 2


def test_a_subject_cannot_leave_the_directory(tmp_path: Path) -> None:
    page = write(tmp_path / "in", "../a/b: c")

    assert page == tmp_path / "in" / "2026-11-21 Test Engineer Report - ..-a-b- c v1.md"


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

    with pytest.raises(HarnessError, match=r"No space left.*\n  Choose another directory"):
        write(tmp_path)

    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_refused_folder_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission bits do not bind root, so mkdir is made to refuse."""

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)

    for tried in (write, render.check_writable):
        with pytest.raises(HarnessError, match=r"Permission denied\n  Choose another directory"):
            tried(tmp_path)


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
        ("`f<int>` <b>", "`f<int>` &lt;b>"),
        ("\\`<b>`", "\\`&lt;b>`"),
        ("```<b>`", "```&lt;b>`"),
    ],
)
def test_a_cell_cannot_break_its_table_or_open_a_tag(raw: str, safe: str) -> None:
    assert markdown.table_cell(raw) == safe
