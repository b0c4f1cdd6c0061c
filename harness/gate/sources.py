"""Whether two commits run the same code: then there is nothing to measure."""

import ast
from pathlib import Path

PROSE = (".md", ".rst")
"""Ends of the names of files that no program runs."""
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def alike(before: Path, after: Path) -> bool:
    """Whether a file, as two commits have it, differs in comments, docstrings and layout alone."""
    if after.suffix in PROSE:
        return True
    files = all(f.is_file() and not f.is_symlink() for f in (before, after))
    if after.suffix != ".py" or not files:
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
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)
