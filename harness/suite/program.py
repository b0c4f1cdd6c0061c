"""A workload of a suite that is a program: what is wrong with it, and what it is for one case."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from harness.records import (
    INTERPRETER,
    METRICS,
    REPORTED,
    Case,
    Metric,
    MetricSource,
    Program,
    Scalar,
    Steps,
)
from harness.suite.positions import Loc, Problem, nearest, show
from harness.suite.schema import ReadingModel, SuiteModel, WorkloadModel

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}:]*)(?::([^{}]*))?\}|[{}]")
"""Doubled braces, a field with or without a text to show where it is true, or a stray brace."""
_OF_A_FACTORY = {"flush_l2": False, "rotate_inputs": 1, "graph": False}
"""Settings that only a factory's workload can follow, as they are when not set."""


def check(workload: WorkloadModel, loc: Loc) -> Iterator[Problem]:
    """What is wrong with a program, its arguments and its metrics, taken by themselves."""
    if workload.command is None:
        return
    try:
        words = _words(workload)
    except ValueError as error:
        yield Problem((*loc, "command"), f"command cannot be split: {error}", "Use a list.")
        return
    if not words:
        yield Problem((*loc, "command"), "command names no program")
        return
    used: set[str] = set()
    problems: list[Problem] = []
    for place, text, whole in _texts(workload, words):
        problems += _check_fields(workload, (*loc, *place), text, used, whole=whole)
    yield from problems
    for name, values in workload.axes.items():
        swept = isinstance(values, list)
        if swept and not name.isupper() and name not in used and not problems:
            remedy = (
                f"Write {{{name}}} in command, or call it {name.upper()}: then it is a variable."
            )
            text = f"{show(name)} is swept and does not reach the program"
            yield Problem((*loc, "axes", name), text, remedy, at_key=True)
    for key in ("tokens", "flops"):
        yield from _check_product(workload, key, (*loc, key))
    yield from _check_metrics(workload, (*loc, "metrics"))


def check_settings(cases: Sequence[Case], loc: Loc) -> Iterator[Problem]:
    """Settings of a program's cases that no program can follow."""
    for name, default in _OF_A_FACTORY.items():
        if any(case.program and getattr(case.settings, name) != default for case in cases):
            text = f"{name} needs a factory; a program arranges its own runs"
            yield Problem((*loc, "measure"), text, at_key=True)


def free_metrics(model: SuiteModel) -> Mapping[str, Metric]:
    """The metrics that programs of a suite tell and the harness does not know."""
    return {
        name: _metric(name, told)
        for workload in model.workloads
        for name, told in workload.metrics.items()
        if name not in METRICS
    }


def check_same(model: SuiteModel) -> Iterator[Problem]:
    """Two programs that mean different things by one metric."""
    known: dict[str, tuple[str, Metric]] = {}
    for w, workload in enumerate(model.workloads):
        for name, told in workload.metrics.items():
            here = _metric(name, told)
            first, there = known.setdefault(name, (workload.name, here))
            if name not in METRICS and here != there:
                text = f"{show(name)} has another unit or direction in {first}"
                place: Loc = ("workloads", w, "metrics", name)
                yield Problem(place, text, "Give one of them another name.", at_key=True)


def bind(workload: WorkloadModel, case: Case) -> Program | None:
    """The program of one case of a workload that `check` has accepted; None for a factory."""
    if workload.command is None:
        return None
    words = _words(workload)
    argv = [_filled(str(word), case) for word in words[:1]]
    for word in words[1:]:
        optional = _optional(word)
        if optional is None:
            argv.append(_filled(word, case))
        elif case.get(optional[0]):
            argv.append(optional[1])
    return Program(
        argv=tuple(argv),
        cwd=_filled(workload.cwd, case),
        steps=_steps(workload),
        readings=tuple(_reading(name, told, case) for name, told in workload.metrics.items()),
        tokens=_product(workload.tokens, case),
        flops=_product(workload.flops, case),
    )


def _words(workload: WorkloadModel) -> list[str]:
    """The command's words, with their fields; ValueError where a quote is not closed."""
    if isinstance(workload.command, str):
        return shlex.split(workload.command)
    return [_as_text(word) for word in workload.command or ()]


def _texts(workload: WorkloadModel, words: Sequence[str]) -> Iterator[tuple[Loc, str, bool]]:
    """Where fields may stand: place, text, and whether it is an argument by itself."""
    listed = not isinstance(workload.command, str)
    for i, word in enumerate(words):
        yield (("command", i) if listed else ("command",)), word, i > 0
    if "cwd" in workload.model_fields_set:
        yield ("cwd",), workload.cwd, False
    for name, told in workload.metrics.items():
        if told.file:
            yield ("metrics", name, "file"), told.file, False


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
            yield Problem(loc, f"a brace stands alone in {show(text)}", "Double it: {{ or }}.")
        elif f"{{{name}}}" == INTERPRETER:
            yield Problem(loc, "{python} is the first word of a command, and nothing else")
        elif name not in names:
            yield Problem(loc, f"{show(name)} is no axis here", nearest(name, names))
        elif shown is not None and not (whole and field[0] == text):
            yield Problem(loc, f"{field[0]} must be an argument by itself")
        elif shown is not None and not all(isinstance(v, bool) for v in _values(workload, name)):
            yield Problem(loc, f"{field[0]} needs an axis that is true or false")
        else:
            used.add(name)


def _check_product(workload: WorkloadModel, key: str, loc: Loc) -> Iterator[Problem]:
    factors = getattr(workload, key)
    for i, factor in enumerate(factors if isinstance(factors, list) else ()):
        if isinstance(factor, int):
            continue
        if factor not in workload.axes:
            text = f"{show(factor)} is no axis here"
            yield Problem((*loc, i), text, nearest(factor, [*workload.axes]))
        elif not all(_is_count(value) for value in _values(workload, factor)):
            yield Problem((*loc, i), f"{factor} is not always a whole number above 0")


def _check_metrics(workload: WorkloadModel, loc: Loc) -> Iterator[Problem]:
    timed = re.compile(_steps_model(workload)).groupindex if workload.progress else {}
    for name, told in workload.metrics.items():
        place = (*loc, name)
        if name in METRICS:
            if name not in REPORTED:
                text = f"{name} is measured, and not for a program to tell"
                yield Problem(place, text, f"It may tell {', '.join(REPORTED)}.", at_key=True)
            elif told.unit or told.better:
                text = f"{name} has the unit {METRICS[name].unit} and its direction already"
                yield Problem(place, text, "Use scale, and drop unit and better.", at_key=True)
        elif not (told.unit and told.better):
            text = f"{show(name)} is not one of the harness's; it needs unit and better"
            yield Problem(place, text, nearest(name, REPORTED), at_key=True)
    if "tokens_per_s" in workload.metrics and workload.tokens is not None:
        yield Problem((*loc, "tokens_per_s"), "tokens gives tokens_per_s already", at_key=True)
    if "step_s" in workload.metrics and {"step_s", "step_ms"} & {*timed}:
        yield Problem((*loc, "step_s"), "progress tells the step's time already", at_key=True)


def _steps_model(workload: WorkloadModel) -> str:
    """The regular expression of a step."""
    if isinstance(workload.progress, str):
        return workload.progress
    return workload.progress.step if workload.progress else ""


def _steps(workload: WorkloadModel) -> Steps | None:
    told = workload.progress
    if told is None:
        return None
    if isinstance(told, str):
        return Steps(step=told)
    return Steps(
        step=told.step,
        alive=told.alive or "",
        setup_steps=told.setup_steps,
        until_sampled=told.until == "sampled",
    )


def _metric(name: str, told: ReadingModel) -> Metric:
    higher = told.better == "higher"
    return Metric(name=name, title=name, unit=told.unit or "", higher_is_better=higher)


def _reading(name: str, told: ReadingModel, case: Case) -> MetricSource:
    return MetricSource(
        metric=name,
        unit=told.unit or "",
        higher_is_better=told.better == "higher",
        line=told.line or "",
        json=told.json_ or "",
        prefix=told.prefix or "",
        file=_filled(told.file, case) if told.file else "",
        csv=told.csv or "",
        scale=told.scale,
        last=told.take == "last",
    )


def _product(factors: int | Sequence[int | str] | None, case: Case) -> int | None:
    if factors is None or isinstance(factors, int):
        return factors
    return prod(int(case.axes[f]) if isinstance(f, str) else f for f in factors)


def _optional(word: str) -> tuple[str, str] | None:
    """Axis and argument of a word that is there only where the axis is true."""
    field = _FIELD.fullmatch(word)
    return (field[1], field[2]) if field and field[2] is not None else None


def _filled(text: str, case: Case) -> str:
    """A text with its fields filled in."""
    if text == INTERPRETER:
        return text

    def fill(field: re.Match[str]) -> str:
        return field[0][0] if field[1] is None else _as_text(case.get(field[1]))

    return _FIELD.sub(fill, text)


def _as_text(value: Scalar | None) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(workload: WorkloadModel, name: str) -> Sequence[Scalar]:
    if name == "provider":
        return workload.providers
    values = workload.axes[name]
    return values if isinstance(values, list) else [values]


def _is_count(value: Scalar) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
