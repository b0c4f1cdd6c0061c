"""What a program writes: bounded in the log, cut into lines, and in memory no more than a little.

A program may write gigabytes, or a line that never ends. The log keeps the beginning and the end;
a line keeps its beginning. A carriage return ends a line too, as progress bars use it.
"""

import os
import re
from collections.abc import Iterator

HEAD_BYTES = 4 * 2**20
"""So much of the beginning of the output stays in the log."""
TAIL_BYTES = 4 * 2**20
"""At least so much of its end, and at most twice that."""
MAX_LINE_BYTES = 2**16
"""What is longer is searched up to here."""

_ENDS = re.compile(rb"[\r\n]+")


class Log:
    """A file that is appended to and keeps head and tail of what came."""

    def __init__(self, fd: int, *, head: int = HEAD_BYTES, tail: int = TAIL_BYTES) -> None:
        """`fd` is open for appending."""
        self._fd = fd
        self._began = os.fstat(fd).st_size
        self._head, self._tail = head, tail
        self._size = 0
        self._recent = bytearray()

    def write(self, data: bytes) -> None:
        """Append; what is then too much in the middle goes."""
        self._recent += data
        if self._size + len(data) > self._head + 2 * self._tail:
            self._compact()
        else:
            self._append(data)
        if len(self._recent) > 2 * self._tail:
            del self._recent[: -self._tail]

    def _compact(self) -> None:
        """Keep the head and the newest tail, and say between them what is gone."""
        del self._recent[: -self._tail]
        self._size = min(self._head, self._size)
        os.ftruncate(self._fd, self._began + self._size)
        self._append(b"\n[... the harness left out what the program wrote here ...]\n")
        self._append(bytes(self._recent))

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self._size += len(data)


class Lines:
    """One stream, cut into lines."""

    def __init__(self, longest: int = MAX_LINE_BYTES) -> None:
        self._longest = longest
        self._begun = b""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The lines that a chunk ends, without their ends and without empty ones."""
        *whole, rest = _ENDS.split(chunk)
        for piece in whole:
            line = self._cut(piece)
            self._begun = b""
            if line:
                yield line.decode(errors="replace")
        self._begun = self._cut(rest)

    def rest(self) -> Iterator[str]:
        """The last line, if the stream ended within it."""
        if self._begun:
            yield self._begun.decode(errors="replace")
        self._begun = b""

    def _cut(self, piece: bytes) -> bytes:
        """What has begun, and this; only so much of it as is searched."""
        room = self._longest - len(self._begun)
        return self._begun + piece[:room] if room > 0 else self._begun
