"""A repository as a newcomer brings it, and what the harness says about each thing planted in it.

    python -m reports.studies.foreign_repository FOLDER --page PAGE.md

makes FOLDER/repository: its package is a namespace package with the name of ours, its history has
merges and commits that do not import, and its training script ignores an option that it does not
know. Suite and policy are younger than all commits. Then it does what a newcomer does: `doctor`,
`run`, `show`, `compare`, `gate --counters`, `bisect`. The page has a row for each planted thing,
with what the harness said; FOLDER/said has its whole output. On a GPU the first step takes a minute
and one kernel never ends. The exit status is 1 if an answer is wrong.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.errors import ProbeError
from harness.git.repository import read_git, run_git
from harness.machine import nvml
from harness.records import Measurement, Outcome, Run
from harness.store import reader
from reports.studies.foreign_files import (
    PLANTED,
    POLICY,
    POLICY_PATH,
    SUITE_PATH,
    files_of,
    suite_text,
)
from reports.studies.planted_history import fingerprint, make

ROOT = Path(__file__).resolve().parents[2]
BOOT = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); import harness.__main__ as command; "
    "sys.path.pop(0); command.main()"
)
"""The command `harness` as installed: nothing else of this checkout can be imported."""
QUIET = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
LIMIT_S = 900.0
"""Longest command."""
DETAIL = 300
"""Characters of an answer that the table shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the harness said about one planted thing."""

    planted: str
    said: str
    right: bool
    wall_s: float = 0.0


Call = Callable[[Sequence[str], Path, Mapping[str, str]], "subprocess.CompletedProcess[str]"]
"""Runs the command `harness` with these words, in this folder, with these variables."""


def installed(
    words: Sequence[str], folder: Path, env: Mapping[str, str]
) -> "subprocess.CompletedProcess[str]":
    """The command as a newcomer has it: the shell sets nothing that concerns Python."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return subprocess.run(
        [sys.executable, "-P", "-c", BOOT, *words],
        cwd=folder,
        env={**kept, "COLUMNS": "200", **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@dataclass(slots=True)
class Newcomer:
    """A person in the repository, with the harness installed."""

    folder: Path
    line: tuple[str, ...]
    """The commits on the line of first parents."""
    call: "Call"
    log: list[str] = field(default_factory=list)
    swallowed: str = ""
    """The folder of the run whose option is swallowed."""

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    def harness(
        self, *words: str, env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """A command in the repository; its output is kept in FOLDER/said."""
        done = self.call(words, self.repository, {**QUIET, **(env or {})})
        said = self.folder / "said" / f"{len(self.log):02}-{words[0]}.txt"
        said.parent.mkdir(exist_ok=True)
        head = f"$ harness {' '.join(words)}\n[exit {done.returncode}]\n"
        said.write_text(f"{head}{done.stdout}\n--- stderr ---\n{done.stderr}")
        self.log.append(said.name)
        return done

    def run(
        self, pattern: str, *words: str, env: Mapping[str, str] | None = None
    ) -> tuple[Run, str]:
        """A run of some cases, and what it printed."""
        quick = ("--no-self-test", "--no-report")
        done = self.harness("run", SUITE_PATH, "--filter", pattern, *quick, *words, env=env)
        found = re.search(r"^Run:? +(\S+)", done.stdout, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"no run: {done.stdout}{done.stderr}")
        stored = self.repository / found[1]
        return reader.load(stored.parent, str(stored)), done.stdout + done.stderr


def begin(
    folder: Path, *, first_s: float, stall_s: float, timeout_s: float, call: Call = installed
) -> Newcomer:
    """Make the repository; its suite and policy are not committed."""
    repository = folder / "repository"
    line = make(repository, PLANTED, files_of)
    (repository / "bench").mkdir()
    text = suite_text(first_s=first_s, stall_s=stall_s, timeout_s=timeout_s)
    (repository / SUITE_PATH).write_text(text)
    (repository / POLICY_PATH).write_text(POLICY)
    return Newcomer(folder, line, call)


# --- what is planted -----------------------------------------------------------------------


def doctor(me: Newcomer) -> Answer:
    said = _line(r"^ git ", me.harness("doctor").stdout)
    return Answer(
        planted="a repository that is not ours", said=said, right=me.line[-1][:10] in said
    )


def own_package(me: Newcomer) -> Answer:
    run, _ = me.run("attend")
    found = {m.code.get("nsa", m.detail) for m in run.measurements}
    return Answer(
        planted="a namespace package `nsa`",
        said=", ".join(found),
        right=found == {str(me.repository / "nsa")},
    )


def shadowed(me: Newcomer) -> Answer:
    site = me.folder / "site/nsa"
    shutil.copytree(me.repository / "nsa", site, dirs_exist_ok=True)
    (site / "__init__.py").touch()
    run, _ = me.run("attend", env={"PYTHONPATH": str(site.parent)})
    m = run.measurements[0]
    named = all(str(place) in m.detail for place in (site, me.repository / "nsa"))
    return Answer(
        planted="another `nsa` on PYTHONPATH, which shadows it",
        said=f"{m.outcome}: {m.detail}",
        right=m.outcome is Outcome.PATH_MISMATCH and named,
    )


def records(me: Newcomer) -> Answer:
    before = read_git(me.repository)
    _, said = me.run("attend", "--store", "measured/runs")
    after = read_git(me.repository)
    same = "the tree is as dirty as before" if before == after else "the run made the tree dirty"
    offer = _line(r"\.gitignore", said)
    return Answer(
        planted="runs stored inside the repository",
        said=f"{same}; {offer}",
        right=before == after and "/measured/runs/" in offer,
    )


def swallowed(me: Newcomer) -> Answer:
    run, said = me.run("plain/*")
    me.swallowed = run.folder
    about = [x for x in said.splitlines() if "micro_batch" in x and "effect" in x]
    claim = " / ".join(about) or "nothing"
    return Answer(
        planted="`--micro_batch`, swallowed by parse_known_args",
        said=claim,
        right="micro_batch has no effect" in claim and "changed something" not in claim,
    )


def throughput(me: Newcomer) -> Answer:
    folder = me.swallowed or me.run("plain/*")[0].folder
    shown = json.loads(me.harness("show", folder, "--json").stdout)["cases"]
    found = {c["case"]: c["metrics"].get("tokens_per_s") for c in shown}
    numbers = [f"{i}: {x['value']:,.0f} tokens/s" for i, x in found.items() if x]
    return Answer(
        planted="tokens of a step, computed from the swallowed option",
        said="; ".join(numbers) or "no tokens/s",
        right=bool(found) and not numbers,
    )


def setting(me: Newcomer) -> Answer:
    runs = [me.run("plain/*micro_batch=1", "--set", f"seq_len={n}")[0].run_id for n in (64, 96)]
    said = me.harness("compare", *runs).stdout
    named = _line(r"axis seq_len .*64.*96", said)
    paired = "only the" not in said
    return Answer(
        planted="two runs that differ by --set seq_len",
        said=named or _line(r"\S", said),
        right=bool(named) and paired,
    )


def first_step(me: Newcomer) -> Answer:
    return _ended(me, "first", "a long first step that computes", (Outcome.OK,), "")


def deadlock(me: Newcomer) -> Answer:
    words = r"lock|join|wait"
    return _ended(me, "deadlock", "two threads, each with the other's lock", (Outcome.HANG,), words)


def endless(me: Newcomer) -> Answer:
    words = r"kernel|spin|sleep"
    return _ended(me, "endless", "a kernel that never ends", (Outcome.HANG,), words)


def _ended(me: Newcomer, mode: str, planted: str, wanted: Sequence[Outcome], words: str) -> Answer:
    run, _ = me.run(f"{mode}/*")
    m = run.measurements[0]
    frame = m.evidence.frame if m.evidence else ""
    said = ": ".join(filter(None, (str(m.outcome), m.detail, frame)))
    right = m.outcome in wanted and bool(re.search(words, said))
    return Answer(planted=planted, said=said, right=right)


def data_dependent(me: Newcomer) -> Answer:
    run, said = me.run("select/*")
    m = run.measurements[0]
    me.harness("report", run.folder)
    pages = sorted((me.repository / "reports").glob("*.md"), key=lambda p: p.stat().st_mtime)
    lost = _line(r"Not available: .*operators per step", pages[-1].read_text()) if pages else ""
    claim = lost or _counts(m)
    right = not lost and "differ" in claim and "no effect" not in said
    return Answer(planted="operator counts that depend on the data", said=claim, right=right)


def _counts(m: Measurement) -> str:
    if m.outcome is not Outcome.OK or m.counters is None:
        return f"{m.outcome}: {m.detail}"
    c = m.counters
    unknown = next(iter(c.unknown.values()), "")
    if c.dispatched_ops is None:
        return f"not available: {unknown}"
    differing = f", steps differ in {', '.join(c.differing)}" if c.differing else ""
    return f"{c.dispatched_ops} operators in {c.steps} steps{differing}"


def gate(me: Newcomer) -> Answer:
    sides = ("--base", me.line[PLANTED.sync_at - 1], "--head", me.line[PLANTED.sync_at])
    policy = ("--policy", POLICY_PATH, "--all", "--no-self-test")
    done = me.harness("gate", "--counters", *sides, *policy)
    said = _line(r"host_syncs", done.stdout) or _line(r"\S", done.stdout + done.stderr)
    return Answer(
        planted="a host sync, gated by a suite and a policy younger than it",
        said=f"exit {done.returncode}: {said}",
        right=done.returncode == 1 and "host_syncs" in said,
    )


def bisect(me: Newcomer) -> Answer:
    asked = ("--case", "attend", "--good", me.line[0], "--counter", "host_syncs")
    done = me.harness("bisect", SUITE_PATH, *asked)
    said = _line(r"\S", done.stdout)
    side = run_git(me.repository, "rev-list", "--reverse", f"^{me.line[22]}", me.line[23]).split()
    right = done.returncode == 0 and any(said.startswith(sha[:10]) for sha in (side[0], side[-1]))
    return Answer(
        planted=f"the same in {PLANTED.commits} commits, in a merge; four do not import",
        said=said,
        right=right,
    )


def working_tree(me: Newcomer, before: str) -> Answer:
    for made in ("reports", "measured"):
        if (me.repository / made).exists():
            shutil.move(me.repository / made, me.folder / made)
    kept = fingerprint(me.repository) == before
    said = "as they were" if kept else "changed"
    return Answer(planted="working tree, index, refs and worktrees", said=said, right=kept)


ROWS: Mapping[str, Callable[[Newcomer], Answer]] = {
    row.__name__: row
    for row in (
        *(doctor, own_package, shadowed, records, swallowed, throughput, setting),
        *(first_step, deadlock, endless, data_dependent, gate, bisect),
    )
}


def answers(me: Newcomer, rows: Sequence[str]) -> Iterator[Answer]:
    """Row after row; a command that fails is an answer too, and a wrong one."""
    before = fingerprint(me.repository)
    for name in rows:
        began = time.monotonic()
        try:
            found = ROWS[name](me)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found = Answer(planted=name, said=str(error), right=False)
        yield replace(found, wall_s=time.monotonic() - began)
    yield working_tree(me, before)


def _line(pattern: str, text: str) -> str:
    """The first line that a pattern fits, without its padding."""
    found = (x for x in text.splitlines() if re.search(pattern, x))
    return " ".join(next(found, "").split())


def page(found: Sequence[Answer], device: str) -> str:
    """The table."""
    right = sum(a.right for a in found)
    git = read_git(ROOT)
    commit = (
        f"{git.commit[:10]}{' with uncommitted changes' * bool(git.dirty_sha256)}" if git else ""
    )
    rows = [
        "# What the harness says about a foreign repository",
        "",
        f"{right} of {len(found)} answers are right, on {device}, {datetime.date.today()}, "
        f"harness at {commit or 'an unknown commit'}.",
        "`python -m reports.studies.foreign_repository FOLDER` makes the repository and this page.",
        "",
        "| planted | said | right? | seconds |",
        "|:--|:--|:--|--:|",
    ]
    for a in found:
        said = a.said.replace("|", "\\|").replace("\n", " ")
        said = said if len(said) <= DETAIL else f"{said[:DETAIL]}..."
        verdict = "yes" if a.right else "**no**"
        rows.append(f"| {a.planted} | {said} | {verdict} | {a.wall_s:.0f} |")
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        device = nvml.gpus()[0].name
    except (ProbeError, IndexError):
        device = ""
    parser = argparse.ArgumentParser(description="Meet a foreign repository as a newcomer does.")
    parser.add_argument("folder", type=Path, help="A folder that does not exist yet.")
    parser.add_argument("--page", type=Path, help="Where the page goes; default FOLDER/page.md.")
    parser.add_argument("--only", nargs="+", choices=[*ROWS], help="These rows; default all.")
    parser.add_argument("--first-s", type=float, default=60.0 if device else 20.0)
    parser.add_argument("--stall-s", type=float, default=30.0 if device else 15.0)
    parser.add_argument("--timeout-s", type=float, default=300.0 if device else 120.0)
    options = parser.parse_args(arguments)
    me = begin(
        options.folder.absolute(),
        first_s=options.first_s,
        stall_s=options.stall_s,
        timeout_s=options.timeout_s,
    )
    found = []
    for answer in answers(me, options.only or [r for r in ROWS if device or r != "endless"]):
        found.append(answer)
        word = "right" if answer.right else "WRONG"
        sys.stderr.write(f"{word}: {answer.planted}: {answer.said[:DETAIL]}\n")
    text = page(found, device or "CPU").replace(str(me.folder), "FOLDER")
    (options.page or me.folder / "page.md").write_text(text)
    sys.stdout.write(text)
    raise SystemExit(0 if all(a.right for a in found) else 1)


if __name__ == "__main__":
    main()
