"""Parent side: starts workers, forks of a forkserver that has imported torch (a warm start). A case
with variables other than NSA_* gets a forkserver of its own (a cold start), because torch, CUDA and
OpenMP read some when they load.
"""

import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, TypeVar

from harness.errors import CaseRefused, HarnessError
from harness.git.repository import home
from harness.messages import (
    Checked,
    CheckOrder,
    Described,
    DescribeOrder,
    MeasureOrder,
    PhaseBegan,
    SelfTestOrder,
)
from harness.processes import last_line
from harness.records import Case, Suite
from harness.runner.forkserver import START_S, ForkserverHandle, Worker
from harness.suite.load import factory_place, shipped_roots

WARM_PREFIX = "NSA_"
"""Prefix of the variables that may be set after torch is loaded."""
TRACE = ".trace.json.gz"
"""End of the name of a Chrome trace beside a log."""

Reply = TypeVar("Reply", Described, Checked)


class Launcher(AbstractContextManager["Launcher"]):
    """Starts workers, one at a time. A context: on exit all its processes are gone."""

    def __init__(
        self,
        roots: Sequence[Path] = (),
        *,
        elsewhere: Sequence[Path] = (),
        device: str = "any",
        around: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        home: Sequence[Path] = (),
    ) -> None:
        """Starts nothing yet. Roots, `elsewhere` and `home` are as of a WorkerOrder and a
        MeasureOrder; `around` are variables of all workers, of which a case's own win. Workers of a
        suite for the device `cpu` see no GPU; they work in `cwd`, or else in the first root."""
        self._roots = tuple(str(root) for root in roots)
        self._home = tuple(str(folder) for folder in home)
        self._cwd = cwd or (roots[0] if roots else None)
        self._elsewhere = tuple(str(tree) for tree in elsewhere)
        self._host: Launcher | None = None  # owns the forkserver, see `at`
        self._around = dict(around or {})
        self._hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        self._warm: ForkserverHandle | None = None
        self._device = ""  # unknown until described
        self.not_preloaded = ""
        """Why the workloads' modules were not imported in advance; empty if they were."""
        self.traces = False
        """Whether the first process of every case keeps the trace of its profile beside its log."""

    @classmethod
    def of(cls, suite: Suite) -> Self:
        """One for a suite; workers of a shipped suite import the code that ships with it, others
        first that of the repository here."""
        return cls(shipped_roots(suite), device=suite.device, cwd=Path.cwd(), home=home(Path.cwd()))

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the forkserver and its descendants."""
        if self._warm is not None:
            self._warm.close()
            self._warm = None

    def at(self, roots: Sequence[Path]) -> "Launcher":
        """A launcher for the code in these folders that shares this one's forkserver. This one must
        have no roots and must not preload. Close this one, not the guest."""
        guest = Launcher(roots)
        guest._elsewhere = self._elsewhere
        guest._host, guest._device = self, self._device
        guest._around, guest._hidden = self._around, self._hidden
        return guest

    def launch(self, case: Case, process: int, log: Path) -> Worker:
        """Start a worker that measures a case; its stdout and stderr are appended to `log`."""
        env = {} if case.program is not None else case.env
        cold = not all(name.startswith(WARM_PREFIX) for name in env)
        forkserver = self._started(env) if cold else self._warmed()
        # Before the time of the process begins; a program needs none of it.
        if case.program is None and not forkserver.prepared and (why := forkserver.preload(())):
            forkserver.close()
            raise HarnessError(f"no worker can be started: {why}")
        order = MeasureOrder(
            case=case,
            process=process,
            launched_at=time.monotonic(),
            device=self._device,
            elsewhere=self._elsewhere,
            roots=self._roots,
            home=self._home,
            trace=str(log.resolve().with_suffix(TRACE)) if self.traces and process == 0 else "",
        )
        return forkserver.fork(order, log, env, cold=cold)

    def self_test(self, log: Path) -> Worker:
        """Start a worker that tests the clocks and counters."""
        return self._warmed().fork(SelfTestOrder(roots=self._roots, home=self._home), log)

    def describe(self) -> dict[str, Any]:
        """The answer of harness.measure.facts.describe() in a fresh worker."""
        facts = self._ask(DescribeOrder(roots=self._roots, home=self._home), Described).facts
        self._device = str(facts["torch_settings"]["device"])
        return facts

    def preflight(self, suite: Suite) -> None:
        """Import the workloads' modules in the forkserver, and check there that every case can run.
        A factory that does not exist, or a workload that refuses its case, is a CaseRefused."""
        modules = (case.factory.partition(":")[0] for case in suite.cases if case.factory)
        if names := [*dict.fromkeys(modules)]:
            forkserver = self._warmed()
            if problem := forkserver.preload(names):  # a new one replaces it, without the imports
                self.not_preloaded = problem
                forkserver.close()
        self.check(suite)

    def check(self, suite: Suite) -> Mapping[str, tuple[int, int]]:
        """`preflight` without the import in the forkserver; case id -> FLOPs and bytes of a step,
        of those whose workload knows them before it is built."""
        order = CheckOrder(cases=suite.cases, roots=self._roots, home=self._home)
        answer = self._ask(order, Checked)
        if answer.refusals:
            first, others = answer.refusals[0], len(answer.refusals) - 1
            cases = "case fails" if others == 1 else "cases fail"
            more = f"{others} more {cases} the same check." if others else ""
            remedy = "\n  ".join(filter(None, [first.remedy, more]))
            case = next(c for c in suite.cases if c.case_id == first.case_id)
            line, column = factory_place(suite, case) if first.of_factory else (0, 0)
            raise CaseRefused(
                suite.path, first.case_id, first.problem, remedy, line=line, column=column
            )
        return answer.work

    def _ask(self, order: CheckOrder | DescribeOrder, answer: type[Reply]) -> Reply:
        """The answer of a worker that does not measure; without one, a HarnessError with the last
        line of its log."""
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            began = time.monotonic()
            received = self._warmed().fork(order, log).converse(START_S)
            for message in received:
                if isinstance(message, answer):
                    return message
            what = "check the cases" if answer is Checked else "describe its environment"
            why = last_line(log)
            if time.monotonic() - began >= START_S:
                why = f"no answer in {START_S:g} s; {why}"
            doing = [message.name for message in received if isinstance(message, PhaseBegan)]
            where, remedy = (f", in {doing[-1]!r}", "") if doing else ("", "")
            if doing and doing[-1].startswith("import "):
                remedy = f"Try the import alone: python -c {shlex.quote(doing[-1])}"
            raise HarnessError(f"a worker cannot {what}{where}: {why}", remedy)

    def _warmed(self) -> ForkserverHandle:
        if self._host is not None:
            return self._host._warmed()
        if self._warm is None or self._warm.closed:
            self._warm = self._started({})
        return self._warm

    def _started(self, env: Mapping[str, str]) -> ForkserverHandle:
        env = {**self._around, **env, **self._hidden}
        return ForkserverHandle(env, self._roots or self._home, self._cwd)
