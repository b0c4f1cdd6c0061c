"""Child side: which files the code under test was loaded from.

Two trees of one project share every name. What a worker of the one side imported from the other
is found nowhere but in the modules themselves. Nor is what both sides imported from a third, the
user's own, as an editable install has it.
"""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from harness.git import repository

OURS = "harness"
"""Measures both sides; it is the same for both, and so from neither tree."""
REMEDY = "name the folder it is imported from under `roots` in the policy (--root of a bisection)"
HIDDEN_REMEDY = "uninstall that package, or rename one of the two"

# What Python says of a module that is not found.
_NOT_FOUND = re.compile(
    r"No module named '?(?P<module>[\w.]+)"
    r"|cannot import name '(?P<name>\w+)' from '(?P<package>[\w.]+)'"
)
_HARNESS = Path(__file__).resolve().parents[1]
_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")
_LOCAL = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
"""Under these git would speak of another repository."""


def loaded(
    factory_module: str, roots: Sequence[str], elsewhere: Sequence[str] = ()
) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """The packages under test that are loaded, and what is wrong with where they came from.

    Under test is the factory's package, whatever else the roots hold a package of, and whatever
    was loaded from another working tree of the repository.

    Args:
        factory_module: Dotted name of the module that holds the case's factory.
        roots: Folders that all of it must come from; empty where nothing was asked.
        elsewhere: Working trees of the repository that none of it may come from.

    Returns:
        Package -> file; and one sentence per module that came from elsewhere.
    """
    if not roots:
        return {}, ()
    tested = ({_top(factory_module)} | held(roots)) - {OURS, *sys.stdlib_module_names}
    code, found, others = {}, [], []
    for name, module in sorted(sys.modules.items()):
        if _top(name) not in tested:
            file = getattr(module, "__dict__", {}).get("__file__")  # a lazy one is not woken up
            others += [(name, file)] if isinstance(file, str) else []
            continue
        places = _places(module)
        if name == _top(name) and places:
            code[name] = places[0]
        found += [(name, place) for place in places]
    return code, (*strangers(found, roots), *foreign(others, roots, elsewhere))


def strangers(places: Iterable[tuple[str, str]], roots: Sequence[str]) -> tuple[str, ...]:
    """One sentence per module whose file does not lie in the roots."""
    inside = tuple(os.path.join(os.path.realpath(root), "") for root in roots)  # noqa: PTH118
    return tuple(
        f"{name} is {place}"
        for name, place in places
        if not os.path.realpath(place).startswith(inside)
    )


def foreign(
    places: Iterable[tuple[str, str]], roots: Sequence[str], elsewhere: Sequence[str]
) -> tuple[str, ...]:
    """One sentence per module that is code of another working tree than that of the roots.

    The harness is none, wherever it lies. Nor is what is installed, or what git ignores there: a
    virtual environment may lie in a working tree.
    """
    if not (roots and elsewhere):
        return ()
    mine = repository.top(roots).resolve()
    trees = sorted({mine, *(Path(tree).resolve() for tree in elsewhere)}, key=_depth)
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in _INSTALLED} - {*trees}
    found: dict[Path, dict[str, tuple[str, str]]] = {}
    for name, place in places:
        file = Path(place).resolve()
        owner = next((tree for tree in reversed(trees) if file.is_relative_to(tree)), mine)
        if owner == mine or _top(name) == OURS:
            continue
        if not any(file.is_relative_to(folder) for folder in (_HARNESS, *installed)):
            found.setdefault(owner, {})[name] = (str(file), place)
    return tuple(
        f"{name} is {place}"
        for owner, named in found.items()
        for ignored in [_ignored(owner, [file for file, _ in named.values()])]
        for name, (file, place) in named.items()
        if file not in ignored
    )


def hidden(folders: Sequence[str]) -> tuple[str, ...]:
    """One sentence per loaded module that a folder holds too, though another file was loaded."""
    found = []
    for folder in folders:
        own = {path.stem for path in Path(folder).iterdir()} - {OURS, *sys.stdlib_module_names}
        for name, module in sorted(sys.modules.items()):
            file = getattr(module, "__dict__", {}).get("__file__")
            wanted = _module_file(folder, name) if _top(name) in own else None
            if wanted and isinstance(file, str) and Path(file).resolve() != wanted.resolve():
                found.append(f"{name} is {file}, not {wanted}")
    return tuple(found)


def hides(said: str, folders: Sequence[str]) -> str:
    """Which package was imported in place of the folders' own, where that is why a module was not
    found; else empty.

    Args:
        said: Python's message of the import that failed.
        folders: Where the module may be.
    """
    for failed in _NOT_FOUND.finditer(said):
        name = failed["module"] or f"{failed['package']}.{failed['name']}"
        top = _top(name)
        spec = find_spec(top) if "." in name and top not in (OURS, "__main__") else None
        if spec is None or spec.origin is None:  # not installed, or without a file that could hide
            continue
        for folder in folders:
            package = Path(folder, *name.split("."))
            wanted = _module_file(folder, name) or (package if package.is_dir() else None)
            if wanted and not Path(spec.origin).resolve().is_relative_to(Path(folder).resolve()):
                return f"{name} is in {wanted}, but {top} was imported from {spec.origin}"
    return ""


def _module_file(folder: str, name: str) -> Path | None:
    """A module's file or package in a folder; None where it has neither."""
    place = Path(folder, *name.split("."))
    places = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((path for path in places if path.is_file()), None)


def _depth(folder: Path) -> int:
    """A working tree may lie in another: the innermost is the one a file is of."""
    return len(folder.parts)


def _ignored(tree: Path, files: Sequence[str]) -> set[str]:
    """Those of the files that git ignores in their working tree; none where it cannot be asked."""
    asked = subprocess.run(
        ["git", "check-ignore", "--stdin", "-z"],
        cwd=tree,
        env={name: value for name, value in os.environ.items() if name not in _LOCAL},
        input="\0".join(files),
        capture_output=True,
        text=True,
        check=False,
    )
    return {file for file in asked.stdout.split("\0") if file}


def held(roots: Sequence[str]) -> set[str]:
    """Top-level packages and modules that lie in the roots."""
    return {
        path.stem
        for root in roots
        for path in Path(root).iterdir()
        if (path.is_dir() and any(path.glob("*.py"))) or path.suffix == ".py"
    }


def _places(module: object) -> list[str]:
    """The module's file; of a namespace package its first folder: its modules have files."""
    file = getattr(module, "__file__", None)
    return [file] if file else [str(folder) for folder in getattr(module, "__path__", ())][:1]


def _top(name: str) -> str:
    return name.partition(".")[0]
