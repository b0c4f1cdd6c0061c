"""Searches for the differences of two runs, on a modelled machine and with real workers."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.bisect import differences, processes, session, subjects
from harness.bisect.differences import DifferenceKind
from harness.bisect.journal import Build, DifferencesRequest, Journal, Measured
from harness.errors import HarnessError
from harness.git.repository import Repository
from harness.records import Case, Clock, Counters, Environment, Git, Measurement, Outcome, Program
from harness.report import bisection
from harness.store import reader
from harness.store.writer import create
from harness.suite import load as suites
from harness.tests.fake_runs import case, environment
from harness.tests.gate_repositories import git, repository
from reports.studies.noise import QUIET

KERNEL = """\
import os

def run(x, depth):
    for _ in range(int(os.environ.get("NSA_SYNCS", "1"))):
        x.sum().item()
    return x + depth
"""
WORKLOADS = """\
import torch
from harness.workload import Workload
from toy import kernel

def sleeps(provider, axes):
    x = torch.ones(8, dtype=torch.float64)
    return Workload(run=lambda: kernel.run(x, axes["step_s"]))
"""
FIRST = {"NSA_SYNCS": "1", "NSA_KEEP": "x", "NSA_BOTH": "b"}
SECOND = {"NSA_SYNCS": "3", "NSA_OTHER": "7", "NSA_BOTH": "b"}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {"toy/kernel.py": KERNEL, "toysuites/workloads.py": WORKLOADS}
    return repository(tmp_path_factory.mktemp("causes") / "toys", files)


def stored(toys: Path, root: Path, variables: Mapping[str, str], **changes: Any) -> str:
    """Store a run of the repository's suite without measurements; its id."""
    suite = suites.load(str(toys / "toysuites/toys.yaml"))
    commit = git(toys, "rev-parse", "HEAD")
    here = environment(
        gpu=None,
        **{"variables": variables, "git": Git(commit=commit, branch="main"), **changes},
    )
    with create(root, suite, here) as writer:
        writer.finish()
        return writer.run_id


def searched(
    toys: Path, folder: Path, names: tuple[str, str], *, resume: bool = False, **changes: Any
) -> session.DifferencesResult:
    state = folder / "state"
    start = Journal.resume(state, "latest") if resume else request(toys, folder, names, **changes)
    result = session.run(start, processes.Resources(state=state, say=lambda text: None))
    assert isinstance(result, session.DifferencesResult)
    return result


def request(
    toys: Path, folder: Path, names: tuple[str, str], *, pattern: str = "sleep", **criterion: str
) -> DifferencesRequest:
    first, second = (reader.load(folder / "runs", name) for name in names)
    return subjects.of_runs(
        first,
        second,
        Repository.around(toys),
        pattern=pattern,
        criterion=criterion,
        effect=0.03,
        build=Build(),
    )


# --- with real workers -------------------------------------------------------------------


def test_the_variable_that_adds_synchronisations_is_found_among_others(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    names = (stored(toys, runs, FIRST), stored(toys, runs, SECOND, hostname="node-8"))
    monkeypatch.setenv("NSA_SYNCS", "5")  # set where the search runs, and in neither run
    before = dict(os.environ), git(toys, "status", "--porcelain"), git(toys, "worktree", "list")

    result = searched(toys, tmp_path, names, counter="host_syncs")

    assert result.found
    (part,) = result.conclusion.parts
    (cause,) = result.named(part.mask)
    assert (cause.kind, cause.name, cause.then, cause.now) == (
        DifferenceKind.VARIABLE,
        "NSA_SYNCS",
        "1",
        "3",
    )
    assert {c.name for c in result.request.causes} == {"NSA_SYNCS", "NSA_KEEP", "NSA_OTHER"}
    assert result.values[0] == (1.0,)
    assert result.processes <= 2 + 3
    assert [f.name for f in result.fixed if f.name == "host"] == ["host"]
    after = dict(os.environ), git(toys, "status", "--porcelain"), git(toys, "worktree", "list")
    assert after == before
    assert bisection.sentence(result).endswith("1 becomes 3")


# --- on a modelled machine ---------------------------------------------------------------


@dataclass
class Machine:
    """A quiet node on which NSA_SLOW makes a step longer."""

    processes: int = 0
    stop_at: int | None = None

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_: object) -> None: ...

    def describe(self) -> dict[str, Any]:
        return {}

    def at(self, roots: Sequence[Path]) -> "Machine":
        return self

    def check(self, suite: object) -> None: ...

    def run(self, case: Case, process: int) -> Measurement:
        if process == self.stop_at:
            raise KeyboardInterrupt
        noise = QUIET.sequence(np.random.default_rng(7), 1, 2000)[0]
        slow = 1.1 if case.env.get("NSA_SLOW") == "1" else 1.0
        crashed = case.env.get("NSA_KEEP") is None and case.env.get("NSA_SLOW") is None
        self.processes += 1
        ended = Outcome.CRASH if crashed else Outcome.OK
        return Measurement(
            case_id=case.case_id,
            process=process,
            outcome=ended,
            detail="as planted" if crashed else "",
            clock=Clock.HOST,
            samples_s=() if crashed else (0.01 * slow * float(np.exp(noise[process])),) * 12,
            steady=True,
            counters=Counters(host_syncs=1),
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr("harness.runner.rig.Launcher", lambda *_, **__: made)
    monkeypatch.setattr(processes, "verified", lambda measured, case, roots: measured)
    monkeypatch.setattr(
        processes, "run_one", lambda case, process, at, *rest: at.run(case, process)
    )
    here = environment(gpu=None)
    monkeypatch.setattr("harness.machine.environment.capture", lambda *a, **k: here)
    return made


def test_a_slow_variable_is_found_although_some_configurations_crash(
    toys: Path, tmp_path: Path, machine: Machine
) -> None:
    runs = tmp_path / "runs"
    names = (
        stored(toys, runs, {"NSA_KEEP": "x", "NSA_A": "1"}),
        stored(toys, runs, {"NSA_SLOW": "1", "NSA_A": "2"}),
    )
    machine.stop_at = 15
    with pytest.raises(KeyboardInterrupt):
        searched(toys, tmp_path, names)
    machine.stop_at = None

    result = searched(toys, tmp_path, names, resume=True)

    assert result.found
    assert [c.name for p in result.conclusion.parts for c in result.named(p.mask)] == ["NSA_SLOW"]
    with Journal.resume(tmp_path / "state", "latest") as journal:
        taken = [x.measurement.process for x in journal.lines if isinstance(x, Measured)]
    assert taken == list(range(result.processes))
    assert result.skipped
    assert all("crash" in x.reason for x in result.skipped)
    (part,) = result.conclusion.parts
    assert part.comparison is not None
    assert part.comparison.ratio == pytest.approx(1.1, abs=0.02)


def test_runs_whose_variables_move_nothing_list_what_was_not_varied(
    toys: Path, tmp_path: Path, machine: Machine
) -> None:
    runs = tmp_path / "runs"
    versions = {"python": "3.12.7", "torch": "2.12.0"}
    names = (
        stored(toys, runs, {"NSA_KEEP": "x", "NSA_A": "1"}),
        stored(toys, runs, {"NSA_KEEP": "x", "NSA_A": "2"}, versions=versions),
    )

    result = searched(toys, tmp_path, names)

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
    names = (stored(toys, tmp_path / "runs", {}), stored(toys, tmp_path / "runs", **fields))

    with pytest.raises(HarnessError, match=message):
        request(toys, tmp_path, names, pattern=pattern)


# --- the differences ---------------------------------------------------------------------


def names_of(found: Sequence[differences.CaseDifference]) -> list[str]:
    return [str(c) for c in found]


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

    assert names_of(found) == [
        "workload",
        "axis seq_len",
        "axis NSA_X",
        "variable NSA_Y",
        "variable NSA_Z",
        "setting graph",
    ]
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

    assert names_of(found) == ["command"]
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
    with differences.only(inherited):
        assert "NSA_HERE" not in os.environ
        assert os.environ["NSA_ALIKE"] == "2"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert os.environ["NSA_HERE"] == "1"


def test_a_number_of_threads_is_varied_by_its_variable() -> None:
    def seen(threads: int, **variables: str) -> Environment:
        return environment(torch_settings={"num_threads": threads}, variables=variables)

    assert differences.threads(seen(4), seen(8)) == (
        {"OMP_NUM_THREADS": "4"},
        {"OMP_NUM_THREADS": "8"},
    )
    assert differences.threads(seen(4), seen(4)) == ({}, {})
    assert differences.threads(seen(4), seen(8, OMP_NUM_THREADS="8")) == ({}, {})
