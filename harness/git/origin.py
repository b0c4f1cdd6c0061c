"""Child side: which files the code under test was loaded from.

One rule: a module that exists in the tree under test must come from there. Two working trees of one
project use the same module names, and so may an installed package; only a module's file shows that
a worker imported another one.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from harness.git import repository

OURS = "harness"
"""The package that measures: the same for baseline and candidate, so from neither tree."""
REMEDY = (
    "uninstall or rename the other one, take it off PYTHONPATH, or name the folder to import from "
    "under `roots` in the policy (--root of a bisection)"
)

# Python's messages about a module that it cannot find.
_NOT_FOUND = re.compile(
    r"No module named '?(?P<module>[\w.]+)"
    r"|cannot import name '(?P<name>\w+)' from '(?P<package>[\w.]+)'"
)
_STDLIB = os.path.realpath(sysconfig.get_path("stdlib"))


def loaded() -> dict[str, str]:
    """The loaded modules that have a file: name -> file. Attribute access would load a lazy one."""
    known = {name: getattr(m, "__dict__", {}) for name, m in [*sys.modules.items()]}
    files = {name: attributes.get("__file__") for name, attributes in known.items()}
    return {name: file for name, file in files.items() if isinstance(file, str)}


def misplaced(
    modules: Mapping[str, str], folders: Sequence[str], elsewhere: Sequence[str] = ()
) -> str:
    """The modules that the tree under test has, but that came from another place, with the remedy;
    empty if there are none. `folders` of the tree are searched for modules; a file of another
    working tree, `elsewhere`, is in the tree if the tree has a file of the same path."""
    mine = os.path.realpath(repository.top(folders))
    trees = sorted({mine, *map(os.path.realpath, elsewhere)}, key=len, reverse=True)
    inside = tuple(map(os.path.realpath, folders))
    own = {path.stem for folder in folders for path in Path(folder).iterdir()}
    own -= {OURS, *sys.stdlib_module_names}
    found: dict[str, str] = {}
    for name, file in sorted(modules.items()):
        place, wanted = _real(file), None
        if _top(name) in own:
            files = (_module_file(folder, name) for folder in folders)
            wanted = next(filter(None, files), None)
        owner = next((tree for tree in trees if _is_in(place, (tree,))), mine)  # the innermost
        if owner != mine and _top(name) != OURS:
            twin = Path(mine, Path(place).relative_to(owner))
            wanted = wanted or (twin if twin.is_file() else None)
        if wanted is None or place == _real(str(wanted)):
            continue
        if owner != mine or _is_installed(place) or not _is_in(place, inside):
            found.setdefault(_top(name), f"{name} is {file}, not {wanted}")
    return "; ".join([*found.values(), REMEDY]) if found else ""


def hidden(message: str, folders: Sequence[str]) -> str:
    """The module of the folders that another package hides, by Python's message of an import that
    failed, with the remedy; empty if none does."""
    for failed in _NOT_FOUND.finditer(message):
        name = failed["module"] or f"{failed['package']}.{failed['name']}"
        top = _top(name)
        spec = find_spec(top) if "." in name and top not in (OURS, "__main__") else None
        if spec is None or spec.origin is None:  # not installed, or a namespace package
            continue
        for folder in map(os.path.realpath, folders):
            package = Path(folder, *name.split("."))
            wanted = _module_file(folder, name) or (package if package.is_dir() else None)
            if wanted and not _is_in(_real(spec.origin), (folder,)):
                return f"{name} is in {wanted}, but {top} is {spec.origin}; {REMEDY}"
    return ""


def own_packages() -> dict[str, str]:
    """The loaded top-level packages and modules that are not installed: name -> file, or the first
    folder of a namespace package."""
    left_out = {OURS, "__main__", "sitecustomize", *sys.stdlib_module_names}
    names = {name for name in sys.modules if "." not in name} - left_out
    places = {name: place_of(name) for name in sorted(names)}
    return {name: place for name, place in places.items() if place and not _is_installed(place)}


def place_of(name: str) -> str:
    """The file of a loaded module, or the first folder of a namespace package; empty if unknown."""
    module = sys.modules.get(name)
    folders = [str(folder) for folder in getattr(module, "__path__", ())]
    return getattr(module, "__file__", None) or next(iter(folders), "")


def _is_installed(file: str) -> bool:
    """Whether a file belongs to this Python, or was installed there."""
    place = _real(file)
    parts = {"site-packages", "dist-packages"} & {*Path(place).parts}
    return bool(parts) or _is_in(place, (_STDLIB,))


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


_real_folder = cache(os.path.realpath)


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
