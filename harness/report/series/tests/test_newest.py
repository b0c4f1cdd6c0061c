"""The list of the newest reports."""

from pathlib import Path

import pytest

from harness.errors import ReportError
from harness.report.series import newest
from harness.tests.gate_repositories import commit, git
from harness.tests.indexed import A100, dated, record, silent

PLACE = "# Reports\n<!-- newest reports, and whether nsa changed -->\nold\n{}\nkept\n"


def page(folder: Path, run_id: str, mark: str, status: str = "GO") -> None:
    head = f"# Report {mark}\n\n**Status**: {status} | **Run**: x\n\n"
    (folder / f"{run_id} {mark}.md").write_text(f"{head}harness report {run_id}  # again\n")


def test_the_newest_report_of_each_suite_and_gpu_is_listed_with_the_age_of_its_code(
    tmp_path: Path,
) -> None:
    git(tmp_path, "init", "-q")
    first = commit(tmp_path, {"nsa/kernel.py": "1"})
    second = commit(tmp_path, {"nsa/kernel.py": "2"})
    commit(tmp_path, {"nsa/tests/test_kernel.py": "changes no kernel"})
    runs, reports = tmp_path / "runs", tmp_path / "reports"
    reports.mkdir()
    marks = ("v1", "partial aaaa", "v2.1", "v2.2", "partial bbbb")
    ids = [record(runs, commit=first if m == "v1" else second) for m in marks]
    ids[3] = ids[2]
    for hour, (run_id, mark) in enumerate(zip(ids, marks, strict=True)):
        dated(runs, run_id, f"2026-11-21T0{hour}:00:00+00:00")
        page(reports, run_id, mark, f"status of {mark}")
    page(reports, record(runs, gpu=A100, commit=first), "v1")
    page(reports, record(runs, suite="other", commit="0" * 40), "v1")
    (reports / "README.md").write_text(PLACE.format(newest.END))

    newest.write(reports, runs, silent)

    text = (reports / "README.md").read_text()
    rows = [[c.strip() for c in r.split("|")[1:-1]] for r in text.splitlines() if r[:3] == "| `"]
    assert [(r[0], r[1][-4:], r[3], r[4]) for r in rows] == [
        ("`other`", "H200", "GO", "not known"),
        ("`retest`", "80GB", "GO", "**older**: 1 commit"),
        ("`retest`", "H200", "status of v2.2", "unchanged"),
        ("`retest`", "H200", "status of partial bbbb", "unchanged"),
    ]
    assert "old\n" not in text
    assert text.endswith("kept\n")
    again = text
    newest.write(reports, runs, silent)
    assert (reports / "README.md").read_text() == again


def test_a_page_without_a_place_for_the_list_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")

    with pytest.raises(ReportError, match="no place for the list"):
        newest.write(tmp_path, tmp_path, silent)

    assert (tmp_path / "README.md").read_text() == "mine"
