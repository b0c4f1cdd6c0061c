"""Whether two commits, or two processes of them, run the same code: then there is nothing more to
measure."""

import ast
from pathlib import Path

from harness.analysis.roofline import works
from harness.records import Measurement

FULL = 0.975
"""Share of a step in kernels from which what is between them does not matter."""
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


def same_step(before: Measurement, after: Measurement, ratio: float) -> bool:
    """Whether a step that the GPU sets runs the same machine code by the same calls: its compiled
    kernels, all kernels and operators with their calls, and exact counters are equal, the times of
    its kernels up to `ratio`, and those of its steps too, which repeat less well, unless they leave
    no room for more than kernels."""
    a, b = before.profile, after.profile
    if not (a and b and before.counters and a.fingerprint and works([before]) and works([after])):
        return False
    known = before.counters.exact and not before.counters.unknown and a.unknown == ()
    ran = [(p.fingerprint, p.compiled, m.counters) for p, m in ((a, before), (b, after))]
    busy = [p.breakdown.device_busy_s or 0.0 for p in (a, b) if p.breakdown and not p.no_kernels]
    steps = [m.step_s for m in (before, after)]
    near = len(busy) == 2 and 0 < max(busy) <= ratio * min(busy)
    full = near and all(b >= FULL * s for b, s in zip(busy, steps, strict=True))
    near &= full or max(steps) <= ratio * min(steps)
    return known and near and ran[0] == ran[1]
