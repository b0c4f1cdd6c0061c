"""What changed in the machine code of kernels, and in their IR in Triton's cache."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from difflib import unified_diff
from itertools import zip_longest
from pathlib import Path

from harness.records import PLACES, CompiledKernel, KernelChange, Profile

MAX_LINES = 20
_VALUES = re.compile(r"%[\w#]+(:\d+)?")
_LAYOUTS = re.compile(r"(#(?:blocked|linear|mma|shared))\d+")


def changed_kernels(before: Profile | None, after: Profile | None) -> Iterator[KernelChange]:
    """The kernels whose machine code differs, those of one name in the order of their size; with
    the lines of TTGIR that differ first, MAX_LINES in all."""
    sides = [{*p.compiled} for p in (before, after) if p and p.compiled]
    if len(sides) < 2:
        return
    lost, new = (
        sorted(a - b, key=lambda k: (k.registers, k.shared_bytes, k.code))
        for a, b in (sides, sides[::-1])
    )
    left = MAX_LINES
    for name in sorted({kernel.name for kernel in (*lost, *new)}):
        of = ([kernel for kernel in side if kernel.name == name] for side in (lost, new))
        for old, now in zip_longest(*of):
            lines = _differing(old, now)[:left]
            left -= len(lines)
            yield KernelChange(name=name, before=old, after=now, ir=tuple(lines))


def _differing(*kernels: CompiledKernel | None) -> list[str]:
    """The lines that differ, without names of values, and without numbers of layouts unless only
    those differ; definitions of layouts last. None unless the cache has both sides."""
    home = Path(os.environ.get("TRITON_HOME") or "~") / ".triton" / "cache"
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or home).expanduser()
    texts: list[str] = []
    with suppress(OSError, ValueError):  # removed since, or not whole
        for key in (k.ir for k in kernels if k and k.ir):
            found = [f.read_text() for f in cache.glob(f"{key}/*.ttgir")]
            texts += [_VALUES.sub("%", PLACES.sub("", text)) for text in found]
    for layout in (r"\1", r"\g<0>") if len(texts) == 2 else ():
        old, new = (_LAYOUTS.sub(layout, text).splitlines() for text in texts)
        diff = [*unified_diff(old, new, n=0, lineterm="")][2:]
        kept = (line for line in diff if line.strip("+- ") and not line.startswith("@@"))
        if lines := [f"{line[0]} {line[1:].strip()}" for line in kept]:
            return sorted(lines, key=lambda line: line[2:].startswith("#"))
    return []
