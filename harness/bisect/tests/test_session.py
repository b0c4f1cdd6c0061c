"""Searches of a planted history on a modelled machine, their journal, and the history itself."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.bisect import criteria, history, session
from harness.bisect.criteria import Criterion, CriterionKind
from harness.bisect.culprit import CallsChange, ProfileChange
from harness.bisect.history import Commit
from harness.bisect.journal import STATE, BisectRequest, Journal, Measured
from harness.bisect.search import ANCHOR_PAIRS, BisectStage
from harness.bisect.session import TRIES
from harness.bisect.tests.modelled import Machine, Tree, failing, install
from harness.bisect.tests.planted import BUILD, Planted, make
from harness.errors import HarnessError, SuiteError
from harness.git.repository import Repository
from harness.records import Case, Counters, Outcome, Profile, Use
from harness.report.series import bisection
from harness.suite import load as suites
from harness.tests.gate_repositories import fingerprint, git

PLANTED = Planted(step=0.10)
STEP_TIME = Criterion(kind=CriterionKind.METRIC, name="step_s")
HOST_SYNCS = Criterion(kind=CriterionKind.COUNTER, name="host_syncs")
CRASH = Criterion(kind=CriterionKind.OUTCOME, name="crash")
SLOW = f"STEP_S = {PLANTED.base_s * 1.10!r}"
"""In the kernel from the slow commit on."""

Past = tuple[Path, tuple[str, ...]]
"""A repository and its line of first parents."""


def as_written(tree: Tree, case: Case) -> tuple[float, dict[str, Any]]:
    """The time and the count that the code of a tree states."""
    stated = dict(re.findall(r"(STEP_S|SYNCS) = (\S+)", tree.kernel))
    return float(stated["STEP_S"]), {"counters": Counters(host_syncs=int(stated["SYNCS"]))}


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Past:
    folder = tmp_path_factory.mktemp("planted") / "repository"
    return folder, make(folder, PLANTED)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch, Machine(as_written))


def change(machine: Machine, text: str, **fields: Any) -> None:
    """Change the measurements of the commits whose kernel contains a text."""

    def changed(tree: Tree, case: Case) -> tuple[float, dict[str, Any]]:
        step_s, known = as_written(tree, case)
        return step_s, known | fields if text in tree.kernel else known

    machine.answer = changed


def searched(
    past: Past, folder: Path, criterion: Criterion, *, bad: int = -1, **changes: Any
) -> session.BisectResult:
    repository, line = Repository.around(past[0]), past[1]
    suite = suites.load(str(past[0] / "toysuites/toys.yaml"))
    budget_s = changes.pop("budget_s", None)
    request = BisectRequest(
        started_at="2026-11-21T12:00:00+00:00",
        repository=str(past[0]),
        history=history.between(repository, line[0], line[bad]),
        suite=suite,
        case=criteria.prepared(suite.cases[0], criterion),
        criterion=criterion,
        effect=0.03,
        build=BUILD,
        **changes,
    )
    return run(request, folder, budget_s=budget_s)


def run(
    start: BisectRequest | Journal,
    folder: Path,
    budget_s: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> session.BisectResult:
    resources = session.Resources(state=folder, budget_s=budget_s, say=say)
    return session.run(start, resources)


def culprit(result: session.BisectResult) -> Commit:
    assert result.found
    return result.request.history[result.conclusion.culprits[0]]


def journalled(folder: Path) -> list[Measured]:
    with Journal.resume(folder, "latest") as journal:
        return [x for x in journal.lines if isinstance(x, Measured)]


def test_a_planted_step_is_found_confirmed_and_reported(
    past: Past, machine: Machine, tmp_path: Path
) -> None:
    before = fingerprint(past[0])

    result = searched(past, tmp_path / "state", STEP_TIME)

    assert result.found
    assert culprit(result).sha == past[1][PLANTED.slow_at]
    assert result.step == pytest.approx(1.10, abs=0.02)
    read = [values for values in result.values if values]
    assert len(machine.checked) == len(read)  # once for each commit
    assert machine.elsewhere == [past[0]]  # the user's own tree is no place for the code
    assert fingerprint(past[0]) == before
    assert re.search(r"before it, confirmed by \d+ new pairs", bisection.sentence(result))
    assert len(read) < len(past[1])


def test_an_interrupted_search_resumes_from_its_journal(
    past: Past, machine: Machine, tmp_path: Path
) -> None:
    machine.interrupt_at = 20
    with pytest.raises(KeyboardInterrupt):
        searched(past, tmp_path, STEP_TIME)

    said: list[str] = []
    result = run(Journal.resume(tmp_path, "latest"), tmp_path, say=said.append)

    assert said[0].startswith(f"{result.folder.name}: "), "the name to resume it by"
    assert "Which commits between them are bad?" in said, "the title of the stage"
    assert any(re.match(r"search \d+ of about \d+: \w{10} [\d.]+ m?s; ", line) for line in said)
    assert any(re.match(r"confirm 12 of 12: \w{10} ", line) for line in said), said
    assert re.match(rf"ended after {result.processes} processes, ", said[-1])
    assert culprit(result).sha == past[1][PLANTED.slow_at]
    assert machine.processes == result.processes
    taken = journalled(tmp_path)
    assert [x.measurement.process for x in taken] == list(range(result.processes))
    anchors = sum(x.stage is BisectStage.ANCHORS for x in taken)
    assert anchors == 2 * ANCHOR_PAIRS  # and not once more


def test_commits_that_cannot_be_measured_are_named_with_the_culprit(
    machine: Machine, tmp_path: Path
) -> None:
    planted = Planted(step=0.10, sync_at=33, merges=(), commits=34)  # 33 lacks the case
    folder = tmp_path / "repository"
    line = make(folder, planted)

    result = searched((folder, line), tmp_path / "state", HOST_SYNCS)

    assert not result.found
    named = {result.request.history[p].sha for p in result.conclusion.culprits}
    assert named == {line[33], line[34]}
    assert "one of" in bisection.sentence(result)
    reasons = {x.commit: x.reason for x in result.skipped}
    assert "it does not have the case" in reasons[line[33]]


def test_a_merge_is_named_and_then_the_side_that_it_brought_in_is_searched(
    past: Past, machine: Machine, tmp_path: Path
) -> None:
    merge = searched(past, tmp_path, HOST_SYNCS)

    assert culprit(merge).subject == f"merge {PLANTED.sync_at}"
    into, merged = culprit(merge).parents
    ends = git(past[0], "merge-base", into, merged), merged
    side = searched((past[0], ends), tmp_path, HOST_SYNCS)
    assert culprit(side).subject == f"side 1 of {PLANTED.sync_at}"
    assert side.summary


@pytest.mark.parametrize("interrupt_at", [None, 9], ids=["at once", "resumed between the profiles"])
def test_what_the_culprit_changed_is_read_from_a_process_before_it_and_one_of_it(
    past: Past, machine: Machine, tmp_path: Path, interrupt_at: int | None
) -> None:
    def profiled(tree: Tree, case: Case) -> tuple[float, dict[str, Any]]:
        step_s, known = as_written(tree, case)
        syncs = known["counters"].host_syncs
        item = Use(name="aten::item", calls=syncs, time_s=1e-6 * syncs)
        profile = Profile(operators=(item,)) if case.settings.profile else Profile(skipped="off")
        return step_s, known | {"profile": profile}

    machine.answer, machine.interrupt_at = profiled, interrupt_at
    try:
        result = searched(past, tmp_path, HOST_SYNCS)
    except KeyboardInterrupt:
        result = run(Journal.resume(tmp_path, "latest"), tmp_path)

    assert result.profile == ProfileChange(
        calls=(
            CallsChange(kind="counter", name="host_syncs", before=1, after=2),
            CallsChange(kind="operator", name="aten::item", before=1, after=2),
        )
    )
    taken = journalled(tmp_path)
    place = result.conclusion.culprits[0]
    profiles = [x.position for x in taken if x.stage is BisectStage.PROFILE]
    assert profiles == [place - 1, place]
    assert {len(values) for values in result.values} == {0, 1}, "a profile is not a reading"
    assert machine.processes == result.processes == len(taken)


def test_an_invalid_environment_ends_a_search(past: Past, machine: Machine, tmp_path: Path) -> None:
    change(machine, SLOW, **failing(Outcome.INVALID_ENVIRONMENT))

    result = searched(past, tmp_path, CRASH)

    assert (result.found, result.resumable) == (False, True)
    assert "not fit" in bisection.sentence(result)


def test_a_machine_without_what_the_suite_requires_is_refused(
    past: Past, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = replace(suites.load(str(past[0] / "toysuites/toys.yaml")), requires={"gpu": "H200"})
    monkeypatch.setattr(suites, "load", lambda path: suite)

    with pytest.raises(SuiteError, match="gpu: no GPU"):
        searched(past, tmp_path, CRASH)


def test_a_commit_without_a_reading_in_three_processes_is_skipped(
    past: Past, machine: Machine, tmp_path: Path
) -> None:
    change(machine, "REVISION = '32.0'", steady=False)

    result = searched(past, tmp_path, STEP_TIME)

    unsteady = past[1][32]
    assert culprit(result).sha == past[1][PLANTED.slow_at]
    reasons = {x.commit: x.reason for x in result.skipped}
    assert "steady" in reasons[unsteady]
    assert sum(x.commit == unsteady for x in journalled(tmp_path)) == TRIES


def test_a_path_mismatch_of_the_good_commit_ends_the_search(
    past: Past, machine: Machine, tmp_path: Path
) -> None:
    change(machine, "", **failing(Outcome.PATH_MISMATCH))

    result = searched(past, tmp_path, HOST_SYNCS)

    assert not result.found
    assert "good commit cannot be measured: path mismatch" in bisection.sentence(result)


def test_ends_that_do_not_fit_are_refused(past: Past) -> None:
    repository, line = Repository.around(past[0]), past[1]
    side = git(past[0], "rev-parse", f"{line[30]}^2")

    for good, bad, message in (
        ("main", line[0], "Exchange --good and --bad"),
        ("main", "main", "same commit"),
        (side, "main", "not a first-parent ancestor"),
    ):
        with pytest.raises(HarnessError, match=message):
            history.between(repository, good, bad)


def test_a_journal_that_is_in_use_unknown_or_damaged_is_refused(
    past: Past, machine: Machine, tmp_path: Path
) -> None:
    folder = searched(past, tmp_path, STEP_TIME, budget_s=0.0).folder
    with (
        Journal.resume(tmp_path, "latest"),
        pytest.raises(HarnessError, match="another process runs"),
    ):
        Journal.resume(tmp_path, "latest")
    with pytest.raises(HarnessError, match=folder.name):  # it lists the stored ones
        Journal.resume(tmp_path, "2019")
    lines = (folder / STATE).read_text().count("\n")
    with (folder / STATE).open("a") as file:
        file.write('{"kind": "left_out"}\n')
    with pytest.raises(HarnessError, match=f"{STATE}:{lines + 1}"):
        Journal.resume(tmp_path, "latest")
