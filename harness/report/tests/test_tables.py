"""The tables of a report, cell by cell where the page of a run does not show the case."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.analysis.study import Study
from harness.analysis.summary import summarise
from harness.records import Case, Evidence, Measurement, MeasureSettings, Outcome, Stop
from harness.report import conditions, context, endings, tables
from harness.tests.fake_runs import ended, environment, run, sweep, taking, timed


def test_what_decided_which_code_ran_is_in_the_environment_and_the_commands() -> None:
    where = environment(interpreter="/v/bin/python", variables={"PYTHONPATH": "/a b"})
    page, _ = context.build(
        Study(run(sweep(gc=["off"]), lambda c: timed(c, 0.05), env=where)), Path("r")
    )

    rows = dict(conditions.environment_rows(where))
    assert rows["interpreter"] == "/v/bin/python"
    commands = page["commands"]
    assert isinstance(commands, tuple)
    assert "# with /v/bin/python" in commands
    assert page["exports"] == ["export PYTHONPATH='/a b'"]


def test_what_did_not_run_has_its_reason() -> None:
    declined, not_started = sweep(gc=["off", "on"])
    detail = "x" * (endings.MAX_DETAIL + 1)

    def measure(c: Case) -> list[Measurement]:
        return ended(c, Outcome.UNSUPPORTED, detail=detail) if c is declined else []

    recorded = run([declined, not_started], measure)
    table = endings.not_run(Study(recorded))

    assert table
    assert [row[1] for row in table.rows] == ["unsupported", "not run"]
    assert len(table.rows[0][2]) == endings.MAX_DETAIL
    assert table.rows[1][2] == "the run ended before this case started"
    stopped = replace(recorded, stopped=Stop(rule="floor"))
    table = endings.not_run(Study(stopped))
    assert table
    assert table.rows[1][2] == "decided by rule “floor”"


def test_a_case_that_the_machine_spoilt_did_not_run_and_one_that_failed_is_elsewhere() -> None:
    spoilt, failed = sweep(gc=["off", "on"])

    def measure(c: Case) -> list[Measurement]:
        measured = timed(c, 0.05)
        if c is spoilt:
            return [replace(m, discarded={"shared": tuple(range(20))}) for m in measured]
        return [*measured[:2], *ended(c, Outcome.INVALID_ENVIRONMENT)]

    table = endings.not_run(Study(run([spoilt, failed], measure)))

    assert table
    assert [row[0] for row in table.rows] == ["nsa, gc=off"]


def test_the_tokens_of_a_timeout_bound_its_rate() -> None:
    """With start-up, where no step was timed: no tokens in 60 s, or two of three steps' worth."""
    quick = MeasureSettings(timeout_s=60.0)
    cases = [replace(c, settings=quick) for c in sweep(seq_len=[512, 1024, 2048, 4096])]
    known: list[dict[str, Any]] = [
        {"tokens": 600, "lower_bound_s": 2.0},
        {"tokens": 600, "evidence": Evidence(steps=2)},
        {"tokens": 600},
        {},
    ]

    def measure(c: Case) -> list[Measurement]:
        return ended(c, Outcome.TIMEOUT, **known[cases.index(c)])

    cells = [tables.metric_cell(s, "tokens_per_s", True) for s in summarise(run(cases, measure))]

    with_start_up = ["under 30 with start-up (timeout)", "under 10 with start-up (timeout)"]
    assert cells == ["under 300 (timeout)", *with_start_up, tables.NONE]


def test_a_case_that_does_not_repeat_is_in_the_report_without_a_speed() -> None:
    cases = sweep(seq_len=[512, 1024, 2048])

    def measure(c: Case) -> list[Measurement]:
        return taking(c, 1.6 if c is cases[0] else 0.05, 0.05, 0.05)

    page, _ = context.build(Study(run(cases, measure)), Path("reports"))

    assert str(page["sections"]).count("'not repeatable'") == 2
    assert "not repeatable, so without a speed" in str(page["lines"])


def test_of_many_providers_a_page_shows_who_leads_and_what_each_is() -> None:
    steps_s = {"a": 0.06, "b": 0.02, "c": 0.05}
    of_b = {"install": "pip install b", "version": "1.2", "licence": "MIT", "definition": "paper"}

    def measure(c: Case) -> list[Measurement]:
        if c.provider == "d":
            return ended(c, Outcome.UNSUPPORTED, detail="not installed")
        seen = of_b if c.provider == "b" else {}
        step_s = int(c.axes["seq_len"]) / 512 * steps_s[c.provider]
        return [replace(m, effective=seen) for m in taking(c, step_s, step_s, step_s)]

    axes: dict[str, Any] = {"shape": ["wide", "deep", "flat", "long"], "seq_len": [512, 1024]}
    cases = [c for p in (*steps_s, "d") for c in sweep(provider=p, **axes)]
    built: dict[str, Any] = context.build(Study(run(cases, measure)), Path("r"))[0]
    (section,) = built["asked"]

    assert section["table"].columns == ("case", ">seq_len=512", ">seq_len=1024")
    for row in section["table"].rows:
        assert row[1:] == ("b 20.0 ms; c 2.5x; a 3.0x", "b 40.0 ms; c 2.5x; a 3.0x")
    assert len(section["full"].rows) == 16
    assert section["effects"] == []
    assert built["operators"].rows[0][:4] == ("b", "1.2", "MIT", "paper")
    assert built["not_run"].rows[0][:2] == ("d: 8 of 8 cases", "unsupported")
