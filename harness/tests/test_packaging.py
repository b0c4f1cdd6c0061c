"""What a user installs: one importable name, with the shipped suites and kernels inside it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from harness.integrations import first_gate
from harness.records import Outcome, Run
from harness.store import reader
from harness.tests.gate_repositories import POLICY, SUITE, commit, git, write

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = tuple(name for names in first_gate.TEMPLATES.values() for name in names)
SOURCES = ("harness", "nsa", "suites")
BUILD = "from setuptools import build_meta as b; b.build_wheel('wheel')"
MODEL = """\
import torch
from harness.workload import Workload
from nsa.sizes import SIZE

def sleeps(provider, axes):
    x = torch.ones(SIZE, dtype=torch.float64)
    return Workload(run=lambda: compute(x))

def compute(x):
    return x + 1
"""
SYNCING = MODEL.replace("return x + 1", "return x + x.sum().item()")
OWN_SUITE = "own.yaml"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, built from a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for package in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", *TEMPLATES):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True)
    return source


@pytest.fixture(scope="module")
def wheel(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment: the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (file,) = (built / "wheel").glob("*.whl")
    zipfile.ZipFile(file).extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin/python"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's repository whose package is called nsa and has no __init__.py."""
    files = {
        "nsa/model.py": MODEL,
        "nsa/sizes.py": "SIZE = 8\n",
        OWN_SUITE: SUITE.replace("toysuites.workloads", "nsa.model"),
        "ci/gate.yaml": POLICY.replace("toysuites/toys.yaml", OWN_SUITE)
        + f"counters: [{{suite: {OWN_SUITE}}}]\n",
        ".gitignore": "__pycache__/\nreports/\n",
    }
    write(tmp_path, files)
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path, {})
    commit(tmp_path, {"nsa/model.py": SYNCING})
    return tmp_path


NOT_INHERITED = ("PYTHONPATH", "TRITON_INTERPRET")
"""This checkout, and what the tests of nsa set in this process: no machine with it is fit."""


def call(python: Path, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """A module's command in a folder, with nothing of this checkout on the path."""
    env = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return subprocess.run(
        [python, "-m", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def stored(folder: Path) -> Run:
    return reader.load(folder / "reports/runs", "latest")


def test_a_wheel_holds_one_name_with_every_module_suite_and_template_and_no_tests(
    built: Path,
) -> None:
    (wheel,) = (built / "wheel").glob("*.whl")
    names = {*zipfile.ZipFile(wheel).namelist()}
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if ".dist-info" not in top} == {"harness"}
    assert [name for name in names if "/tests/" in name] == []
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in SOURCES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".yaml", ".j2", ".typed")
        if not {"tests", "build", "__pycache__"} & set(path.parts[len(ROOT.parts) :])
    }

    wanted |= {*TEMPLATES}
    assert {f if f.startswith("harness/") else f"harness/shipped/{f}" for f in wanted} <= names


def test_a_gate_measures_the_users_own_package_of_a_shipped_name(wheel: Path, own: Path) -> None:
    words = ("--counters", "--base", "main~1", "--head", "main")

    answer = call(wheel, own, "harness", "gate", *words)

    assert answer.returncode == 1, answer.stdout + answer.stderr  # one more sync
    measured = stored(own).measurements
    assert {m.outcome for m in measured} == {Outcome.OK}, answer.stderr
    assert {*measured[0].code} == {"nsa"}


def test_a_shipped_suite_runs_from_a_wheel_beside_a_package_of_the_same_name(
    wheel: Path, own: Path
) -> None:
    quick = ("-s", "measure.warmup_s=0.1", "-s", "measure.sample_s=0.1", "--no-self-test")
    chosen = ("--filter", "forward/nsa/seq_len=64", "-s", "measure.processes=1", *quick)

    answer = call(wheel, own, "harness", "run", "smoke", *chosen)

    (measurement,) = stored(own).measurements
    assert measurement.outcome is Outcome.OK, answer.stdout + answer.stderr
    assert "/harness/shipped/nsa/" in measurement.code["nsa"]
