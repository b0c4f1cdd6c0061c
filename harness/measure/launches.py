"""Which operator or kernel a process began last, told to whoever watches it hang.

Each is written into a shared file, by one copy in memory, before it begins and after it came back.
Who reads needs no torch.
"""

import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SIZE = 512
"""Bytes of the file: run, state and name, by tabs, filled up with zeros."""
BEGAN, RETURNED = "began", "returned"

_TOLD = re.compile(rf"(-?\d+)\t({BEGAN}|{RETURNED})\t(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What was told last."""

    run: int
    """Counted from 0; -1 before the first."""
    name: str
    """`aten.mm`, or the name of a Triton kernel."""
    returned: bool


class Teller:
    """Writes what began and what returned."""

    def __init__(self, shared: mmap.mmap) -> None:
        self.run = -1
        self._shared = shared

    def tell(self, state: str, name: str) -> None:
        data = f"{self.run}\t{state}\t{name}".encode()[:SIZE]
        self._shared[:] = data.ljust(SIZE, b"\0")


def create(path: Path) -> None:
    """An empty file, to be told into."""
    path.write_bytes(bytes(SIZE))


@contextmanager
def telling_into(path: Path) -> Iterator[Teller]:
    """A file that was created, to be told into."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), SIZE) as shared:
        yield Teller(shared)


def read(path: Path) -> Launch | None:
    """What was told last; None before anything was, or while it is being told."""
    text = path.read_bytes().rstrip(b"\0").decode(errors="replace")
    if not (told := _TOLD.fullmatch(text)):
        return None
    run, state, name = told.groups()
    return Launch(run=int(run), name=name, returned=state == RETURNED)
