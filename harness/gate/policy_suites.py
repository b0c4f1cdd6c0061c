"""The suites that a policy chooses, read from the working tree, or from the candidate if only that
has them: like the policy, a suite may be younger than the commits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.errors import SuiteError
from harness.gate.policy import ChosenSuite, Policy
from harness.git import origin
from harness.records import Case, Suite
from harness.suite import load as suites
from harness.suite.choice import passing
from harness.suite.positions import Loc, Problem, nearest, show


def require(places: Sequence[Path], choice: ChosenSuite, policy: Policy) -> Suite:
    """The suite in the first of these trees that has it, with the cases that the policy chooses.

    Raises:
        SuiteError: There is no such suite or case.
    """
    suite = suite_of(places, choice)
    if suite is None:
        beside = (places[0] / choice.suite).parent.glob("*.yaml")
        names = sorted(Path(choice.suite).with_name(file.name).as_posix() for file in beside)
        remedy = f"Check the spelling, or add the file. {nearest(choice.suite, names)}".rstrip()
        text = f"there is no suite {choice.suite} in the working tree or the candidate"
        raise _refused(choice, policy, ("suite",), text, remedy)
    kept = chosen_of(suite, choice)
    if not kept.cases:
        wanted = next((i for i, f in enumerate(choice.cases) if not f.startswith("!")), 0)
        text = f"no case of {choice.suite} matches {', '.join(map(show, choice.cases))}"
        ids = [case.case_id for case in suite.cases]
        remedy = nearest(choice.cases[wanted], ids)
        raise _refused(choice, policy, ("cases", wanted), text, remedy)
    return kept


def require_own(suite: Suite, roots: Sequence[Path]) -> None:
    """Refuse cases whose code is not in the worktree.

    Raises:
        SuiteError: The package of a factory is not under `roots`.
    """
    for case in suite.cases:
        if not (package := absent(case, roots)):
            continue
        line, column = suites.factory_place(suite, case)
        raise SuiteError(
            suite.path,
            f"factory {case.factory!r}: the repository has no package {package!r}",
            "A gate measures code under the policy's `roots` only: name a factory of your own.\n"
            "  The shipped suites measure nsa in its own repository.",
            line=line,
            column=column,
        )


def absent(case: Case, roots: Sequence[Path]) -> str:
    """The package of a case's factory if it is not under `roots`; otherwise an empty string."""
    package = case.factory.partition(":")[0].partition(".")[0]
    if package in ("", origin.OURS) or any(_holds(root, package) for root in roots):
        return ""
    return package


def _holds(root: Path, package: str) -> bool:
    """Whether a folder has the package or module, with code."""
    found = (*(root / package).rglob("*"), *root.glob(f"{package}.*"))
    return any(file.suffix in (".py", ".so") for file in found)


def _refused(choice: ChosenSuite, policy: Policy, loc: Loc, text: str, remedy: str) -> SuiteError:
    """The error of a choice, at its place in the policy if it has one."""
    if policy.document is None:
        return SuiteError(choice.suite, text, remedy)
    key = "suites" if choice in policy.form.suites else "counters"
    index = getattr(policy.form, key).index(choice)
    return policy.document.error([Problem((key, index, *loc), text, remedy)])


def suite_of(places: Sequence[Path], choice: ChosenSuite) -> Suite | None:
    """A whole suite, of the first of these trees that has its file; None if none has."""
    for tree in places:
        file = tree / choice.suite
        if file.resolve().is_relative_to(tree.resolve()) and file.is_file():
            text = suites.text_of(file, choice.suite, "Save it as UTF-8.")
            return suites.loads(text, choice.suite)
    return None


def chosen_of(suite: Suite, choice: ChosenSuite) -> Suite:
    """The suite with only the cases that the policy chooses."""
    return replace(suite, cases=passing(suite.cases, choice.cases))
