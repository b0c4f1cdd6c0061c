"""Differences between two environments, or two forms of one case, that could move a number.

Most suspect first: the GPU before its driver, the driver before versions, the rest of the machine
last. Each difference says how it could move a number; only a measurement shows whether it does.
Pure: records in, records out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.errors import StoreError
from harness.machine import facts
from harness.records import Case, Environment, Git, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    name: str
    baseline: str
    candidate: str
    how: str
    """How it could move a number."""

    def __str__(self) -> str:
        if self.baseline == self.candidate:
            return f"{self.name}: {self.baseline}; {self.how}"
        return f"{self.name}: {self.baseline} before, {self.candidate} now"


DIRTY = "uncommitted changes"
_KIND = frozenset({"measure.flush_l2", "measure.graph"})
"""Settings that change what is measured; others change how often, or for how long."""


def require_alike(before: Run, here: Environment) -> None:
    """Raise a StoreError if a run would be resumed on another device, driver or code."""
    fixed = {"GPU", "driver"}
    if before.environment.git and here.git:  # else unknown: a note of the run names it
        fixed |= {"commit", DIRTY}
    for found in differences(before.environment, here):
        if found.name in fixed:
            seen = ": see git status; what the run writes counts, too, unless git ignores it"
            raise StoreError(
                f"run {before.run_id} started with {found.name} {found.baseline}, "
                f"but here it is {found.candidate}{seen if found.name == DIRTY else ''}",
                f"Resume it with the same {found.name}, or start a new one: "
                f"harness run {before.suite.path}",
            )


# --- two environments --------------------------------------------------------------------


def differences(baseline: Environment, candidate: Environment) -> Iterator[Difference]:
    """The differences of two environments that could move a number, most suspect first. If neither
    is in a git repository, the commit is among them: it is unknown."""
    sides = (baseline, candidate)
    gpus = [e.gpu for e in sides]
    yield from _one("GPU", "the chip has other limits", *(g and g.name for g in gpus))
    if all(gpus):
        yield from _fields(facts.GPU, *gpus)
    # A package that only one suite requires was not looked for by the other run.
    named = facts.VERSIONS.keys() | (baseline.versions.keys() & candidate.versions.keys())
    versions = ({n: v for n, v in e.versions.items() if n in named} for e in sides)
    yield from _mapped(facts.VERSIONS, "other code runs below the model", *versions)
    settings = (e.torch_settings for e in sides)
    yield from _mapped(facts.SETTINGS, "torch behaves differently", *settings)
    variables = {*baseline.variables, *candidate.variables}
    known = (v for v in variables if all(v.startswith(e.prefixes) for e in sides))
    for name in sorted(v for v in known if not v.endswith("_CACHE_DIR")):  # a place, no switch
        whys = (why for begin, why in facts.VARIABLES.items() if name.startswith(begin))
        how = next(whys, "a switch is set")
        yield from _one(name, how, *(e.variables.get(name) for e in sides))
    if all(e.interpreter for e in sides):  # else it was not recorded
        how = "a package may be imported from elsewhere"
        yield from _one(facts.INTERPRETER, how, *(e.interpreter for e in sides))
    yield from _commits(baseline.git, candidate.git)
    yield from _fields(facts.MACHINE, *sides)


def _fields(named: Mapping[str, tuple[str, str]], *sides: object) -> Iterator[Difference]:
    for name, (field, how) in named.items():
        yield from _one(name, how, *(getattr(side, field) for side in sides))


def _commits(*gits: Git | None) -> Iterator[Difference]:
    if not any(gits):
        how = "the code may differ: it is not in a git repository"
        yield Difference(name="commit", baseline="not known", candidate="not known", how=how)
    commits = [g and g.commit[:10] for g in gits]
    yield from _one("commit", "the code under test differs", *commits)
    changes = [(g and g.dirty_sha256[:10]) or None for g in gits]
    how = "the code under test differs from its commit"
    yield from _one(DIRTY, how, *changes)


def _mapped(
    known: Mapping[str, str], otherwise: str, *sides: Mapping[str, Any]
) -> Iterator[Difference]:
    """The differences of two mappings, in the order of `known`, then by name."""
    names = {name for side in sides for name in side}
    for name in (*known, *sorted(names - known.keys())):
        yield from _one(name, known.get(name, otherwise), *(side.get(name) for side in sides))


def _one(name: str, how: str, *sides: Any) -> Iterator[Difference]:
    baseline, candidate = sides
    if baseline != candidate:
        yield Difference(name=name, baseline=_word(baseline), candidate=_word(candidate), how=how)


# --- two forms of one case ---------------------------------------------------------------


def changed(baseline: Case, candidate: Case) -> Mapping[str, tuple[Any, Any]]:
    """What differs between two cases: factory or program, axes, variables and settings."""
    flat = [_flat(case) for case in (baseline, candidate)]
    pairs = {name: (flat[0].get(name), flat[1].get(name)) for name in {**flat[0], **flat[1]}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def measured(baseline: Case, candidate: Case) -> Mapping[str, tuple[Any, Any]]:
    """The part of `changed` that changes what is measured, not only how often."""
    return {
        name: pair
        for name, pair in changed(baseline, candidate).items()
        if not name.startswith("measure.") or name in _KIND
    }


def _flat(case: Case) -> dict[str, Any]:
    how = asdict(case.program) if case.program else {}  # the command, and how its output is read
    return {
        "factory": case.factory,
        **({"command": " ".join(how.pop("argv"))} if how else {}),
        **{f"program.{n}": v for n, v in how.items() if n not in ("carried", "gpus", "work_axes")},
        **{f"axis {name}": value for name, value in case.axes.items()},
        **{f"variable {name}": value for name, value in case.env.items()},
        **{f"measure.{name}": value for name, value in asdict(case.settings).items()},
    }


def _word(value: object) -> str:
    return "none" if value is None else "empty" if value == "" else str(value)
