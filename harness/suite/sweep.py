"""Expands a workload of a suite into its cases, and a `match` into the cases that it selects.

A case id names workload, provider and every swept axis: `train/nsa/seq_len=512/gc=off`. It joins
runs, so it depends only on the file; it is valid in a path and on a command line without quotes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, TypeVar

from harness.records import Case, Match, MeasureSettings, Outcome, PathRule, Scalar, as_text
from harness.suite import program
from harness.suite.positions import Loc, Problem, nearest, show
from harness.suite.schema import PathModel, SomeModel, SuiteModel, WorkloadModel

SomeForm = TypeVar("SomeForm", bound=SomeModel)

MAX_CASES = 10_000
"""Cases of one workload before exclusions."""
MIN_FIT_POINTS = 3
"""Values of an axis that a fit needs to have a residual."""

_SAFE = re.compile(r"[A-Za-z0-9._+-]{1,200}")
PSEUDO_AXES = ("workload", "provider")


def check(workload: WorkloadModel, loc: Loc) -> list[Problem]:
    """Problems of a workload's providers and axes."""
    problems = [*_check_values(workload.providers, (*loc, "providers"))]
    for name, values in workload.axes.items():
        if name in PSEUDO_AXES:
            text = f"{show(name)} cannot be an axis; every case has it already"
            remedy = "Give the axis another name."
            problems.append(Problem((*loc, "axes", name), text, remedy, at_key=True))
        for i, some in enumerate(workload.env):
            if name in some.set:
                text, place = f"{name} is both an axis and in env", (*loc, "env", i, "set", name)
                problems.append(Problem(place, text, "Remove one of them.", at_key=True))
        if isinstance(values, list):
            repeats = any(name in group for group in workload.zip)
            problems += _check_values(values, (*loc, "axes", name), repeats=repeats)
    problems += _check_zip(workload, (*loc, "zip"))
    problems += program.check(workload, loc)
    if not problems:
        points = len(workload.providers) * prod(len(rows) for rows in _dimensions(workload))
        if points > MAX_CASES:
            text = f"{points} cases, but a workload may have at most {MAX_CASES}"
            problems.append(Problem((*loc, "axes"), text, "Split it, or zip axes.", at_key=True))
    return problems


def _check_values(values: Sequence[Scalar], loc: Loc, *, repeats: bool = False) -> list[Problem]:
    problems = []
    seen: set[Scalar] = set()
    for i, value in enumerate(values):
        text = as_text(value)
        if not _SAFE.fullmatch(text):
            problem = f"{show(value)} cannot be part of a case id"
            remedy = "Use at most 200 letters, digits and . _ + - in swept values."
            problems.append(Problem((*loc, i), problem, remedy))
        if not repeats and (value in seen or text in seen):
            problems.append(Problem((*loc, i), f"{show(value)} is listed twice", "Remove one."))
        seen |= {value, text}
    return problems


def _check_zip(workload: WorkloadModel, loc: Loc) -> list[Problem]:
    problems = []
    swept = [name for name, values in workload.axes.items() if isinstance(values, list)]
    zipped: set[str] = set()
    for g, group in enumerate(workload.zip):
        for i, name in enumerate(group):
            if name not in swept:
                text = f"{show(name)} is not a swept axis"
                problems.append(Problem((*loc, g, i), text, nearest(name, swept)))
            elif name in zipped:
                problems.append(Problem((*loc, g, i), f"{show(name)} is zipped twice"))
            zipped.add(name)
        columns = {name: program.values_of(workload, name) for name in group if name in swept}
        if len({len(values) for values in columns.values()}) > 1:
            listed = ", ".join(f"{name} has {len(values)}" for name, values in columns.items())
            text = f"zipped axes must have the same number of values: {listed}"
            problems.append(Problem((*loc, g), text))
        elif len(rows := [*zip(*columns.values(), strict=True)]) > len(set(rows)):
            problems.append(Problem((*loc, g), f"{' and '.join(group)} have a combination twice"))
    return problems


def combinations(
    workload: WorkloadModel, measure: Mapping[str, Any], overrides: Mapping[str, Any]
) -> list[Case]:
    """The cases of a workload that passed `check`, with the excluded ones.

    The provider varies slowest, the last axis fastest; zipped axes vary in the place of the first.
    Of MeasureSettings, those of the workload override `measure`, and `overrides` both.
    """
    swept = tuple(name for name, values in workload.axes.items() if isinstance(values, list))
    found = []
    for provider, rows in product(workload.providers, [*product(*_dimensions(workload))]):
        bound = {name: value for row in rows for name, value in row.items()}
        axes = {name: bound[name] for name in workload.axes}
        labels = (f"{name}={as_text(axes[name])}" for name in swept)
        case = Case(
            case_id="/".join((workload.name, provider, *labels)),
            workload=workload.name,
            factory=workload.factory or "",
            provider=provider,
            axes=axes,
            swept=swept,
            env={name: as_text(v) for name, v in axes.items() if name.isupper()},
            nondeterministic=workload.nondeterministic or "",
        )
        variables = {k: as_text(v) for e in _ours(workload.env, case) for k, v in e.set.items()}
        measured = {k: v for m in _ours(workload.measure, case) for k, v in m.given().items()}
        found.append(
            replace(
                case,
                program=program.bind(workload, case),
                env={**variables, **case.env},
                settings=MeasureSettings(**{**measure, **measured, **overrides}),
                allow=_allowed(workload, case),
                kernels=_path(workload.kernels, case),
                operators=_path(workload.operators, case),
            )
        )
    return found


def kept(workload: WorkloadModel, combinations: Sequence[Case]) -> list[Case]:
    return [case for case in combinations if not any(m.accepts(case) for m in workload.exclude)]


def expanded(model: SuiteModel, overrides: Mapping[str, Any]) -> list[Case]:
    """The cases of a suite, with these settings instead of its own."""
    measure = model.measure.given()
    return [
        case
        for workload in model.workloads
        for case in kept(workload, combinations(workload, measure, overrides))
    ]


def _ours(stated: Sequence[SomeForm], case: Case) -> Sequence[SomeForm]:
    """The parts that are for a case."""
    return [some for some in stated if some.match.accepts(case)]


def _path(stated: Sequence[PathModel], case: Case) -> PathRule:
    rules = _ours(stated, case)
    return PathRule(
        must=tuple(p for r in rules for p in r.must),
        must_not=tuple(p for r in rules for p in r.must_not),
    )


def _allowed(workload: WorkloadModel, case: Case) -> Mapping[Outcome, str]:
    if isinstance(workload.allow, dict):
        return workload.allow
    return {a.outcome: a.reason for a in _ours(workload.allow, case)}


def _dimensions(workload: WorkloadModel) -> list[list[dict[str, Scalar]]]:
    """One list of bindings per axis, or per group of zipped axes."""
    group_of = {name: group for group in workload.zip for name in group}
    dimensions = []
    for name in workload.axes:
        group = group_of.get(name, [name])
        if name == min(group, key=list(workload.axes).index):
            columns = zip(*(program.values_of(workload, n) for n in group), strict=True)
            dimensions.append([dict(zip(group, row, strict=True)) for row in columns])
    return dimensions


def check_match(match: Match, loc: Loc, candidates: Sequence[Case]) -> list[Problem]:
    """Why a `match` selects no candidate."""
    chosen = match.criteria
    pool = [c for c in candidates if c.workload in chosen.get("workload", (c.workload,))]
    pool = pool or list(candidates)
    names = [*PSEUDO_AXES, *dict.fromkeys(name for case in pool for name in case.axes)]
    problems = []
    for name, wanted in chosen.items():
        if name not in names:
            text = f"{show(name)} is not an axis here"
            problems.append(Problem((*loc, name), text, nearest(name, names), at_key=True))
            continue
        taken = [*dict.fromkeys(v for case in pool if (v := case.get(name)) is not None)]
        for i, value in enumerate(wanted):
            if value not in taken:
                text = f"{name} is never {show(value)}"
                problems.append(Problem((*loc, name, i), text, nearest(value, taken)))
    if not problems and not any(match.accepts(case) for case in candidates):
        remedy = "Each value exists, but no case has all of them."
        problems.append(Problem(loc, "matches no case", remedy))
    return problems


def check_fit(axis: str, loc: Loc, matched: Sequence[Case]) -> list[Problem]:
    """Why no scaling exponent over an axis can be fitted."""
    numeric = {
        name
        for case in matched
        for name in case.swept
        if isinstance(case.axes[name], int | float) and not isinstance(case.axes[name], bool)
    }
    if axis not in numeric:
        text = f"{show(axis)} is not a swept axis of numbers here"
        return [Problem(loc, text, nearest(axis, sorted(numeric)))]
    found = len({case.axes[axis] for case in matched if axis in case.swept})
    if found < MIN_FIT_POINTS:
        text = f"a fit over {axis} needs {MIN_FIT_POINTS} values; these cases have {found}"
        return [Problem(loc, text, "Add values to the axis.")]
    return []
