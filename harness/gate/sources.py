"""Whether two commits, or two processes of them, run the same code: then there is nothing more to
measure."""

import ast
from pathlib import Path

from harness.records import Measurement

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


def same_step(before: Measurement, after: Measurement) -> bool:
    """Whether a step runs the same machine code by the same calls: its compiled kernels, all its
    kernels and operators with their calls, and its counters are equal, exact and known."""
    a, b = before.profile, after.profile
    if not a or not b or a.no_kernels or not a.fingerprint or before.counters is None:
        return False
    known = before.counters.exact and not before.counters.unknown
    named = {kernel.name for kernel in a.compiled}
    generated = {use.name for use in a.kernels if use.name.startswith("triton_")}  # by Inductor
    alike = (a.fingerprint, a.compiled, before.counters) == (
        b.fingerprint,
        b.compiled,
        after.counters,
    )
    return known and alike and generated <= named
