"""Which room of nsa may import which: from lines below its own only, or within the room."""

import ast
from pathlib import Path

NSA = Path(__file__).resolve().parents[1]

FLOORS = (
    {"train"},
    {"model"},
    {"ops", "flags"},
    {"routes"},
    {"kernels"},
    {"kernels.banded", "kernels.selected", "kernels.decode"},
    {"kernels.common", "reference", "checks", "roofline", "profiling"},
    {"config", "errors"},
)
"""Top to bottom. `kernels` means the modules directly in its folder."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, Path]:
    """Every module of nsa by its name within the package, tests aside; packages are empty names."""
    found: dict[str, Path] = {}
    for path in sorted(NSA.rglob("*.py")):
        parts = path.relative_to(NSA).with_suffix("").parts
        if "tests" not in parts:
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


def room(module: str) -> str:
    """The innermost room of a module."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in FLOOR), "")


def imports(path: Path) -> set[str]:
    """The modules of nsa that a file imports anywhere, functions included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(source), level=level):
                assert level == 0, f"{path}: a relative import"
                names |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
            case ast.Call(func=ast.Name("import_module"), args=[ast.Constant(str(source))]):
                names.add(source)
    ours = {name.removeprefix("nsa.") for name in names if name.startswith("nsa.")}
    return {name for name in ours if name in MODULES and MODULES[name].name != "__init__.py"}


ARROWS = {name: imports(path) for name, path in MODULES.items()}


def test_every_module_is_in_a_room() -> None:
    assert {name for name in MODULES if name and not room(name)} == set()


def test_imports_go_down_or_stay_in_the_room() -> None:
    up = {
        f"{importer} -> {imported}"
        for importer, targets in ARROWS.items()
        for imported in targets
        if room(importer) != room(imported) and FLOOR[room(importer)] >= FLOOR[room(imported)]
    }

    assert up == set()


def test_no_two_modules_import_each_other() -> None:
    """Nor three in a ring."""
    left = dict(ARROWS)
    while free := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in free}

    assert left == {}


def test_packages_import_nothing_and_state_their_purpose() -> None:
    for path in NSA.rglob("__init__.py"):
        tree = ast.parse(path.read_text())
        if "tests" not in path.parts:
            assert ast.get_docstring(tree), path
            assert len(tree.body) == 1, path
