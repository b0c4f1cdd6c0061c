"""Samples of the Python stack of the thread that launches work, taken by a second thread.

The second thread gets the interpreter's lock when an operator releases it, or after SWITCH_S. A
sample is therefore a little late, never early.
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
"""Least time between two samples; longer for long steps, so that there are at most MAX_SAMPLES."""
SWITCH_S = 5e-4
MAX_SAMPLES = 4000
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen")
_OTHERS = ("/site-packages/", "/dist-packages/")
_ROOM = __file__.rpartition("/")[0]
_GENERATED = re.compile(r"c[a-z2-7]{51}")
"""Name of a file that torch.compile wrote: a hash."""
_ENGINE = "_engine_run_backward"
"""Function in which the calling thread waits while autograd's threads run the backward pass."""

Spot = tuple[str, str, int]
"""File, function and line."""
Sample = tuple[int, Spot]
"""When it was taken (time.time_ns), and the innermost own code of the sampled thread."""


@contextmanager
def sampling(*, expected_s: float) -> Iterator[list[Sample]]:
    """Sample the calling thread until the block ends, in about `expected_s`."""
    samples: list[Sample] = []
    done = threading.Event()
    watched = threading.get_ident()
    interval_s = max(INTERVAL_S, expected_s / MAX_SAMPLES)
    thread = threading.Thread(
        target=_sample, args=(watched, samples, done, interval_s), name="stacks", daemon=True
    )
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_S))
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)


def summarise(spots: Sequence[tuple[Spot, str]], most: int) -> list[tuple[str, str, float]]:
    """The `most` frequent functions: label, range and share of all samples.

    Args:
        spots: Samples, each with its range.
        most: Functions to return.
    """
    lines: dict[tuple[str, str, str], Counter[int]] = defaultdict(Counter)
    for (file, function, line), where in spots:
        lines[file, function, where][line] += 1
    counts = Counter({key: seen.total() for key, seen in lines.items()})
    found = []
    for key, count in counts.most_common(most):
        file, function, where = key
        line = lines[key].most_common(1)[0][0]
        path = PurePath(file)
        generated = _GENERATED.fullmatch(path.stem)
        short = "torch.compile's code" if generated else "/".join(path.parts[-2:])
        plain = function.replace("<", "").replace(">", "")  # <module>
        found.append((f"{short}:{line} {plain}", where, count / len(spots)))
    return found


def _sample(watched: int, samples: list[Sample], done: threading.Event, interval_s: float) -> None:
    me = threading.get_ident()
    while not done.wait(interval_s):
        frames = sys._current_frames()
        frame = frames.get(watched)
        at_ns = time.time_ns()
        if frame is None or len(samples) >= MAX_SAMPLES:
            continue
        own = [_own_spot(frame)]
        if frame.f_code.co_name == _ENGINE:
            own = [_own_spot(f) for i, f in frames.items() if i not in (me, watched)] + own
        code = frame.f_code
        innermost = code.co_filename, code.co_name, frame.f_lineno
        samples.append((at_ns, next(filter(None, own), innermost)))
        del frames, frame, code


def _own_spot(frame: FrameType) -> Spot | None:
    """The innermost frame of the user's own code; None if there is none. If it waits for the
    backward pass, whose operators have no frames, its name says so."""
    at: FrameType | None = frame
    backward = ""
    while at is not None:
        code = at.f_code
        if code.co_name == _ENGINE:
            backward = ", backward pass"
        if _is_own(code.co_filename):
            return code.co_filename, code.co_name + backward, at.f_lineno
        at = at.f_back
    return None


def _is_own(file: str) -> bool:
    if any(part in file for part in _OTHERS) or file.rpartition("/")[0] == _ROOM:
        return False
    return not file.startswith(_LIBRARIES)
