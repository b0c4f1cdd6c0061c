"""What differs between two runs of one commit: what can be varied here, and what cannot.

Both runs' cases are made complete first: the variables that were recorded around each run join the
case's own, so that a process depends on nothing that is set around the search.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from harness import drift
from harness.environment import VARIABLE_PREFIXES
from harness.records import Case, Environment

KEPT = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Variables that say which device; what is measured here, is measured on the device of here."""
_IGNORED = ("processes", "timeout_s", "stall_s", "telemetry", "census")
"""Settings by which no step is longer."""
_THREADS = "OMP_NUM_THREADS"


class Kind(StrEnum):
    WORKLOAD = "workload"
    COMMAND = "command"
    AXIS = "axis"
    VARIABLE = "variable"
    SETTING = "setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A difference that can be varied."""

    kind: Kind
    name: str
    then: str
    """In the first run, as a report shows it."""
    now: str
    """In the second."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name != self.kind else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A difference that is not varied."""

    name: str
    then: str
    now: str
    here: str
    """Where the search is carried out: like the first run, like the second, or as it is."""
    why: str


def complete(case: Case, around: Mapping[str, str], inherited: Mapping[str, str]) -> Case:
    """A run's case with all variables that were set when it was made.

    Args:
        case: As the run has it.
        around: The variables recorded around that run.
        inherited: Those that both runs and this process have alike; they need not be set.
    """
    told = {n: v for n, v in around.items() if n not in inherited and n not in KEPT}
    return replace(case, env={**told, **case.env})


def alike(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    """The variables that were set around both runs as they are set here."""
    here = os.environ
    return {n: v for n, v in first.items() if second.get(n) == v == here.get(n) and n not in KEPT}


@contextmanager
def around(inherited: Mapping[str, str]) -> Iterator[None]:
    """Let no variable that a run would record reach a worker but these."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(VARIABLE_PREFIXES) and name not in KEPT:
            del os.environ[name]
    os.environ.update(inherited)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def of_cases(first: Case, second: Case) -> tuple[Cause, ...]:
    """All that differs between two complete cases, the most suspect first."""
    return tuple(_of_cases(first, second))


def threads(first: Environment, second: Environment) -> tuple[dict[str, str], dict[str, str]]:
    """The numbers of threads as variables, where they differ and no variable said so."""
    counts = [e.torch_settings.get("num_threads") for e in (first, second)]
    told = any(_THREADS in e.variables for e in (first, second))
    if told or None in counts or counts[0] == counts[1]:
        return {}, {}
    return {_THREADS: str(counts[0])}, {_THREADS: str(counts[1])}


def fixed(
    first: Environment, second: Environment, here: Environment, varied: Iterable[Cause]
) -> tuple[Fixed, ...]:
    """All that differs between the runs' environments and is not varied."""
    done = {c.name for c in varied if c.kind is Kind.VARIABLE}
    if _THREADS in done:
        done.add("num_threads")
    unlike_first = {d.name: d.now for d in drift.differences(first, here)}
    unlike_second = {d.name for d in drift.differences(second, here)}
    found = []
    for d in drift.differences(first, second):
        if d.name in done:
            continue
        as_here = "as in the first run"
        if d.name in unlike_first:
            other = unlike_first[d.name]
            as_here = other if d.name in unlike_second else "as in the second run"
        why = _why_fixed(d.name, first, second)
        found.append(Fixed(name=d.name, then=d.then, now=d.now, here=as_here, why=why))
    return tuple(found)


def applied(first: Case, second: Case, chosen: Iterable[Cause]) -> Case:
    """The first case with some differences taken over from the second."""
    case = first
    for cause in chosen:
        match cause.kind:
            case Kind.WORKLOAD:
                case = replace(case, factory=second.factory, provider=second.provider)
            case Kind.COMMAND:
                case = replace(case, program=second.program, axes=second.axes)
            case Kind.AXIS:
                case = replace(case, axes=_taken(case.axes, second.axes, cause.name))
                if cause.name in first.env or cause.name in second.env:  # an upper-case axis
                    case = replace(case, env=_taken(case.env, second.env, cause.name))
            case Kind.VARIABLE:
                case = replace(case, env=_taken(case.env, second.env, cause.name))
            case Kind.SETTING:
                value = getattr(second.settings, cause.name)
                case = replace(case, settings=replace(case.settings, **{cause.name: value}))
    return case


def _of_cases(first: Case, second: Case) -> Iterator[Cause]:
    factories = [f"{c.factory}, provider {c.provider}" for c in (first, second)]
    if factories[0] != factories[1]:
        yield Cause(kind=Kind.WORKLOAD, name="workload", then=factories[0], now=factories[1])
    if first.program != second.program:
        told = [" ".join(c.program.argv) if c.program else "none" for c in (first, second)]
        yield Cause(kind=Kind.COMMAND, name="command", then=told[0], now=told[1])
    elif first.program is None:
        yield from _mapped(Kind.AXIS, first.axes, second.axes)
    axes = {*first.axes, *second.axes} if first.program is None else set()
    yield from (c for c in _mapped(Kind.VARIABLE, first.env, second.env) if c.name not in axes)
    yield from (
        c
        for c in _mapped(Kind.SETTING, asdict(first.settings), asdict(second.settings))
        if c.name not in _IGNORED
    )


def _mapped(
    kind: Kind, first: Mapping[str, object], second: Mapping[str, object]
) -> Iterator[Cause]:
    for name in {**first, **second}:
        if name not in first or name not in second or first[name] != second[name]:
            then, now = (str(m[name]) if name in m else "not set" for m in (first, second))
            yield Cause(kind=kind, name=name, then=then, now=now)


def _taken(into: Mapping[str, Any], source: Mapping[str, Any], name: str) -> dict[str, Any]:
    rest = {n: v for n, v in into.items() if n != name}
    return {**rest, name: source[name]} if name in source else rest


def _why_fixed(name: str, first: Environment, second: Environment) -> str:
    if name in {**first.versions, **second.versions}:
        return "another installation is needed"
    if name in {**first.torch_settings, **second.torch_settings}:
        return "it follows from variables, versions or the code"
    if name in KEPT:
        return "it chooses the device"
    if name.startswith("data "):
        return "the data here is as it is"
    return "another machine is needed"
