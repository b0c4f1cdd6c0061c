"""A run of several GPUs: what is not compared, what its record says, and the command for it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis.effects import effects
from harness.analysis.summary import summarise
from harness.executor import hosts
from harness.executor.jobs import Attempt, JobEnd
from harness.executor.tests.fake_nodes import FakeNodes
from harness.gate import compare
from harness.records import Case, Measurement, Run, joined
from harness.store import reader
from harness.suite import load
from harness.tests.command_line import harness
from harness.tests.fake_runs import H200, environment, run, sweep, timed

HERE = [environment(gpu=replace(H200, uuid=f"GPU-{n}")) for n in range(6)]
SUITE = """schema: 1
title: Dealt
subject: Dealt
question: Who measures what?
measure: {processes: 2}
workloads:
  - {name: train, factory: "suites.workloads:train", providers: [nsa], axes: {seq_len: [1, 2, 3]}}
"""


def on(*uuids: str) -> Run:
    """Two cases, gc off and on, on these GPUs."""
    cases = sweep(gc=["off", "on"])
    card = {c.case_id: uuid for c, uuid in zip(cases, uuids, strict=True)}

    def measure(c: Case) -> list[Measurement]:
        return [replace(m, card=card[c.case_id]) for m in timed(c, 0.1, cv=0.001)]

    return run(cases, measure, env=joined(HERE[:2]), run_id="-".join(uuids))


def test_effects_are_taken_on_one_gpu_only() -> None:
    assert len(effects(summarise(on("GPU-0", "GPU-0")))) == 1
    assert effects(summarise(on("GPU-0", "GPU-1"))) == ()


def test_a_case_that_two_runs_have_on_other_gpus_is_compared_as_such() -> None:
    def card(a: Run, b: Run) -> list[float | None]:
        return [c.comparison.card for c in compare.runs(a, b).cases if c.comparison]

    one = on("GPU-0", "GPU-1")
    same, swapped = replace(one, run_id="x"), on("GPU-1", "GPU-0")
    assert card(one, same) == [None, None]
    assert all(card(one, swapped))
    here = replace(on("GPU-0", "GPU-0"), environment=HERE[0])  # by an executor, with one slot
    plain = [replace(m, card="") for m in here.measurements]
    assert card(here, replace(here, run_id="z", measurements=tuple(plain))) == [None, None]
    alone = replace(one, run_id="y", environment=HERE[0])
    assert all(card(one, alone))
    found = compare.runs(one, alone)
    assert [d.name for d in found.differences] == ["GPU UUID"]


def test_several_machines_are_never_taken_for_one_of_them() -> None:
    limited = replace(HERE[1], hostname="b", gpu=replace(H200, uuid="GPU-1", power_limit_w=500.0))
    both = joined([HERE[0], limited])
    assert (both.card, both.hostname) == ("GPU-0, GPU-1", "b, node-7")
    assert both.gpu
    assert both.gpu.power_limit_share == pytest.approx(5 / 7)  # what the report states
    assert joined(HERE).card == "6 in all"
    assert joined(HERE[:1]) == HERE[0]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNodes:
    """Two GPUs that `--executor local` finds."""
    (tmp_path / "s.yaml").write_text(SUITE)
    whole = load.load(str(tmp_path / "s.yaml"), overrides=["measure.min_samples=3"])
    found = FakeNodes(whole, ["GPU-0", "GPU-1"])
    monkeypatch.setattr(hosts, "of", lambda *_: found)
    return found


def test_the_command_measures_resumes_and_says_which_gpus(tmp_path: Path, nodes: FakeNodes) -> None:
    def interrupted(attempt: Attempt, gpu: str) -> tuple[int, JobEnd | BaseException]:
        return (1, KeyboardInterrupt()) if gpu == "GPU-1" else (1000, JobEnd())

    def run(*words: str) -> tuple[int, str, str]:
        done = harness("run", *words, "--store", "runs", "--no-report", "--json", cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    nodes.plan = interrupted
    options = ("--set", "measure.min_samples=3", "--no-self-test", "--executor", "local")
    status, _, said = run("s.yaml", *options)
    assert status == 3
    assert "--resume" in said
    assert not any("GPU-1" in e.card for e in reader.load(tmp_path / "runs", "latest").environments)

    nodes.plan = lambda *_: (1000, JobEnd())
    assert "--budget" in run("--resume", "latest", "--budget", "1")[2]
    status, out, said = run("--resume", "latest", "--trace")
    assert status == 0, said
    assert {c["outcome"] for c in json.loads(out)["cases"]} == {"ok"}
    assert "b001" in said
    assert nodes.jobs[0].attempt.options == ("--no-self-test", "--set=measure.min_samples=3")
    assert nodes.jobs[-1].attempt.options[-1] == "--trace"
    recorded = reader.load(tmp_path / "runs", "latest")
    assert recorded.environment.command[1:3] == ("run", "s.yaml")
    assert any("2 GPUs measured this run" in note for note in recorded.notes)


@pytest.mark.parametrize(
    "words", ["s.yaml --budget 1", "s.yaml --hosts h", "--resume latest", "s.yaml --executor ssh"]
)
def test_options_that_do_not_apply_are_refused(tmp_path: Path, words: str) -> None:
    (tmp_path / "s.yaml").write_text(SUITE)
    done = harness("run", "--executor", "local", *words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert "--" in done.stderr
