"""Whether a compiled kernel's loops fill shared memory that a matrix product still reads.

On sm_90 a product reads its operands from shared memory while the program goes on, and Triton lets
it run into the next step of the loop. It gives such an operand one slot more than the loads in
flight need, but not if the same load also goes to registers (seen in Triton 3.6 and 3.7): then one
slot is all there is, and the next load overwrites what the product reads. Results are wrong now and
then, on a GPU alone. The compiled program shows it.
"""

import re
from collections.abc import Sequence

_VALUE = r"(%[\w-]+(?:#\d+)?)"
_BUFFER = re.compile(rf"{_VALUE} = ttg\.local_alloc : \(\) -> !ttg\.memdesc<1x")
_VIEW = re.compile(rf"{_VALUE} = ttg\.memdesc_\w+ {_VALUE}")
_PRODUCT = re.compile(rf"ttng\.warp_group_dot {_VALUE}, {_VALUE}, .*isAsync = true")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")
_COPY = re.compile(r"ttn?g\.async_(?:tma_)?copy_global_to_local ([^:]*)")


def overwritten(ttgir: str) -> set[str]:
    """Buffers of one slot that a loop fills while a product may be reading them."""
    lines = ttgir.splitlines()
    views = {match[1]: match[1] for line in lines if (match := _BUFFER.search(line))}
    for line in lines:
        if (match := _VIEW.search(line)) and match[2] in views:
            views[match[1]] = views[match[2]]
    found: set[str] = set()
    for first, line in enumerate(lines):
        if "scf.for" in line:
            indent = line[: len(line) - len(line.lstrip())]
            steps = lines[first + 1 :]
            length = next(i for i, x in enumerate(steps) if x.startswith(indent + "}"))
            # Twice: what one step leaves running meets the copies of the next.
            found |= _overwritten_in(2 * steps[:length], views)
    return found


def _overwritten_in(lines: Sequence[str], views: dict[str, str]) -> set[str]:
    found: set[str] = set()
    running: list[set[str]] = []  # what each product reads, oldest first
    for line in lines:
        if match := _PRODUCT.search(line):
            running.append({views[value] for value in match.groups() if value in views})
        elif match := _WAIT.search(line):
            running = running[max(0, len(running) - int(match[1])) :]
        elif match := _COPY.search(line):
            filled = {views[value] for value in re.findall(_VALUE, match[1]) if value in views}
            found.update(*(filled & read for read in running))
    return found
