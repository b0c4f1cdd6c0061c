"""Child side: loads the factory that a case names, and checks cases without building them."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

from harness.git import origin
from harness.measure.failures import Failed
from harness.messages import Checked, CheckOrder, Refusal
from harness.program import process
from harness.records import Case, Outcome, bounded
from harness.workload import PREFLIGHT, Factory, Preflight


class NoFactory(LookupError):
    """A suite's `factory:` does not name a function."""

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        super().__init__(f"factory {name!r}: {problem}")
        self.remedy = remedy


def load_factory(name: str) -> Factory:
    """Import `package.module:function`; NoFactory if there is none, a path mismatch if an
    installed package hides the folder's module of this name."""
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports does not
        if hides(error):
            raise
        problem = f"no module {error.name!r} is installed, or in the current folder"
        remedy = "Check the spelling, install it, or add its folder to PYTHONPATH."
        raise NoFactory(name, problem, remedy) from error
    try:
        factory: Factory = getattr(module, function)
    except AttributeError as error:
        if wrong := origin.misplaced(origin.loaded(), [str(Path.cwd())]):
            raise Failed(Outcome.PATH_MISMATCH, wrong) from error
        near = get_close_matches(function, vars(module), n=1)
        remedy = f"Did you mean {near[0]!r}?" if near else ""
        raise NoFactory(name, f"{module_name} has no {function!r}", remedy) from error
    if not callable(factory):
        raise NoFactory(
            name,
            f"it is of type {type(factory).__name__}, not a function",
            "Name a function that returns a harness.workload.Workload.",
        )
    return factory


def hides(error: ImportError) -> str:
    """Which package hides the module that was not found, and the remedy; empty if none does."""
    return origin.hidden(str(error), [str(Path.cwd()), *sys.path])


def check(order: CheckOrder, begin: Callable[[str], None]) -> Checked:
    """Which cases cannot run, and what the others do; `begin` hears what may hang."""
    found = {case.case_id: _asked(case, order.roots, begin) for case in order.cases}
    refusals = tuple(answer for answer in found.values() if isinstance(answer, Refusal))
    work = {case_id: answer for case_id, answer in found.items() if isinstance(answer, tuple)}
    return Checked(refusals=refusals, work=work)


def _asked(
    case: Case, roots: Sequence[str], begin: Callable[[str], None]
) -> Refusal | tuple[int, int] | None:
    """Why a case cannot run, or what it does, as far as this is known without building it."""
    if case.program is not None:
        problem = process.refusal(case, case.program, roots)
        return Refusal(case_id=case.case_id, problem=problem) if problem else None
    module, _, function = case.factory.partition(":")
    try:
        if module not in sys.modules:
            begin(f"import {module}")
        load_factory(case.factory)
        preflight: Preflight | None = getattr(sys.modules[module], PREFLIGHT, None)
        if preflight:
            begin(f"preflight of {case.case_id}")
            env = {**os.environ, **case.env}
            return preflight(function, case.provider, case.axes, env)
    except (ImportError, Failed) as error:
        if isinstance(error, ImportError) and not hides(error):
            raise
        return None  # the case ends as a path mismatch
    except NoFactory as error:
        return Refusal(
            case_id=case.case_id, problem=str(error), remedy=error.remedy, of_factory=True
        )
    except (LookupError, ValueError) as error:
        return Refusal(case_id=case.case_id, problem=bounded(str(error)))
    return None
