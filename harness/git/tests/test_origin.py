"""A package that hides the user's own of the same name is found out, by factories and programs."""

from pathlib import Path

import pytest

from harness.records import INTERPRETER, Case, Outcome, Program
from harness.runner.launcher import Launcher
from harness.tests.gate_repositories import write
from harness.tests.workers import QUICK, make_suite, run

MAKE = """\
import torch
from harness.workload import Workload

def make(provider, axes):
    return Workload(run=lambda: torch.ones(1))
"""
LATE = """\
def make(provider, axes):
    import kern.sub.model
"""


def case(factory: str, program: Program | None = None) -> Case:
    return Case(
        case_id=factory or "program",
        workload="w",
        factory=factory,
        provider="p",
        axes={},
        settings=QUICK,
        program=program,
    )


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages; the present folder has a namespace package of one's name."""
    write(tmp_path / "site", {"kern/__init__.py": "", "kern/ops.py": MAKE})
    own = {
        "kern/model.py": MAKE,
        "kern/ops.py": MAKE + "mine = make\n",
        "kern/sub/model.py": "",
        "bench.py": f"from kern import model\n{MAKE}",
        "late.py": LATE,
        "plain.py": MAKE,
    }
    write(tmp_path / "own", own)
    monkeypatch.chdir(tmp_path / "own")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return tmp_path / "site/kern"


def test_a_hidden_package_is_a_path_mismatch_with_both_files(
    installed: Path, tmp_path: Path
) -> None:
    factories = ("kern.model:make", "bench:make", "late:make", "kern.ops:make", "kern.ops:mine")
    cases = [case(name) for name in (*factories, "plain:make")]
    with Launcher() as launcher:
        launcher.check(make_suite(*cases))
        *hidden, plain = run(launcher, tmp_path, *cases)

    assert plain.outcome is Outcome.OK, plain.detail
    assert [m.outcome for m in hidden] == [Outcome.PATH_MISMATCH] * 5
    own = Path.cwd() / "kern"
    wanted = [own / "model.py", own / "model.py", own / "sub", own / "ops.py", own / "ops.py"]
    for measurement, file in zip(hidden, wanted, strict=True):
        assert str(file) in measurement.detail
        assert str(installed) in measurement.detail


def test_a_program_that_imports_a_hidden_package_is_a_path_mismatch(
    installed: Path, tmp_path: Path
) -> None:
    program = Program(argv=(INTERPRETER, "-c", "import kern.model"))

    with Launcher() as launcher:
        (measurement,) = run(launcher, tmp_path, case("", program))

    assert measurement.outcome is Outcome.PATH_MISMATCH
    assert measurement.detail.startswith(
        f"kern.model is in {Path.cwd()}/kern/model.py, but kern was imported from {installed}"
    )
