"""Where code under test was loaded from: the right tree, another, or a shadowing package."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from harness.git import origin
from harness.records import INTERPRETER, Case, Outcome, Program
from harness.runner.launcher import Launcher
from harness.tests import fake_runs
from harness.tests.gate_repositories import repository, write
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
    name = factory or "program"
    found: Case = fake_runs.case({}, case_id=name, factory=factory, settings=QUICK, program=program)
    return found


SLEEP = case("toysuites.workloads:sleeps")
SLEEP = dataclasses.replace(SLEEP, case_id="sleep", provider="a", axes={"step_s": 0.001})


# --- the right tree ----------------------------------------------------------------------


def test_a_package_that_the_tree_lacks_is_a_path_mismatch(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = repository(tmp_path / "other")
    monkeypatch.syspath_prepend(str(other))
    shutil.rmtree(toys / "toysuites")

    with Launcher([toys]) as launcher:
        (measurement,) = run(launcher, tmp_path, SLEEP)

    assert measurement.outcome is Outcome.PATH_MISMATCH
    assert str(other / "toysuites") in measurement.detail


@pytest.mark.parametrize(
    ("name", "file", "expected"),
    [
        ("kern", "other/src/kern.py", "not {tree}/src/kern.py"),
        ("kern", "tree/src/kern.py", ""),
        ("venv.kern", "other/venv/kern.py", ""),  # the tree has no such file
        ("harness.kern", "other/src/kern.py", ""),
        ("model", "site/model.py", "not {tree}/model.py"),
        ("model", "tree/model.py", ""),
        ("model.kern", "site/model/kern.py", ""),
        ("json", "site/json.py", ""),
    ],
)
def test_a_module_that_the_tree_has_must_come_from_the_tree(
    name: str, file: str, expected: str, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    write(tree, {".git": "", "src/kern.py": "", "model.py": "", "json.py": ""})
    write(tmp_path, {"other/src/kern.py": "", "other/venv/kern.py": "", "site/model.py": ""})
    elsewhere = [str(tree), str(tmp_path / "other")]

    found = origin.misplaced({name: str(tmp_path / file)}, [str(tree)], elsewhere)

    assert bool(found) is bool(expected)
    assert expected.format(tree=tree) in found


# --- a package that shadows the user's own -----------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package; the current folder has a namespace package of the same name."""
    write(tmp_path / "site", {"kern/__init__.py": "", "kern/ops.py": MAKE})
    own = {
        "kern/model.py": MAKE,
        "kern/ops.py": MAKE,
        "kern/sub/model.py": "",
        "bench.py": f"from kern import model\n{MAKE}",
        "late.py": LATE,
        "lib/flat.py": "",
        "flat.py": "",
        "plain.py": f"import flat\n{MAKE}",
    }
    write(tmp_path / "own", own)
    monkeypatch.chdir(tmp_path / "own")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return tmp_path / "site/kern"


def test_a_shadowed_package_is_a_path_mismatch_with_both_files(
    installed: Path, tmp_path: Path
) -> None:
    cases = [case(f"{name}:make") for name in ("bench", "late", "kern.ops", "plain")]
    cases.insert(0, case("", Program(argv=(INTERPRETER, "-c", "import kern.model"))))
    with Launcher() as launcher:
        launcher.check(make_suite(*cases))
        *shadowed, plain = run(launcher, tmp_path, *cases)

    assert plain.outcome is Outcome.OK, plain.detail
    assert [m.outcome for m in shadowed] == [Outcome.PATH_MISMATCH] * 4
    own = Path.cwd() / "kern"
    wanted = [own / "model.py", own / "model.py", own / "sub", own / "ops.py"]
    for measurement, file in zip(shadowed, wanted, strict=True):
        assert str(file) in measurement.detail
        assert str(installed) in measurement.detail


@pytest.fixture
def shadowing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a repository with a package that PYTHONPATH has too."""
    repo = repository(tmp_path / "toys")
    write(tmp_path / "site", {"toy/__init__.py": "", "toysuites/__init__.py": ""})
    write(repo, {"scripts/train.py": "import toy; print('from', toy.__file__)"})
    monkeypatch.chdir(repo / "scripts")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return repo


def test_a_run_imports_the_code_of_the_repository_first(shadowing: Path, tmp_path: Path) -> None:
    script = Program(argv=(INTERPRETER, "train.py"))
    suite = make_suite(SLEEP, case("", script))

    with Launcher.of(suite) as launcher:
        workload, program = run(launcher, tmp_path, *suite.cases)

    assert workload.outcome is Outcome.OK, workload.detail
    assert workload.code["toy"] == str(shadowing / "toy/__init__.py")
    assert program.outcome is Outcome.OK, program.detail
    said = (tmp_path / program.log).read_text()
    assert said == f"from {shadowing / 'toy/__init__.py'}\n"
