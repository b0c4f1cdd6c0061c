"""The rooms of the harness and the arrows between them, as CONTRIBUTING.md draws them."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Top to bottom: a room imports from rows below its own, never from its own row or from above.
PARENT = (
    {"cli"},
    {"integrations"},
    {"report"},
    {"gate", "bisect", "executor"},
    {"runner"},
    {"machine", "store"},
    {"suite", "git", "analysis"},
    {"units", "messages", "processes", "workload"},
    {"records", "errors"},
)
CHILD = ({"worker"}, {"program"}, {"measure"})
# What a room of the child may import beside lower rooms of the child.
SHARED = {"git", "messages", "processes", "workload", "records", "errors"}

# Importer -> all it may import, the standard library aside.
ALLOWED = {
    "harness/analysis": {"numpy", "scipy", "harness.analysis", "harness.units", "harness.records"},
    "harness/records": {"harness.records"},
    "harness/workload.py": {"harness.records"},
    "suites": {"torch", "nsa", "suites", "harness.workload", "harness.records"},
}

FOR_LOAD = {
    ("pathlib", "Path"),
    ("typing", "TYPE_CHECKING"),
    ("harness.store", "frames"),
    ("harness.store.frames", "RunFrames"),
}
"""What `harness.load` imports, of the harness only when it is called."""
HOUSES = ("harness", "nsa", "suites", "reports")
MOST_MODULES = 14
"""Modules of a room, `__init__` aside; a room with more holds two features."""

MOST_LINES = {
    "harness": 929,  # the modules beside the rooms
    "harness/analysis": 4_256,
    "harness/bisect": 1_521,
    "harness/cli": 1_828,
    "harness/executor": 288,
    "harness/gate": 1_716,
    "harness/git": 447,
    "harness/integrations": 691,
    "harness/machine": 1_170,
    "harness/measure": 2_113,
    "harness/program": 1_562,
    "harness/records": 1_878,
    "harness/report": 4_724,
    "harness/runner": 2_094,
    "harness/store": 733,
    "harness/suite": 1_914,
    "harness/worker": 628,
    "nsa": 13_295,
    "suites": 3_004,
    "reports": 1_496,  # its studies
}
"""Lines beside the tests; 28,500 with conftest and shipped. Who passes one lowers another."""
MOST_TEST_LINES = {"harness": 19_000, "harness/executor": 300, "nsa": 8_860, "suites": 2_200}


def sources(prefix: str) -> dict[str, Path]:
    """The modules under a prefix by their path from the root, tests aside."""
    start = ROOT / prefix
    found = [start] if start.is_file() else sorted(start.rglob("*.py"))
    assert found, f"nothing at {prefix}"
    return {
        p.relative_to(ROOT).as_posix(): p
        for p in found
        if not {"tests", "shipped", "build"} & {*p.parts} and p.name != "conftest.py"
    }


def module_of(path: Path) -> str:
    """Dotted name: harness/store/reader.py is harness.store.reader, a package its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Imports, classes and functions of a file, also those inside functions."""
    wanted = ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, wanted)]


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of a file; name is empty for `import module`."""
    package = path.relative_to(ROOT).parent.parts
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*start, *filter(None, [node.module])])
            yield from ((module, alias.name) for alias in node.names)


def imported_modules(path: Path) -> set[str]:
    """Absolute names imported by a file, each with its parents: a.b.c gives a, a.b, a.b.c."""
    names = {f"{module}.{name}".strip(".") for module, name in imported(path)}
    return {".".join(n.split(".")[: i + 1]) for n in names for i in range(n.count(".") + 1)}


def edges(prefix: str) -> dict[str, set[str]]:
    """Module -> modules under the same prefix that it imports."""
    modules = {module_of(path): path for path in sources(prefix).values()}
    return {
        name: {
            full if (full := f"{module}.{symbol}") in modules else module
            for module, symbol in imported(path)
        }
        & set(modules) - {name}
        for name, path in modules.items()
    }


def room_of(module: str) -> str:
    """The room of a module; empty for the root package and its `__main__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else ""


def row_of(room: str, rows: tuple[set[str], ...]) -> int | None:
    return next((i for i, row in enumerate(rows) if room in row), None)


def may_import(importer: str, imported: str) -> bool:
    """Whether one room may import another."""
    if importer == imported:
        return True
    own, other = row_of(importer, CHILD), row_of(imported, CHILD)
    if own is not None:
        return own < other if other is not None else imported in SHARED
    above, below = row_of(importer, PARENT), row_of(imported, PARENT)
    return above is not None and below is not None and above < below


def test_every_room_is_on_the_list() -> None:
    rooms = {room_of(module_of(path)) for path in sources("harness").values()} - {""}

    assert rooms == set().union(*PARENT, *CHILD)


def test_a_room_imports_from_rows_below_its_own() -> None:
    wrong = {
        (module, other)
        for module, others in edges("harness").items()
        for other in others
        if room_of(module) and room_of(other) and not may_import(room_of(module), room_of(other))
    }

    assert wrong == set()


@pytest.mark.parametrize("house", ["harness", "suites"])
def test_no_modules_import_each_other_in_a_circle(house: str) -> None:
    TopologicalSorter(edges(house)).prepare()  # raises CycleError


def test_the_houses_do_not_know_each_other() -> None:
    forbidden = {"nsa": {"harness", "suites"}, "harness": {"nsa", "suites"}}

    found = {
        (file, name)
        for importer, names in forbidden.items()
        for file, path in sources(importer).items()
        for name in names & imported_modules(path)
    }

    assert found == set()


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


def test_a_room_states_its_purpose_and_its_init_imports_nothing() -> None:
    """`records` alone hands on its names, and `harness.load` is the function of the store."""
    for file, path in sources("harness").items():
        if path.name == "__init__.py":
            tree = ast.parse(path.read_text())
            assert ast.get_docstring(tree), f"{file} states no purpose"
            allowed = FOR_LOAD if file == "harness/__init__.py" else set()
            if path.parent.name != "records":
                assert set(imported(path)) <= allowed, file


def test_a_room_has_a_reader_s_number_of_modules() -> None:
    modules = [path for path in sources("harness").values() if path.name != "__init__.py"]
    counts = Counter(path.parent for path in modules)

    assert {room: n for room, n in counts.items() if n > MOST_MODULES} == {}


def test_modules_and_functions_have_a_reader_s_length() -> None:
    ours = [path for house in ("harness", "reports", "suites") for path in sources(house).values()]
    functions = [f for path in ours for f in nodes(path) if isinstance(f, ast.FunctionDef)]

    assert [path for path in ours if lines([path]) > 400] == []
    assert [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= 80] == []
    many = {f.name for f in functions if len(f.args.args + f.args.kwonlyargs) > 9}
    assert many == {"run", "gate", "bisect"}, "the options of a command are its parameters"


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_no_room_passes_its_ceiling() -> None:
    assert sum(n for room, n in MOST_LINES.items() if room.startswith("harness")) <= 28_493
    sizes: Counter[str] = Counter()
    for file, path in (pair for house in HOUSES for pair in sources(house).items()):
        house, *rooms_below = file.split("/")[:-1]
        room = "/".join([house, *rooms_below[:1]]) if house == "harness" else house
        sizes[room] += lines([path])

    assert {room: n for room, n in sizes.items() if n > MOST_LINES.get(room, 0)} == {}


@pytest.mark.parametrize("house", MOST_TEST_LINES)
def test_the_tests_of_a_house_do_not_pass_their_ceiling(house: str) -> None:
    tests = {*(ROOT / house).rglob("tests/**/*.py"), *(ROOT / house).rglob("conftest.py")}

    assert lines(tests) <= MOST_TEST_LINES[house]


def test_no_class_name_means_two_things() -> None:
    """`Unsupported` means one thing in two houses that do not know each other."""
    places: dict[str, list[str]] = {}
    for house in HOUSES:
        for file, path in sources(house).items():
            for node in nodes(path):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(file)

    assert {name for name, files in places.items() if len(files) > 1} == {"Unsupported"}


def test_only_the_child_imports_torch() -> None:
    """The parent must hold no CUDA context, and reports must render without a GPU stack."""
    users = {
        room_of(module_of(path))
        for path in sources("harness").values()
        if "torch" in imported_modules(path)
    }

    assert users <= set().union(*CHILD)


def test_the_parent_starts_without_torch_nsa_or_workloads() -> None:
    """The same, for what other packages pull in on our behalf."""
    absent = {"torch", "nsa", "suites", "harness.worker.answer"}
    script = f"import sys, harness.cli.main; print(*{absent} & set(sys.modules))"

    loaded = subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True)

    assert loaded.split() == []


def test_one_module_of_nsa_reads_the_environment() -> None:
    """A switch read anywhere else would escape the check of unknown names."""
    reads = re.compile(r"\bos\.(?:environ|getenv)|from os import")

    assert {f for f, p in sources("nsa").items() if reads.search(p.read_text())} == {"nsa/flags.py"}
