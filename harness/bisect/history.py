"""The commits between good and bad, along first parents."""

from dataclasses import dataclass

from harness.errors import HarnessError
from harness.git.repository import Repository

_FORMAT = "%H%x00%P%x00%an%x00%aI%x00%s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    sha: str
    subject: str = ""
    author: str = ""
    date: str = ""
    """ISO 8601, with its offset."""
    parents: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        return self.sha[:10]

    @property
    def merge(self) -> bool:
        return len(self.parents) > 1


def between(repository: Repository, good: str, bad: str) -> tuple[Commit, ...]:
    """The commits from the good one to the bad one along first parents; a HarnessError if one is
    not a commit, or if the good one is not a first-parent ancestor."""
    first, last = repository.commit(good), repository.commit(bad)
    if first == last:
        raise HarnessError(
            f"good and bad are the same commit, {first[:10]}",
            "To find what differs between two runs: harness bisect --runs A B --case CASE",
        )
    text = repository.ask(
        "log", "--first-parent", "--reverse", f"--format={_FORMAT}", last, f"^{first}", "--"
    )
    listed = [_commit(line) for line in text.splitlines()]
    if not listed:
        raise HarnessError(
            f"bad {last[:10]} is older than good {first[:10]}", "Exchange --good and --bad."
        )
    if listed[0].parents[:1] != (first,):
        start = listed[0].parents[0][:10] if listed[0].parents else "nothing"
        raise HarnessError(
            f"good {first[:10]} is not a first-parent ancestor of bad {last[:10]}",
            f"If {start} is good, use it: the first parents of bad meet the history of good there.",
        )
    return (_commit(repository.ask("log", "-1", f"--format={_FORMAT}", first, "--")), *listed)


def summary(repository: Repository, commit: Commit) -> str:
    """The files that a commit changed, and by how much; for a merge against its first parent."""
    return repository.ask(
        "show", "--stat=100", "--format=", "--first-parent", "--no-ext-diff", commit.sha, "--"
    )


def _commit(line: str) -> Commit:
    sha, parents, author, date, subject = line.split("\0")
    return Commit(
        sha=sha, parents=tuple(parents.split()), author=author, date=date, subject=subject
    )
