"""The arrows between packages, checked. README.md draws them."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# importer (a path prefix) -> modules it must not import
FORBIDDEN = {
    "nsa": {"harness", "suites"},
    "harness": {"nsa", "suites"},
    "harness/report": {"harness.store", "harness.execution"},
    "harness/analysis": {"harness.store", "harness.execution", "harness.report"},
    "suites": {"harness.cli", "harness.store", "harness.execution", "harness.report"},
}
# importer -> all it may import, the standard library aside
ALLOWED = {
    "harness/analysis": {
        "numpy",
        "scipy",
        "harness.analysis",
        "harness.records",
        "harness.program",
        "harness.what_ran",
    },
    "harness/records.py": {"harness.program", "harness.what_ran"},
    "harness/program.py": set(),
    "harness/what_ran.py": set(),
    "harness/workload.py": {"harness.records"},
    "suites": {"torch", "nsa", "suites", "harness.workload", "harness.records"},
}
# The harness modules that may import torch: they run in the worker process.
WORKER_SIDE = ("harness/measure/", "harness/execution/worker", "harness/execution/zygote.py")
# The one module of nsa that may read the environment.
FLAGS = "nsa/flags.py"
# The one module of the harness that prints and ends the process; workers end themselves.
CLI = "harness/cli/main.py"

ROOT_FILES = {"README.md", "LICENSE", "Makefile", "pyproject.toml", "constraints.txt"}
ROOT_FOLDERS = {"nsa", "harness", "suites", "reports", "ci"}


def imported_modules(path: Path) -> set[str]:
    """Absolute names imported by a file, each with its parents: a.b.c gives a, a.b, a.b.c."""
    package = path.relative_to(ROOT).parent.parts
    names = set()
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*start, *filter(None, [node.module])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return {".".join(n.split(".")[: i + 1]) for n in names for i in range(n.count(".") + 1)}


def sources(prefix: str) -> dict[str, Path]:
    """The modules under a prefix by their path from the root, tests aside."""
    start = ROOT / prefix
    found = [start] if start.is_file() else sorted(start.rglob("*.py"))
    assert found, f"nothing at {prefix}"
    return {p.relative_to(ROOT).as_posix(): p for p in found if "tests" not in p.parts}


def uses(path: Path, *names: str) -> set[str]:
    """Which of some dotted names (`os.environ`) a file speaks of."""
    tree = ast.parse(path.read_text(), filename=str(path))
    spoken = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return (spoken | imported_modules(path)) & set(names)


@pytest.mark.parametrize("importer", FORBIDDEN)
def test_no_forbidden_import(importer: str) -> None:
    found = {
        file: bad
        for file, path in sources(importer).items()
        if (bad := imported_modules(path) & FORBIDDEN[importer])
    }

    assert found == {}


@pytest.mark.parametrize("importer", ALLOWED)
def test_nothing_is_imported_but_what_is_allowed(importer: str) -> None:
    def allowed(module: str) -> bool:
        return any(
            module == name or module.startswith(f"{name}.") or name.startswith(f"{module}.")
            for name in (*ALLOWED[importer], *sys.stdlib_module_names)
        )

    found = {
        file: bad
        for file, path in sources(importer).items()
        if (bad := {module for module in imported_modules(path) if not allowed(module)})
    }

    assert found == {}


def test_torch_stays_on_the_worker_side() -> None:
    """The parent must hold no CUDA context, and reports must render without a GPU stack."""
    users = {f for f, path in sources("harness").items() if "torch" in imported_modules(path)}

    assert {file for file in users if not file.startswith(WORKER_SIDE)} == set()


def test_the_parent_starts_without_torch_nsa_or_workloads() -> None:
    """The same, for what other packages pull in on our behalf."""
    script = (
        "import sys, harness.cli.main\n"
        "print(*{'torch', 'nsa', 'suites', 'harness.execution.worker'} & set(sys.modules))"
    )

    answer = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )

    assert answer.stdout.split() == []


def test_only_the_flags_read_the_environment_in_nsa() -> None:
    """A switch read anywhere else would escape the check of unknown names."""
    readers = {
        file
        for file, path in sources("nsa").items()
        if uses(path, "os.environ", "os.environb", "os.getenv", "os.getenvb")
    }

    assert readers == {FLAGS}


def test_only_the_command_line_ends_the_process() -> None:
    enders = {
        file
        for file, path in sources("harness").items()
        if uses(path, "sys.exit", "os._exit", "os.abort")
    }

    assert {file for file in enders if not file.startswith((*WORKER_SIDE, CLI))} == set()


def test_the_root_holds_only_what_the_plan_allows() -> None:
    """Dotfiles aside. A diary or a result at the root is how a checkout rots."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files are the project's")

    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")

    visible = [Path(file).parts for file in tracked if file and not file.startswith(".")]
    assert {parts[0] for parts in visible if len(parts) == 1} <= ROOT_FILES
    assert {parts[0] for parts in visible if len(parts) > 1} <= ROOT_FOLDERS
