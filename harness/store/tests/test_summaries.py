"""The summaries of a store follow its runs, and the commands that show them."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.analysis import summary
from harness.cli import main as cli
from harness.errors import HarnessError
from harness.records import CaseSummary, Outcome, Run
from harness.store import reader, summaries
from harness.store.summaries import RunFilter
from harness.store.writer import resume
from harness.tests.fake_runs import H200
from harness.tests.stored_runs import A100, CASE, CASES, dated, headers, ids, record, silent

# --- they follow the runs ------------------------------------------------------------------


def test_the_summaries_follow_the_folders(tmp_path: Path) -> None:
    first, second = record(tmp_path), record(tmp_path, finish=False)
    assert ids(tmp_path) == sorted([first, second])

    shutil.rmtree(tmp_path / first)
    writer, _ = resume(tmp_path, second)
    with writer:
        writer.finish()
    copied = "20200101-000000-copied-from-elsewhere-0000"
    shutil.copytree(tmp_path / second, tmp_path / copied)

    stored = summaries.read(tmp_path, silent)
    assert [Path(h.folder).name for h in stored.runs()] == [copied, second]
    assert all(h.ended_at and not h.problem for h in stored.runs())
    assert len(stored.history(CASE)) == 2
    assert ids(tmp_path / "none") == []


def test_a_run_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [record(tmp_path)]
    before = summaries.read(tmp_path, silent)
    monkeypatch.setattr(reader, "load", None)

    after = summaries.read(tmp_path, silent)

    assert [h.run_id for h in after.runs()] == made
    assert (after.runs(), after.history(CASE)) == (before.runs(), before.history(CASE))


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[]", "{}", '{"of": [1, 2, 3], "header": {}, "case_ids": []}\n{}\n'],
)
def test_a_damaged_or_old_summary_is_made_again(tmp_path: Path, text: str) -> None:
    made = record(tmp_path)
    before = summaries.read(tmp_path, silent).history(CASE)
    file = tmp_path / made / summaries.SUMMARY
    whole = file.read_text()
    file.write_text(text)

    assert summaries.read(tmp_path, silent).history(CASE) == before
    assert file.read_text() == whole


def test_a_run_that_cannot_be_read_or_summarised_is_listed_and_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, failing, damaged, not_a_number = (record(tmp_path) for _ in range(4))
    file = tmp_path / damaged / reader.RUN_FILE
    file.write_bytes(file.read_bytes().replace(b"\n", b"\n{\n", 1))
    summarise = summary.summarise

    def fails(run: Run) -> tuple[CaseSummary, ...]:
        if run.run_id == failing:
            raise ZeroDivisionError
        cases = summarise(run)
        if run.run_id == not_a_number:
            nan = replace(cases[0].metrics["step_s"], value=math.nan)
            return (replace(cases[0], metrics={"step_s": nan}),)
        return cases

    monkeypatch.setattr(summary, "summarise", fails)

    found = {h.run_id: h for h in headers(tmp_path)}

    assert (bool(found[whole].ended_at), found[whole].problem) == (True, "")
    assert all(found[i].problem for i in (failing, damaged, not_a_number))
    assert found[failing].problem.startswith("its summary fails: ZeroDivisionError")
    assert found[not_a_number].problem.startswith("its summary fails: ValueError")
    assert found[damaged].problem.startswith(f"{file}:2: ")


# --- answers -----------------------------------------------------------------------------


def test_list_and_history_agree_with_the_records(tmp_path: Path) -> None:
    made = [record(tmp_path, commit=commit * 40, finish=commit != "b") for commit in "ab"]

    stored = summaries.read(tmp_path, silent)
    found, points = stored.runs(), stored.history(CASE)

    runs = [reader.load(tmp_path, run_id) for run_id in sorted(made)]
    assert [replace(h, outcomes={}) for h in found] == [*map(reader.header_of, runs)]
    assert sorted(bool(h.ended_at) for h in found) == [False, True]
    assert found[0].outcomes == {"ok": 2}
    for p in points:
        (expected, _) = summary.summarise(reader.load(tmp_path, p.run_id))
        assert p.metrics == expected.metrics
        assert (p.outcome, p.device_id) == ("ok", H200.uuid)
    assert len(points) == 2
    assert stored.history(CASE, RunFilter(limit=1)) == points[-1:]


def test_a_filter_selects_runs(tmp_path: Path) -> None:
    made = [
        record(tmp_path),
        record(tmp_path, commit="b" * 40, suite="smoke"),
        record(tmp_path, gpu=A100, broken=Outcome.CRASH),
        record(tmp_path, gpu=None),
    ]
    for run_id, at in zip(made, ("01T09:00", "01T12:00", "02T12:00", "03T12:00"), strict=True):
        dated(tmp_path, run_id, f"2026-03-{at}:00+00:00")
    expected = [
        (RunFilter(suite="smoke"), {1}),
        (RunFilter(gpu="A100"), {2}),
        (RunFilter(gpu="cpu"), {3}),
        (RunFilter(commit="bbbb"), {1}),
        (RunFilter(outcome="crash"), {2}),
        (RunFilter(since="2026-03-02"), {2, 3}),
        (RunFilter(until="2026-03-02"), {0, 1, 2}),  # the day is included
        (RunFilter(until="2026-03-02T11:59"), {0, 1}),
        (RunFilter(suite="retest", gpu="H200"), {0}),
    ]

    for runs, wanted in expected:
        assert set(ids(tmp_path, runs)) == {made[i] for i in wanted}, runs


# --- the commands ------------------------------------------------------------------------


def output(*arguments: str) -> str:
    answer = CliRunner().invoke(cli.app, list(arguments))
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_the_list_shows_the_outcomes_of_cases(tmp_path: Path) -> None:
    crashed = record(tmp_path, broken=Outcome.CRASH)
    record(tmp_path)

    shown = output("list", "--outcome", "crash", "--store", str(tmp_path))

    assert crashed in shown
    assert "1 crash, 1 ok" in shown
    assert "suites" not in shown
    document = json.loads(output("list", "runs", "--json", "-n", "1", "--store", str(tmp_path)))
    assert len(document["runs"]) == 1


def test_a_history_shows_the_change_from_the_previous_run(tmp_path: Path) -> None:
    other = replace(H200, uuid="GPU-other")
    for n, (commit, step_s, gpu) in enumerate(
        (("a", 0.01, H200), ("b", 0.02, H200), ("c", 0.03, other), ("d", 0.04, A100))
    ):
        ran = record(tmp_path, commit=commit * 40, step_s=step_s, gpu=gpu)
        dated(tmp_path, ran, f"2026-03-0{1 + n}T12:00:00+00:00")

    shown = output("history", "seq_len=512", "--store", str(tmp_path))

    rows = [line for line in shown.splitlines() if " ms" in line]
    assert ["aaaaaaa" in rows[0], "bbbbbbb" in rows[1]] == [True, True]
    assert "2.0x" in rows[1]
    assert ["other card" in row for row in rows] == [False, False, True, False]
    assert ["other device" in row for row in rows] == [False, False, False, True]
    assert "1.5x" in rows[2] or "+50" in rows[2], "against the other card of the model"
    assert shown.startswith(CASE)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        pytest.param(["history", "seq_len"], [c.case_id for c in CASES], id="two cases"),
        pytest.param(["history", "train/nsa/seq_len=513"], [CASE], id="no case"),
        pytest.param(["history", CASE, "-m", "step"], ["step_s", "mfu"], id="no metric"),
        pytest.param(["history", CASE, "-m", "nope"], ["step_s", "mfu"], id="unlike any metric"),
        pytest.param(["list", "suites", "--gpu", "A100"], ["runs"], id="suites"),
    ],
)
def test_a_refusal_lists_valid_names(
    tmp_path: Path, arguments: list[str], names: list[str]
) -> None:
    record(tmp_path)

    refused = CliRunner().invoke(cli.app, [*arguments, "--store", str(tmp_path)]).exception

    assert isinstance(refused, HarnessError)
    assert [name for name in names if name not in str(refused)] == []


def test_only_a_suite_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    record(tmp_path, suite="mine")
    options = ["list", "runs", "--store", str(tmp_path), "--suite"]

    refused = CliRunner().invoke(cli.app, [*options, "nope"]).exception

    assert isinstance(refused, HarnessError)
    assert {"mine", "smoke"} <= set(re.findall(r"\w+", str(refused)))
    output(*options, "smoke")
