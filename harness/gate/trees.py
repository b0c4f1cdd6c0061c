"""The worktrees of the sides of a gate, and what differs between them."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harness.gate import sources
from harness.gate.records import GateSide
from harness.git.repository import WORKING_TREE, Repository
from harness.git.worktrees import checked_out
from harness.records import Decision, Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    repository: Repository
    candidate: GateSide
    baseline: GateSide | None = None
    folders: tuple[Path, ...]
    """The baseline's first, if there is one."""
    base_policy: str | None = None
    """The baseline's policy; None in a comparison."""
    findings: tuple[Finding, ...] = ()
    changed: tuple[str, ...] = ()
    """Files of code in which the sides differ."""

    @property
    def same_code(self) -> bool:
        """Whether both sides run the same code."""
        base, candidate = self.folders[0], self.tree
        return all(sources.alike(base / name, candidate / name) for name in self.changed)

    @property
    def tree(self) -> Path:
        return self.folders[-1]


def from_root(path: Path, root: Path) -> str:
    whole = path.absolute()
    return whole.relative_to(root).as_posix() if whole.is_relative_to(root) else str(path)


def take(held: ExitStack, repository: Repository, policy: str, *, base: str, head: str) -> Trees:
    """Check out the sides; without the path of a policy `base` itself, not the merge base."""
    mine, dirty = head == WORKING_TREE, repository.dirty()
    commit = repository.commit("HEAD" if mine else head)
    candidate = GateSide(ref=head, commit=commit, uncommitted=mine and dirty)
    findings, changed, baseline, base_policy = [], tuple[str, ...](), None, None
    if not mine and dirty:
        findings.append(Finding(check="working tree", decision=Decision.GO, facts={"unseen": True}))
    if base:
        before = repository.commit(base)
        before = repository.merge_base(before, commit) if policy else before
        baseline = GateSide(ref=base, commit=before)
        judged = repository.snapshot() if candidate.uncommitted else commit
        folders = held.enter_context(checked_out(repository, before, judged))
        changed = repository.changed(before, judged)
        base_policy = repository.text(before, policy) if policy else None
        if base_policy is not None and base_policy != repository.text(judged, policy):
            findings.append(Finding(check="policy", decision=Decision.GO, facts={"own": policy}))
    elif mine:
        folders = (repository.root,)
    else:
        folders = held.enter_context(checked_out(repository, commit))
    return Trees(
        repository=repository,
        candidate=candidate,
        baseline=baseline,
        folders=folders,
        base_policy=base_policy,
        findings=tuple(findings),
        changed=changed,
    )
