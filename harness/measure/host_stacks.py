"""Where in Python the host is, looked at again and again by a thread beside it.

The interpreter lets the other thread look when it gives up its lock: whenever an operator runs
without it, and otherwise after SWITCH_S. So a look falls a little late, and never early.
"""

import re
import sys
import sysconfig
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from types import FrameType

INTERVAL_S = 5e-4
"""Time between two looks; of a long step more, so that there are at most MAX_LOOKS."""
SWITCH_S = 5e-4
MAX_LOOKS = 4000
_LIBRARIES = (
    *{sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")},
    "<frozen",
)
_OTHERS = ("/site-packages/", "/dist-packages/")
_HARNESS = "/harness/measure/"
_GENERATED = re.compile(r"c[a-z2-7]{51}")
"""Name of a file that torch.compile wrote: a hash of its content, which tells a reader nothing."""
_ENGINE = "_engine_run_backward"
"""Where the calling thread waits while autograd's own threads run the backward pass."""

Spot = tuple[str, str, int]
"""File, function and line."""


class Looks:
    """What was seen, and when (time.time_ns)."""

    def __init__(self) -> None:
        self.at_ns: list[int] = []
        self.spots: list[Spot] = []


@contextmanager
def looking(*, expected_s: float) -> Iterator[Looks]:
    """Look at the calling thread until the block ends, which takes about `expected_s`."""
    looks, done = Looks(), threading.Event()
    watched = threading.get_ident()
    interval_s = max(INTERVAL_S, expected_s / MAX_LOOKS)
    thread = threading.Thread(
        target=_look, args=(watched, looks, done, interval_s), name="harness-looks", daemon=True
    )
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_S))
    thread.start()
    try:
        yield looks
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)


def summarise(spots: Sequence[tuple[Spot, str]], most: int) -> list[tuple[str, str, float]]:
    """Functions by how often they were seen: label, range and share, the most frequent first.

    Args:
        spots: What was seen, each with the range it was seen in.
        most: How many to keep.
    """
    seen: Counter[tuple[str, str, str]] = Counter()
    lines: dict[tuple[str, str, str], Counter[int]] = defaultdict(Counter)
    for (file, function, line), where in spots:
        seen[file, function, where] += 1
        lines[file, function, where][line] += 1
    found = []
    for key, count in seen.most_common(most):
        file, function, where = key
        line = lines[key].most_common(1)[0][0]
        path = PurePath(file)
        generated = _GENERATED.fullmatch(path.stem)
        short = "torch.compile's code" if generated else "/".join(path.parts[-2:])
        plain = function.replace("<", "").replace(">", "")  # <module>
        found.append((f"{short}:{line} {plain}", where, count / len(spots)))
    return found


def _look(watched: int, looks: Looks, done: threading.Event, interval_s: float) -> None:
    me = threading.get_ident()
    while not done.wait(interval_s):
        frames = sys._current_frames()
        frame = frames.get(watched)
        at_ns = time.time_ns()
        if frame is None or len(looks.spots) >= MAX_LOOKS:
            continue
        spot = _spot(frame)
        if frame.f_code.co_name == _ENGINE:
            busy = [f for i, f in frames.items() if i not in (me, watched) and _is_code(f)]
            spot = _spot(busy[0]) if busy else spot
        looks.at_ns.append(at_ns)
        looks.spots.append(spot)
        del frames, frame


def _spot(frame: FrameType) -> Spot:
    """The innermost frame of somebody's own code; the innermost of all where there is none.

    Where it only waits for the backward pass, which has no frames, its name says so.
    """
    at: FrameType | None = frame
    backward = ""
    while at is not None:
        if at.f_code.co_name == _ENGINE:
            backward = ", backward pass"
        if _is_own(at.f_code.co_filename):
            return at.f_code.co_filename, at.f_code.co_name + backward, at.f_lineno
        at = at.f_back
    return frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno


def _is_code(frame: FrameType) -> bool:
    """Whether a thread is in somebody's own code at all, and not merely waiting."""
    at: FrameType | None = frame
    while at is not None:
        if _is_own(at.f_code.co_filename):
            return True
        at = at.f_back
    return False


def _is_own(file: str) -> bool:
    if any(part in file for part in _OTHERS) or _HARNESS in file:
        return False
    return not file.startswith(_LIBRARIES)
