"""Searches for the differences of two runs, on a modelled machine."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.bisect import differences, processes, session, subjects
from harness.bisect.differences import DifferenceKind
from harness.bisect.journal import Build, DifferencesRequest, Journal, Measured
from harness.bisect.tests.modelled import Machine, Tree, failing, install
from harness.errors import HarnessError
from harness.git.repository import Repository
from harness.records import Case, Counters, Environment, Git, Outcome, Program
from harness.report.series import bisection
from harness.store import reader
from harness.store.writer import create
from harness.suite import load as suites
from harness.tests.fake_runs import case, environment
from harness.tests.gate_repositories import git, repository


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("causes") / "toys")


def by_variables(tree: Tree, case: Case) -> tuple[float, Mapping[str, Any]]:
    """NSA_SYNCS is a count, NSA_SLOW makes a step longer, and without NSA_KEEP the others crash."""
    seen = {**tree.machine.environ, **case.env}
    if not {"NSA_KEEP", "NSA_SLOW", "NSA_SYNCS"} & seen.keys():
        return 0.01, failing(Outcome.CRASH)
    counters = Counters(host_syncs=int(seen.get("NSA_SYNCS", 1)))
    return 0.011 if "NSA_SLOW" in seen else 0.01, {"counters": counters}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch, Machine(by_variables))


def searched(request: DifferencesRequest | Journal, folder: Path) -> session.DifferencesResult:
    resources = processes.Resources(state=folder / "state", say=lambda text: None)
    result = session.run(request, resources)
    assert isinstance(result, session.DifferencesResult)
    return result


def request(
    toys: Path,
    folder: Path,
    *variables: Mapping[str, str],
    pattern: str = "sleep",
    criterion: Mapping[str, str] | None = None,
    **second: Any,
) -> DifferencesRequest:
    """To search two runs with these variables, stored without measurements; the second one has
    these other fields, too."""
    suite = suites.load(str(toys / "toysuites/toys.yaml"))
    code = Git(commit=git(toys, "rev-parse", "HEAD"), branch="main")
    runs = []
    for seen, changes in zip(variables, ({}, second), strict=True):
        here = environment(gpu=None, **{"variables": seen, "git": code, **changes})
        with create(folder / "runs", suite, here) as writer:
            writer.finish()
        runs.append(reader.load(folder / "runs", writer.run_id))
    given: dict[str, Any] = {
        "pattern": pattern,
        "criterion": criterion or {},
        "effect": 0.03,
        "build": Build(),
    }
    return subjects.of_runs(runs[0], runs[1], Repository.around(toys), **given)


def test_the_variable_that_adds_synchronisations_is_found_among_others(
    toys: Path, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"NSA_SYNCS": "1", "NSA_KEEP": "x", "NSA_BOTH": "b"}
    second = {"NSA_SYNCS": "3", "NSA_OTHER": "7", "NSA_BOTH": "b"}
    counter = {"counter": "host_syncs"}
    asked = request(toys, tmp_path, first, second, criterion=counter, hostname="node-8")
    monkeypatch.setenv("NSA_SYNCS", "5")  # set where the search runs, and in neither run

    result = searched(asked, tmp_path)

    assert result.found
    (part,) = result.conclusion.parts
    (cause,) = result.named(part.mask)
    assert (cause.kind, str(cause)) == (DifferenceKind.VARIABLE, "variable NSA_SYNCS")
    assert (cause.then, cause.now) == ("1", "3")
    assert {c.name for c in result.request.causes} == {"NSA_SYNCS", "NSA_KEEP", "NSA_OTHER"}
    assert result.values[0] == (1.0,)
    assert (result.decided[0], result.decided[part.mask]) == (False, True)
    assert result.processes <= 2 + 3
    assert "host" in {f.name for f in result.fixed}
    assert "NSA_SYNCS" not in machine.environ
    assert bisection.sentence(result).endswith("1 becomes 3, 100 % of the difference")


def test_a_slow_variable_is_found_although_some_configurations_crash(
    toys: Path, tmp_path: Path, machine: Machine
) -> None:
    first, second = {"NSA_KEEP": "x", "NSA_A": "1"}, {"NSA_SLOW": "1", "NSA_A": "2"}
    machine.interrupt_at = 15
    with pytest.raises(KeyboardInterrupt):
        searched(request(toys, tmp_path, first, second), tmp_path)

    result = searched(Journal.resume(tmp_path / "state", "latest"), tmp_path)

    assert result.found
    (part,) = result.conclusion.parts
    assert [c.name for c in result.named(part.mask)] == ["NSA_SLOW"]
    assert part.comparison is not None
    assert part.comparison.ratio == pytest.approx(1.1, abs=0.02)
    with Journal.resume(tmp_path / "state", "latest") as journal:
        taken = [x.measurement.process for x in journal.lines if isinstance(x, Measured)]
    assert taken == list(range(result.processes))
    assert result.skipped
    assert all("crash" in x.reason for x in result.skipped)


def test_runs_whose_variables_move_nothing_list_what_was_not_varied(
    toys: Path, tmp_path: Path, machine: Machine
) -> None:
    first, second = ({"NSA_KEEP": "x", "NSA_A": n} for n in "12")
    versions = {"python": "3.12.7", "torch": "2.12.0"}

    result = searched(request(toys, tmp_path, first, second, versions=versions), tmp_path)

    assert not result.found
    assert result.conclusion.parts == ()
    (torch,) = (f for f in result.fixed if f.name == "torch")
    assert (torch.now, torch.here) == ("2.12.0", "as in the first run")
    assert torch.why == "it needs another installation"


# --- requests that are refused -----------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "pattern", "message"),
    [
        ({"git": Git(commit="f" * 40, branch="main")}, "sleep", r"two commits[\s\S]*--good"),
        ({"dirty": "d" * 64}, "sleep", "uncommitted code"),
        ({"git": None}, "sleep", "only one of .* has a commit"),
        ({}, "nothing", "matches 0 cases of"),
        ({"variables": {}, "hostname": "node-8"}, "sleep", r"be varied[\s\S]*host: .*node-8"),
    ],
    ids=["two commits", "uncommitted", "no commit", "no case", "nothing varied"],
)
def test_runs_that_cannot_be_searched_are_refused(
    toys: Path, tmp_path: Path, second: dict[str, Any], pattern: str, message: str
) -> None:
    if dirty := second.get("dirty"):
        commit = git(toys, "rev-parse", "HEAD")
        second = {"git": Git(commit=commit, branch="main", dirty_sha256=dirty)}
    fields = {"variables": {"NSA_A": "1"}, **second}

    with pytest.raises(HarnessError, match=message):
        request(toys, tmp_path, {}, {}, pattern=pattern, **fields)


# --- the differences ---------------------------------------------------------------------


def test_each_difference_of_two_cases_is_listed_and_applied_alone() -> None:
    first = case({"seq_len": 512, "NSA_X": "a"}, env={"NSA_X": "a", "NSA_Y": "1"})
    second = replace(
        first,
        provider="dense",
        axes={"seq_len": 1024, "NSA_X": "b", "precision": "bf16"},
        env={"NSA_X": "b", "NSA_Z": "2"},
        settings=replace(first.settings, graph=True, processes=9),
    )

    found = tuple(differences.of_cases(first, second))

    axes, variables = ("axis seq_len", "axis NSA_X"), ("variable NSA_Y", "variable NSA_Z")
    assert [str(c) for c in found] == ["workload", *axes, *variables, "setting graph"]
    alone = [differences.applied(first, second, [c]) for c in found]
    assert alone[0] == replace(first, provider="dense")
    assert alone[1].axes["seq_len"] == 1024
    assert (alone[2].axes["NSA_X"], alone[2].env["NSA_X"]) == ("b", "b")
    assert "NSA_Y" not in alone[3].env
    assert alone[4].env == {**first.env, "NSA_Z": "2"}
    assert alone[5].settings == replace(first.settings, graph=True)
    both = differences.applied(first, second, found)
    assert (both.axes, both.env, both.provider) == (second.axes, second.env, "dense")
    assert differences.applied(first, second, []) == first


def test_a_program_differs_by_its_whole_command() -> None:
    first = replace(case({"lr": 1}), factory="", program=Program(argv=("train", "--lr", "1")))
    second = replace(first, axes={"lr": 2}, program=Program(argv=("train", "--lr", "2")))

    found = tuple(differences.of_cases(first, second))

    assert [str(c) for c in found] == ["command"]
    assert differences.applied(first, second, found).program == second.program


def test_workers_get_the_variables_of_the_runs_and_not_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("NSA_HERE", "1"), ("NSA_ALIKE", "2"), ("CUDA_VISIBLE_DEVICES", "3")):
        monkeypatch.setenv(name, value)
    first = {"NSA_ALIKE": "2", "NSA_FIRST": "4", "CUDA_VISIBLE_DEVICES": "0"}
    inherited = differences.inherited(first, {"NSA_ALIKE": "2"})
    assert inherited == {"NSA_ALIKE": "2"}

    complete = differences.complete(case({}, env={"NSA_FIRST": "of the case"}), first, inherited)
    assert complete.env == {"NSA_FIRST": "of the case"}
    with differences.only(inherited, environment(), environment()):
        assert "NSA_HERE" not in os.environ
        assert os.environ["NSA_ALIKE"] == "2"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert os.environ["NSA_HERE"] == "1"


def test_a_number_of_threads_is_varied_by_its_variable() -> None:
    def seen(threads: int, **variables: str) -> Environment:
        return environment(torch_settings={"num_threads": threads}, variables=variables)

    four, eight = {"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "8"}
    assert differences.variables(seen(4), seen(8)) == [four, eight]
    assert differences.variables(seen(4), seen(4)) == [{}, {}]
    assert differences.variables(seen(4), seen(8, **eight)) == [{}, eight]
