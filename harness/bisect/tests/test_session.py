"""Sessions on a modelled machine: real commits and worktrees, and processes that answer at once
from the code in their tree."""

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.bisect import criteria, history, processes, session
from harness.bisect.criteria import Criterion, CriterionKind
from harness.bisect.history import Commit
from harness.bisect.journal import STATE, Build, CommitsRequest, Journal, Measured, MergeEntered
from harness.bisect.readings import TRIES
from harness.bisect.search import ANCHOR_PAIRS, BisectStage
from harness.errors import CaseRefused, HarnessError
from harness.git.repository import Repository
from harness.records import Case, Clock, Counters, Measurement, Outcome, Suite
from harness.report import bisection
from harness.suite import load as suites
from harness.tests.fake_runs import environment
from harness.tests.gate_repositories import git
from reports.studies.noise import QUIET
from reports.studies.planted_history import BUILD, CASE, Planted, fingerprint, make

PLANTED = Planted(step=0.10)
STEP = re.compile(r"STEP_S = (\S+)")
SYNCS = re.compile(r"SYNCS = (\d+)")


@dataclass
class Machine:
    """A quiet node on which each process takes the time that its tree's code has."""

    repository: Path
    line: Sequence[str]
    noise: Sequence[float] = field(
        default_factory=lambda: QUIET.sequence(np.random.default_rng(5), 1, 2000)[0]
    )
    breaks: Callable[[int], Mapping[str, Any] | None] = lambda process: None
    """Process -> changes to its measurement."""
    processes: int = 0
    interrupt_at: int | None = None
    """The number of processes before the first Ctrl-C."""

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_: object) -> None: ...

    def launcher(self, roots: object, *, elsewhere: Sequence[Path], **_: object) -> "Machine":
        assert [*elsewhere] == [self.repository], "the user's own tree is no place for the code"
        return self

    def describe(self) -> dict[str, Any]:
        return {}

    def at(self, roots: Sequence[Path]) -> "Tree":
        return Tree(self, tuple(roots))


@dataclass
class Tree:
    machine: Machine
    roots: tuple[Path, ...]

    def check(self, suite: Suite) -> None:
        module, _, function = suite.cases[0].factory.partition(":")
        file = self.roots[0] / f"{module.replace('.', '/')}.py"
        if f"def {function}(" not in file.read_text():
            raise CaseRefused(suite.path, CASE, f"{module} has no function {function!r}")

    def run(self, case: Case, process: int) -> Measurement:
        text = (self.roots[0] / "toy/kernel.py").read_text()
        step, syncs = STEP.search(text), SYNCS.search(text)
        assert step is not None
        assert syncs is not None
        if self.machine.processes == self.machine.interrupt_at:
            self.machine.interrupt_at = None
            raise KeyboardInterrupt
        seconds = float(step[1]) * float(np.exp(self.machine.noise[self.machine.processes]))
        self.machine.processes += 1
        measured = Measurement(
            case_id=case.case_id,
            process=process,
            outcome=Outcome.OK,
            clock=Clock.HOST,
            samples_s=(seconds,) * case.settings.min_samples,
            steady=True,
            code={"toysuites": str(self.roots[0] / "toysuites/__init__.py")},
            counters=Counters(host_syncs=int(syncs[1])),
        )
        changes = self.machine.breaks(process)
        return replace(measured, **changes) if changes else measured


def failing(outcome: Outcome) -> Mapping[str, Any]:
    return {"outcome": outcome, "detail": "as planted", "samples_s": ()}


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("planted") / "repository"
    return folder, make(folder, PLANTED)


@pytest.fixture
def machine(past: tuple[Path, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(*past)
    here = environment(gpu=None)
    monkeypatch.setattr("harness.runner.rig.Launcher", made.launcher)
    monkeypatch.setattr("harness.machine.environment.capture", lambda *a, **k: here)
    monkeypatch.setattr(
        processes, "run_one", lambda case, process, tree, *rest: tree.run(case, process)
    )
    return made


def searched(
    machine: Machine,
    folder: Path,
    criterion: Criterion,
    *,
    good: int = 0,
    bad: int = -1,
    budget_s: float | None = None,
    **changes: Any,
) -> session.CommitsResult:
    line, repository = machine.line, Repository.around(machine.repository)
    suite = suites.load(str(machine.repository / "toysuites/toys.yaml"))
    request = CommitsRequest(
        started_at="2026-11-21T12:00:00+00:00",
        repository=str(machine.repository),
        history=history.between(repository, line[good], line[bad]),
        suite=suite,
        case=criteria.prepared(suite.cases[0], criterion),
        criterion=criterion,
        effect=0.03,
        **{"build": Build(command=BUILD), **changes},
    )
    return run(request, folder, budget_s=budget_s)


def run(
    start: CommitsRequest | Journal, folder: Path, budget_s: float | None = None
) -> session.CommitsResult:
    resources = processes.Resources(state=folder, budget_s=budget_s, say=lambda text: None)
    result = session.run(start, resources)
    assert isinstance(result, session.CommitsResult)
    return result


STEP_TIME = Criterion(kind=CriterionKind.METRIC, name="step_s")
HOST_SYNCS = Criterion(kind=CriterionKind.COUNTER, name="host_syncs")
CRASH = Criterion(kind=CriterionKind.OUTCOME, name="crash")


def test_a_planted_step_is_found_confirmed_and_reported(machine: Machine, tmp_path: Path) -> None:
    before = fingerprint(machine.repository)

    result = searched(machine, tmp_path / "state", STEP_TIME)

    assert result.found
    assert result.culprit is not None
    assert result.culprit.sha == machine.line[PLANTED.slow_at]
    assert result.levels[0].step == pytest.approx(1.10, abs=0.02)
    assert fingerprint(machine.repository) == before
    assert len(git(machine.repository, "worktree", "list").splitlines()) == 1
    page = bisection.markdown(result, datetime.date(2026, 11, 21))
    assert re.search(r"before it, confirmed by \d+ new pairs", page)
    assert sum(bool(values) for values in result.levels[0].values) < len(machine.line)


def test_an_interrupted_search_resumes_from_its_journal(machine: Machine, tmp_path: Path) -> None:
    machine.interrupt_at = 20
    with pytest.raises(KeyboardInterrupt):
        searched(machine, tmp_path, STEP_TIME)

    result = run(Journal.resume(tmp_path, "latest"), tmp_path)

    assert result.culprit is not None
    assert result.culprit.sha == machine.line[PLANTED.slow_at]
    assert machine.processes == result.processes
    with Journal.resume(tmp_path, "latest") as journal:
        taken = [x for x in journal.lines if isinstance(x, Measured)]
    assert [x.measurement.process for x in taken] == list(range(result.processes))
    assert (
        sum(x.stage is BisectStage.ANCHORS for x in taken) == 2 * ANCHOR_PAIRS
    )  # and not once more


def test_a_search_without_budget_left_can_be_resumed(machine: Machine, tmp_path: Path) -> None:
    result = searched(machine, tmp_path, STEP_TIME, budget_s=0.0)

    assert not result.found
    assert result.resumable
    assert "time budget is spent" in bisection.sentence(result)
    page = bisection.markdown(result, datetime.date(2026, 11, 21))
    assert f"harness bisect --resume {result.folder.name}" in page


def test_commits_that_cannot_be_measured_are_named_with_the_culprit(
    machine: Machine, tmp_path: Path
) -> None:
    planted = Planted(step=0.10, sync_at=33, merges=(), commits=34)  # 33 lacks the case
    folder = tmp_path / "repository"
    machine.repository, machine.line = folder, make(folder, planted)

    result = searched(machine, tmp_path / "state", HOST_SYNCS)

    assert not result.found
    named = {result.levels[0].history[p].sha for p in result.levels[0].conclusion.culprits}
    assert named == {machine.line[33], machine.line[34]}
    assert "one of" in bisection.sentence(result)
    reasons = {x.commit: x.reason for x in result.levels[0].skipped}
    assert "it does not have the case" in reasons[machine.line[33]]


def test_the_merged_side_of_a_culprit_is_searched_on_request(
    machine: Machine, tmp_path: Path
) -> None:
    result = searched(machine, tmp_path, HOST_SYNCS, enter_merges=True)

    assert result.culprit is not None
    assert result.culprit.subject == f"side 1 of {PLANTED.sync_at}"
    assert "on the side that" in bisection.sentence(result)
    assert all(level.summary for level in result.levels)


def test_a_search_of_a_merged_side_resumes_in_it(machine: Machine, tmp_path: Path) -> None:
    machine.interrupt_at = 9  # the line of first parents takes fewer
    with pytest.raises(KeyboardInterrupt):
        searched(machine, tmp_path, HOST_SYNCS, enter_merges=True)
    with Journal.resume(tmp_path, "latest") as journal:
        assert any(isinstance(line, MergeEntered) for line in journal.lines)

    result = run(Journal.resume(tmp_path, "latest"), tmp_path)

    assert result.culprit is not None
    assert result.culprit.subject == f"side 1 of {PLANTED.sync_at}"
    assert len(result.levels) == 2


def test_an_outcome_is_a_criterion_but_an_invalid_environment_stops_the_search(
    machine: Machine, tmp_path: Path
) -> None:
    slow = f"STEP_S = {PLANTED.base_s * 1.10!r}"
    whole = Tree.run

    def crashing(tree: Tree, case: Case, process: int) -> Measurement:
        measured = whole(tree, case, process)
        crashed = slow in (tree.roots[0] / "toy/kernel.py").read_text()
        return replace(measured, **failing(Outcome.CRASH)) if crashed else measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tree, "run", crashing)
        result = searched(machine, tmp_path / "one", CRASH)
    assert result.culprit is not None
    assert result.culprit.sha == machine.line[PLANTED.slow_at]
    assert "it ends with crash" in bisection.sentence(result)

    machine.breaks = lambda process: failing(Outcome.INVALID_ENVIRONMENT) if process else None
    result = searched(machine, tmp_path / "two", CRASH)
    assert not result.found
    assert result.resumable
    assert "not fit" in bisection.sentence(result)


def test_a_commit_without_a_reading_in_three_processes_is_skipped(
    machine: Machine, tmp_path: Path
) -> None:
    unsteady = machine.line[32]
    whole = Tree.run

    def run(tree: Tree, case: Case, process: int) -> Measurement:
        measured = whole(tree, case, process)
        revision = (tree.roots[0] / "toy/kernel.py").read_text()
        return replace(measured, steady=False) if "REVISION = '32.0'" in revision else measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tree, "run", run)
        result = searched(machine, tmp_path, STEP_TIME)

    assert result.culprit is not None
    assert result.culprit.sha == machine.line[PLANTED.slow_at]
    reasons = {x.commit: x.reason for x in result.levels[0].skipped}
    assert "steady" in reasons[unsteady]
    with Journal.resume(tmp_path, "latest") as journal:
        taken = [x for x in journal.lines if isinstance(x, Measured) and x.commit == unsteady]
    assert len(taken) == TRIES


def test_code_from_another_tree_is_a_path_mismatch(machine: Machine, tmp_path: Path) -> None:
    machine.breaks = lambda process: {"code": {"toysuites": "/elsewhere/toysuites/__init__.py"}}

    result = searched(machine, tmp_path, HOST_SYNCS)

    assert not result.found
    assert "good commit cannot be measured: path mismatch" in bisection.sentence(result)


def test_ends_with_equal_counts_find_no_commit_and_show_the_counts(
    machine: Machine, tmp_path: Path
) -> None:
    result = searched(machine, tmp_path, HOST_SYNCS, bad=2)

    assert not result.found
    ends = f"{machine.line[0][:10]}, 1 at {machine.line[2][:10]})"
    assert bisection.sentence(result).endswith(f"(host_syncs: 1 at {ends}")


def test_ends_that_do_not_fit_are_refused(machine: Machine) -> None:
    repository = Repository.around(machine.repository)

    with pytest.raises(HarnessError, match="Exchange --good and --bad"):
        history.between(repository, "main", machine.line[0])
    with pytest.raises(HarnessError, match="same commit"):
        history.between(repository, "main", "main")
    side = git(machine.repository, "rev-parse", f"{machine.line[30]}^2")
    with pytest.raises(HarnessError, match="not a first-parent ancestor"):
        history.between(repository, side, "main")


def test_the_history_follows_first_parents(machine: Machine) -> None:
    found = history.between(Repository.around(machine.repository), machine.line[0], "main")

    assert [c.sha for c in found] == list(machine.line)
    assert [i for i, c in enumerate(found) if c.merge] == sorted(PLANTED.merges)
    assert found[10] == replace(found[10], subject="merge 10", author="A. Uthor")


def test_build_products_are_shared_if_the_key_files_are_equal(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    counted = tmp_path / "builds"
    build = Build(command=f"echo . >> {counted}; date +%N > built", key=("toysuites/*",))

    result = searched(machine, tmp_path / "state", HOST_SYNCS, build=build)

    assert result.culprit is not None
    assert result.processes > 7
    assert len(counted.read_text().split()) == 1  # all measured commits have the same suite


# --- the journal -------------------------------------------------------------------------


def begun_in(folder: Path) -> Journal:
    suite = suites.load("smoke")
    commits = tuple(Commit(sha=f"{n:040x}") for n in range(3))
    begun = CommitsRequest(
        started_at="2026-11-21T12:00:00+00:00",
        repository="/somewhere",
        history=commits,
        suite=suite,
        case=suite.cases[0],
        criterion=STEP_TIME,
        effect=0.03,
    )
    return Journal.create(folder, begun)


def test_a_journal_is_open_in_one_process_only(tmp_path: Path) -> None:
    with begun_in(tmp_path), pytest.raises(HarnessError, match="another process runs"):
        Journal.resume(tmp_path, "latest")


def test_a_damaged_journal_is_refused_with_its_line(tmp_path: Path) -> None:
    with begun_in(tmp_path) as journal:
        state = journal.folder / STATE
    with state.open("a") as file:
        file.write('{"kind": "left_out", "level": 0}\n')

    with pytest.raises(HarnessError, match=f"{STATE}:2"):
        Journal.resume(tmp_path, "latest")


def test_an_unknown_bisection_lists_the_stored_ones(tmp_path: Path) -> None:
    with begun_in(tmp_path) as journal:
        name = journal.folder.name
    with pytest.raises(HarnessError, match=name):
        Journal.resume(tmp_path, "2019")
