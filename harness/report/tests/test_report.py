"""The report of a run: what its page as a whole must not have, and sentences of its own."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.analysis.study import Study
from harness.records import INTERPRETER, Outcome, Program, Run
from harness.report import context, text
from harness.report.series import pages
from harness.tests.fake_runs import case, ended, environment, run, sweep, timed


def values(recorded: Run) -> dict[str, Any]:
    """What the template of its report prints."""
    built = context.build(Study(recorded), Path("reports"))[0]
    lines: Any = built["lines"]
    return {**{label.lower(): said for label, said in lines}, **built, "lines": str(lines)}


def page(recorded: Run, folder: Path) -> str:
    return pages.write(Study(recorded), folder).read_text(encoding="utf-8")


def test_nothing_from_a_suite_or_its_code_is_active_in_a_report(tmp_path: Path) -> None:
    nasty = "\x1b[2J ![i](//evil/i.png) [a](javascript:b) @owner <img> www.evil &commat;me"
    named = case({"gc": "off"}, case_id="x` @owner `y")
    broken = run(
        [named],
        lambda c: ended(c, Outcome.CRASH, detail=nasty),
        env=environment(variables={"NSA_X": f"\n```\n{nasty}"}, hostname=nasty, command=(nasty,)),
        notes=(nasty,),
        title=nasty,
        question=nasty,
    )

    text = page(broken, tmp_path)

    outside = re.sub(r"```bash.*?\n```\n|`[^`]+`", "", text, flags=re.DOTALL)
    active = re.findall(r"\x1b|i\]\(|a\]\(|@owner|<img|www\.evil|&commat", outside)
    assert active == []
    assert "export NSA_X" not in outside


def test_an_axis_has_one_name_on_the_page(tmp_path: Path) -> None:
    """The suite's. Commands, case ids and names of files keep that of the code."""
    cases = sweep(seq_len=[512, 1024, 2048], gc=["off", "on"])
    names = {"seq_len": "T", "gc": "checkpointing"}
    recorded = run(cases, lambda c: timed(c, 1e-4 * float(c.axes["seq_len"])), axis_names=names)

    said = re.sub(r"```bash.*?\n```\n|\]\([^)]*\)", "", page(recorded, tmp_path), flags=re.DOTALL)
    said = re.sub(r"`([^`\n]*)`", lambda m: m[1] if m[1].isidentifier() else "", said)
    assert re.findall(r".*\b(?:seq_len|gc)\b.*", said) == []
    assert "| T | checkpointing |" in said


def test_a_page_names_logs_only_where_they_are(tmp_path: Path) -> None:
    recorded = run(sweep(gc=["off"]), lambda c: timed(c, 0.05), folder=str(tmp_path))

    (first,) = values(recorded)["artefacts"]
    (tmp_path / "logs").mkdir()
    _, logs = values(recorded)["artefacts"]

    assert "run.jsonl" in first
    assert "output of the processes" in logs


def test_records_beside_the_report_are_linked(tmp_path: Path) -> None:
    folder = str(tmp_path / "runs" / "x y")
    text = page(run(sweep(gc=["off"]), lambda c: timed(c, 0.05), folder=folder), tmp_path)

    assert "[`runs/x y/run.jsonl`](runs/x%20y/run.jsonl)" in text
    assert str(tmp_path) not in text


def test_a_run_without_any_number_still_has_a_report(tmp_path: Path) -> None:
    broken = run(sweep(gc=["off", "on"]), lambda c: ended(c, Outcome.CRASH, detail="boom"))

    assert " (unfinished) | " in page(replace(broken, ended_at=""), tmp_path)
    assert not any(tmp_path.glob("figures/*.png"))


def test_a_program_has_its_command_and_no_value_of_a_variable() -> None:
    program = Program(argv=(INTERPRETER, "train.py", "--gc"), cwd="code")
    cases = [replace(c, program=program, env={"KEY": "s3"}) for c in sweep(gc=["off", "on"])]
    started = run(cases, lambda c: timed(c, 0.05, code={"program": "/where"}))

    (line,) = text.ran_lines(started)

    more = "(in /where; sets KEY); 1 more case"
    assert line == f"train runs: python train.py --gc {more}"
