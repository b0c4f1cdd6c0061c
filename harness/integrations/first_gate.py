"""The first gate of a repository: its suite, its policy, and its workflows.

Nothing is written before everything has run: the program whose output is read, and every case.
"""

import json
import re
import shlex
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import units
from harness.analysis.summary import summarise
from harness.errors import HarnessError, SuiteError
from harness.gate import counters, policy
from harness.gate.plan import Say
from harness.gate.policy_suites import require_own
from harness.git.origin import packages_in
from harness.git.repository import Repository, try_git
from harness.records import Outcome, Run, Suite
from harness.report.text import note_text
from harness.runner.rig import Rig
from harness.runner.run import Agenda, run_suite
from harness.runner.self_test import run_self_test
from harness.runner.watchdog import RunObserver
from harness.store import reader, writer
from harness.suite import load as suites
from harness.suite.positions import dumped, scalar
from harness.suite.printed import last, readings

SUITE, POLICY, REQUIREMENTS = "suites/gate.yaml", str(policy.DEFAULT), "ci/requirements.txt"
TEMPLATES = {
    "github": (
        ".github/workflows/gate.yml",
        ".github/workflows/gpu-gate.yml",
        ".github/workflows/gate-comment.yml",
        "ci/post_comment.sh",
    ),
    "gitlab": ("ci/gitlab.yml",),
}
IGNORED = ("__pycache__/", "*.egg-info/", "/.gate-venv/", "/gate/", "/comment/", "/reports/")
"""What a job of the workflows writes."""
TRIAL_S = 120.0
"""Longest first run of a program."""
PROCESSES = 3
"""Of a case: fewer seldom show whether its times are repeatable."""
ON_CPU = {"screen_ratio": 1.1, "confirm_pairs": 20, "practical": 0.1}
ON_CPU |= {"tolerance": 0.25, "stored_tolerance": 0.25}
"""A shared CPU cannot tell 3 %: GO is less than 25 % slower, NO-GO more than 10 %."""
NOTHING = "Nothing was written. Repair it, and repeat the command."
APART = "Nothing was written. Look for other load (harness doctor), or {more}, and repeat it."
VALUES = "Give each axis its values: --axis rows=256,4096. A brace of your own is doubled: {{."
NO_STEPS = """No steps were recognised in the output: the gate times the whole program.
  To time steps, print a line for each, such as: step 3 step_ms=12.5"""

Shown = Callable[[Suite], AbstractContextManager[RunObserver]]
Measure = Callable[[Suite, Path], Run]


@dataclass(slots=True)
class FirstGate:
    files: dict[str, str] = field(default_factory=dict)
    """Path from the root -> the whole text to write."""
    notes: list[str] = field(default_factory=list)

    def write(self) -> None:
        for name, text in self.files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text, encoding="utf-8")


def prepared(
    workload: Mapping[str, Any], *, line: Sequence[str], say: Say, shown: Shown
) -> FirstGate:
    """Look at the repository of the current folder, and measure what its gate will judge; a
    HarnessError if a file exists, or if a case does not run. `workload`, as in a suite: command, or
    factory and providers; axes. `line`: the command line, for the record."""
    root = Repository.around(Path.cwd()).root
    if root.resolve() != Path.cwd().resolve():
        raise HarnessError("a gate starts at the root of the repository", f"Run: cd {root}")
    remotes = try_git(root, "remote", "-v") or ""
    forge = "gitlab" if Path(".gitlab-ci.yml").exists() or "gitlab" in remotes else "github"
    names = [SUITE, POLICY, REQUIREMENTS, *TEMPLATES[forge]]
    if there := [name for name in names if Path(name).exists()]:
        exist = "exists" if len(there) == 1 else "exist"
        problem = f"{', '.join(there)} {exist}; nothing was written"
        raise HarnessError(problem, "Edit what is there, or move it away and repeat the command.")
    inner = root / "src"
    roots = [".", *(["src"] if inner.is_dir() and packages_in([str(inner)]) else [])]
    try:
        suite = suites.loads(_suite_text(workload, {}, 0.0), SUITE)
    except SuiteError as error:  # the file that it names is not written
        raise HarnessError(f"no suite for these options: {error.fact}", VALUES) from None
    require_own(suite, [root / folder for folder in roots])
    found, took_s = FirstGate(), 0.0
    read: Mapping[str, Any] = {}
    with ExitStack() as held:
        measure = _started(held, suite, roots, line, say, shown)
        if "command" in workload:
            read, took_s = _printed(measure, suite, found.notes)
        found.files[SUITE] = _suite_text(workload, read, took_s)
        run = measure(suites.loads(found.files[SUITE], SUITE), reader.DEFAULT_ROOT)
    _require_ok(run)
    found.files[POLICY] = _policy_text(run, roots, found.notes)
    policy.parse(found.files[POLICY], policy.DEFAULT)
    found.files[REQUIREMENTS] = _requirements_text(root, found.notes)
    gpu = run.environment.gpu is not None
    found.files |= {name: _template(name, gpu=gpu) for name in TEMPLATES[forge]}
    if forge == "gitlab":
        found.notes.append("To do: add to .gitlab-ci.yml: include: [{local: ci/gitlab.yml}]")
    ignore = Path(".gitignore")
    lines = ignore.read_text("utf-8").splitlines() if ignore.exists() else []
    found.files[".gitignore"] = "\n".join([*lines, *(x for x in IGNORED if x not in lines), ""])
    if gpu:
        found.notes.append("To do: give CI a runner with a GPU: see ci/README.md of the harness.")
    return found


def _printed(measure: Measure, suite: Suite, notes: list[str]) -> tuple[Mapping[str, Any], float]:
    """What the output of the first case gives, and how long the program took, in seconds."""
    case = suite.cases[0]
    case = replace(case, settings=replace(case.settings, processes=1, timeout_s=TRIAL_S))
    with tempfile.TemporaryDirectory() as folder:
        run = measure(replace(suite, cases=(case,)), Path(folder))
        (m,) = run.measurements
        output = Path(run.folder, m.log).read_text("utf-8", errors="replace")
    read = readings(output)
    if m.outcome is not Outcome.TIMEOUT or "progress" not in read:
        _require_ok(run)
    notes.append(recognised(read, output))
    return read, m.wall_s


def recognised(read: Mapping[str, Any], output: str) -> str:
    """What of a program's output ends a step and what states its time, with the last such line."""
    ways = {
        "progress": read.get("progress", {}).get("step"),
        "step_s": read.get("metrics", {}).get("step_s", {}).get("line"),
    }
    found = [
        f"\n  {key}: as in `{last(pattern, output).string.strip()[:60]}`"
        for key, pattern in ways.items()
        if pattern
    ]
    wrong = f"\n  If this is wrong, change `metrics` and `progress` in {SUITE}."
    return f"Read from the output:{''.join(found)}{wrong}" if found else NO_STEPS


def _started(
    held: ExitStack, suite: Suite, roots: Sequence[str], line: Sequence[str], say: Say, shown: Shown
) -> Measure:
    """Measures with the code under `roots`, as in a gate; a HarnessError if a workload refuses its
    cases, or if no worker starts."""
    rig = held.enter_context(Rig(suite.device, say=say))
    launcher = rig.start([Path(folder).resolve() for folder in roots])
    here = rig.describe(suite, command=line, repository=Path.cwd())
    launcher.preflight(suite)
    rig.observe(here)

    def measured(suite: Suite, store: Path) -> Run:
        with writer.create(store, suite, here) as kept, shown(suite) as observer:
            kept.append(run_self_test(rig.launcher, rig.probes, here.gpu, skip="harness init"))
            rig.observer = observer
            run_suite(Agenda(suite), rig, kept)
            kept.finish()
        return reader.load(store, str(kept.folder))

    return measured


def _require_ok(run: Run) -> None:
    if bad := next((m for m in run.measurements if m.outcome is not Outcome.OK), None):
        raise HarnessError(f"{bad.case_id}: {bad.outcome}: {bad.detail}", NOTHING)


def axis(text: str) -> tuple[str, Any]:
    """Name and values of an axis as typed: rows=256,4096."""
    name, equals, values = text.partition("=")
    if not (equals and values):
        raise SuiteError(f"--axis {text}", "not an axis with values", "For example: rows=256,4096")
    listed = [scalar(value) for value in values.split(",")]
    return name, listed if len(listed) > 1 else listed[0]


def _suite_text(workload: Mapping[str, Any], read: Mapping[str, Any], took_s: float) -> str:
    words = shlex.split(workload.get("command", ""))
    script = next((Path(w).stem for w in words if w.endswith((".py", ".sh"))), "")
    function = workload.get("factory", "").partition(":")[2] or script
    name = re.sub(r"[^A-Za-z0-9]+", "-", function).strip("-") or "program"
    measure = {"processes": PROCESSES, "warmup_s": 2, "sample_s": 0.5}
    if words:
        measure |= {"timeout_s": max(60, round(5 * took_s)), "profile": False}
    return dumped(
        "What the merge gate measures. Show its cases: harness run suites/gate.yaml --dry-run\n"
        "# `python` is the one on PATH; {python} would be the one that the harness runs in.",
        schema=1,
        title="Gate",
        subject="Gate",
        question="Is anything slower, or wrong?",
        measure=measure,
        workloads=[{"name": name, **workload, **read}],
    )


def _policy_text(run: Run, roots: list[str], notes: list[str]) -> str:
    """The policy; the time of each case is noted."""
    notes.append(f"Measured on {run.environment.device_name}:")
    for one in summarise(run):
        if "step_s" not in one.metrics:
            each = one.apart["step_s"].each
            why = note_text({"fastest": min(each), "slowest": max(each)})
            more = "give larger --axis values" if one.case.axes else "make each step longer"
            raise HarnessError(f"{one.case.case_id}: {why}", APART.format(more=more))
        step = units.quantity("step_s", one.metrics["step_s"].value)
        notes.append(f"  {one.case.case_id}: {step}")
    cases = (run.of(case.case_id) for case in run.suite.cases)
    counted = all(counters.counts_of(measured)[0] is not None for measured in cases)
    suite = [{"suite": SUITE}]
    return dumped(
        "Policy of the merge gate: what it compares with the base, and what blocks.",
        schema=1,
        stage="block",
        roots=roots,
        suites=suite,
        **({"counters": suite} if counted else {}),
        **({} if run.environment.gpu else {"compare": ON_CPU}),
    )


def _requirements_text(root: Path, notes: list[str]) -> str:
    """What CI installs: this harness, by what pip recorded of it, and what their code needs."""
    found = next(iter(metadata.distributions(name="nsa-harness")), None)
    origin = json.loads((found.read_text("direct_url.json") if found else "") or "{}")
    source = "nsa-harness @ git+https://HARNESS"
    if vcs := origin.get("vcs_info"):
        source = f"nsa-harness @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}"
    else:
        notes.append(f"To do: in {REQUIREMENTS}, put the harness's git URL in place of HARNESS.")
    theirs = ["-r ../requirements.txt"] if (root / "requirements.txt").exists() else []
    project = root / "pyproject.toml"
    if project.exists() and "project" in tomllib.loads(project.read_text("utf-8")):
        theirs.append(".")
    return "\n".join(["# Installed before a gate, from the root.", source, *theirs, ""])


def _template(name: str, *, gpu: bool) -> str:
    """A file that ships, for a repository with or without a GPU."""
    text = (suites.shipped_folder() / name).read_text("utf-8")
    hosted = "nothing" if gpu else "times"
    changes = {
        ".github/workflows/gate.yml": {
            "HOSTED: counters": f"HOSTED: {hosted}",
            "FORKS_NEED_GPU: true": f"FORKS_NEED_GPU: {json.dumps(gpu)}",
        },
        "ci/gitlab.yml": {
            "value: counters": f"value: {hosted}",
            "value: gpu": f"value: {json.dumps('gpu' if gpu else '')}",
        },
    }
    for old, new in changes.get(name, {}).items():
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new, 1)
    return text
