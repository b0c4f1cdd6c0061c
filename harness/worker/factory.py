"""Child side: loads the factory that a case names, and says what it refuses before it runs."""

import importlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from harness.git import origin
from harness.measure import attestation
from harness.messages import Checked, CheckOrder, Refusal
from harness.program import process
from harness.records import Case, Work
from harness.workload import COUNTS, PREFLIGHT, Factory


class NoFactory(LookupError):
    """What a suite names as a factory is none."""

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        super().__init__(f"factory {name!r}: {problem}")
        self.remedy = remedy


def load_factory(name: str) -> Factory:
    """Import `package.module:function`.

    Raises:
        NoFactory: There is no such module or function; with the nearest name there is.
    """
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; what it imports does not
        if hides(error):
            raise
        raise NoFactory(
            name,
            f"no module {error.name!r} is installed, or in the current folder",
            "Check the spelling, install it, or add its folder to PYTHONPATH.",
        ) from error
    try:
        factory: Factory = getattr(module, function)
    except AttributeError as error:
        if instead := origin.shadowed([str(Path.cwd())]):
            problem = "; ".join((*instead, origin.SHADOW_REMEDY))
            raise attestation.PathMismatch(problem) from error
        said = f"{module_name} has no {function!r}"
        raise NoFactory(name, said, _instead(function, module)) from error
    if not callable(factory):
        raise NoFactory(
            name,
            f"it is of type {type(factory).__name__}, not a function",
            "Name a function that returns a harness.workload.Workload.",
        )
    return factory


def _instead(function: str, module: ModuleType) -> str:
    """What to name in place of a function that a module does not have."""
    if near := get_close_matches(function, vars(module), n=1):
        return f"Did you mean {near[0]!r}?"
    own = [
        repr(name)
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    return f"Its functions: {', '.join(own)}." if own else f"{module.__name__} has no function."


def hides(error: ImportError) -> str:
    """What was imported in place of the module that is missing, and what to do; else empty."""
    instead = origin.why_shadowed(str(error), [str(Path.cwd()), *sys.path])
    return f"{instead}; {origin.SHADOW_REMEDY}" if instead else ""


def check(order: CheckOrder) -> Checked:
    """Ask the workloads of all cases whether they can run, without building them."""
    refusals = tuple(filter(None, (_refusal(case, order.roots) for case in order.cases)))
    return Checked(refusals=refusals, work={} if refusals else _work(order.cases))


def _refusal(case: Case, roots: Sequence[str]) -> Refusal | None:
    """Why a case cannot run, as far as its factory's module can tell without building it."""
    if case.program is not None:
        problem = process.refusal(case, case.program, roots)
        return Refusal(case_id=case.case_id, problem=problem) if problem else None
    module, _, function = case.factory.partition(":")
    try:
        load_factory(case.factory)
        preflight = getattr(sys.modules[module], PREFLIGHT, None)
        if preflight is not None:
            preflight(function, case.provider, case.axes, {**os.environ, **case.env})
    except (ImportError, attestation.PathMismatch) as error:
        if isinstance(error, ImportError) and not hides(error):
            raise
        return None  # the case ends as a path mismatch
    except NoFactory as error:
        return Refusal(
            case_id=case.case_id, problem=str(error), remedy=error.remedy, of_factory=True
        )
    except (LookupError, ValueError) as error:
        return Refusal(case_id=case.case_id, problem=str(error))
    return None


def _work(cases: Sequence[Case]) -> Mapping[str, Work]:
    """What one run of each case will do, of those whose module can tell without building it."""
    found = {}
    for case in cases:
        if case.program is not None:
            found[case.case_id] = Work(tokens=case.program.tokens, flops=case.program.flops)
            continue
        module, _, function = case.factory.partition(":")
        counts = getattr(sys.modules.get(module), COUNTS, None)
        if counts is not None:
            told = counts(function, case.provider, case.axes, {**os.environ, **case.env})
            found[case.case_id] = Work(tokens=told.tokens, flops=told.flops)
    return found
