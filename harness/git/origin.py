"""Child side: which files the code under test was loaded from.

Two working trees of one project use the same module names. Only a module's file shows that a
worker imported it from the other tree, or from a third such as an editable install of the user.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from harness.git import repository

OURS = "harness"
"""The package that measures: the same for baseline and candidate, so from neither tree."""
REMEDY = "name the folder it is imported from under `roots` in the policy (--root of a bisection)"
SHADOW_REMEDY = (
    "uninstall that package, take it off PYTHONPATH, rename one of the two, or name its folder "
    "with --root"
)
LAYOUTS = ("src", "python", "lib")
"""Folders of a tree in which projects keep their packages."""

# Python's messages about a module that it cannot find.
_NOT_FOUND = re.compile(
    r"No module named '?(?P<module>[\w.]+)"
    r"|cannot import name '(?P<name>\w+)' from '(?P<package>[\w.]+)'"
)
_HARNESS = str(Path(__file__).resolve().parents[1])
_STDLIB = os.path.realpath(sysconfig.get_path("stdlib"))
_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")


def loaded(
    factory_module: str, roots: Sequence[str], elsewhere: Sequence[str] = ()
) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """The loaded packages under test, and which modules came from a wrong place.

    Under test are the package of the factory, every package in the roots, and whatever was loaded
    from another working tree of the repository.

    Args:
        factory_module: Dotted name of the module with the case's factory.
        roots: Folders that the code under test must come from; nothing is checked without any.
        elsewhere: Working trees of the repository that it must not come from.

    Returns:
        Package -> file, of those under test and all others that are not installed; and one
        sentence per module from a wrong place.
    """
    code = own_packages()
    tested = {_top(factory_module)} - {"", OURS, *sys.stdlib_module_names}
    code |= {n: place for n in tested & {*sys.modules} for place in _places(sys.modules[n])}
    if not roots:
        return code, ()
    tested |= packages_in(roots)
    found, others = [], []
    for name, module in sorted(sys.modules.items()):
        if _top(name) not in tested:
            if elsewhere and (file := _file(module)):
                others.append((name, file))
            continue
        places = _places(module)
        if name == _top(name) and places:
            code[name] = places[0]
        found += [(name, place) for place in places]
    return code, (*outside(found, roots), *from_other_trees(others, roots, elsewhere))


def outside(places: Iterable[tuple[str, str]], roots: Sequence[str]) -> tuple[str, ...]:
    """One sentence per module whose file is not in the roots."""
    inside = tuple(map(os.path.realpath, roots))
    return tuple(f"{name} is {place}" for name, place in places if not _is_in(_real(place), inside))


def from_other_trees(
    places: Iterable[tuple[str, str]], roots: Sequence[str], elsewhere: Sequence[str]
) -> tuple[str, ...]:
    """One sentence per module that is code of a working tree other than that of the roots.

    The harness, installed packages and files that git ignores (a virtual environment may be in a
    working tree) do not count.
    """
    if not (roots and elsewhere):
        return ()
    mine = os.path.realpath(repository.top(roots))
    trees = {mine, *map(os.path.realpath, elsewhere)}
    innermost_first = sorted(trees, key=len, reverse=True)
    installed = {os.path.realpath(sysconfig.get_path(kind)) for kind in _INSTALLED} - trees
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for name, place in places:
        file = _real(place)
        owner = next((tree for tree in innermost_first if _is_in(file, (tree,))), mine)
        if owner != mine and _top(name) != OURS and not _is_in(file, (_HARNESS, *installed)):
            found.setdefault(owner, {})[name] = (file, place)
    return tuple(
        f"{name} is {place}"
        for owner, named in found.items()
        for ignored in [_ignored(Path(owner), [file for file, _ in named.values()])]
        for name, (file, place) in named.items()
        if file not in ignored
    )


def _ignored(tree: Path, files: Sequence[str]) -> set[str]:
    """The files that git ignores in their working tree."""
    listed = repository.try_git(tree, "check-ignore", "--stdin", "-z", stdin="\0".join(files))
    return {*(listed or "").split("\0")}


def own_packages() -> dict[str, str]:
    """The loaded top-level packages and modules that are not installed: name -> file."""
    left_out = {OURS, "__main__", "sitecustomize", *sys.stdlib_module_names}
    names = {name for name in sys.modules if "." not in name} - left_out
    places = {name: _places(sys.modules[name]) for name in sorted(names)}
    return {name: p[0] for name, p in places.items() if p and not _is_installed(p[0])}


def _is_installed(file: str) -> bool:
    """Whether a file belongs to this Python, or was installed there."""
    place = _real(file)
    parts = {"site-packages", "dist-packages"} & {*Path(place).parts}
    return bool(parts) or _is_in(place, (_STDLIB,))


def shadowed(folders: Sequence[str]) -> tuple[str, ...]:
    """One sentence per loaded package with a module that a folder contains too, but that is from
    none of them."""
    found: dict[str, str] = {}
    places = (Path(folder, name) for folder in folders for name in LAYOUTS)
    nested = [str(place) for place in places if place.is_dir()]
    for folder in (*folders, *nested):
        own = {path.stem for path in Path(folder).iterdir()} - {OURS, *sys.stdlib_module_names}
        for name in sorted(name for name in [*sys.modules] if _top(name) in own):
            file, wanted = _file(sys.modules.get(name)), _module_file(folder, name)
            if not wanted or not file or _real(file) == _real(str(wanted)):
                continue
            if _is_installed(file) or outside([(name, file)], folders):
                found.setdefault(_top(name), f"{name} is {file}, not {wanted}")
    return tuple(found.values())


def why_shadowed(message: str, folders: Sequence[str]) -> str:
    """Which package was imported instead of the one in the folders; empty if none was.

    Args:
        message: Python's message of an import that failed.
        folders: Where the module may be.
    """
    for failed in _NOT_FOUND.finditer(message):
        name = failed["module"] or f"{failed['package']}.{failed['name']}"
        top = _top(name)
        spec = find_spec(top) if "." in name and top not in (OURS, "__main__") else None
        if spec is None or spec.origin is None:  # not installed, or a namespace package
            continue
        for folder in folders:
            package = Path(folder, *name.split("."))
            wanted = _module_file(folder, name) or (package if package.is_dir() else None)
            if wanted and not Path(spec.origin).resolve().is_relative_to(Path(folder).resolve()):
                return f"{name} is in {wanted}, but {top} was imported from {spec.origin}"
    return ""


def packages_in(roots: Sequence[str]) -> set[str]:
    """Names of the top-level packages and modules in the roots, but for ours and Python's."""
    found = {
        path.stem
        for root in roots
        for path in Path(root).iterdir()
        if (path.is_dir() and any(path.glob("*.py"))) or path.suffix == ".py"
    }
    return found - {OURS, *sys.stdlib_module_names}


def _module_file(folder: str, name: str) -> Path | None:
    """The file of a module or package in a folder."""
    place = Path(folder, *name.split("."))
    places = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((path for path in places if path.is_file()), None)


def _file(module: object) -> str | None:
    """A module's file; read from `__dict__`, because attribute access would load a lazy module."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else None


def _places(module: object) -> list[str]:
    """A module's file; the first folder of a namespace package."""
    file = getattr(module, "__file__", None)
    return [file] if file else [str(folder) for folder in getattr(module, "__path__", ())][:1]


@cache
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _real(file: str) -> str:
    """The real path of a file; its folder, which many share, is resolved once a process."""
    folder, name = os.path.split(file)
    place = os.path.join(_real_folder(folder), name)  # noqa: PTH118 - thousands of files
    return os.path.realpath(place) if os.path.islink(place) else place  # noqa: PTH114


def _is_in(file: str, folders: Sequence[str]) -> bool:
    """Whether a file, or the folder of a namespace package, is one of the folders or below it; all
    are real paths."""
    return f"{file}{os.sep}".startswith(tuple(f"{folder}{os.sep}" for folder in folders))


def _top(name: str) -> str:
    return name.partition(".")[0]
