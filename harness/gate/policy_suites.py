"""The suites that a policy chooses, read from the working tree, or from the candidate if only that
has them: like the policy, a suite may be younger than the commits. And the acknowledgements that
apply to a change."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from harness.errors import SuiteError
from harness.gate.policy import ACKNOWLEDGED, Acknowledgement, ChosenSuite, Policy
from harness.gate.records import GateSide
from harness.git import origin
from harness.git.repository import Repository, try_git
from harness.records import Case, Suite
from harness.suite import load as suites
from harness.suite.choice import passes
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
    kept = tuple(case for case in suite.cases if passes(case.case_id, choice.cases))
    return replace(suite, cases=kept)


def acknowledged(
    loaded: Policy,
    places: Sequence[Path],
    repository: Repository | None,
    base: GateSide | None,
    head: GateSide,
) -> tuple[dict[str, Acknowledgement], list[str]]:
    """The acknowledgements that apply to a change, and a sentence for each of its own and for each
    that matches no case.

    Raises:
        SuiteError: The repository does not have the commit of one.
    """
    judged, span, said = head.commit, "", list[str]()
    applied: dict[str, Acknowledgement] = {}
    own = PurePosixPath(loaded.path).with_name(ACKNOWLEDGED).as_posix()
    choices = (*loaded.form.suites, *loaded.form.counters) if loaded.acknowledged else ()
    chosen = [(c, [case.case_id for case in require(places, c, loaded).cases]) for c in choices]
    if repository and base and choices:
        judged = repository.snapshot() if head.uncommitted else judged
        span = repository.ask("rev-list", f"{base.commit}..{judged}")
        if own in repository.changed(base.commit, judged):
            said.append(f"this change modifies {own}, which excuses cases")
    for place, entry in loaded.acknowledged.items():
        mine = [c for c, ids in chosen if any(map(entry.covers, ids))]
        text, named, since = f"{place}: {', '.join(entry.cases)}: {entry.sentence}", False, None
        if repository and entry.commit:
            if try_git(repository.root, "cat-file", "-e", entry.commit + "^{commit}") is None:
                remedy = "After a rebase or squash, write its new hash: git log --oneline. "
                remedy += "In a shallow clone, fetch the history: git fetch --unshallow."
                raise SuiteError(place, f"{entry.commit} is not a commit here", remedy)
            if named := f"\n{entry.commit}" in f"\n{span}":
                later = (p for p in repository.changed(entry.commit, judged) if p != own)
                since = next((p for p in later if loaded.concerned(mine, [p])), None)
        if entry.expires or (named and since is None):
            applied[place] = entry
        if since:
            text += f"; not applied: {since} has changed since"
        if lost := not mine and entry.verdict != "missing":
            text += "; no case of the gate matches: correct or remove the entry"
        if named or lost:
            said.append(text)
    return applied, said
