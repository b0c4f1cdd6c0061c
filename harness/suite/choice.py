"""What the command line changes in a suite: `--set` its axes and settings, `--filter` its cases."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from harness.errors import SuiteError
from harness.records import Case, Scalar
from harness.suite import sweep
from harness.suite.positions import nearest, read, scalar
from harness.suite.schema import SuiteModel, WorkloadModel, measure_setting

_SHOWN_IDS = 5
_SHOWN_CHARACTERS = 60
_SETTING = "measure."
LISTS_AXES = "`harness run SUITE --dry-run` lists the cases by their axes."
NO_AXES = "The suite has none: write {NAME} in `command`, and its values under `axes`."


def overridden(model: SuiteModel, texts: Sequence[str]) -> tuple[SuiteModel, Mapping[str, Any]]:
    """The suite with the axes of `--set`, and the settings of `--set`, which override its own.

    A rule without remaining cases is kept: it must not pass unseen.
    """
    known = [*dict.fromkeys(name for w in model.workloads for name in w.axes)]
    axes: dict[str, list[Scalar]] = {}
    settings: dict[str, Any] = {}
    given = set[str]()
    for text in texts:
        name, _, value = text.partition("=")
        if not value:
            raise set_error(text, "no value", "Write axis=value[,value...].")
        if name in given:
            raise set_error(text, f"{name} is set twice")
        given.add(name)
        try:
            if name.startswith(_SETTING):
                stated = read(value, "--set").data if value[0] == "{" else scalar(value)
                settings |= measure_setting(name.removeprefix(_SETTING), stated)
            elif name in known:
                axes[name] = [scalar(word) for word in value.split(",")]
            else:
                remedy = f"{nearest(name, known)} {LISTS_AXES}" if known else NO_AXES
                raise ValueError(f"no workload has the axis {name!r}", remedy)
        except ValueError as error:
            raise set_error(text, *map(str, error.args)) from None
    workloads = [_with_axes(workload, axes) for workload in model.workloads]
    for workload in workloads:
        for problem in sweep.check(workload, ()):
            text = f"{workload.name}: {problem.text}"
            raise set_error(" ".join(texts)[:_SHOWN_CHARACTERS], text, problem.remedy)
    return model.model_copy(update={"workloads": workloads}), settings


def _with_axes(workload: WorkloadModel, axes: Mapping[str, list[Scalar]]) -> WorkloadModel:
    """The workload with replaced axes. One value does not make a fixed axis a swept one: the case
    keeps its id."""
    changed = dict(workload.axes)
    for name in changed.keys() & axes.keys():
        one = len(axes[name]) == 1 and not isinstance(changed[name], list)
        changed[name] = axes[name][0] if one else axes[name]
    return workload.model_copy(update={"axes": changed})


def set_error(text: str, problem: str, remedy: str = "") -> SuiteError:
    return SuiteError(f"--set {text}", problem, remedy)


def filtered(cases: Sequence[Case], filters: Sequence[str], path: Path | str) -> tuple[Case, ...]:
    """The cases that filters keep; SuiteError if none is left, or if a filter matches none."""
    if any(not f.removeprefix("!") for f in filters):
        raise SuiteError(path, "an empty filter matches every case", "Omit it to run all cases.")
    kept = passing(cases, filters)
    if not kept and not filters:
        raise SuiteError(path, "every case is excluded with these overrides")
    lost = [f for f in filters if not f.startswith("!") and not passing(cases, [f])]
    if lost or not kept:
        ids = [f"  {case.case_id}" for case in cases[:_SHOWN_IDS]]
        if len(cases) > len(ids):
            ids.append(f"  and {len(cases) - len(ids)} more")
        problem = f"no case matches {' '.join(map(repr, lost or filters))}"
        raise SuiteError(path, problem, "\n".join(["Cases:", *ids]))
    return kept


def passing(cases: Sequence[Case], filters: Sequence[str]) -> tuple[Case, ...]:
    """The cases that filters keep: one without `!` matches, if there is one, and none with `!`.
    A filter that is the whole id of a case matches that case only."""
    ids = {case.case_id for case in cases}

    def matches(case: Case, pattern: str) -> bool:
        return case.case_id == pattern if pattern in ids else fits(case.case_id, pattern)

    wanted = [f for f in filters if not f.startswith("!")]
    unwanted = [f[1:] for f in filters if f.startswith("!")]
    return tuple(
        case
        for case in cases
        if (not wanted or any(matches(case, f) for f in wanted))
        and not any(matches(case, f) for f in unwanted)
    )


def fits(case_id: str, pattern: str) -> bool:
    """Whether a case id matches a pattern (with `*?[`), or contains a text without them."""
    if any(c in pattern for c in "*?["):
        return fnmatchcase(case_id, pattern)
    return pattern in case_id
