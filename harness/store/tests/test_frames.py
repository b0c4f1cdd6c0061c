"""A stored run as pandas frames."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import harness
from harness.analysis.summary import summarise
from harness.records import Case, Counters, Measurement, MetricSource, Outcome, Program, Run
from harness.store.reader import load
from harness.tests.fake_runs import ended, run, sweep, timed, trained
from harness.tests.stored_runs import store

README = Path(__file__).resolve().parents[2] / "README.md"
BOTH = [c for p in ("nsa", "dense") for c in sweep(provider=p, seq_len=[512, 1024])]
GOOD, ALONE, LATE, ABSENT = BOTH
PROGRAM = Program(argv=("x",), readings=(MetricSource(metric="loss", unit="nats", take="last"),))


def measure(c: Case) -> list[Measurement]:
    if c.case_id == GOOD.case_id:
        counted = Counters(host_syncs=4, steps=2)
        first, *others = timed(c, 0.05, readings={"loss": (9.0, 4.0, 2.5)}, counters=counted)
        return [replace(first, discarded={"throttled": (1,)}), *others]
    if c.case_id == ALONE.case_id:
        (m,) = timed(c, 0.1, processes=1, telemetry={"cpu_utilisation": 0.9})
        return [trained(m, bits_per_byte=lambda n: 8.0)]
    return ended(c, Outcome.TIMEOUT, lower_bound_s=2.0) if c.case_id == LATE.case_id else []


@pytest.fixture
def recorded(tmp_path: Path) -> Run:
    cases = [replace(c, axes={**c.axes, "outcome": 1}) for c in BOTH]
    whole = run([replace(cases[0], program=PROGRAM), *cases[1:]], measure)
    root = tmp_path / "reports/runs"
    return load(root, store(root, whole))


def test_a_case_has_its_axes_its_outcome_and_its_metrics_with_units(recorded: Run) -> None:
    cases = harness.load(recorded.folder).cases.set_index("case_id")

    assert [*cases.index] == [c.case_id for c in BOTH]
    assert [*cases.outcome] == ["ok", "ok", "timeout", "not run"]
    assert [*cases.seq_len] == [512, 1024, 512, 1024]
    assert [*cases.axis_outcome] == [1] * 4, "an axis whose name is taken"
    step = summarise(recorded)[0].metrics["step_s"]
    of_good = cases.loc[GOOD.case_id]
    assert [*of_good[["step_s", "step_s_lo", "step_s_hi"]]] == [step.value, step.low, step.high]
    assert cases.step_s_lo.isna().tolist() == [False, True, True, True], "one has no interval"
    assert of_good.loss == 2.5
    units = cases.attrs["units"]
    named = ("step_s", "step_s_lo", "loss", "peak_memory_bytes", "mfu")
    assert " ".join(units[name] for name in named) == "s s nats B ratio"
    assert {n for n in cases if cases[n].dtype == float} <= units.keys()


def test_samples_processes_and_counters_are_those_of_the_record(recorded: Run) -> None:
    frames = harness.load(recorded.folder)

    ok = [m for m in recorded.measurements if m.samples_s]
    assert tuple(frames.samples.sample_s) == tuple(s for m in ok for s in m.samples_s)
    assert [*frames.samples.discarded.dropna()] == ["throttled"]
    assert frames.samples.attrs["units"]["sample_at_s"] == "s"
    assert [*frames.processes.wall_s] == [m.wall_s for m in recorded.measurements]
    assert [*frames.processes.lower_bound_s.dropna()] == [2.0]
    assert frames.processes.attrs["units"]["flops"] == "FLOP"
    assert [*frames.counters.host_syncs] == [4] * 3
    assert frames.counters.exact.all()
    for frame in (frames.cases, frames.samples, frames.processes, frames.counters):
        assert {*frame.run_id} == {recorded.run_id}
        assert {"workload", "provider", "seq_len", "precision"} <= {*frame}


def test_a_training_step_has_what_it_reported_and_the_telemetry_at_its_end(recorded: Run) -> None:
    steps = harness.load(recorded.folder).steps

    assert {*steps["case_id"]} == {ALONE.case_id}
    assert [*steps["step"]] == [*range(1, 201)]
    assert set(steps["bits_per_byte"]) == {8.0}
    assert steps["cpu_utilisation"].iloc[-1] == pytest.approx(0.9, rel=0.3)
    assert steps.attrs["units"]["step_s"] == "s"
    assert {"loss", "end_s", "axis_outcome", "seq_len"} <= {*steps}


def test_the_example_of_the_page_runs(
    recorded: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(import harness\n.*?)```", README.read_text(), re.DOTALL)
    monkeypatch.chdir(Path(recorded.folder).parents[2])

    exec(example, {})

    said = capsys.readouterr().out
    assert "provider" in said
    assert said.endswith("\ns\n")
