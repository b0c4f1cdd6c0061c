"""What `harness show` prints.

To accept a change: python -m harness.cli.tests.test_console
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text
from typer.testing import CliRunner

from harness.cli import console
from harness.cli.main import app
from harness.cli.run import last_runs
from harness.machine import nvml
from harness.records import CaseSummary, Counters, Outcome, Peaks, Run, SelfTest
from harness.runner.launcher import Launcher
from harness.store import reader
from harness.suite import load as suites
from harness.tests.fake_runs import H200, case, environment, run, taking, timed, variables

ROOT = Path(__file__).resolve().parents[3]
RUN = "20261121-092511-smoke-h200-45c5"
SHOWN = Path(__file__).with_name("show.txt")
CASE = case({"seq_len": 512})


def test_text_from_code_under_test_is_not_searched_for_what_to_highlight() -> None:
    assert console.console().render_str("12 of /tmp/a").spans == []


def test_text_from_elsewhere_cannot_command_the_terminal() -> None:
    here, nasty = console.console(), "T\x1b]52;c;cm0=\x07\x9b2J\u202e"
    bad = CaseSummary(case=CASE, outcome=Outcome.CRASH, metrics={}, detail=nasty)

    with here.capture() as captured:
        here.print(console.summaries([bad]), Text(nasty), nasty)

    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*captured.get()}
    assert captured.get().count("T\N{REPLACEMENT CHARACTER}]52") == 3


def test_what_a_program_never_read_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    one = case({"NSA_X": 1}, env={"NSA_X": "1"})
    flags = {"NSA_X": False, "--seq-len": False}
    recorded = run([one], lambda c: timed(c, 0.01, processes=2, flags_read=flags))
    monkeypatch.setattr(reader, "load", lambda *_: recorded)

    shown = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["show"]).stdout

    notes = [line for line in shown.splitlines() if line.startswith("note: ")]
    assert [note.rpartition(": ")[2] for note in notes] == ["--seq-len, NSA_X."]
    assert f"{one.case_id}: 2 of 3 processes ran\n" in shown, "what weakens its numbers, too"


def shown() -> str:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["show", RUN]).stdout


def test_a_stored_run_is_shown_as_reviewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    assert shown() == SHOWN.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("then", "now", "expected_s"),
    [
        ((99.0, 12.0), {}, 12.0),
        ((12.0, None), {}, 12.0),  # the newest lacks the case
        ((12.0,), {"processes": 5}, 12.0),
        ((12.0,), {"sample_s": 4.0}, None),
        ((), {}, None),
    ],
)
def test_a_process_is_expected_to_take_as_long_as_in_the_newest_run_alike(
    then: Sequence[float | None], now: dict[str, Any], expected_s: float | None
) -> None:
    def earlier(wall_s: float | None) -> Run:
        return run([CASE], lambda c: timed(c, 0.05, wall_s=wall_s) if wall_s else [])

    asked = replace(CASE, settings=replace(CASE.settings, **now))

    found = last_runs(run([asked], lambda _: []).suite, [*map(earlier, then)]).get(asked.case_id)

    assert (found and found.measurements[0].wall_s) == expected_s


def test_a_case_that_never_ran_here_has_a_bound_and_about_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its FLOPs on another GPU, or as its workload knows them, the peaks of this one, and the
    share of the bound that its provider reached here in the case with most of its axes and the
    nearest bound."""
    asked = [case({"seq_len": 4096, "gc": 0}, provider=p) for p in ("nsa", "dense")]
    asked.append(replace(asked[0], case_id="new", env={"X": "1"}))
    steps_s: dict[Any, float] = {512: 0.002, 256: 0.003, 4000: 0.001}
    near = [case({"seq_len": n, "gc": int(n > 512)}) for n in steps_s]
    slow, fast = (Peaks(flops_per_s={"bf16": flops}, launch_s=1.0) for flops in (1e14, 1e15))
    h200, a100 = ((SelfTest(at="", device="", peaks=p),) for p in (slow, fast))
    seen = Counters(kernel_launches=9)
    there = run(asked[:2], lambda c: taking(c, 9.0, counters=seen), name="other", self_tests=h200)
    env = environment(gpu=replace(H200, name="NVIDIA A100-PCIE-40GB"))
    here = run(near, lambda c: taking(c, steps_s[c.axes["seq_len"]]), env=env, self_tests=a100)
    suite = run(asked, lambda _: []).suite
    monkeypatch.setattr(suites, "load", lambda *_, **__: suite)
    monkeypatch.setattr(Launcher, "check", lambda *_: {"new": (10**12, 1)})

    def steps(gpus: Sequence[object], *runs: Run) -> list[str]:
        monkeypatch.setattr(nvml, "gpus", lambda: gpus)
        monkeypatch.setattr(reader, "stored", lambda *_: iter(runs))
        shown = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["run", "x", "--dry-run"]).stdout
        return re.findall(r"  ((?:about .+? ms )?\(.+? ms\)|unknown)", shown)

    both = ["about 16.0 ms (1.93 ms)", "(1.93 ms)", "about 8.31 ms (1.00 ms)"]
    assert steps([env.gpu], here, there) == both
    assert steps([env.gpu], there) == ["unknown"] * 3
    assert steps([H200, env.gpu], here, there) == ["unknown"] * 3


if __name__ == "__main__":
    os.chdir(ROOT)
    SHOWN.write_text(shown(), encoding="utf-8")


def test_a_narrow_terminal_breaks_no_id_and_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = variables()
    monkeypatch.setattr(reader, "load", lambda *_: recorded)

    shown = CliRunner(env={"COLUMNS": "44"}).invoke(app, ["show"]).stdout

    for c in recorded.suite.cases:
        assert c.case_id in shown
    for number in ("539 [537 … 541]", "under 11.4"):
        assert number in shown
