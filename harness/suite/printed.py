"""What a program prints, as keys of a suite: lines that end a step, and its time."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain, islice, pairwise
from typing import Any

MIN_STEPS = 4
"""Lines with rising numbers that are steps; so many times that rise are those since the start."""
MAX_LINE, MAX_PATTERNS = 400, 20
"""Characters of a line that are searched, and ways to print a number that are compared."""

_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_ENDS = r"(?![.,]?\w|%)"  # 12,345 and 12.3k are not read as 12
_VALUE = rf"(?P<value>{_NUMBER})"
_STEPS = (r"\b(?:step|iter(?:ation)?|batch|update)\b\W{0,8}(?P<value>\d+)",)
_TIME = (  # with all words before it: neither "total time" nor "compile time"
    r"(?<!total )(?<!compile )\b(?!total|wall|elapsed|compile)(?:[A-Za-z]+ )*"
    r"\w*(?:step|time|latency|took|takes|median|mean|duration)"
)
_TIMES = (
    rf"{_TIME}_(?P<unit>us|ms|s)\b\W{{0,4}}{_VALUE}{_ENDS}",
    rf"{_TIME}\b\W{{0,8}}{_VALUE} *(?P<unit>us|µs|ms|s)\b",
)


def readings(output: str) -> Mapping[str, Any]:
    """`progress` and `metrics` of a workload whose program prints this; only what was found.

    The program may be ended early if each step prints its time, or none does.
    """
    lines = [line[:MAX_LINE] for line in output.splitlines()]
    found: dict[str, Any] = {}
    often = True
    steps = [p for p in _patterns(_STEPS, r"\d+", lines) if _rises(_values(p, lines))]
    times = _patterns(_TIMES, _NUMBER, lines).items()
    timed = next(((p, u) for p, u in times if not _rises(_values(p, lines))), None)
    if timed is not None:
        pattern, unit = timed
        scale = {} if unit == "s" else {"scale": 1e-3 if unit == "ms" else 1e-6}
        found["metrics"] = {"step_s": {"line": pattern, **scale}}
        often = len(_values(pattern, lines)) >= MIN_STEPS
    if steps:
        until = "sampled" if often else "exit"
        most = max(steps, key=lambda pattern: len(_values(pattern, lines)))  # not evaluations
        found["progress"] = {"step": most.replace("value", "step", 1), "until": until}
    return found


def last(pattern: str, output: str) -> re.Match[str]:
    """What a pattern of `readings` finds in the last line that it fits."""
    lines = (line[:MAX_LINE] for line in output.splitlines())
    *_, found = filter(None, (re.search(pattern, line) for line in lines))
    return found


def _patterns(ways: Sequence[str], number: str, lines: Sequence[str]) -> Mapping[str, str | None]:
    """What fits one of the ways, with the words of its line and any number -> its unit."""
    found: dict[str, str | None] = {}
    for way in ways:
        for match in chain(*(re.finditer(way, line, re.IGNORECASE) for line in lines)):
            start, end = match.span("value")
            texts = (match.string[match.start() : start], match.string[end : match.end()])
            words = (re.escape(text).replace("\\ ", " ") for text in texts)
            before, after = (re.sub(r"^ +| +$", " *", text) for text in words)
            ends = after or (_ENDS if number != r"\d+" else "")
            pattern = f"{before}(?P<value>{number}){ends}"
            found.setdefault(pattern, match.groupdict().get("unit"))
    return dict(islice(found.items(), MAX_PATTERNS))


def _values(pattern: str, lines: Sequence[str]) -> Sequence[float]:
    return [float(m["value"]) for line in lines if (m := re.search(pattern, line))]


def _rises(values: Sequence[float]) -> bool:
    return len(values) >= MIN_STEPS and all(a < b for a, b in pairwise(values))
