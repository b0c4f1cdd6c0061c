"""A workload that is a program: its problems, and the program of one case."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from harness.records import INTERPRETER, METRICS, REPORTED, Case, Metric, Program, Scalar, as_text
from harness.suite.positions import Loc, Problem, nearest, show
from harness.suite.schema import Product, SuiteModel, WorkloadModel

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}:]*)(?::([^{}]*))?\}|[{}]")
"""Double braces, a field (also `{axis:text if true}`), or a single brace."""
_FACTORY_ONLY = {"flush_l2": False, "graph": False}
"""Settings for factories only, with their defaults."""


def check(workload: WorkloadModel, loc: Loc) -> Iterator[Problem]:
    """Problems of a program, its arguments and its metrics."""
    if workload.command is None:
        return
    used = {factor for factor in workload.world_size if isinstance(factor, str)}
    problems: list[Problem] = []
    for i, word in enumerate(workload.command):
        place = (*loc, "command", i)
        problems += _check_fields(workload, place, as_text(word), used, whole=i > 0)
    problems += _check_fields(workload, (*loc, "cwd"), workload.cwd, used, whole=False)
    yield from problems
    for name, values in workload.axes.items():
        swept = isinstance(values, list)
        if swept and not name.isupper() and name not in used and not problems:
            remedy = f"Write {{{name}}} in command, or name it {name.upper()}, a variable."
            text = f"{show(name)} is swept but does not reach the program"
            yield Problem((*loc, "axes", name), text, remedy, at_key=True)
    for key in ("tokens", "gpus", "world_size"):
        yield from _check_product(workload, key, (*loc, key))
    yield from _check_metrics(workload, (*loc, "metrics"))


def check_settings(cases: Sequence[Case], loc: Loc) -> Iterator[Problem]:
    """Settings of cases with a program that need a factory."""
    for name, default in _FACTORY_ONLY.items():
        if any(case.program and getattr(case.settings, name) != default for case in cases):
            text = f"{name} needs a factory; a program controls its own steps"
            yield Problem((*loc, "measure"), text, at_key=True)


def free_metrics(model: SuiteModel) -> Mapping[str, Metric]:
    """The metrics that only programs of the suite report."""
    return {
        name: Metric(
            name=name, title=name, unit=read.unit, higher_is_better=read.better == "higher"
        )
        for workload in model.workloads
        for name, read in workload.metrics.items()
        if name not in METRICS
    }


def bind(workload: WorkloadModel, case: Case) -> Program | None:
    """The program of one case of a workload that passed `check`; None for a factory."""
    if workload.command is None:
        return None
    words = [as_text(word) for word in workload.command]
    factors = {*workload.tokens} - {*workload.gpus, *workload.world_size}
    argv = [_filled(word, case) for word in words[:1]]
    for word in words[1:]:
        field = _FIELD.fullmatch(word)
        if field is None or field[2] is None:
            argv.append(_filled(word, case))
        elif case.get(field[1]):  # an argument only if the axis is true
            argv.append(field[2])
    return Program(
        argv=tuple(argv),
        cwd=_filled(workload.cwd, case),
        steps=workload.progress,
        readings=tuple(replace(read, metric=name) for name, read in workload.metrics.items()),
        tokens=_product(workload.tokens, case),
        gpus=_product(workload.gpus, case) or 0,
        world_size=_product(workload.world_size, case) or 0,
        carried=_carried(["", workload.cwd, *words]),
        # More GPUs do more work in the same time, which an axis without effect does, too.
        work_axes=tuple(n for n in case.axes if n in factors),
    )


def _carried(words: Sequence[str]) -> Mapping[str, str]:
    """Axis -> its option, of `--n={axis}`, `--n {axis}` and `{axis:--n}`, if it is nowhere else."""
    ways: dict[str, set[str]] = {}
    for before, word in pairwise(words):
        for field in _FIELD.finditer(word):
            option = (field[2] or (word if word.startswith("-") else before)).partition("=")[0]
            ways.setdefault(field[1] or "", set()).add(option)
    return {axis: o for axis, (o, *more) in ways.items() if o.startswith("-") and not more}


def _check_fields(
    workload: WorkloadModel, loc: Loc, text: str, used: set[str], *, whole: bool
) -> Iterator[Problem]:
    if loc[-1] != "cwd" and text == INTERPRETER and not whole:
        return
    names = [*workload.axes, "provider"]
    for field in _FIELD.finditer(text):
        name, shown = field.groups()
        if field[0] in ("{{", "}}"):
            continue
        if name is None:
            yield Problem(loc, f"single brace in {show(text)}", "Double it: {{ or }}.")
        elif f"{{{name}}}" == INTERPRETER:
            yield Problem(loc, "{python} must be the first word of a command")
        elif name not in names:
            yield Problem(loc, f"{show(name)} is not an axis here", nearest(name, names))
        elif shown is not None and not (whole and field[0] == text):
            yield Problem(loc, f"{field[0]} must be a whole argument")
        elif shown is not None and not all(isinstance(v, bool) for v in values_of(workload, name)):
            yield Problem(loc, f"{field[0]} needs an axis that is true or false")
        else:
            used.add(name)


def _check_product(workload: WorkloadModel, key: str, loc: Loc) -> Iterator[Problem]:
    for i, factor in enumerate(getattr(workload, key)):
        place = (*loc, i)
        if isinstance(factor, int):
            continue
        if factor not in workload.axes:
            text = f"{show(factor)} is not an axis here"
            yield Problem(place, text, nearest(factor, [*workload.axes]))
        elif not all(type(v) is int and v > 0 for v in values_of(workload, factor)):
            yield Problem(place, f"{factor} must be a positive whole number in every case")


def _check_metrics(workload: WorkloadModel, loc: Loc) -> Iterator[Problem]:
    for name, reading in workload.metrics.items():
        place = (*loc, name)
        if name in METRICS and name not in REPORTED:
            text = f"{name} is measured by the harness; a program cannot report it"
            remedy = f"A program can report {', '.join(REPORTED)}."
            yield Problem(place, text, remedy, at_key=True)
        elif name not in METRICS and not (reading.unit and reading.better):
            text = f"{show(name)} is not a metric of the harness, so it needs unit and better"
            yield Problem(place, text, nearest(name, REPORTED), at_key=True)
    if "tokens_per_s" in workload.metrics and workload.tokens:
        text, remedy = "tokens already gives tokens_per_s", "Remove this metric, or tokens."
        yield Problem((*loc, "tokens_per_s"), text, remedy, at_key=True)


def _product(product: Product, case: Case) -> int | None:
    values = [int(case.axes[f]) if isinstance(f, str) else f for f in product]
    return prod(values) if values else None


def _filled(text: str, case: Case) -> str:
    if text == INTERPRETER:
        return text

    def fill(field: re.Match[str]) -> str:
        return field[0][0] if field[1] is None else as_text(case.get(field[1]))

    return _FIELD.sub(fill, text)


def values_of(workload: WorkloadModel, name: str) -> Sequence[Scalar]:
    """The values of an axis, or the providers."""
    if name == "provider":
        return workload.providers
    values = workload.axes[name]
    return values if isinstance(values, list) else [values]
