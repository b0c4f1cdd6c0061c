"""What a gate will measure, decided before any case runs, and why other cases are left out.

A machine that is not fit is a finding of the whole gate, and then nothing is measured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import CaseRefused, HarnessError, SuiteError
from harness.gate import counters, policy
from harness.gate.policy import ChosenSuite, Policy
from harness.gate.policy_suites import absent, chosen, require, require_own
from harness.gate.records import Mode
from harness.gate.trees import Trees, from_root, take
from harness.git.repository import WORKING_TREE, Repository, read_git
from harness.machine import doctor, requirements
from harness.records import Case, Decision, Environment, Facts, Finding, Grade, Suite
from harness.runner.interleave import Side, Task
from harness.runner.rig import Rig
from harness.store import reader as store
from harness.store.writer import now

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A gate as the command line requests it."""

    mode: Mode
    policy: Path = policy.DEFAULT
    given: Policy | None = None
    """Of a comparison: replaces that file, and `base` itself is compared, not the merge base."""
    base: str = ""
    """The ref to compare with; empty for the counters on record."""
    head: str = WORKING_TREE
    """A ref, or `.` for the working tree."""
    store: Path = store.DEFAULT_ROOT
    command: tuple[str, ...] = ()
    wait_for_gpu_s: float = 0.0
    self_test: bool = True
    """Self-test timers and probes first."""
    measure: bool = False
    """Measure also where both sides run the same code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What is judged, known on any machine."""

    policy: Policy
    trees: Trees
    suites: Mapping[str, Suite]
    """Path from the root -> the candidate's suite, with the cases that the policy chooses."""
    began: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Ground):
    """What a gate will measure, and its findings so far."""

    tasks: tuple[Task, ...]
    gone: Mapping[tuple[str, str], Facts]
    """Suite and case of the baseline, or on record, that is not measured -> why."""
    recorded: counters.CounterBaseline | None
    """The counters on record, if counters are compared."""
    rig: Rig
    sides: tuple[Side, ...]
    """The baseline first, if there is one."""
    findings: tuple[Finding, ...]

    @property
    def here(self) -> Environment:
        """Where the candidate is measured."""
        return self.sides[-1].environment

    @property
    def sound(self) -> bool:
        """Whether the machine is fit to measure."""
        return all(f.decision is Decision.GO for f in self.findings if f.check == "preflight")


def opened(request: Request, held: ExitStack) -> Ground:
    """Policy, worktrees and suites; a HarnessError if the request cannot be carried out."""
    began = now()
    loaded = request.given or policy.load(request.policy)
    repository = Repository.around(Path.cwd())
    loaded = replace(loaded, path=from_root(Path(loaded.path), repository.root))
    gated = "" if request.given else loaded.path
    trees = take(held, repository, gated, base=request.base, head=request.head)
    asked = _choices(loaded, request.mode)
    if not asked:
        raise SuiteError(
            loaded.path, "names no suite to count", "List one: counters: [{suite: FILE}]"
        )
    places = (repository.root, trees.tree)
    suites = {c.suite: require(places, c, loaded.path) for c in asked}
    for suite in suites.values():
        require_own(suite, [trees.tree / folder for folder in loaded.form.roots])
    return Ground(policy=loaded, trees=trees, suites=suites, began=began)


def prepared(request: Request, ground: Ground, held: ExitStack, say: Say) -> Plan:
    """Everything before the first process of a case; a HarnessError if the request cannot be
    carried out. `held` holds worktrees, launchers and the GPU lock."""
    loaded, trees, suites = ground.policy, ground.trees, ground.suites
    counting = request.mode is Mode.COUNTERS
    kept = counters.load() if counting else None
    devices = {suite.device for suite in suites.values()}
    if "cpu" in devices and len(devices) > 1:
        text = "has suites for the CPU and for a GPU; a gate judges one device"
        raise SuiteError(loaded.path, text, "Split them into two policies.")
    rig = Rig(devices.pop(), wait_s=request.wait_for_gpu_s, say=say, alone=not counting)
    held.enter_context(rig)
    sides = _sides(request, ground, rig)
    here = sides[-1].environment
    for suite in suites.values():
        requirements.require(suite, here)
    found = () if counting else doctor.examined(here, store=request.store).checks
    wrong = [c for c in found if c.grade in (Grade.FAIL, Grade.UNKNOWN)]
    plan = Plan(
        policy=loaded,
        trees=trees,
        suites=suites,
        tasks=tuple(
            Task(
                suite=path,
                case=_as_measured(case, request.mode, loaded.thresholds().screen_pairs),
                attest=bool(case.kernels or case.operators),
            )
            for path, suite in suites.items()
            for case in suite.cases
        ),
        gone=dict(gone(request.mode, ground, kept)),
        recorded=kept,
        rig=rig,
        sides=sides,
        findings=(*trees.findings, *(unfit({"check": c.name, "shows": c.fact}) for c in wrong)),
        began=ground.began,
    )
    if plan.sound:
        _preflight(plan)
    return plan


def _as_measured(case: Case, mode: Mode, pairs: int) -> Case:
    """The case with its processes before the first decision."""
    if mode is Mode.COUNTERS:
        return replace(case, settings=case.settings.untimed(counters.SAMPLES))
    return replace(case, settings=replace(case.settings, processes=pairs))


def _choices(loaded: Policy, mode: Mode) -> Sequence[ChosenSuite]:
    return loaded.form.counters if mode is Mode.COUNTERS else loaded.form.suites


def gone(
    mode: Mode, ground: Ground, kept: counters.CounterBaseline | None = None
) -> Iterator[tuple[tuple[str, str], Facts]]:
    """Cases of the baseline, or of the file of counters, that are not measured now; and why."""
    loaded, trees, suites = ground.policy, ground.trees, ground.suites
    measured = {path: {c.case_id for c in suite.cases} for path, suite in suites.items()}
    if trees.baseline is None:
        for path, cases in kept.cases.items() if kept else ():
            for case_id in sorted(cases.keys() - measured.get(path, set())):
                yield (path, case_id), {"remove": counters.RENEW}
        return
    before_change = loaded
    if trees.base_policy is not None:
        with suppress(SuiteError):
            before_change = policy.parse(trees.base_policy, Path(loaded.path))
    for choice in _choices(before_change, mode):
        with suppress(SuiteError):  # an unreadable suite has no cases to lose
            before = chosen(trees.folders[:1], choice)
            for case in before.cases if before else ():
                if case.case_id not in measured.get(choice.suite, set()):
                    yield (choice.suite, case.case_id), {"only": "baseline", "policy": loaded.path}


def _sides(request: Request, ground: Ground, rig: Rig) -> tuple[Side, ...]:
    """A side for each tree, with its warm launcher and its environment."""
    sides, trees, repository = [], ground.trees.folders, ground.trees.repository
    names = ("baseline", "candidate")[-len(trees) :]
    for name, tree in zip(names, trees, strict=True):
        roots = [(tree / root).resolve() for root in ground.policy.form.roots]
        launcher = rig.start(
            roots,
            elsewhere=repository.worktrees(),
            around=counters.AROUND if request.mode is Mode.COUNTERS else {},
        )
        here = rig.describe(*ground.suites.values(), command=request.command, repository=tree)
        sides.append(Side(name, roots, launcher, here))
    if request.head == WORKING_TREE:  # its snapshot is on no branch
        sides[-1].environment = replace(here, git=read_git(repository.root))
    return tuple(sides)


def unfit(why: Facts) -> Finding:
    """The finding because of which nothing is measured."""
    return Finding(check="preflight", decision=Decision.INCONCLUSIVE, facts=why)


def _preflight(plan: Plan) -> None:
    """Let the workloads of each side check their cases. A case that the candidate refuses is an
    error of the suite; one that the baseline refuses is new. If a tree's workloads cannot be
    loaded, its cases crash later."""
    *baseline, candidate = plan.sides
    for path, suite in plan.suites.items():
        cases = [t.case for t in plan.tasks if t.suite == path]
        if refused := _refusal(candidate, suite, cases):
            raise refused
        for side in baseline:
            missing = {case.case_id: _lacks(case, side, plan.trees) for case in cases}
            side.cannot |= {(path, i): f"there is no {what}" for i, what in missing.items() if what}
            there = [case for case in cases if not missing[case.case_id]]
            if not _refusal(side, suite, there):
                continue
            for case in there:
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
