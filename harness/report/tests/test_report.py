"""The report: what it says, where it is written, and what it leaves behind when it cannot be."""

import datetime
import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import jinja2
import pytest

from harness.analysis import overhead, verdict
from harness.analysis.effects import Effect
from harness.errors import ReportError
from harness.records import Breakdown, Case, Decision, Measurement, Outcome, PathRule, Profile, Run
from harness.report import context, figures, markdown, render
from harness.report import render as report
from harness.report import text as sentences
from harness.tests.fake_runs import case, ended, environment, retest, run, sweep, timed

DATE = datetime.date(2026, 11, 21)
NAME = "2026-11-21 Test Engineer Report - Small v{}.md"


def small(**changes: Any) -> Run:
    """Two cases: quick to render."""
    return run(sweep(gc=["off", "on"]), lambda c: timed(c, 0.05), **{"subject": "Small", **changes})


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, report.ReportPaths]:
    """The report of a run with everything in it, written once."""
    paths = report.write(retest(), tmp_path_factory.mktemp("reports"), date=DATE)
    return paths.markdown.read_text(), paths


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}")[2].partition("\n## ")[0]


def summary_of(told: Run) -> tuple[str, ...]:
    content = context.analyse(told)
    links = {p.name: "x.png" for p in content.pictures}
    return context.build(
        content, date=DATE, author="x", version=1, directory=Path("reports"), links=links
    ).summary


# --- what it says ------------------------------------------------------------------------


def test_every_section_of_the_convention_is_there(full: tuple[str, Any]) -> None:
    titles = re.findall(r"^## (.+)$", full[0], re.MULTILINE)

    assert titles == [
        "Executive summary",
        "Verdict: NO-GO",
        "Results",
        "What ran",
        "What went wrong",
        "How steady the numbers are",
        "Expected against actual",
        "Scaling",
        "Utilisation over time",
        "What did not run, and why",
        "Time and cost",
        "Environment",
        "Effective configuration",
        "Timeline",
        "Commands to reproduce",
        "Artefacts",
    ]
    for header in ("Date", "Author", "Subject", "Status", "Branch", "Commit"):
        assert re.search(rf"^\*\*{header}\*\*: \S", full[0], re.MULTILINE)


def test_every_picture_it_shows_exists_and_has_words(full: tuple[str, Any]) -> None:
    text, paths = full

    shown = re.findall(r"^!\[([^\]]+)\]\((\S+)\)$", text, re.MULTILINE)

    assert {paths.markdown.parent / link for _, link in shown} == set(paths.figures)
    assert len(paths.figures) == 4
    for path in paths.figures:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_every_table_row_has_the_columns_of_its_head(full: tuple[str, Any]) -> None:
    """A pipe or a newline in a detail would break the table around it."""
    blocks = re.findall(r"(?:^\|.*\n)+", full[0], re.MULTILINE)

    assert len(blocks) > 10
    for block in blocks:
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1, block


def test_the_summary_is_computed(full: tuple[str, Any]) -> None:
    summary = section(full[0], "Executive summary")

    for claim in (
        r"^- \*\*NO-GO\*\* by the rule “floor”",
        r"12 train and 11 forward cases on NVIDIA H200: 20 ok, 1 out of memory, 1 timeout",
        r"Stated for other GPUs and not applied here: “A100 only”",
        r"\*\*train\*\*: 2\d\d \[.*\(`train/nsa/seq_len=2048/gc=on/data=text`\) to ",
        r"`gc=on` against `gc=off` \+2[345]\.\d % \[",
        r"`data=text` against `data=synthetic` unchanged \(",
        r"Exponent .* over seq_len: .*`forward/loop` 1\.9\d+ \[.*1 timed out",
        r"8 below, .*; farthest below: `train/nsa/seq_len=2048/gc=on/data=text`, by 44x",
        r"asks for 10,000 tokens/s of `train/.*`: on H200 SXM that is 0\.475 % MFU",
        r"GPU was busy less than half of the time in 17 cases",
    ):
        assert re.search(claim, summary, re.MULTILINE), claim


def test_what_nobody_looked_for_is_open_and_what_nobody_can_see_is_not_applied(
    tmp_path: Path,
) -> None:
    stated = PathRule(must=("gemm",))
    first, second = sweep(gc=["off", "on"])
    cases = [replace(first, operators=stated), replace(second, kernels=stated)]
    recorded = run(cases, lambda c: timed(c, 0.05), env=environment(gpu=None))

    text = report.write(recorded, tmp_path, date=DATE).markdown.read_text()

    assert f"**INCONCLUSIVE** by the rule “{verdict.WHAT_RAN}”" in text
    assert (
        f"Not applied, “{verdict.KERNELS_THAT_RAN}”: no GPU here: kernels cannot be seen." in text
    )
    assert "other GPUs" not in text
    assert re.search(rf"\| {verdict.KERNELS_THAT_RAN} \|.*\| not applicable \| no GPU here", text)


def test_notes_on_the_record_end_in_one_full_stop(tmp_path: Path) -> None:
    notes = ("Resumed at noon after 1 measurements.", "a line was cut short")

    text = report.write(replace(small(), notes=notes), tmp_path, date=DATE).markdown.read_text()

    assert text.endswith(
        "\nOf the record itself: Resumed at noon after 1 measurements; a line was cut short.\n"
    )


def test_a_step_that_keeps_the_gpu_busy_is_not_called_idle_for_the_pauses_between_runs() -> None:
    cases = sweep(seq_len=[512, 1024])
    busy = Profile(breakdown=Breakdown(step_s=0.05, profiled_step_s=0.06, device_busy_s=0.049))

    def measure(c: Case) -> list[Measurement]:
        census = busy if c is cases[0] else None
        return timed(c, 0.05, telemetry={"gpu_utilisation": 0.3}, census=census)

    (said,) = [line for line in summary_of(run(cases, measure)) if "GPU was busy" in line]

    assert "in 1 case; least in `train/nsa/seq_len=1024`" in said


def test_a_case_that_reached_no_steady_state_is_named_in_the_summary() -> None:
    cases = sweep(seq_len=[512, 1024])
    unsteady = run(cases, lambda c: timed(c, 0.05, steady=c is cases[0]))

    said = [line for line in summary_of(unsteady) if "steady state" in line]

    assert said == [
        "No steady state was reached in `train/nsa/seq_len=1024`: those numbers may still move."
    ]


def test_a_run_that_asks_what_sampling_costs_is_answered() -> None:
    suite = overhead.arranged(small().suite, processes=6)
    measured = run(suite.cases, lambda c: timed(c, 0.05, processes=6), subject=suite.subject)
    content = context.analyse(measured)
    links = {p.name: "x.png" for p in content.pictures}
    built = context.build(
        content, date=DATE, author="x", version=1, directory=Path("reports"), links=links
    )

    (said,) = (line for line in built.summary if line.startswith("Sampling: step time"))
    assert "over 12 pairs of processes" in said
    assert built.title == "2026-11-21 Test Engineer Report - Small Sampling v1"


def test_the_summary_is_short_and_begins_with_the_verdict(full: tuple[str, Any]) -> None:
    bullets = section(full[0], "Executive summary").strip().splitlines()

    assert bullets[0].startswith("- **NO-GO**")
    assert len(bullets) <= 12


def test_every_effect_is_said_in_full_below(full: tuple[str, Any]) -> None:
    results = section(full[0], "Results")

    assert re.search(
        r"^- `gc=on` against `gc=off`: step time per token \+2\d\.\d % \[.*over 5 pairs of cases\.",
        results,
        re.MULTILINE,
    )


def test_a_case_that_did_not_end_ok_is_not_said_to_have_run_as_the_others(
    full: tuple[str, Any],
) -> None:
    """It was not observed after its last sample, as it had none."""
    observed = section(full[0], "Effective configuration")

    assert "`forward/loop/seq_len=2048` | not available (timeout) |" in observed
    assert "**forward**, all cases: precision=bf16, dim=768, n_layers=12." in observed


@pytest.mark.parametrize(
    ("smallest", "largest", "said"),
    [
        pytest.param(1.5, 1.6, "+55.0 % [+54.0 … +56.0], over 4 pairs of cases.", id="alike"),
        pytest.param(
            1.3, 1.8, "+55.0 % [+54.0 … +56.0], over 4 pairs of cases, from +30 %", id="near"
        ),
        pytest.param(0.8, 4.4, "+55 % in the mean, over 4 pairs of cases, from -20 %", id="far"),
        pytest.param(0.8, 1.5, "+55 % in the mean, over 4 pairs of cases, from -20 %", id="both"),
    ],
)
def test_a_mean_of_pairs_that_differ_widely_is_no_effect(
    smallest: float, largest: float, said: str
) -> None:
    effect = Effect(
        workload="w", axis="gc", base="off", value="on", ratio=1.55, low=1.54, high=1.56,
        smallest=smallest, largest=largest, pairs=4,
    )  # fmt: skip

    assert said in sentences.effect_sentence(effect)


def test_a_difference_that_points_both_ways_is_not_called_none() -> None:
    effect = Effect(
        workload="w", axis="gc", base="off", value="on", ratio=1.0, low=0.999, high=1.001,
        smallest=0.7, largest=1.4, pairs=2,
    )  # fmt: skip

    assert "unchanged" not in sentences.effect_sentence(effect)


def test_the_price_behind_a_cost_is_stated(full: tuple[str, Any]) -> None:
    assert "cost at $3.50 a GPU hour [95 %]" in section(full[0], "Time and cost")


def test_records_beside_the_report_are_linked(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x y"

    paths = report.write(small(folder=str(folder)), tmp_path, date=DATE)

    text = section(paths.markdown.read_text(), "Artefacts")
    assert "[`runs/x y/run.jsonl`](runs/x%20y/run.jsonl)" in text
    assert str(tmp_path) not in text


def test_what_did_not_run_is_listed_with_its_reason(full: tuple[str, Any]) -> None:
    listed = section(full[0], "What did not run, and why")

    assert "out of memory" not in listed
    assert r"flash-attn is not installed \| pip install \|" in listed
    assert "the package is not installed here" in listed


def test_what_went_wrong_has_a_line_a_case(full: tuple[str, Any]) -> None:
    told = section(full[0], "What went wrong")

    assert re.search(r"- `train/dense/.*seq_len=2048.*`: \*\*out of memory\*\*: tried 2.00", told)
    assert re.search(r"- `forward/loop/seq_len=2048`: \*\*timeout\*\*: planted", told)
    assert "fa2" not in told


def test_a_timeout_is_shown_as_a_bound(full: tuple[str, Any]) -> None:
    assert "&lt; 1,020 (timeout) | > 2.00 s (timeout)" in section(full[0], "Results")


def test_an_expectation_for_another_card_is_shown_and_not_judged(full: tuple[str, Any]) -> None:
    table = section(full[0], "Expected against actual")

    assert table.count("stated for A100, not judged") == 4
    assert re.search(r"1\.\d+x to 3\.3x below", table)


def test_time_and_cost_have_intervals_and_admit_what_is_unknown(full: tuple[str, Any]) -> None:
    table = section(full[0], "Time and cost")

    assert re.search(r"\| 12 h \d\d min \[12 h .* … 1\d h .*\] \| \$4\d\.\d\d \[", table)
    assert "not available (out of memory)" in table


def test_commands_are_those_of_the_run(full: tuple[str, Any]) -> None:
    commands = section(full[0], "Commands to reproduce")

    assert "export NSA_PREFILL_BATCHED=1\nharness run suites/retest.yaml\n" in commands
    assert "/home/" not in commands


def test_without_a_gpu_the_reason_stands_in_place_of_the_number(tmp_path: Path) -> None:
    paths = report.write(small(env=environment(gpu=None)), tmp_path, date=DATE)

    text = paths.markdown.read_text()

    assert "| GPU | not available (NVML: no NVIDIA driver is loaded) |" in text
    assert "GPU: not available (NVML: no NVIDIA driver is loaded)." in text
    assert "MFU: not available (no data-sheet peak for cpu at bf16)." in text


def test_a_run_without_any_number_still_has_a_report(tmp_path: Path) -> None:
    broken = run(sweep(gc=["off", "on"]), lambda c: ended(c, Outcome.CRASH, detail="boom"))

    paths = report.write(replace(broken, ended_at=""), tmp_path, date=DATE)

    assert paths.verdict.decision is Decision.NO_GO
    assert paths.figures == ()
    assert "the run is unfinished" in paths.markdown.read_text()


def test_one_process_is_shown_without_an_interval_and_inconclusive(tmp_path: Path) -> None:
    once = run([case({"gc": "off"})], lambda c: timed(c, 0.05, processes=1))

    paths = report.write(once, tmp_path, date=DATE)

    assert paths.verdict.decision is Decision.INCONCLUSIVE
    assert "1 of 3 processes ran" in paths.markdown.read_text()


@pytest.mark.parametrize(
    ("raw", "safe"),
    [
        ("a|b", r"a\|b"),
        ("a\nb\r\n c", "a b c"),
        ("`open", "'open"),
        ("`x|y`", r"`x\|y`"),
        ("\\|", r"\|"),
        ("<script>", "&lt;script>"),
    ],
)
def test_a_cell_cannot_break_its_table(raw: str, safe: str) -> None:
    assert markdown.table_cell(raw) == safe


def test_a_misspelt_field_stops_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    content = context.analyse(small())
    links = {p.name: "x.png" for p in content.pictures}
    built = context.build(
        content, date=DATE, author="x", version=1, directory=Path("reports"), links=links
    )
    loader = jinja2.DictLoader({"report.md.j2": "{{ verdct }}"})
    monkeypatch.setattr(render._templates, "loader", loader)
    monkeypatch.setattr(render._templates, "cache", None)

    with pytest.raises(jinja2.UndefinedError, match="verdct"):
        render.markdown(built)


def test_a_long_name_is_folded_between_its_axes() -> None:
    flags = [f"NSA_FLAG_NUMBER_{n}=0" for n in range(4)]

    folded = figures._folded("  ".join(["nsa", *flags]))

    assert max(map(len, folded.splitlines())) <= figures.LONG_ROW
    assert folded.split() == ["nsa", *flags]


# --- where it is written -----------------------------------------------------------------


def test_a_second_report_is_the_second_version(tmp_path: Path) -> None:
    first = report.write(small(), tmp_path, date=DATE)
    before = first.markdown.read_bytes()

    second = report.write(small(), tmp_path, date=DATE)

    assert [p.markdown.name for p in (first, second)] == [NAME.format(1), NAME.format(2)]
    assert first.markdown.read_bytes() == before
    assert set(first.figures).isdisjoint(second.figures)


def test_versions_go_on_after_the_highest_not_into_a_gap(tmp_path: Path) -> None:
    (tmp_path / NAME.format(7)).write_text("kept")
    (tmp_path / NAME.format("9 draft")).write_text("not a version")

    paths = report.write(small(), tmp_path, date=DATE)

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
    threads = [
        Thread(target=report.write, args=(small(), tmp_path), kwargs={"date": DATE}) for _ in "ab"
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()

    assert sorted(p.name for p in tmp_path.glob("*.md")) == [NAME.format(1), NAME.format(2)]
    assert len(list(tmp_path.glob("figures/*.png"))) == 2


def test_a_subject_cannot_leave_the_directory(tmp_path: Path) -> None:
    paths = report.write(small(subject="../a/b: c"), tmp_path / "in", date=DATE)

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

    with pytest.raises(ReportError, match=r"cannot be written: No space left.*\n  Free some space"):
        report.write(small(), tmp_path, date=DATE)

    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_file_in_the_way_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("")

    for refuse in (
        lambda: report.write(small(), tmp_path / "reports", date=DATE),
        lambda: report.check_writable(tmp_path / "reports"),
    ):
        with pytest.raises(ReportError, match="Name a directory"):
            refuse()


def test_a_directory_without_permission_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permission bits do not bind root, who runs many a container, so mkdir is made to refuse."""

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)

    with pytest.raises(ReportError, match="Permission denied\n  Name a directory that you may"):
        report.check_writable(tmp_path / "reports")


def test_check_writable_leaves_no_file(tmp_path: Path) -> None:
    report.check_writable(tmp_path / "new")

    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
