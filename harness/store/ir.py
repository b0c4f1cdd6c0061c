"""What changed in the IR of a kernel, from Triton's cache on this machine."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path

from harness.records import PLACES, KernelChange, Profile, kernel_changes

MAX_LINES = 20
_VALUES = re.compile(r"%[\w#]+(:\d+)?")


def changed_kernels(before: Profile | None, after: Profile | None) -> Iterator[KernelChange]:
    """The kernels whose machine code differs, with the lines of TTGIR that differ first, MAX_LINES
    in all and without the names of values, if Triton's cache still has both sides."""
    home = Path(os.environ.get("TRITON_HOME") or "~") / ".triton" / "cache"
    cache, left = Path(os.environ.get("TRITON_CACHE_DIR") or home).expanduser(), MAX_LINES
    for change in kernel_changes(before, after):
        texts: list[list[str]] = []
        with suppress(OSError, ValueError):  # removed since, or not whole
            for key in (k.ir for k in (change.before, change.after) if k and k.ir):
                found = [f.read_text() for f in cache.glob(f"{key}/*.ttgir")]
                texts += [_VALUES.sub("%", PLACES.sub("", text)).splitlines() for text in found]
        diff = unified_diff(texts[0], texts[-1], n=0, lineterm="") if len(texts) == 2 else ()
        kept = (line for line in [*diff][2:] if line.strip("+- ") and not line.startswith("@@"))
        lines = [f"{line[0]} {line[1:].strip()}" for line in kept][:left]
        left -= len(lines)
        yield replace(change, ir=tuple(lines))
