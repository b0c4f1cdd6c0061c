"""A program's output, bounded in the log, in lines and in memory.

A program may write gigabytes, or a line without an end. The log keeps beginning and end of the
output, and a line keeps its beginning. A carriage return ends a line too, for progress bars.
"""

import os
import re
from collections.abc import Iterator

from harness.messages import LEFT_OUT, LOG_HEAD_BYTES, LOG_TAIL_BYTES

MAX_LINE_BYTES = 2**16
"""A longer line is read up to here."""

STDOUT = 1
_ENDS = re.compile(rb"[\r\n]+")


class BoundedLog:
    """Appends to the standard output, a file, which keeps the head and the tail."""

    def __init__(self) -> None:
        self._began = os.fstat(STDOUT).st_size
        self._size = 0
        self._recent = bytearray()

    def write(self, data: bytes) -> None:
        """Append, and cut the middle if the file becomes too long."""
        self._recent += data
        if self._size + len(data) > LOG_HEAD_BYTES + 2 * LOG_TAIL_BYTES:
            self._compact()
        else:
            self._append(data)
        if len(self._recent) > 2 * LOG_TAIL_BYTES:
            del self._recent[:-LOG_TAIL_BYTES]

    def _compact(self) -> None:
        """Keep head and newest tail, with a note between them."""
        del self._recent[:-LOG_TAIL_BYTES]
        self._size = min(LOG_HEAD_BYTES, self._size)
        os.ftruncate(STDOUT, self._began + self._size)
        self._append(LEFT_OUT)
        self._append(bytes(self._recent))

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(STDOUT, rest) :]
        self._size += len(data)


class Lines:
    """Cuts one stream into lines."""

    def __init__(self, longest: int = MAX_LINE_BYTES) -> None:
        self._longest = longest
        self._begun = b""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The lines that end in a chunk, without line ends and empty lines."""
        *whole, rest = _ENDS.split(chunk)
        for piece in whole:
            line = self._cut(piece)
            self._begun = b""
            if line:
                yield line.decode(errors="replace")
        self._begun = self._cut(rest)

    def rest(self) -> Iterator[str]:
        """The last line, if it has no end."""
        if self._begun:
            yield self._begun.decode(errors="replace")
        self._begun = b""

    def _cut(self, piece: bytes) -> bytes:
        """The line so far and this piece, up to the longest line."""
        room = self._longest - len(self._begun)
        return self._begun + piece[:room] if room > 0 else self._begun
