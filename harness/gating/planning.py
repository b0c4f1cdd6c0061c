"""What a gate will measure, decided before any case runs, and why the rest is left out.

Whatever keeps the whole from being judged honestly is a finding of the whole, and then nothing is
measured.
"""

import datetime
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness import doctor, environment, store
from harness import suite as suites
from harness.analysis.compare import Thresholds
from harness.errors import HarnessError, SuiteError
from harness.execution import gpu_lock, machine, provenance
from harness.execution.launcher import Launcher
from harness.execution.vacancy import mismatch
from harness.gating import calibration, counting, files, policy, selection
from harness.gating.interleave import Side, Task
from harness.gating.policy import Choice, Policy
from harness.gating.records import Finding, GateSide, LeftOut, Mode
from harness.gating.worktrees import WORKING_TREE, Repository, checked_out
from harness.records import (
    METRICS,
    Case,
    Decision,
    Environment,
    Suite,
    gpu_matches,
)
from harness.suite_yaml import Document, Loc, Problem, nearest, show
from harness.what_ran import PathRule

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks of a gate."""

    mode: Mode
    policy: Path = policy.DEFAULT
    given: Policy | None = None
    """In place of that file: what a comparison without a policy of its own goes by."""
    base: str = ""
    """The ref to compare with, in relative mode."""
    exact: bool = False
    """Compare with the base itself, and not with where the head left it."""
    head: str = WORKING_TREE
    """A ref, or `.` for the working tree."""
    every_case: bool = False
    """Judge the cases that the change cannot reach as well."""
    store: Path = store.DEFAULT_ROOT
    baselines: Path = files.FOLDER
    command: tuple[str, ...] = ()
    wait_for_gpu_s: float = 0.0
    proof: bool = True
    """Have the instrument prove itself before it times anything."""
    today: datetime.date = field(default_factory=datetime.date.today)


@dataclass(slots=True, kw_only=True)
class Plan:
    """What a gate will measure, and what it found on the way there."""

    policy: Policy
    head: GateSide
    base: GateSide | None
    suites: Mapping[str, Suite]
    """Path from the root -> the suite as the head has it, with the cases the policy chooses."""
    sides: tuple[Side, ...] = ()
    """The base first, where there is one; none where nothing is left to measure."""
    tasks: list[Task]
    gone: list[Task]
    """Cases that only the base has."""
    base_counters: str | None = None
    """The base's file of counters on record."""
    left_out: list[LeftOut] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    calibrations: Mapping[str, calibration.Stored | None] = field(default_factory=dict)
    began: str = ""

    @property
    def here(self) -> Environment:
        """Where the head is measured."""
        return self.sides[-1].environment

    def thresholds(self, task: Task) -> Thresholds:
        stored = self.calibrations.get(task.suite)
        case_id = task.case.case_id
        return calibration.thresholds(stored, case_id, self.policy.thresholds, self.policy.given)

    @property
    def sound(self) -> bool:
        """Whether anything may be measured."""
        return all(f.decision is Decision.GO for f in self.findings if f.check == "preflight")


def prepared(request: Request, held: ExitStack, say: Say) -> Plan:
    """Everything up to the first process of a case.

    Args:
        held: Keeps trees, launchers and the GPU's lock until it is left.

    Raises:
        HarnessError: The request cannot be carried out.
    """
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    repository = _repository(request)
    root = repository.root if repository else Path.cwd()
    loaded, document = request.given, None
    if loaded is None:
        loaded, document = policy.load(request.policy)
        loaded = replace(loaded, path=_from_root(request.policy, root))
    trees = _trees(request, repository, root, loaded, held)
    asked = loaded.counted if request.mode is Mode.COUNTERS else loaded.choices
    if not asked:
        raise SuiteError(loaded.path, "names no suite to count", "List one under `counters`.")
    if request.mode is Mode.COUNTERS:
        counting.load(request.baselines)  # a damaged file is told before minutes are spent
    chosen = {c.suite: _require(trees.head, c, document) for c in asked}
    for suite in chosen.values():
        _require_own(suite, [trees.head / folder for folder in loaded.roots])
    others = [
        _require(trees.head, c, document)
        for c in (*loaded.choices, *loaded.counted)
        if c not in asked
    ]
    gone = _gone(trees.folders[0], asked, chosen) if trees.base else []
    ids = [t.case.case_id for t in gone]
    known = [case for suite in (*chosen.values(), *others) for case in suite.cases]
    if document is not None:
        policy.check(document, known, ids)
    plan = Plan(
        policy=loaded,
        head=trees.head_side,
        base=trees.base,
        suites=chosen,
        tasks=[
            Task(suite=path, case=case) for path, suite in chosen.items() for case in suite.cases
        ],
        gone=gone,
        findings=trees.findings,
        base_counters=trees.base_counters,
        began=began,
    )
    if trees.base and not request.every_case:
        _leave_out(plan, trees.changed, trees.folders)
    if plan.tasks:
        elsewhere = repository.worktrees() if repository else ()
        plan.sides = _sides(request, trees.folders, elsewhere, plan, held, say)
        if repository and request.head == WORKING_TREE:  # of a snapshot nobody knows the commit
            git = environment.read_git(root)
            plan.sides[-1].environment = replace(plan.here, git=git)
        plan.tasks = [_asked(t, plan, request.mode) for t in plan.tasks]
        _calibrate(plan, request)
        _preflight(plan, request)
    return plan


# --- trees and suites --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trees:
    """Where the sides lie, and what differs between them."""

    head_side: GateSide
    base: GateSide | None = None
    folders: tuple[Path, ...]
    """The base's first, where there is one."""
    changed: tuple[str, ...] = ()
    base_counters: str | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def head(self) -> Path:
        return self.folders[-1]


def _repository(request: Request) -> Repository | None:
    """The repository of the current folder; None where there is none and none is needed."""
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
    request: Request,
    repository: Repository | None,
    root: Path,
    loaded: Policy,
    held: ExitStack,
) -> _Trees:
    if repository is None:
        return _Trees(head_side=GateSide(ref=request.head), folders=(root,))
    mine = request.head == WORKING_TREE
    commit = repository.commit("HEAD" if mine else request.head)
    dirty = repository.dirty()
    head = GateSide(ref=request.head, commit=commit, uncommitted=mine and dirty)
    findings: list[Finding] = []
    if not mine and dirty:
        reason = "uncommitted changes are not judged; with . as the head they are"
        findings.append(_noted("working tree", reason))
    if not request.base:
        folders = (root,) if mine else held.enter_context(checked_out(repository, commit))
        return _Trees(head_side=head, folders=folders, findings=findings)
    base = repository.commit(request.base)
    if not request.exact:
        base = repository.merge_base(base, commit)
    judged = repository.snapshot() if head.uncommitted else commit
    folders = held.enter_context(checked_out(repository, base, judged))
    before, after = (repository.text(side, loaded.path) for side in (base, judged))
    if request.given is None and before is not None and before != after:
        reason = f"this change alters {loaded.path}, by which it is judged"
        findings.append(_noted("policy", reason))
    kept = counting.path_of(request.baselines)
    return _Trees(
        head_side=head,
        base=GateSide(ref=request.base, commit=base),
        folders=folders,
        changed=repository.changed(base, judged),
        base_counters=repository.text(base, _from_root(kept, root)),
        findings=findings,
    )


def _noted(check: str, reason: str) -> Finding:
    return Finding(check=check, decision=Decision.GO, reason=reason)


def _require(tree: Path, choice: Choice, document: Document | None) -> Suite:
    """The suite in the head, with the cases that the policy chooses: there must be some."""
    suite = _suite(tree, choice)
    if suite is None:
        beside = (tree / choice.suite).parent.glob("*.yaml")
        names = sorted(Path(choice.suite).with_name(file.name).as_posix() for file in beside)
        remedy = f"Name one that there is, or write it. {nearest(choice.suite, names)}".rstrip()
        text = f"there is no such suite in the head: {choice.suite}"
        raise _refused(choice, document, ("suite",), text, remedy)
    kept = _chosen(suite, choice)
    if not kept.cases:
        wanted = next((i for i, f in enumerate(choice.filters) if not f.startswith("!")), 0)
        text = f"no case fits {', '.join(map(show, choice.filters))} in {choice.suite}"
        ids = [case.case_id for case in suite.cases]
        remedy = nearest(choice.filters[wanted], ids)
        raise _refused(choice, document, ("cases", wanted), text, remedy)
    return kept


def _require_own(suite: Suite, roots: Sequence[Path]) -> None:
    """Refuse cases whose code is not in the tree: whatever ran would be somebody else's."""
    for case in suite.cases:
        if not (package := _absent(case, roots)):
            continue
        line, column = suites.factory_place(suite, case)
        raise SuiteError(
            suite.path,
            f"factory {case.factory!r}: there is no package {package!r} in the repository",
            "Only code that lies there, under one of the policy's `roots`, is measured: name a\n"
            "  factory of your own. The suites that ship measure nsa, in its own repository.",
            line=line,
            column=column,
        )


def _absent(case: Case, roots: Sequence[Path]) -> str:
    """The package of a case's factory, where a tree does not have it; else empty."""
    package = case.factory.partition(":")[0].partition(".")[0]
    if package in ("", provenance.OURS) or any(_holds(root, package) for root in roots):
        return ""
    return package


def _holds(root: Path, package: str) -> bool:
    """Whether a folder has the package, or the module. One without code, such as a folder of
    suites, is none, and Python goes on looking."""
    found = (*(root / package).rglob("*"), *root.glob(f"{package}.*"))
    return any(file.suffix in (".py", ".so") for file in found)


def _refused(
    choice: Choice, document: Document | None, loc: Loc, text: str, remedy: str
) -> SuiteError:
    """The error of a choice, at its place in the policy; of one from a command line, its own."""
    if document is None or not choice.loc:
        return SuiteError(choice.suite, text, remedy)
    return document.error([Problem((*choice.loc, *loc), text, remedy)])


def _suite(tree: Path, choice: Choice) -> Suite | None:
    """A suite as a tree has it, whole; None where it has none."""
    file = tree / choice.suite
    if not file.resolve().is_relative_to(tree.resolve()) or not file.is_file():
        return None
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError:
        raise SuiteError(choice.suite, "this is not a text file") from None
    return suites.loads(text, choice.suite)


def _chosen(suite: Suite, choice: Choice) -> Suite:
    """The suite with those of its cases that the policy chooses, if there are any."""
    kept = tuple(case for case in suite.cases if suites.passes(case.case_id, choice.filters))
    return replace(suite, cases=kept)


def _gone(tree: Path, asked: Sequence[Choice], chosen: Mapping[str, Suite]) -> list[Task]:
    """Cases of the base's suites that the head's no longer have."""
    gone = []
    for choice in asked:
        try:
            before = _suite(tree, choice)
        except SuiteError:
            continue  # a suite that could not be read in the base had no case to lose
        if before is None:
            continue
        kept = {case.case_id for case in chosen[choice.suite].cases}
        for case in _chosen(before, choice).cases:
            if case.case_id not in kept:
                gone.append(Task(suite=choice.suite, case=case))
    return gone


def _asked(task: Task, plan: Plan, mode: Mode) -> Task:
    """The task as it is measured here: with the kernels that the policy requires, and counted in
    every process where a rule needs that."""
    case, device = task.case, plan.here.device_name
    for asked in plan.policy.kernels:
        if asked.match.accepts(case) and gpu_matches(asked.gpu, device):
            rule = PathRule(
                must=(*case.kernels.must, *asked.must),
                must_not=(*case.kernels.must_not, *asked.must_not),
            )
            case = replace(case, kernels=rule)
    counted = any(
        METRICS[rule.metric].counted and rule.match.accepts(case) for rule in plan.policy.rules
    )
    attest = bool(case.kernels or case.operators) or counted
    if mode is Mode.COUNTERS:
        case = counting.without_times(case)
    return replace(task, case=case, attest=attest)


# --- the machine -------------------------------------------------------------------------


def _sides(
    request: Request,
    trees: Sequence[Path],
    elsewhere: Sequence[Path],
    plan: Plan,
    held: ExitStack,
    say: Say,
) -> tuple[Side, ...]:
    """A side per tree, each with its warm launcher and its environment."""
    wait_s = request.wait_for_gpu_s
    device = _device(plan)
    lock, around = None, counting.AROUND
    if request.mode is not Mode.COUNTERS:
        around = {}
        lock = gpu_lock.lock_first(held, device, wait_s=wait_s, say=say)
    sides = []
    for name, tree in zip(("base", "head")[-len(trees) :], trees, strict=True):
        roots = [(tree / root).resolve() for root in plan.policy.roots]
        launcher = held.enter_context(
            Launcher(roots, elsewhere=elsewhere, device=device, around=around)
        )
        here = environment.capture(
            launcher.describe(),
            command=request.command,
            repository=tree,
            cases=[t.case for t in plan.tasks],
        )
        if request.mode is not Mode.COUNTERS:
            lock = gpu_lock.lock_only(held, lock, here.gpu, wait_s=wait_s, say=say)
        sides.append(Side(name, roots, launcher, here))
    return tuple(sides)


def _device(plan: Plan) -> str:
    """What the suites run on, all of them."""
    devices = {suite.device: path for path, suite in plan.suites.items()}
    if "cpu" in devices and len(devices) > 1:
        other = next(path for device, path in devices.items() if device != "cpu")
        raise SuiteError(
            plan.policy.path,
            f"{devices['cpu']} runs on the CPU, and {other} on the GPU where there is one",
            "One gate judges one device: split them into two policies.",
        )
    return next(iter(devices), "any")


def _leave_out(plan: Plan, changed: Sequence[str], trees: Sequence[Path]) -> None:
    """Keep the tasks that the change can reach."""
    candidates = [selection.Candidate(t.suite, t.case) for t in plan.tasks]
    chosen = selection.select(candidates, changed, trees, plan.policy)
    reason = f"none of {len(changed)} changed files reaches it"
    if not changed:
        reason = "nothing differs from the base"
    plan.left_out += [
        LeftOut(case_id=t.case.case_id, suite=t.suite, reason=reason)
        for t in plan.tasks
        if t.key not in chosen.why
    ]
    plan.tasks = [t for t in plan.tasks if t.key in chosen.why]


def _calibrate(plan: Plan, request: Request) -> None:
    if request.mode not in (Mode.RELATIVE, Mode.BASELINE):
        return
    plan.calibrations = {
        suite: calibration.load(
            request.baselines,
            plan.here,
            suite,
            max_age_days=plan.policy.calibration_days,
            required=plan.policy.calibration_required,
        )
        for suite in dict.fromkeys(t.suite for t in plan.tasks)
    }


def _preflight(plan: Plan, request: Request) -> None:
    """Ask whether the machine is fit, and every workload whether it can run."""
    for suite in plan.suites.values():
        here = plan.here
        remedy = "Run the gate on a GPU node; `harness gate --counters` needs none."
        machine.require_gpu(suite, here, remedy)
        if other := mismatch(suite.requires, here):
            plan.findings.append(unfit(other))
    if request.mode is not Mode.COUNTERS:
        pins = environment.pins_of(plan.sides[-1].roots[0])
        vitals = doctor.inspect(plan.here, store=request.store, constraints=pins)
        plan.findings += [
            unfit(f"{check.name}: {check.fact}")
            for check in doctor.checks(plan.here, vitals)
            if check.grade in (doctor.Grade.FAIL, doctor.Grade.UNKNOWN)
        ]
    if not plan.sound:
        return
    head, *others = plan.sides[::-1]
    _ask(head, plan, refuse=True)
    for base in others:
        _ask(base, plan, refuse=False)


def unfit(reason: str) -> Finding:
    """The finding that keeps everything from being measured."""
    return Finding(check="preflight", decision=Decision.INCONCLUSIVE, reason=reason)


def _ask(side: Side, plan: Plan, *, refuse: bool) -> None:
    """Have a side's workloads check their cases.

    What the head refuses, the suite states wrongly, and the request cannot be carried out. What
    the base refuses is new. A tree whose workloads cannot even be asked will crash, case by case.
    """
    for path, suite in plan.suites.items():
        cases = tuple(t.case for t in plan.tasks if t.suite == path)
        for case in cases if not refuse else ():
            if package := _absent(case, side.roots):
                side.cannot[path, case.case_id] = f"there is no package {package!r}"
        cases = tuple(case for case in cases if (path, case.case_id) not in side.cannot)
        if not cases:
            continue
        try:
            side.launcher.preflight(replace(suite, cases=cases))
        except SuiteError as error:
            if refuse:
                raise
            _ask_each(side, replace(suite, cases=cases), path, str(error))
        except HarnessError:
            continue


def _ask_each(side: Side, suite: Suite, path: str, first: str) -> None:
    for case in suite.cases:
        try:
            side.launcher.preflight(replace(suite, cases=(case,)))
        except SuiteError as error:
            said = str(error).partition("\n")[0].partition(": ")[2] or first
            side.cannot[path, case.case_id] = said.removeprefix(f"case {case.case_id}: ")
