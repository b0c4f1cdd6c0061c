"""The differences between two runs of one commit: those that can be varied here, and the others.

Both runs' cases are completed first with the environment variables recorded for each run, so that a
process does not depend on variables that are set around the search.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from harness.machine import drift
from harness.records import Case, Environment

KEPT = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Variables that select the device; those of this process are kept."""
_IGNORED = ("processes", "timeout_s", "stall_s", "telemetry", "profile")
"""Settings that do not change the time of a step."""
_THREADS = "OMP_NUM_THREADS"


class DifferenceKind(StrEnum):
    WORKLOAD = "workload"
    COMMAND = "command"
    AXIS = "axis"
    VARIABLE = "variable"
    SETTING = "setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseDifference:
    """A difference between two cases, which can be varied."""

    kind: DifferenceKind
    name: str
    then: str
    """Value in the first run, as a report shows it."""
    now: str
    """Value in the second run."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name != self.kind else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDifference:
    """A difference between two environments, which is not varied."""

    name: str
    then: str
    now: str
    here: str
    """On this machine: as in the first run, as in the second run, or the value."""
    why: str


def complete(case: Case, around: Mapping[str, str], inherited: Mapping[str, str]) -> Case:
    """A run's case with all variables recorded `around` it, but for the inherited ones."""
    added = {n: v for n, v in around.items() if n not in inherited and n not in KEPT}
    return replace(case, env={**added, **case.env})


def inherited(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    """The variables with the same value in both runs and in this process."""
    here = os.environ
    return {n: v for n, v in first.items() if second.get(n) == v == here.get(n) and n not in KEPT}


@contextmanager
def only(inherited: Mapping[str, str], *runs: Environment) -> Iterator[None]:
    """Of the variables that all runs recorded, let only these reach a worker."""
    before = dict(os.environ)
    for name in before:
        if name not in KEPT and all(name.startswith(run.prefixes) for run in runs):
            del os.environ[name]
    os.environ.update(inherited)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def variables(first: Environment, second: Environment) -> list[dict[str, str]]:
    """The variables of both; with the numbers of threads, if they differ and none set them."""
    both = (first, second)
    counts = [e.torch_settings.get("num_threads") for e in both]
    if None in counts or counts[0] == counts[1] or any(_THREADS in e.variables for e in both):
        return [dict(e.variables) for e in both]
    return [{**e.variables, _THREADS: str(n)} for e, n in zip(both, counts, strict=True)]


def fixed(
    first: Environment, second: Environment, here: Environment, varied: Iterable[CaseDifference]
) -> Iterator[FixedDifference]:
    """All differences between the runs' environments that are not varied."""
    done = {c.name for c in varied if c.kind is DifferenceKind.VARIABLE}
    if _THREADS in done:
        done.add("num_threads")
    unlike_first = {d.name: d.candidate for d in drift.differences(first, here)}
    unlike_second = {d.name for d in drift.differences(second, here)}
    for d in drift.differences(first, second):
        if d.name in done:
            continue
        as_here = "as in the first run"
        if d.name in unlike_first:
            other = unlike_first[d.name]
            as_here = other if d.name in unlike_second else "as in the second run"
        why = _why_fixed(d.name, first, second)
        yield FixedDifference(name=d.name, then=d.baseline, now=d.candidate, here=as_here, why=why)


def applied(first: Case, second: Case, chosen: Iterable[CaseDifference]) -> Case:
    """The first case with some values taken from the second one."""
    case = first
    for cause in chosen:
        match cause.kind:
            case DifferenceKind.WORKLOAD:
                case = replace(case, factory=second.factory, provider=second.provider)
            case DifferenceKind.COMMAND:
                case = replace(case, program=second.program, axes=second.axes)
            case DifferenceKind.AXIS | DifferenceKind.VARIABLE:
                if cause.kind is DifferenceKind.AXIS:
                    case = replace(case, axes=_taken(case.axes, second.axes, cause.name))
                # An upper-case axis is a variable, too.
                case = replace(case, env=_taken(case.env, second.env, cause.name))
            case DifferenceKind.SETTING:
                value = getattr(second.settings, cause.name)
                case = replace(case, settings=replace(case.settings, **{cause.name: value}))
    return case


def of_cases(first: Case, second: Case) -> Iterator[CaseDifference]:
    """All differences between two complete cases, the most likely cause first."""
    factories = [{"workload": f"{c.factory}, provider {c.provider}"} for c in (first, second)]
    yield from _mapped(DifferenceKind.WORKLOAD, *factories)
    if first.program != second.program:
        one, other = (" ".join(c.program.argv) if c.program else "none" for c in (first, second))
        yield CaseDifference(kind=DifferenceKind.COMMAND, name="command", then=one, now=other)
    elif first.program is None:
        yield from _mapped(DifferenceKind.AXIS, first.axes, second.axes)
    axes = {*first.axes, *second.axes} if first.program is None else set()
    variables = _mapped(DifferenceKind.VARIABLE, first.env, second.env)
    yield from (c for c in variables if c.name not in axes)
    settings = (asdict(c.settings) for c in (first, second))
    yield from (c for c in _mapped(DifferenceKind.SETTING, *settings) if c.name not in _IGNORED)


def _mapped(
    kind: DifferenceKind, first: Mapping[str, object], second: Mapping[str, object]
) -> Iterator[CaseDifference]:
    for name in {**first, **second}:
        if name not in first or name not in second or first[name] != second[name]:
            then, now = (str(m[name]) if name in m else "not set" for m in (first, second))
            yield CaseDifference(kind=kind, name=name, then=then, now=now)


def _taken(into: Mapping[str, Any], source: Mapping[str, Any], name: str) -> dict[str, Any]:
    rest = {n: v for n, v in into.items() if n != name}
    return {**rest, name: source[name]} if name in source else rest


def _why_fixed(name: str, first: Environment, second: Environment) -> str:
    if name in {**first.versions, **second.versions}:
        return "it needs another installation"
    if name in {**first.torch_settings, **second.torch_settings}:
        return "variables, versions or the code determine it"
    if name in KEPT:
        return "it selects the device"
    if name.startswith("data "):
        return "the data cannot be changed here"
    return "it needs another machine"
