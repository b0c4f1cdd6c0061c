"""Gates over a repository with planted faults."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError, SuiteError
from harness.gate import session
from harness.gate.plan import Request
from harness.gate.records import GateCase, GateRecord, Mode, State, decode
from harness.gate.session import carry_out
from harness.records import Case, Counters, Decision, Measurement, Outcome, TensorDigest
from harness.report.series.gate_text import next_steps, reason, verdict_reason
from harness.runner import interleave
from harness.runner.launcher import Launcher
from harness.store import reader
from harness.tests import fake_runs, gate_repositories
from harness.tests.command_line import harness
from harness.tests.gate_repositories import (
    TOYS,
    TOYS_POLICY,
    commit,
    git,
    kernel,
    repository,
    tree,
    write,
)

GO, NO_GO, OPEN = Decision.GO, Decision.NO_GO, Decision.INCONCLUSIVE

Interleaved = tuple[GateRecord, Path]
SYNC = "float(__import__('torch').ones(1)[0])"


class Quiet:
    def stage(self, text: str, processes: int) -> None: ...

    def ended(self, place: str, measurement: Measurement) -> None: ...


def judge(folder: Path, **request: object) -> GateRecord:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("TRITON_INTERPRET", raising=False)  # it would make this machine unfit
        return carry_out(Request(self_test=False, **request), Quiet(), lambda _: None)  # type: ignore[arg-type]


def case_id(provider: str) -> str:
    return f"sleep/{provider}/step_s=0.004"


def of(verdict: GateRecord, provider: str) -> GateCase:
    (found,) = (c for c in verdict.cases if c.case_id == case_id(provider))
    return found


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started: a kernel takes the time, and waits as often, as its file states."""

    def run_one(case: Case, index: int, launcher: Launcher, *_: object) -> Measurement:
        root = Path(launcher._roots[0])
        text = (root / f"toy/{case.provider}.py").read_text()
        (made,) = fake_runs.timed(
            case,
            0.004 * int(text.partition("sleep(")[2].partition(" ")[0]),
            processes=1,
            process=index,
            seed=index,
            counters=Counters(steps=2, host_syncs=text.count("float(")),
            code={"toysuites": str(root / "toysuites/workloads.py")},
        )
        return made

    monkeypatch.setattr(interleave, "run_one", run_one)


@pytest.mark.parametrize("spoiled", ["accuracy", "digest"])
def test_a_race_that_spoils_one_process_in_ten_does_not_pass(
    spoiled: str, planted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Six pairs and more: one of the candidate's processes is wrong, and not the first."""
    folder = repository(tmp_path, tree("a"))
    commit(folder, {"toy/a.py": kernel() + "CHANGED = 1"}, branch="change")
    once: Callable[..., Measurement] = getattr(interleave, "run_one")  # noqa: B009  mypy

    def run_one(case: Case, index: int, *rest: Any) -> Measurement:
        made = replace(once(case, index, *rest), output_digest=(digest(1.0),))
        if index != 1 or "CHANGED" not in (Path(rest[0]._roots[0]) / "toy/a.py").read_text():
            return made
        if spoiled == "digest":
            return replace(made, output_digest=(digest(2.0),))
        if not case.settings.accuracy:
            return made
        return replace(made, outcome=Outcome.INCORRECT, samples_s=(), host_samples_s=())

    monkeypatch.setattr(interleave, "run_one", run_one)

    found = of(judge(folder, mode=Mode.RELATIVE, base="main", head="HEAD"), "a")

    assert found.decision is (NO_GO if spoiled == "accuracy" else OPEN), found


def digest(norm: float) -> TensorDigest:
    return TensorDigest(name="o", dtype="float64", shape=(8,), norm=norm, projection=0.0)


# --- baseline and candidate, interleaved -------------------------------------------------


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Interleaved:
    """One gate, with real processes, over a change that breaks each kernel in its own way."""
    folder = repository(tmp_path_factory.mktemp("toys"), tree("slow", "wrong", "unread", "gone"))
    faults = {"slow": kernel(times=4), "wrong": kernel("2.0"), "unread": kernel("(")}
    broken = tree(*faults, "new", **faults)
    commit(folder, {**broken, "toy/gone.py": None}, branch="change")
    return judge(folder, mode=Mode.RELATIVE, base="main", head="HEAD"), folder


@pytest.mark.parametrize(
    ("provider", "decision", "state", "said"),
    [
        ("slow", NO_GO, State.COMPARED, "x slower (p = "),
        ("wrong", NO_GO, State.FAILED, "incorrect"),
        ("unread", NO_GO, State.FAILED, "SyntaxError"),
        ("gone", OPEN, State.MISSING, "only the baseline has this case"),
        ("new", GO, State.NEW, "no provider new"),
    ],
)
def test_each_planted_fault_has_its_decision(
    provider: str, decision: Decision, state: State, said: str, interleaved: Interleaved
) -> None:
    verdict, _ = interleaved
    found = of(verdict, provider)

    assert (found.decision, found.state) == (decision, state), found
    assert said in reason(found)
    assert (verdict.decision, verdict.blocks, verdict.decision.exit_status) == (NO_GO, True, 1)


def test_a_slowdown_is_measured_in_pairs_and_stored(interleaved: Interleaved) -> None:
    verdict, folder = interleaved
    slow = of(verdict, "slow")
    assert slow.comparison is not None
    assert slow.comparison.ratio.low is not None
    assert 1.5 < slow.comparison.ratio.low <= slow.comparison.ratio.value
    assert slow.comparison.ratio.n >= 4, "of six; a busy machine may spoil some"
    assert slow.gpu_s > 0
    assert verdict.baseline is not None
    (remedy,) = (text for text in next_steps(verdict) if "harness bisect" in text)
    ends = verdict.baseline.commit[:10], verdict.candidate.commit[:10]
    assert "--good {} --bad {}".format(*ends) in remedy
    began: dict[int, dict[str, str]] = {}
    for side, ref in ((verdict.baseline, "main"), (verdict.candidate, "change")):
        assert side is not None
        (name,) = side.folders
        run = reader.load(folder, folder / name)
        assert run.ended_at
        assert [p.skipped for p in run.self_tests] == ["not requested"]
        assert run.environment.git is not None
        assert run.environment.git.commit == git(folder, "rev-parse", ref) == side.commit
        assert not side.uncommitted
        measured = run.of(case_id("slow"))
        assert all(m.accuracy and m.accuracy.tensors for m in measured), "in every process"
        for m in measured:
            began.setdefault(m.process, {})[ref] = m.started_at

    assert len(run.of(case_id("new"))) == 2, "only the candidate runs it"
    first = [min(sides, key=lambda name: sides[name]) for _, sides in sorted(began.items())]

    assert len(first) >= 7, "the first look, unless it came too late for unsteady pairs"
    assert first == (["main", "change"] * len(first))[: len(first)], "they alternate their order"


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("toysuites/toy.yaml", "ci/gate.yaml: there is no suite toysuites/toy.yaml in the working"),
        (f"{TOYS}, cases: ['!x', zzz]", f"ci/gate.yaml: no case of {TOYS} matches '!x', 'zzz'"),
        (f"{TOYS}, cases: ['!sleep/*']", f"ci/gate.yaml: no case of {TOYS} matches"),
        ("other.yaml", "other.yaml:9:14: factory 'suites.workloads:sleeps': the repository has no"),
    ],
    ids=["suite", "case", "all left out", "package"],
)
def test_a_policy_with_a_wrong_suite_is_refused(chosen: str, said: str, tmp_path: Path) -> None:
    other = gate_repositories.SUITE.replace("toysuites.workloads", "suites.workloads")
    policy = TOYS_POLICY.replace(f"suites: [{{suite: {TOYS}", f"suites: [{{suite: {chosen}")
    folder = repository(tmp_path / "toys", {"other.yaml": other, "ci/gate.yaml": policy})

    with pytest.raises(SuiteError) as refused:
        judge(folder, mode=Mode.RELATIVE, base="HEAD")

    assert said in str(refused.value)


@pytest.mark.usefixtures("planted")
def test_a_machine_without_what_a_suite_requires_is_refused(tmp_path: Path) -> None:
    files = tree("a")
    folder = repository(tmp_path, {**files, TOYS: f"{files[TOYS]}requires: {{gpu: none}}\n"})

    with pytest.raises(SuiteError, match="gpu: "):
        judge(folder, mode=Mode.RELATIVE, base="HEAD", measure=True)


@pytest.mark.parametrize(
    ("files", "same"),
    [
        ({"toy/a.py": f"# Why\n{kernel()}", "notes.md": "Why"}, True),
        ({"toy/a.py": kernel() + "TILE = 2"}, False),
        ({"toy/a.py": f"{kernel()}X = {'+'.join('1' * 3000)}"}, False),
        ({"weights.bin": "1"}, False),
        ({"reports/speed.py": "TIMES = 5"}, False),
    ],
)
def test_a_change_of_comments_and_prose_alone_is_not_measured(
    files: dict[str, str], same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(*_: object) -> None:
        raise HarnessError("it is measured")

    monkeypatch.setattr(session, "prepared", prepared)
    folder = repository(tmp_path, {**tree("a"), ".gitignore": "__pycache__/"})
    commit(folder, files, branch="change")

    with nullcontext() if same else pytest.raises(HarnessError, match="it is measured"):
        verdict = judge(folder, mode=Mode.RELATIVE, base="main", head="HEAD")
        assert of(verdict, "a").state is State.SAME
        assert verdict_reason(verdict).endswith("docstrings and prose differ; not measured")


@pytest.mark.usefixtures("planted")
def test_a_suite_and_a_policy_may_be_younger_than_the_commits(tmp_path: Path) -> None:
    files = tree("same", "slow")
    folder = repository(tmp_path, {**files, TOYS: None, "ci/gate.yaml": None})
    head = commit(folder, {"toy/slow.py": kernel(times=2)}, branch="change")
    write(folder, {TOYS: files[TOYS], "ci/gate.yaml": files["ci/gate.yaml"]})

    gated = judge(folder, mode=Mode.RELATIVE, base="main", head=head)
    slow = ("--suite", TOYS, "--filter", "*slow*", "--no-self-test")
    compared = harness("compare", "main", head, *slow, cwd=folder)

    assert (of(gated, "same").decision, of(gated, "slow").decision) == (GO, NO_GO)
    assert compared.returncode == 1, compared.stderr
    ended = re.findall(rf"(\S+) \d+/\d+: {case_id('slow')} pair 1, (\S+) ok ", compared.stderr)
    assert ended == [("screen", "baseline"), ("screen", "candidate")]


@pytest.mark.usefixtures("planted")
def test_a_case_that_is_not_measured_any_more_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = repository(tmp_path / "toys", tree("same", "slow"))
    monkeypatch.chdir(folder)
    session.count(Request(mode=Mode.COUNTERS), Quiet(), lambda _: None)
    narrow = TOYS_POLICY.replace(
        f"counters: [{{suite: {TOYS}", f"counters: [{{suite: {TOYS}, cases: [same]"
    )

    write(folder, {"ci/gate.yaml": narrow})
    by_policy = judge(folder, mode=Mode.COUNTERS, base="HEAD")
    on_record = judge(folder, mode=Mode.COUNTERS)
    whys = [of(v, "slow") for v in (by_policy, on_record)]
    assert [(c.state, c.decision) for c in whys] == [(State.MISSING, OPEN)] * 2
    assert len({reason(c) for c in whys}) == 2
    assert {v.decision for v in (by_policy, on_record)} == {OPEN}


@pytest.mark.parametrize(("roots", "found"), [("", State.FAILED), ("[., src]", State.COMPARED)])
def test_code_from_outside_both_trees_is_refused(
    roots: str, found: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an editable install both sides would import the user's tree."""
    folder = repository(
        tmp_path / "toys",
        {
            **tree("same", same="from kern.ops import run\n"),
            "src/kern/__init__.py": "",
            "src/kern/ops.py": kernel(),
            "ci/gate.yaml": TOYS_POLICY + (f"roots: {roots}\n" if roots else ""),
        },
    )
    write(folder, {"src/kern/ops.py": kernel(SYNC)})
    monkeypatch.syspath_prepend(str(folder / "src"))

    verdict = judge(folder, mode=Mode.COUNTERS, base="HEAD")

    case = of(verdict, "same")
    assert (case.decision, case.state) == (NO_GO, found), case
    assert verdict.baseline is not None
    assert verdict.candidate.commit == verdict.baseline.commit
    assert (verdict.candidate.uncommitted, verdict.baseline.uncommitted) == (True, False)
    if not roots:
        assert f"kern is {folder / 'src/kern/__init__.py'}" in reason(case)
        assert "under `roots` in the policy" in reason(case)
    else:
        assert ("host_syncs", 0, 1) in [(c.name, c.before, c.after) for c in case.counters]
        assert "harness gate --counters --record" in next(next_steps(verdict))


# --- the command -------------------------------------------------------------------------


@pytest.mark.usefixtures("planted")
def test_the_command_writes_its_verdict(tmp_path: Path) -> None:
    folder = repository(tmp_path / "toys", tree("same"))
    verdict = tmp_path / "out/verdict.json"
    write(folder, {"ci/baselines/counters.json": "{}"})

    asked = ("gate", "--counters", "--verdict", str(verdict))
    damaged = harness(*asked, cwd=folder)
    left = verdict.exists()
    (folder / "ci/baselines/counters.json").unlink()
    strict = harness(*asked, cwd=folder)

    assert (damaged.returncode, left) == (2, False)
    assert "counters.json" in damaged.stderr
    assert strict.returncode == 3
    assert "Gate: INCONCLUSIVE" in strict.stdout
    recorded = re.search(r"Recorded: harness show (\S+)\n", strict.stdout)
    assert recorded
    assert "One side of a gate" in harness("show", recorded[1], cwd=folder).stdout
    assert decode(verdict.read_bytes(), "it").decision is OPEN


def test_an_interrupted_gate_removes_its_worktrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = repository(tmp_path / "toys", tree("same"))
    trees: list[str] = []

    def run_one(*_: object) -> Measurement:
        trees.extend(git(folder, "worktree", "list").splitlines())
        raise KeyboardInterrupt

    monkeypatch.setattr(interleave, "run_one", run_one)
    words = ("--base", "main", "--head", "HEAD", "--measure", "--no-self-test")
    gate = harness("gate", *words, cwd=folder)

    assert gate.returncode == 3
    assert len(trees) == 3
    assert not Path(trees[1].split()[0]).parent.exists()
    assert len(git(folder, "worktree", "list").splitlines()) == 1
