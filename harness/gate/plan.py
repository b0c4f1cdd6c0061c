"""What a gate will measure, decided before any case runs, and why other cases are left out.

A machine that is not fit is a finding of the whole gate, and then nothing is measured.
"""

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.errors import CaseRefused, HarnessError, SuiteError
from harness.gate import counters, policy
from harness.gate.policy import ChosenSuite, Policy
from harness.gate.policy_suites import absent, chosen_of, require, require_own, suite_of
from harness.gate.records import GateSide, LeftOut, Mode
from harness.git.repository import WORKING_TREE, Repository, read_git
from harness.git.worktrees import checked_out
from harness.machine import doctor, environment, requirements
from harness.records import (
    METRICS,
    Case,
    Decision,
    Environment,
    Finding,
    Grade,
    PathRule,
    Run,
    Suite,
    gpu_matches,
)
from harness.runner.interleave import Side, Task
from harness.runner.rig import Rig
from harness.store import reader as store
from harness.store.writer import now
from harness.suite.sweep import match

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A gate as the command line requests it."""

    mode: Mode
    policy: Path = policy.DEFAULT
    given: Policy | None = None
    """Of a comparison: replaces that file, and `base` itself is compared, not the merge base."""
    base: str = ""
    """The ref to compare with; empty for none."""
    runs: Sequence[str] = ()
    """The stored runs to compare with, one a suite."""
    head: str = WORKING_TREE
    """A ref, or `.` for the working tree."""
    store: Path = store.DEFAULT_ROOT
    command: tuple[str, ...] = ()
    wait_for_gpu_s: float = 0.0
    self_test: bool = True
    """Self-test timers and probes first."""
    today: datetime.date = field(default_factory=datetime.date.today)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a gate will measure, and its findings so far."""

    policy: Policy
    trees: "Trees"
    suites: Mapping[str, Suite]
    """Path from the root -> the candidate's suite, with the cases that the policy chooses."""
    tasks: tuple[Task, ...]
    gone: tuple[LeftOut, ...]
    """Cases of the baseline, or on record, that are not measured."""
    stored: Mapping[str, Run] = field(default_factory=dict)
    """Suite -> the stored run to compare with."""
    rig: Rig | None = None
    sides: tuple[Side, ...] = ()
    """The baseline first, if there is one; empty if there is nothing to measure."""
    findings: tuple[Finding, ...] = ()
    began: str = ""
    say: Say = lambda _: None

    @property
    def here(self) -> Environment:
        """Where the candidate is measured."""
        return self.sides[-1].environment

    @property
    def sound(self) -> bool:
        """Whether the machine is fit to measure."""
        return all(f.decision is Decision.GO for f in self.findings if f.check == "preflight")


def prepared(request: Request, held: ExitStack, say: Say) -> Plan:
    """Everything before the first process of a case.

    Args:
        held: Holds worktrees, launchers and the GPU lock.

    Raises:
        HarnessError: The request cannot be carried out.
    """
    began = now()
    repository = _repository(request)
    root = repository.root if repository else Path.cwd()
    loaded = request.given
    if loaded is None:
        loaded = replace(policy.load(request.policy), path=_from_root(request.policy, root))
    trees = _trees(request, repository, root, loaded, held)
    plan = _chosen(request, loaded, trees)
    if plan.tasks:
        plan = _on_machine(request, plan, held, say)
    return replace(plan, began=began, say=say)


def _chosen(request: Request, loaded: Policy, trees: "Trees") -> Plan:
    """The suites that the policy chooses, and the cases that are gone from them."""
    asked = _choices(loaded, request.mode)
    if not asked:
        raise SuiteError(
            loaded.path, "names no suite to count", "List one: counters: [{suite: FILE}]"
        )
    kept = counters.load() if request.mode is Mode.COUNTERS else None
    suites = {c.suite: require(trees.places, c, loaded) for c in asked}
    stored = {}
    if request.mode is Mode.BASELINE:
        stored = _stored(request, loaded, suites)
        suites = {path: suites[path] for path in stored}
    for suite in suites.values():
        require_own(suite, [trees.tree / folder for folder in loaded.form.roots])
    gone = tuple(_gone(request.mode, trees, loaded, suites, kept))
    tasks = [Task(suite=path, case=case) for path, suite in suites.items() for case in suite.cases]
    if loaded.document is not None:
        # Every case that the policy names must exist, also those of the other mode.
        others = loaded.form.suites if asked is loaded.form.counters else loaded.form.counters
        known = [case for c in others for case in require(trees.places, c, loaded).cases]
        policy.check(loaded.document, [*(t.case for t in tasks), *known])
    return Plan(
        policy=loaded,
        trees=trees,
        suites=suites,
        tasks=tuple(tasks),
        gone=gone,
        stored=stored,
        findings=(
            *trees.findings,
            *_unmatched(loaded, [*(t.case.case_id for t in tasks), *(x.case_id for x in gone)]),
            *_younger(trees, suites),
        ),
    )


def _unmatched(loaded: Policy, case_ids: Sequence[str]) -> Iterator[Finding]:
    """A note for each exemption that covers no case."""
    for i, entry in enumerate(loaded.form.exempt):
        if not any(map(entry.covers, case_ids)):
            reason = f"no case matches the exemption at {loaded.place('exempt', i)}: remove it"
            yield noted("exempt", reason)


def _younger(trees: "Trees", suites: Mapping[str, Suite]) -> Iterator[Finding]:
    """A note for each suite that the candidate does not have like this."""
    for path, suite in suites.items():
        file = trees.tree / path
        if not file.is_file() or file.read_bytes() != suite.text.encode():
            there = "has another version" if file.is_file() else "does not have it"
            yield noted("suite", f"{path} is read from the working tree; the candidate {there}")


def _choices(loaded: Policy, mode: Mode) -> Sequence[ChosenSuite]:
    return loaded.form.counters if mode is Mode.COUNTERS else loaded.form.suites


def _on_machine(request: Request, plan: Plan, held: ExitStack, say: Say) -> Plan:
    """The plan on this machine: its sides, tasks as they are measured here, and its fitness."""
    counting = request.mode is Mode.COUNTERS
    rig = Rig(_device(plan), wait_s=request.wait_for_gpu_s, say=say, alone=not counting)
    held.enter_context(rig)
    plan = replace(plan, rig=rig, sides=_sides(request, plan, rig))
    plan = replace(plan, tasks=tuple(_as_measured(t, plan, request.mode) for t in plan.tasks))
    for suite in plan.suites.values():
        remedy = "Run the gate on a GPU node; `harness gate --counters` needs no GPU."
        requirements.require(suite, plan.here, remedy)
    home = plan.sides[-1].roots[0]
    why = () if counting else unfitness(plan.here, store=request.store, home=home)
    findings = (*plan.findings, *_foreign_limits(plan, request.mode), *map(unfit, why))
    plan = replace(plan, findings=findings)
    if plan.sound:
        _preflight(plan)
    return plan


# --- trees and suites --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """The worktrees of the sides, and what differs between them."""

    repository: Repository | None
    candidate: GateSide
    baseline: GateSide | None = None
    folders: tuple[Path, ...]
    """The baseline's first, if there is one."""
    base_counters: str | None = None
    """The baseline's file of recorded counters."""
    base_policy: str | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def tree(self) -> Path:
        return self.folders[-1]

    @property
    def places(self) -> tuple[Path, ...]:
        """Where suites are read: the working tree, then the candidate's."""
        mine = self.repository.root if self.repository else self.tree
        return (mine, self.tree)


def _repository(request: Request) -> Repository | None:
    """The repository of the current folder, or None if there is none and none is needed."""
    try:
        return Repository.around(Path.cwd())
    except HarnessError:
        if request.base or request.head != WORKING_TREE:
            raise
        return None


def _from_root(path: Path, root: Path) -> str:
    whole = path.absolute()
    return whole.relative_to(root).as_posix() if whole.is_relative_to(root) else str(path)


def _trees(
    request: Request, repository: Repository | None, root: Path, loaded: Policy, held: ExitStack
) -> Trees:
    if repository is None:
        return Trees(repository=None, candidate=GateSide(ref=request.head), folders=(root,))
    mine = request.head == WORKING_TREE
    commit = repository.commit("HEAD" if mine else request.head)
    dirty = repository.dirty()
    head = GateSide(ref=request.head, commit=commit, uncommitted=mine and dirty)
    trees = Trees(repository=repository, candidate=head, folders=(root,))
    if not mine and dirty:
        reason = "uncommitted changes are not included; give . as the candidate to include them"
        trees = replace(trees, findings=(noted("working tree", reason),))
    if not request.base:
        checkout = None if mine else held.enter_context(checked_out(repository, commit))
        return replace(trees, folders=checkout or trees.folders)
    base = repository.commit(request.base)
    if request.given is None:
        base = repository.merge_base(base, commit)
    judged = repository.snapshot() if head.uncommitted else commit
    folders = held.enter_context(checked_out(repository, base, judged))
    before, after = (repository.text(side, loaded.path) for side in (base, judged))
    if request.given is None and before is not None and before != after:
        reason = f"this change modifies its own policy, {loaded.path}"
        trees = replace(trees, findings=(*trees.findings, noted("policy", reason)))
    return replace(
        trees,
        baseline=GateSide(ref=request.base, commit=base),
        folders=folders,
        base_counters=repository.text(base, _from_root(counters.FILE, root)),
        base_policy=before if request.given is None else None,
    )


def noted(check: str, reason: str) -> Finding:
    return Finding(check=check, decision=Decision.GO, reason=reason)


def _gone(
    mode: Mode,
    trees: Trees,
    loaded: Policy,
    chosen: Mapping[str, Suite],
    kept: counters.CounterBaseline | None,
) -> Iterator[LeftOut]:
    """Cases of the baseline, or of the file of counters, that are not measured now."""
    measured = {path: {c.case_id for c in suite.cases} for path, suite in chosen.items()}
    if trees.baseline is None:
        for path, cases in kept.cases.items() if kept else ():
            why = f"recorded counters exist but the case was not run; {counters.RENEW} removes them"
            for case_id in sorted(cases.keys() - measured.get(path, set())):
                yield LeftOut(suite=path, case_id=case_id, reason=why)
        return
    before_change = loaded
    if trees.base_policy is not None:
        with suppress(SuiteError):
            before_change = policy.parse(trees.base_policy, Path(loaded.path))
    why = f"only the baseline has this case, or selects it in {loaded.path}"
    for choice in _choices(before_change, mode):
        with suppress(SuiteError):  # an unreadable suite has no cases to lose
            before = suite_of(trees.folders[:1], choice)
            for case in chosen_of(before, choice).cases if before else ():
                if case.case_id not in measured.get(choice.suite, set()):
                    yield LeftOut(suite=choice.suite, case_id=case.case_id, reason=why)


def _stored(request: Request, loaded: Policy, suites: Mapping[str, Suite]) -> dict[str, Run]:
    """The stored run of each suite that has one.

    Raises:
        HarnessError: There is no such run, or the policy does not choose its suite.
    """
    found = {}
    for name in request.runs:
        run = store.load(request.store, name)
        path = next((p for p, suite in suites.items() if suite.name == run.suite.name), None)
        if path is None:
            problem = f"run {run.run_id} is of suite {run.suite.name}, which {loaded.path} omits"
            raise HarnessError(problem, f"Name a run of one of: {', '.join(suites)}")
        found[path] = run
    return found


def _foreign_limits(plan: Plan, mode: Mode) -> Iterator[Finding]:
    """A note if the policy has absolute limits, but none for this device."""
    device, rules = plan.here.device_name, plan.policy.rules
    if mode is not Mode.COUNTERS and rules and not any(gpu_matches(r.gpu, device) for r in rules):
        stated = ", ".join(sorted({r.gpu for r in rules}))
        reason = f"{plan.policy.path} sets absolute limits for {stated}, but not for {device}"
        yield noted("absolute", reason)


def _as_measured(task: Task, plan: Plan, mode: Mode) -> Task:
    """The task with the kernels that the policy requires, counted in every process if a rule needs
    that."""
    case, device = task.case, plan.here.device_name
    for limit in plan.policy.form.absolute:
        kernels = limit.kernels
        if kernels and match(limit.match).accepts(case) and gpu_matches(limit.gpu, device):
            rule = PathRule(
                must=(*case.kernels.must, *kernels.must),
                must_not=(*case.kernels.must_not, *kernels.must_not),
            )
            case = replace(case, kernels=rule)
    counted = any(
        METRICS[rule.metric].counted and rule.match.accepts(case) for rule in plan.policy.rules
    )
    attest = bool(case.kernels or case.operators) or counted
    if mode is Mode.COUNTERS:
        case = counters.without_times(case)
    return replace(task, case=case, attest=attest)


# --- the machine -------------------------------------------------------------------------


def _sides(request: Request, plan: Plan, rig: Rig) -> tuple[Side, ...]:
    """A side for each tree, with its warm launcher and its environment."""
    sides, trees, repository = [], plan.trees.folders, plan.trees.repository
    for name, tree in zip(("baseline", "candidate")[-len(trees) :], trees, strict=True):
        roots = [(tree / root).resolve() for root in plan.policy.form.roots]
        launcher = rig.start(
            roots,
            elsewhere=repository.worktrees() if repository else (),
            around=counters.AROUND if request.mode is Mode.COUNTERS else {},
        )
        cases = [t.case for t in plan.tasks]
        here = rig.describe(
            launcher,
            command=request.command,
            repository=tree,
            cases=cases,
            required={key for s in plan.suites.values() for key in (*s.requires, *s.wants)},
        )
        sides.append(Side(name, roots, launcher, here))
    if repository and request.head == WORKING_TREE:  # its snapshot is on no branch
        sides[-1].environment = replace(here, git=read_git(repository.root))
    return tuple(sides)


def _device(plan: Plan) -> str:
    devices = {suite.device: path for path, suite in plan.suites.items()}
    if "cpu" in devices and len(devices) > 1:
        other = next(path for device, path in devices.items() if device != "cpu")
        raise SuiteError(
            plan.policy.path,
            f"{devices['cpu']} runs on the CPU, but {other} runs on a GPU",
            "A gate judges one device: split the suites into two policies.",
        )
    return next(iter(devices), "any")


def unfitness(here: Environment, *, store: Path, home: Path) -> Iterator[str]:
    """Why the machine is not fit to time on; the versions that are pinned in `home` must be
    installed."""
    here = doctor.examined(here, store=store, constraints=environment.pins_of(home))
    for check in here.vitals.checks if here.vitals else ():
        if check.grade in (Grade.FAIL, Grade.UNKNOWN):
            yield f"{check.name}: {check.fact}"


def unfit(reason: str) -> Finding:
    """The finding because of which nothing is measured."""
    return Finding(check="preflight", decision=Decision.INCONCLUSIVE, reason=reason)


def _preflight(plan: Plan) -> None:
    """Let the workloads of each side check their cases.

    A case that the candidate refuses is an error of the suite; one that the baseline refuses is
    new. If a tree's workloads cannot be loaded, its cases crash later.
    """
    *baseline, candidate = plan.sides
    for path, suite in plan.suites.items():
        cases = [t.case for t in plan.tasks if t.suite == path]
        if refused := _refusal(candidate, suite, cases):
            raise refused
        for side in baseline:
            missing = {case.case_id: _lacks(case, side, plan.trees) for case in cases}
            side.cannot |= {(path, i): f"there is no {what}" for i, what in missing.items() if what}
            there = [case for case in cases if not missing[case.case_id]]
            for case in there if _refusal(side, suite, there) else ():
                if refused := _refusal(side, suite, [case]):
                    reason = refused.reason if isinstance(refused, CaseRefused) else str(refused)
                    side.cannot[path, case.case_id] = reason


def _lacks(case: Case, side: Side, trees: Trees) -> str:
    """The package or the program's file that a case needs and only the candidate has."""
    if package := absent(case, side.roots):
        return f"package {package!r}"
    base, candidate = (t / case.program.cwd if case.program else t for t in trees.folders)
    words = case.program.argv if case.program else ()
    lost = (w for w in words if (candidate / w).is_file() and not (base / w).is_file())
    return f"file {name!r}" if (name := next(lost, "")) else ""


def _refusal(side: Side, suite: Suite, cases: Sequence[Case]) -> SuiteError | None:
    """Why the workloads of a side refuse one of these cases, if they do."""
    try:
        if cases:
            side.launcher.preflight(replace(suite, cases=tuple(cases)))
    except SuiteError as error:
        return error
    except HarnessError:
        pass
    return None
