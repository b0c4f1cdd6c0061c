"""All pages of a folder again, and the list of the newest."""

from pathlib import Path

import pytest

from harness.analysis.study import Study
from harness.cli import report as command
from harness.errors import HarnessError
from harness.records import Rule
from harness.report.series import every_page
from harness.store import reader
from harness.tests.fake_runs import run, sweep, timed
from harness.tests.stored_runs import A100, dated, record, store

README = f"# Reports\n{every_page.START}old\n{every_page.END}\nkept\n"


def test_all_pages_are_those_of_their_records_and_the_newest_are_listed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    ids = [record(runs, gpu=gpu) if gpu else record(runs) for gpu in (None, None, None, A100)]
    ids.append(record(runs, finish=False))
    for hour, run_id in enumerate(ids):
        dated(runs, run_id, f"2026-11-21T0{hour}:00:00+00:00")
    named = [ids[1], ids[2], ids[2], ids[3], ids[4]]
    paths = [command.written(Study(reader.load(runs, run_id)), tmp_path) for run_id in named]
    before = [path.read_text(encoding="utf-8") for path in paths]
    paths[1].write_text(before[1].replace("Trust", "Doubt"), encoding="utf-8")
    (tmp_path / "README.md").write_text(README)
    (appendix, *_) = sorted((tmp_path / "figures").glob("*.md"))
    appendix.unlink()

    changed = every_page.write(tmp_path, runs)

    assert {path.name for path in changed} == {paths[1].name, appendix.name, "README.md"}
    assert [path.read_text(encoding="utf-8") for path in paths] == before
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    rows = [[c.strip() for c in r.split("|")[1:-1]] for r in text.splitlines() if r[:3] == "| `"]
    assert [(r[1][-4:], r[2].partition("]")[0].split()[-1]) for r in rows] == [
        ("80GB", "v4"),
        ("H200", "v3.1"),
        ("H200", ids[4][-4:]),
    ]
    assert f"**Status**: {rows[1][3]} | " in before[2]
    assert rows[1][4] == f"`{'a' * 10}`"
    assert "old\n" not in text
    assert text.endswith("kept\n")
    assert every_page.write(tmp_path, runs) == []


def test_a_page_whose_run_is_gone_is_an_error_and_another_is_left_alone(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    record(runs)
    (tmp_path / "mine.md").write_text("# Mine\n")
    assert every_page.write(tmp_path, runs) == []

    (tmp_path / "lost.md").write_text(
        '# Lost\n\n<!-- made from {"run": "20200101", "mark": "v1"} -->'
    )
    with pytest.raises(HarnessError, match="20200101"):
        every_page.write(tmp_path, runs)


def test_a_figure_is_drawn_only_where_it_is_absent(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    growth = Rule(name="growth", metric="scaling_exponent", axis="seq_len", go=2)
    cases = sweep(seq_len=[512, 1024, 2048])
    asked = run(cases, lambda c: timed(c, float(c.axes["seq_len"])), rules=(growth,))
    command.written(Study(reader.load(runs, store(runs, asked))), tmp_path)
    (figure,) = (tmp_path / "figures").glob("*.png")
    figure.write_bytes(b"of another version of matplotlib")
    assert every_page.write(tmp_path, runs) == []

    figure.unlink()

    assert every_page.write(tmp_path, runs) == [figure]
    assert figure.read_bytes().startswith(b"\x89PNG")
