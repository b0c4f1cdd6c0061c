"""What a user installs is whole: the wheel works in a folder that knows nothing of the project."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("harness", "nsa", "suites")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources and unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for package in SHIPPED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--quiet", "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_suites_templates_and_workloads_are_inside(installed: Path) -> None:
    names = {path.relative_to(installed).as_posix() for path in installed.rglob("*")}

    for package in SHIPPED:
        sources = (ROOT / package).rglob("*")
        wanted = {
            path.relative_to(ROOT).as_posix()
            for path in sources
            if path.suffix in (".py", ".yaml", ".json", ".j2", ".typed")
            if not {"tests", "__pycache__"} & set(path.parts)
        }
        assert wanted <= names


def test_a_shipped_suite_is_found_and_checked_from_any_folder(
    installed: Path, tmp_path: Path
) -> None:
    planned = run(installed, tmp_path, "-m", "harness", "run", "smoke", "--dry-run")

    assert planned.returncode == 0, planned.stderr
    assert "cases" in planned.stdout


def test_pytest_finds_the_plugin_by_itself(installed: Path, tmp_path: Path) -> None:
    suite = installed / "suites/gate.yaml"
    shutil.copy(suite, tmp_path)

    collected = run(installed, tmp_path, "-m", "pytest", "--collect-only", "-q", "gate.yaml")

    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert "gate.yaml::attention/gather" in collected.stdout


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a folder, with the wheel's modules and none of the checkout's."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    elsewhere = [p for p in given if p and Path(p).resolve() != ROOT]
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), *elsewhere])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
