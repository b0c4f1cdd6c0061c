"""Whether two commits run the same code: then there is nothing to measure."""

import ast
from pathlib import Path

PROSE = (".md", ".rst")
"""Ends of the names of files that no program runs."""


def alike(before: Path, after: Path) -> bool:
    """Whether a file, as two commits have it, differs in comments, docstrings and layout alone."""
    files = (before, after)
    if after.suffix in PROSE:
        return True
    if after.suffix != ".py" or not all(f.is_file() and not f.is_symlink() for f in files):
        return False
    if before.stat().st_mode != after.stat().st_mode:
        return False
    try:
        return _program(before) == _program(after)
    except (SyntaxError, ValueError, RecursionError):  # ValueError: a null byte
        return False


def _program(path: Path) -> str:
    """The syntax tree of a file, without positions and the text of docstrings."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)
