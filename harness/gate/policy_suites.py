"""The suites that a policy chooses, read from the working tree, or from the candidate if only that
has them: like the policy, a suite may be younger than the commits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.errors import SuiteError
from harness.gate.policy import ChosenSuite
from harness.git import origin
from harness.records import Case, Suite
from harness.suite import load as suites
from harness.suite.choice import passing
from harness.suite.positions import show


def require(places: Sequence[Path], choice: ChosenSuite, policy: str) -> Suite:
    """The suite in the first of these trees that has it, with the cases that the policy chooses; a
    SuiteError without such a suite or case."""
    suite = chosen(places, choice)
    if suite is None:
        text = f"there is no suite {choice.suite} in the working tree or the candidate"
        raise SuiteError(policy, text, "Check the spelling, or add the file.")
    if not suite.cases:
        text = f"no case of {choice.suite} matches {', '.join(map(show, choice.cases))}"
        raise SuiteError(policy, text, f"List them: harness run {choice.suite} --dry-run")
    return suite


def chosen(places: Sequence[Path], choice: ChosenSuite) -> Suite | None:
    """A suite, of the first of these trees that has its file, with only the cases that the policy
    chooses; None if no tree has it."""
    for tree in places:
        file = tree / choice.suite
        if file.resolve().is_relative_to(tree.resolve()) and file.is_file():
            text = suites.text_of(file, choice.suite, "Save it as UTF-8.")
            suite = suites.loads(text, choice.suite)
            return replace(suite, cases=passing(suite.cases, choice.cases))
    return None


def require_own(suite: Suite, roots: Sequence[Path]) -> None:
    """Refuse cases whose factory has its package outside of `roots`: a SuiteError."""
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
