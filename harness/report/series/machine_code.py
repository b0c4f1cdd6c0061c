"""Kernels whose machine code changed, of a gate or a bisection, as a table."""

from collections import Counter
from collections.abc import Iterable

from harness.records import KernelChange
from harness.report.markdown import code
from harness.report.tables import Table
from harness.store.ir import MAX_LINES

MAX_KERNELS = 18
_FACTS = {
    "registers": "registers",
    "local_bytes": "spilled bytes",
    "shared_bytes": "shared bytes",
    "warps": "warps",
    "mma": "MMA",
    "loads": "loads",
    "barriers": "barriers",
}


def kernel_table(changes: Iterable[KernelChange], *, cases: bool) -> Table:
    """A row for each kernel: its resources and instructions, `127 → 255`; with `cases` also the
    number of the cases that gave it."""
    rows = [
        (code(c.name), *(_moved(c, fact) for fact in _FACTS), *([f"{n}"] if cases else []))
        for c, n in Counter(changes).items()
    ]
    remark = "Machine code changed; registers and spills of a thread, instructions in PTX."
    if len(rows) > MAX_KERNELS:
        remark += f" {len(rows) - MAX_KERNELS} more are in the record."
    heads = (*_FACTS.values(), *(["cases"] if cases else []))
    return Table(
        columns=("kernel", *(f">{head}" for head in heads)),
        rows=tuple(rows[:MAX_KERNELS]),
        remarks=(remark,) if rows else (),
    )


def ir_table(changes: Iterable[KernelChange]) -> Table:
    """The lines of TTGIR that differ first, of each kernel where it has most."""
    found: dict[str, tuple[str, ...]] = {}
    for c in changes:
        found[c.name] = max(found.get(c.name, ()), c.ir, key=len)
    rows = tuple((code(name), code(line)) for name, lines in found.items() for line in lines)
    return Table(columns=("kernel", "first lines of TTGIR that differ"), rows=rows[:MAX_LINES])


def _moved(change: KernelChange, fact: str) -> str:
    sides = [f"{getattr(k, fact):,}" if k else "–" for k in (change.before, change.after)]
    return " → ".join(dict.fromkeys(sides))
