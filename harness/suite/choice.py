"""What the command line changes in a suite: `--set` its axes and settings, `--filter` its cases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from harness.errors import SuiteError
from harness.records import Case, Scalar, as_text
from harness.suite import sweep
from harness.suite.positions import nearest, read, scalar
from harness.suite.schema import SuiteModel, WorkloadModel, measure_setting

_SHOWN_IDS = 5
_SHOWN_CHARACTERS = 60
_SETTING = "measure."
LISTS_AXES = "`harness run SUITE --dry-run` lists the cases by their axes."
NO_AXES = "The suite has none: write {NAME} in `command`, and its values under `axes`."


@dataclass(frozen=True, slots=True)
class Overrides:
    """The changes of `--set`. A rule without remaining cases is kept: it must not pass unseen."""

    axes: Mapping[str, tuple[str, ...]]
    """Axis -> new values, as typed."""
    settings: Mapping[str, Any]
    """Fields of MeasureSettings."""

    @classmethod
    def parse(cls, texts: Sequence[str], model: SuiteModel) -> "Overrides":
        """Read the options of a suite; SuiteError where one does not apply."""
        known = [*dict.fromkeys(name for w in model.workloads for name in w.axes)]
        axes: dict[str, tuple[str, ...]] = {}
        settings: dict[str, Any] = {}
        given: set[str] = set()
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or not value:
                raise set_error(text, "no value", "Write axis=value[,value...].")
            if name in given:
                raise set_error(text, f"{name} is set twice")
            given.add(name)
            if name.startswith(_SETTING):
                try:
                    stated = read(value, "--set").data if value[0] == "{" else scalar(value)
                    settings |= measure_setting(name.removeprefix(_SETTING), stated)
                except ValueError as error:
                    raise set_error(text, *map(str, error.args)) from None
            elif name in known:
                axes[name] = tuple(value.split(","))
            else:
                remedy = f"{nearest(name, known)} {LISTS_AXES}" if known else NO_AXES
                raise set_error(text, f"no workload has the axis {name!r}", remedy)
        changes = cls(axes, settings)
        for workload in model.workloads:
            problems = sweep.check(changes.apply(workload), ())
            if problems:
                text = f"{workload.name}: {problems[0].text}"
                raise set_error(" ".join(texts), text, problems[0].remedy)
        return changes

    def cases(self, model: SuiteModel) -> list[Case]:
        """The cases of the suite with these changes."""
        found: list[Case] = []
        for workload in model.workloads:
            changed = self.apply(workload)
            made = sweep.combinations(changed, model.measure.given(), self.settings)
            found += sweep.kept(changed, made)
        return found

    def apply(self, workload: WorkloadModel) -> WorkloadModel:
        """The workload with replaced axes. One value does not make a fixed axis a swept one: the
        case keeps its id."""
        new = {n: self._values(n, workload) for n in workload.axes if n in self.axes}
        fixed = {n for n, old in workload.axes.items() if not isinstance(old, list)}
        one = {n: values[0] for n, values in new.items() if n in fixed and len(values) == 1}
        return workload.model_copy(update={"axes": workload.axes | new | one})

    def _values(self, name: str, workload: WorkloadModel) -> list[Scalar]:
        """The values with their types in the file, so that "1" stays text."""
        written = workload.axes[name]
        by_text = {as_text(v): v for v in (written if isinstance(written, list) else [written])}
        values = []
        for text in self.axes[name]:
            try:
                values.append(by_text[text] if text in by_text else scalar(text))
            except ValueError as error:
                raise set_error(f"{name}={','.join(self.axes[name])}", str(error)) from None
        return values


def set_error(text: str, problem: str, remedy: str = "") -> SuiteError:
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return SuiteError(f"--set {shown}", problem, remedy)


def filtered(cases: Sequence[Case], filters: Sequence[str], path: Path | str) -> tuple[Case, ...]:
    """The cases that filters keep; SuiteError if none is left."""
    if any(not f.removeprefix("!") for f in filters):
        raise SuiteError(path, "an empty filter matches every case", "Omit it to run all cases.")
    kept = passing(cases, filters)
    if not kept and not filters:
        raise SuiteError(path, "every case is excluded with these overrides")
    if not kept:
        ids = [case.case_id for case in cases[:_SHOWN_IDS]]
        more = f"\n  and {len(cases) - len(ids)} more" if len(cases) > len(ids) else ""
        raise SuiteError(
            path,
            f"no case matches {' '.join(map(repr, filters))}",
            "Cases:\n  " + "\n  ".join(ids) + more,
        )
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
