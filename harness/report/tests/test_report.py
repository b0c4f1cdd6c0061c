"""The report of a run: its page as a whole, and the sentences that need a run of their own.

To accept a change of the page: python -m harness.report.tests.test_report
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.effects import Effect
from harness.records import (
    INTERPRETER,
    Decision,
    Outcome,
    Program,
    Run,
)
from harness.report import context, text
from harness.report.series import pages
from harness.tests.fake_runs import case, ended, environment, retest, run, sweep, timed

PAGE = Path(__file__).with_name("run.md")


def small(**changes: Any) -> Run:
    """Two cases: quick to render."""
    return run(sweep(gc=["off", "on"]), lambda c: timed(c, 0.05), **{"subject": "Small", **changes})


def values(recorded: Run) -> dict[str, Any]:
    """What the template of its report prints."""
    built = context.build(recorded, Path("reports"))[0]
    lines: Any = built["lines"]
    return {**{label.lower(): said for label, said in lines}, **built, "lines": str(lines)}


def page(recorded: Run, folder: Path) -> str:
    return pages.write(recorded, folder).read_text(encoding="utf-8")


def test_nothing_from_a_suite_or_its_code_is_active_in_a_report(tmp_path: Path) -> None:
    nasty = "\x1b[2J ![i](//evil/i.png) [a](javascript:b) @owner <img> www.evil &commat;me"
    named = case({"gc": "off"}, case_id="x` @owner `y")
    broken = run(
        [named],
        lambda c: ended(c, Outcome.CRASH, detail=nasty),
        env=environment(variables={"NSA_X": f"\n```\n{nasty}"}, hostname=nasty, command=(nasty,)),
        notes=(nasty,),
    )
    suite = replace(broken.suite, title=nasty, question=nasty)

    text = page(replace(broken, suite=suite), tmp_path)

    outside = re.sub(r"```bash.*?\n```\n|`[^`]+`", "", text, flags=re.DOTALL)
    active = re.findall(r"\x1b|i\]\(|a\]\(|@owner|<img|www\.evil|&commat", outside)
    assert active == []
    assert "export NSA_X" not in outside


def test_an_axis_has_one_name_on_the_page(tmp_path: Path) -> None:
    """The suite's. Commands, case ids and names of files keep that of the code."""
    recorded = retest()
    suite = replace(recorded.suite, axis_names={"seq_len": "T", "gc": "checkpointing"})

    text = page(replace(recorded, suite=suite), tmp_path)

    said = re.sub(r"```bash.*?\n```\n|\]\([^)]*\)", "", text, flags=re.DOTALL)
    said = re.sub(r"`([^`\n]*)`", lambda m: m[1] if m[1].isidentifier() else "", said)
    assert re.findall(r".*\b(?:seq_len|gc)\b.*", said) == []
    assert "| T | checkpointing |" in said


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with everything in it."""
    return pages.write(retest(), tmp_path_factory.mktemp("reports"))


def test_the_page_is_the_reviewed_text(full: Path) -> None:
    assert full.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_every_picture_it_shows_exists_and_has_words(full: Path) -> None:
    text = full.read_text(encoding="utf-8")
    shown = re.findall(r"^!\[([^\]]+)\]\((\S+)\)$", text, re.MULTILINE)

    assert {full.parent / link for _, link in shown} == {*full.parent.glob("figures/*.png")}
    assert len(shown) == 2
    for _, link in shown:
        assert (full.parent / link).read_bytes().startswith(b"\x89PNG")


def test_a_page_names_logs_only_where_they_are(tmp_path: Path) -> None:
    recorded = run(sweep(gc=["off"]), lambda c: timed(c, 0.05), folder=str(tmp_path))

    (first,) = values(recorded)["artefacts"]
    (tmp_path / "logs").mkdir()
    _, logs = values(recorded)["artefacts"]

    assert "run.jsonl" in first
    assert "output of the processes" in logs


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (1.55, "55.0 % [54.0 … 56.0] slower"),
        (0.8, "25.0 % [23.5 … 26.6] faster"),
        (3.0, "3.000x [2.990 … 3.010] slower"),
        (1.001, "unchanged (+0.1 % [-0.9 … +1.1])"),
        (1.012, "no difference shown (+1.2 % [-0.8 … +3.2])"),
    ],
)
def test_an_effect_has_a_direction(ratio: float, expected: str) -> None:
    around = 0.02 if ratio == 1.012 else 0.01
    effect = Effect(
        workload="w", axis="gc", base="off", value="on", ratio=ratio, low=ratio - around,
        high=ratio + around, smallest=ratio, largest=ratio, pairs=4,
    )  # fmt: skip

    (sentence,) = text.effect_sentences([effect])
    assert sentence == f"`gc`, on against off: {expected} (4 pairs)."
    apart = replace(effect, smallest=0.2, largest=4.4, disagree=True, within={"T": 512})
    (sentence,) = text.effect_sentences([apart])
    assert sentence == "`gc`, on against off: 5.0x faster to 4.4x slower (4 pairs, T=512)."


def test_records_beside_the_report_are_linked(tmp_path: Path) -> None:
    text = page(small(folder=str(tmp_path / "runs" / "x y")), tmp_path)

    assert "[`runs/x y/run.jsonl`](runs/x%20y/run.jsonl)" in text
    assert str(tmp_path) not in text


def test_a_run_without_any_number_still_has_a_report(tmp_path: Path) -> None:
    broken = run(sweep(gc=["off", "on"]), lambda c: ended(c, Outcome.CRASH, detail="boom"))

    text = page(replace(broken, ended_at=""), tmp_path)

    assert " (unfinished) | " in text
    assert not any(tmp_path.glob("figures/*.png"))


def test_a_program_has_its_command_and_no_value_of_a_variable() -> None:
    program = Program(argv=(INTERPRETER, "train.py", "--gc"), cwd="code")
    cases = [replace(c, program=program, env={"KEY": "s3"}) for c in sweep(gc=["off", "on"])]
    started = run(cases, lambda c: timed(c, 0.05, code={"program": "/where"}))

    (line,) = text.ran_lines(started)

    more = "(in /where; sets KEY); 1 more case"
    assert line == f"train runs: python train.py --gc {more}"


def test_one_process_has_no_interval_and_leaves_the_verdict_open() -> None:
    once = run([case({"gc": "off"})], lambda c: timed(c, 0.05, processes=1))

    built = values(once)

    assert built["verdict"].decision is Decision.INCONCLUSIVE
    assert built["sections"][0]["details"] is None


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(retest(), Path(folder)), encoding="utf-8")
