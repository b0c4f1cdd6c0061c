"""Two runs, two commits, or a commit and the working tree, compared."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.analysis.study import Study
from harness.cli import console
from harness.cli import main as cli
from harness.errors import HarnessError
from harness.gate.compare import commits
from harness.gate.compare import runs as compare
from harness.gate.records import GateRecord, State
from harness.records import (
    Case,
    Counters,
    Decision,
    Environment,
    Git,
    Measurement,
    MeasureSettings,
    Outcome,
    Run,
)
from harness.report.series.gate_text import next_steps, reason, stated, verdict_reason
from harness.store import reader
from harness.tests.command_line import harness
from harness.tests.fake_runs import H200, ended, environment, run, sweep, timed
from harness.tests.fake_verdicts import gate_case, gate_verdict
from harness.tests.gate_repositories import (
    FILES,
    KERNEL,
    commit,
    fingerprint,
    git,
    repository,
    write,
)
from harness.tests.stored_runs import store

CASES = sweep(seq_len=[512, 1024])
GO, NO_GO, OPEN = Decision.GO, Decision.NO_GO, Decision.INCONCLUSIVE
Measure = Callable[[Case], list[Measurement]]
FIRST, SECOND = (c.case_id for c in CASES)


def at(commit: str, *, gpu=H200) -> Environment:
    return environment(gpu=gpu, git=Git(commit=commit * 40, branch="main"))


def steady(step_s: float) -> Measure:
    return lambda c: timed(c, step_s, processes=6, cv=0.001)


def side(
    name: str, measure: Measure, *, cases: Sequence[Case] = CASES, env: Environment | None = None
) -> Run:
    six = [replace(c, settings=MeasureSettings(processes=6)) for c in cases]
    return run(six, measure, env=env or at(name), run_id=f"run-{name}", folder=f"runs/run-{name}")


def of(compared: GateRecord, case_id: str) -> tuple[Decision, State, str | None]:
    (found,) = (c for c in compared.cases if c.case_id == case_id)
    return found.decision, found.state, found.change


def unsteady(c: Case) -> list[Measurement]:
    return [replace(m, steady=m.process == 0) for m in timed(c, 0.2, processes=6)]


def ends(outcome: Outcome) -> Measure:
    return lambda c: ended(c, outcome)


FAST, CRASHED, REFUSED = steady(0.1), ends(Outcome.CRASH), ends(Outcome.UNSUPPORTED)
SIDES: dict[str, tuple[Measure, Measure, Decision, State, str]] = {
    "not slower": (FAST, steady(0.098), GO, State.COMPARED, "% slower: below the tolerance of 5 %"),
    "slower": (FAST, steady(0.15), NO_GO, State.COMPARED, "shown to be 50 % slower (p = "),
    "faster": (FAST, steady(0.05), GO, State.COMPARED, "shown to be 2.0x faster (p = "),
    "days vary as much": (FAST, FAST, OPEN, State.COMPARED, ""),
    "one": (FAST, lambda c: timed(c, 0.2, processes=1), OPEN, State.UNCOMPARED, "1 of 6 processes"),
    "unsteady": (FAST, unsteady, OPEN, State.UNCOMPARED, "1 in the candidate"),
    "broken": (FAST, CRASHED, NO_GO, State.FAILED, "crash"),
    "repaired": (CRASHED, FAST, OPEN, State.UNCOMPARED, "crash"),
    "new": (REFUSED, FAST, OPEN, State.NEW, "only the cand"),
    "absent": (FAST, lambda _: [], OPEN, State.FAILED, "did not run"),
}


@pytest.mark.parametrize("what", SIDES)
def test_runs_are_judged_as_a_gate_judges(what: str) -> None:
    before, after, decision, state, said = SIDES[what]
    answer = compare(side("a", before), Study(side("b", after)))
    case = answer.cases[0]

    assert answer.decision is decision
    assert (case.decision, case.state) == (decision, state)
    assert said in reason(case)
    assert [d.name for d in answer.differences] == ["commit"]


def test_another_environment_leaves_times_undecided() -> None:
    a = side("a", steady(0.1))
    b = side("b", steady(0.2), env=at("b", gpu=replace(H200, driver="590.1")))

    answer = compare(a, Study(b))

    assert [d.name for d in answer.differences] == ["driver", "commit"]
    assert of(answer, FIRST) == (OPEN, State.COMPARED, "slower")
    assert "driver differs" in verdict_reason(answer)
    across, measure = next_steps(answer)
    assert across.endswith("--across")
    assert f"compare {'a' * 10} {'b' * 10}" in measure
    assert compare(a, Study(b), across=True).decision is NO_GO


def test_a_case_of_one_side_is_undecided() -> None:
    (other,) = sweep(seq_len=[4096])
    a = side("a", steady(0.1))
    b = side("b", steady(0.098), cases=[CASES[0], other])

    answer = compare(a, Study(b))

    assert of(answer, SECOND)[:2] == (OPEN, State.MISSING)
    assert of(answer, other.case_id)[:2] == (OPEN, State.NEW)
    assert answer.decision is OPEN
    assert "only the candidate has this case" in verdict_reason(answer)
    assert compare(a, Study(b), filters=["seq_len=512"]).decision is GO


def test_a_case_with_another_setting_is_compared_and_the_difference_is_named() -> None:
    a, b = (
        side(n, steady(s), cases=[replace(c, axes={**c.axes, "batch": k}) for c in CASES])
        for n, s, k in (("a", 0.1, 1), ("b", 0.2, 4))
    )
    answer = compare(a, Study(b))

    assert [(c.decision, c.change) for c in answer.cases] == [(OPEN, "slower")] * 2
    assert "axis batch is 1 in the baseline, 4 in the candidate" in reason(answer.cases[0])
    assert any("--across" in step for step in next_steps(answer))
    across = compare(a, Study(b), across=True)
    assert (across.decision, "axis batch is 1" in verdict_reason(across)) == (NO_GO, True)
    edited = replace(b, suite=replace(b.suite, sha256="another"))
    assert {c.comparison for c in compare(a, Study(edited)).cases} == {None}
    assert "axis batch is 1" in reason(compare(a, Study(edited), counters=True).cases[0])
    few = replace(b, measurements=tuple(replace(m, steady=False) for m in b.measurements))
    assert "axis batch is 1" in reason(compare(a, Study(few)).cases[0]), "before how few there are"


def counting(host_syncs: int, step_s: float = 0.1) -> Measure:
    counters = Counters(steps=2, host_syncs=host_syncs, dispatched_ops=7)
    return lambda c: [replace(m, counters=counters) for m in steady(step_s)(c)]


def test_counters_are_compared_exactly_and_shown_beside_times() -> None:
    a, b = side("a", counting(34)), side("b", counting(35, 0.098))

    exact = compare(a, Study(b), counters=True)
    timed_too = compare(a, Study(b))

    assert exact.decision is NO_GO
    assert [(c.name, c.before, c.after) for c in exact.cases[0].counters] == [
        ("host_syncs", 34, 35)
    ]
    assert timed_too.decision is GO
    assert "host_syncs 34 → 35" in stated(timed_too.cases[0].findings[-1])
    assert compare(a, Study(side("c", counting(34))), counters=True).decision.exit_status == 0
    assert compare(a, Study(side("c", steady(0.1))), counters=True).decision.exit_status == 3


def test_the_command_prints_differences_before_cases(tmp_path: Path) -> None:
    ids = [store(tmp_path, side(n, steady(s))) for n, s in (("a", 0.1), ("b", 0.15))]

    shown = CliRunner().invoke(cli.app, ["compare", *ids, "--store", str(tmp_path)])

    assert shown.exit_code == 1, shown.output
    assert shown.stdout.index("commit") < shown.stdout.index("slower"), "differences first"
    assert "Comparison: NO-GO  2 of 2 cases" in shown.stdout
    assert "--ci" not in shown.stdout


MORE = KERNEL.replace("return 1.0", "return float(__import__('torch').ones(1).sum())")
SUITE = "toysuites/toys.yaml"
TWO_CASES = FILES[SUITE].replace("providers: [a]", "providers: [a, b]")
STALE_POLICY = FILES["ci/gate.yaml"] + (
    "exempt: [{cases: ['*'], because: all, expires: 2099-01-01}]\n"
)


def test_the_working_tree_is_compared_with_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncommitted changes, a new case, and a baseline with further commits."""
    root = repository(tmp_path, {"ci/gate.yaml": STALE_POLICY})
    git(root, "branch", "work")
    commit(root, {"toy/kernel.py": KERNEL + "\n# main went on\n"})
    git(root, "checkout", "--quiet", "work")
    write(root, {"toy/kernel.py": MORE, SUITE: TWO_CASES, "untracked.txt": "mine"})
    git(root, "add", SUITE)  # staged, unlike the rest
    before = fingerprint(root)

    answers: list[GateRecord] = []
    monkeypatch.setattr(console, "judged", answers.append)
    said = harness("compare", "main", ".", "--counters", "--suite", SUITE, cwd=root)

    shutil.rmtree(root / "reports")
    assert fingerprint(root) == before, "the user's files and refs"
    (answer,) = answers
    (more,) = (case for case in answer.cases if case.case_id.startswith("sleep/a"))
    assert (answer.decision, said.returncode, answer.decision.exit_status) == (NO_GO, 1, 1)
    assert more.state is State.COMPARED
    assert "dispatched_ops" in [c.name for c in more.counters]
    assert not more.exemption
    assert answer.findings == ()
    assert (answer.mode, answer.subject) == ("counters", "comparison")
    assert answer.baseline
    assert answer.baseline.commit == git(root, "rev-parse", "main")
    assert "uncommitted changes" in [d.name for d in answer.differences]


def test_a_case_that_only_one_side_can_run_is_undecided() -> None:
    verdict = gate_verdict(*(gate_case(state=s) for s in (State.COMPARED, State.NEW)))

    answer = commits(verdict, ())

    assert verdict_reason(verdict) == "2 cases passed; 1 new"
    assert [c.decision for c in answer.cases] == [GO, OPEN]
    assert (answer.decision, answer.decision.exit_status) == (OPEN, 3)
    assert "only the candidate can run it" in verdict_reason(answer)


@pytest.fixture(scope="module")
def two_branches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Branches main and work, and a stored run."""
    root = repository(tmp_path_factory.mktemp("toys"))
    commit(root, {"toy/kernel.py": KERNEL + "\n"}, branch="work")
    git(root, "checkout", "--quiet", "main")
    store(root / reader.DEFAULT_ROOT, side("a", steady(0.1)))
    return root


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (". HEAD", "'.' is not a commit"),
        ("HEAD main", "are both commit"),
        ("HEAD .", "has no changes"),
        ("HEAD nowhere", "'nowhere' is not a commit here, and .* has no run 'nowhere'"),
        ("latest latest", "both are run"),
        ("HEAD latest", "only one of HEAD and latest is a run"),
        ("main work --across", "stored runs only"),
        ("main work --suite no.yaml", "there is no suite"),
        ("main work -f nothing", "no case of .* matches"),
    ],
)
def test_an_impossible_comparison_is_refused(
    two_branches: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(two_branches)

    with pytest.raises(HarnessError, match=message):
        CliRunner().invoke(cli.app, ["compare", *arguments.split()], catch_exceptions=False)
