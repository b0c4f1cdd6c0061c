"""Child side: which files the code under test was loaded from.

Two trees of one project share every name. What a worker of the one side imported from the other
is found nowhere but in the modules themselves.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

OURS = "harness"
"""Measures both sides; it is the same for both, and so from neither tree."""


def loaded(factory_module: str, roots: Sequence[str]) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """The packages under test that are loaded, and what is wrong with where they came from.

    Under test is the factory's package, and whatever else the roots hold a package of.

    Args:
        factory_module: Dotted name of the module that holds the case's factory.
        roots: Folders that all of it must come from; empty where nothing was asked.

    Returns:
        Package -> file; and one sentence per module that came from elsewhere.
    """
    if not roots:
        return {}, ()
    tested = ({_top(factory_module)} | held(roots)) - {OURS, *sys.stdlib_module_names}
    code, found = {}, []
    for name, module in sorted(sys.modules.items()):
        if _top(name) not in tested:
            continue
        places = _places(module)
        if name == _top(name) and places:
            code[name] = places[0]
        found += [(name, place) for place in places]
    return code, strangers(found, roots)


def strangers(places: Iterable[tuple[str, str]], roots: Sequence[str]) -> tuple[str, ...]:
    """One sentence per module whose file does not lie in the roots."""
    inside = tuple(os.path.join(os.path.realpath(root), "") for root in roots)  # noqa: PTH118
    return tuple(
        f"{name} is {place}"
        for name, place in places
        if not os.path.realpath(place).startswith(inside)
    )


def held(roots: Sequence[str]) -> set[str]:
    """Top-level packages and modules that lie in the roots."""
    return {
        path.stem
        for root in roots
        for path in Path(root).iterdir()
        if (path.is_dir() and any(path.glob("*.py"))) or path.suffix == ".py"
    }


def _places(module: object) -> list[str]:
    """The module's file; of a package without one, its folders."""
    file = getattr(module, "__file__", None)
    return [file] if file else [str(folder) for folder in getattr(module, "__path__", ())]


def _top(name: str) -> str:
    return name.partition(".")[0]
