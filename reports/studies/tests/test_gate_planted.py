"""The study of planted slowdowns: branches, lines and table, with a gate that reads the branch."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from harness.gate.plan import Request
from harness.gate.records import GateRecord
from harness.records import Decision
from harness.store import reader
from harness.suite import load as suites
from harness.tests import fake_runs
from harness.tests.fake_verdicts import gate_case, gate_verdict
from harness.tests.gate_repositories import FILES, SUITE, git, write
from reports.studies import gate_planted

CASE_ID = "sleep/a/step_s=0.004"


def gate_by_text(request: Request, observer: object, say: object) -> GateRecord:
    """In place of a gate: NO-GO if the head's module of workloads holds a delay."""
    slower = "_slower(" in git(Path.cwd(), "show", f"{request.head}:toysuites/workloads.py")
    decision, ratio = (Decision.NO_GO, 2.0) if slower else (Decision.GO, 1.0)
    seen = fake_runs.comparison(ratio=fake_runs.ratio(ratio, None, None, *[ratio] * 5))
    return gate_verdict(gate_case(CASE_ID, decision, baseline_s=0.004, comparison=seen))


def test_a_slowdown_is_planted_on_a_branch_and_each_gate_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_planted, "carry_out", gate_by_text)
    write(tmp_path, FILES)
    (tmp_path / "toys.yaml").write_text(SUITE)
    out = tmp_path / "out"
    words = [str(out), "--suite", str(tmp_path / "toys.yaml"), "--slower", "1.0", "--again", "1"]

    gate_planted.main(
        [*words, "--packages", str(tmp_path / "toy"), str(tmp_path / "toysuites")],
    )

    kept = [json.loads(text) for text in (out / "gates.jsonl").read_text().splitlines()]
    said = capsys.readouterr().out
    assert "WRONG" not in said
    seen = [(k["gate"], k["case"]["decision"]) for k in kept]
    assert seen == [("A/A 1", "GO"), ("+100 %", "NO-GO")]
    assert f"| +100 % | {CASE_ID} | NO-GO | 2.000 (? to ?) | 5 |" in said
    assert git(out / "repository", "status", "--porcelain") == ""
    planted = git(out / "repository", "show", "slower-1:toysuites/workloads.py")
    assert f"{('a', [('step_s', 0.004)])!r}" in planted
    assert ": 0.004}" in planted, "the delay of this case alone"


def test_factories_of_one_module_keep_their_own_delays() -> None:
    waited: list[float] = []
    module: dict[str, Any] = {"dataclass": dataclass}
    text = "@dataclass\nclass Built:\n    run: object\ndef a(*_):\n    return Built(int)\nb = a\n"
    for function, delay_s in (("a", 0.5), ("b", 0.25)):
        delays_s = {repr(("mine", [("n", 1)])): delay_s}
        text += gate_planted.DELAY.format(delays_s=delays_s, function=function)
    exec(text, module)
    module["_wait"] = waited.append

    module["a"]("mine", {"n": 1}).run()
    module["b"]("mine", {"n": 1}).run()
    module["b"]("mine", {"n": 2}).run()

    assert waited == [0.5, 0.25], "a case without a planted delay does not wait"


def test_known_step_times_spare_the_gate_of_one_commit() -> None:
    planted = {}

    class Scratch:
        def plant(self, name: str, delays_s: dict[str, float]) -> None:
            planted[name] = delays_s

        def gate(self, head: str, *, proof: bool) -> GateRecord:
            return gate_verdict(gate_case(CASE_ID, Decision.NO_GO, baseline_s=0.004))

    found = gate_planted.study(Scratch(), [0.5], 0, 1.0, {CASE_ID: 0.004})  # type: ignore[arg-type]

    assert [line.gate for (line,) in found] == ["+50 %"]
    assert planted == {"slower-0.5": {CASE_ID: 0.002}}


def test_a_stored_step_is_found_by_its_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, other = fake_runs.case({"n": 1}), fake_runs.case({"n": 3})
    stored = fake_runs.run([alone], lambda c: fake_runs.timed(c, 0.25, cv=0.0))
    monkeypatch.setattr(reader, "load", lambda *_: stored)
    swept = replace(alone, case_id="train/nsa")

    assert gate_planted.step_times(Path("run"), [swept]) == {
        "train/nsa": pytest.approx(0.25, rel=0.01)
    }
    with pytest.raises(SystemExit, match="run has no step of train/nsa/n=3"):
        gate_planted.step_times(Path("run"), [swept, other])


def test_the_suite_of_the_study_is_a_suite_of_one_case_for_a_gpu() -> None:
    found = suites.loads(gate_planted.SUITE, "planted.yaml")

    assert (found.device, len(found.cases)) == ("cuda", 1)
