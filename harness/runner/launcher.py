"""Parent side: starts workers, warm where that is as good as fresh, and ends their families.

The parent never imports torch. The forkserver (see harness.worker.forkserver) imports it once and
forks one worker per case and process. A case that sets environment variables which torch,
CUDA or OpenMP may read when they load gets a forkserver of its own, started under them: NSA_*
variables, which our own code reads when called, are the only ones set after the fact.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from harness.errors import CaseRefused, HarnessError
from harness.messages import (
    ASK_FOR_STACKS,
    Checked,
    CheckOrder,
    DescribeOrder,
    Facts,
    MeasureOrder,
    Message,
    MessageReader,
    Order,
    SelfTestOrder,
    encode_order,
)
from harness.records import Case, Suite, Work
from harness.suite.load import factory_place, shipped_roots

WARM_PREFIX = "NSA_"
"""Variables of this name may be set in a process that has torch loaded already."""
START_S = 120.0
"""Longest time for an interpreter to import torch; a cold network disk takes half of it."""
DESCRIBE_S = 120.0
GRACE_S = 1.0
"""Time between SIGTERM and SIGKILL."""
CLOSE_S = 10.0
"""Longest time for a forkserver to end what is under it."""
MAX_REPLY_BYTES = 2**12
CASES_PER_CHECK = 64
"""Cases sent to one preflight; an order has a largest size."""

Said = TypeVar("Said", Facts, Checked)

# The forkserver's modules are the parent's, wherever either was started; what it measures comes
# from the roots, which come first on the path once the harness is loaded.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from harness.worker import forkserver; sys.path[:0] = sys.argv[3:]; "
    "forkserver.main(int(sys.argv[2]))"
)


class Worker:
    """A process that works on one order, as the parent sees it."""

    def __init__(
        self,
        forkserver: "_ForkserverHandle",
        pid: int,
        answers: int,
        launched_at: float,
        *,
        cold: bool,
        roots: Sequence[str],
    ) -> None:
        self.pid = pid
        self.launched_at = launched_at
        """time.monotonic at the fork; the start of a forkserver is over by then."""
        self.cold = cold
        self.roots = roots
        self.answers = answers
        """File descriptor its messages come from; does not block."""
        self.exit_code: int | None = None
        """As subprocess.Popen.returncode: minus the signal's number if one killed it."""
        self._forkserver = forkserver

    def wait(self, *, seconds: float) -> None:
        """Sleep until the worker says something or exits, at most so long."""
        files = [self.answers]
        if self.exit_code is None:
            files.append(self._forkserver.control.fileno())
        ready, _, _ = select.select(files, [], [], max(0.0, seconds))
        if self._forkserver.control.fileno() in ready:
            self.exit_code = self._forkserver.hear().get("exited", -signal.SIGKILL)

    def dump_stacks(self) -> None:
        """Ask the worker to write the Python stacks of its threads to its log."""
        if self.exit_code is None:
            os.kill(self.pid, ASK_FOR_STACKS)

    def end(self) -> int:
        """End whatever is left of the worker and its descendants.

        Returns:
            The number of processes that would not die; nothing more can be done to them.
        """
        os.close(self.answers)
        left = self._forkserver.end(GRACE_S)
        if self.cold or left:
            self._forkserver.close()
        return left


class Launcher:
    """Starts workers, one at a time. A context: leaving it leaves no process behind."""

    def __init__(
        self,
        roots: Sequence[Path] = (),
        *,
        elsewhere: Sequence[Path] = (),
        device: str = "any",
        around: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            roots: Workloads and all they import come from these folders, or it is a path mismatch.
            elsewhere: Other working trees of the repository; what comes from there is one as well.
            device: As of a suite; workers of `cpu` see no GPU.
            around: Variables of the environment that all workers start in; a case's own win.
            cwd: Where workers start; by default in the first of the roots.
        """
        self._roots = tuple(str(root) for root in roots)
        self._cwd = cwd or (roots[0] if roots else None)
        self._elsewhere = tuple(str(tree) for tree in elsewhere)
        self._host: Launcher | None = None  # whose forkserver this one uses, see `at`
        self._around = dict(around or {})
        self._hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        self._warm: _ForkserverHandle | None = None
        self._device = ""  # unknown until described
        self.not_preloaded = ""
        """Why the workloads' modules could not be imported ahead; empty where they were."""

    @classmethod
    def of(cls, suite: Suite) -> Self:
        """One for a suite as it is here: workers of a shipped suite import what ships with it."""
        return cls(shipped_roots(suite), device=suite.device, cwd=Path.cwd())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the forkserver and every process under it."""
        if self._warm is not None:
            self._warm.close()
            self._warm = None

    def at(self, roots: Sequence[Path]) -> "Launcher":
        """One for the code in these folders that forks from this one's forkserver.

        For many trees in turn: none of them needs to wait for torch. This one must have no roots
        and must not preload, so that its forkserver holds none of the code; it is the one to close.
        """
        guest = Launcher(roots)
        guest._elsewhere = self._elsewhere
        guest._host, guest._device = self, self._device
        guest._around, guest._hidden = self._around, self._hidden
        return guest

    def launch(self, case: Case, process: int, log: Path) -> Worker:
        """Start a worker that measures a case.

        Args:
            case: What to measure.
            process: Which of the case's processes this is.
            log: Where its stdout and stderr go; appended to.

        Raises:
            HarnessError: No interpreter with torch can be started here.
        """
        env = {} if case.program is not None else case.env
        cold = not all(name.startswith(WARM_PREFIX) for name in env)
        forkserver = (
            _ForkserverHandle({**self._around, **env, **self._hidden}, self._roots, self._cwd)
            if cold
            else self._warmed()
        )
        if case.program is None:
            forkserver.prepare()
        order = MeasureOrder(
            case=case,
            process=process,
            launched_at=time.monotonic(),
            device=self._device,
            roots=self._roots,
            elsewhere=self._elsewhere,
        )
        return _fork(forkserver, order, env, log, launched_at=order.launched_at, cold=cold)

    def self_test(self, log: Path) -> Worker:
        """Start a worker that tests the clocks and counters."""
        return self._start(SelfTestOrder(roots=self._roots), log)

    def _start(self, order: CheckOrder | SelfTestOrder | DescribeOrder, log: Path) -> Worker:
        return _fork(self._warmed(), order, {}, log, launched_at=time.monotonic(), cold=False)

    def describe(self) -> dict[str, Any]:
        """What harness.measure.facts.describe() says in a fresh worker.

        Raises:
            HarnessError: It failed, or took too long; with the last line it logged.
        """
        facts = self._ask(DescribeOrder(roots=self._roots), Facts).facts
        self._device = str(facts["torch_settings"]["device"])
        return facts

    def preflight(self, suite: Suite) -> Mapping[str, Work]:
        """Ask every case's workload whether it can run at all, before any does.

        What the workloads import is then imported once, for all workers that start warm.

        Returns:
            Case id -> what one run will do, where its workload can tell.

        Raises:
            SuiteError: A case names a factory that is not there, or axes, a provider or flags
                that its workload refuses.
            HarnessError: No worker answers.
        """
        work = self.check(suite)
        modules = (case.factory.partition(":")[0] for case in suite.cases if case.factory)
        if names := dict.fromkeys(modules):
            self._preload(names)
        return work

    def check(self, suite: Suite) -> Mapping[str, Work]:
        """`preflight` without the import: the forkserver stays free of the workloads' code."""
        answers = [
            self._ask(
                CheckOrder(cases=suite.cases[i : i + CASES_PER_CHECK], roots=self._roots), Checked
            )
            for i in range(0, len(suite.cases), CASES_PER_CHECK)
        ]
        refusals = [refusal for answer in answers for refusal in answer.refusals]
        if refusals:
            first, others = refusals[0], len(refusals) - 1
            more = [f"So {'are' if others > 1 else 'is'} {others} more."] if others else []
            case = next(c for c in suite.cases if c.case_id == first.case_id)
            line, column = factory_place(suite, case) if first.of_factory else (0, 0)
            raise CaseRefused(
                suite.path,
                first.case_id,
                first.problem,
                "\n  ".join([*filter(None, [first.remedy]), *more]),
                line=line,
                column=column,
            )
        return {case_id: work for answer in answers for case_id, work in answer.work.items()}

    def _preload(self, modules: Iterable[str]) -> None:
        """Have the warm forkserver import the workloads' modules. If it then cannot fork well, a
        new one without them takes its place, and each worker imports for itself."""
        forkserver = self._warmed()
        if problem := forkserver.preload(list(modules)):
            self.not_preloaded = problem
            forkserver.close()

    def _ask(self, order: CheckOrder | DescribeOrder, answer: type[Said]) -> Said:
        """The one answer of a worker that measures nothing."""
        said: list[Message] = []
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            worker = self._start(order, log)
            try:
                reader = MessageReader(worker.answers)
                deadline = time.monotonic() + DESCRIBE_S
                while not reader.at_end and time.monotonic() < deadline:
                    worker.wait(seconds=deadline - time.monotonic())
                    reader.drain(said.append)
            finally:
                worker.end()
            answers = [message for message in said if isinstance(message, answer)]
            if not answers:
                checking = isinstance(order, CheckOrder)
                what = "check the cases" if checking else "describe its environment"
                raise HarnessError(f"a worker cannot {what}: {last_line(log.read_bytes())}")
        return answers[0]

    def _warmed(self) -> "_ForkserverHandle":
        if self._host is not None:
            return self._host._warmed()
        if self._warm is None or self._warm.closed:
            self._warm = _ForkserverHandle({**self._around, **self._hidden}, self._roots, self._cwd)
        return self._warm


def _fork(
    forkserver: "_ForkserverHandle",
    order: Order,
    env: Mapping[str, str],
    log: Path,
    *,
    launched_at: float,
    cold: bool,
) -> Worker:
    answers, write_end = os.pipe()
    os.set_blocking(answers, False)
    try:
        with log.open("ab") as log_file:
            pid = forkserver.fork(order, env, write_end, log_file.fileno())
    finally:
        os.close(write_end)
    return Worker(forkserver, pid, answers, launched_at, cold=cold, roots=order.roots)


class _ForkserverHandle:
    """The helper's process and the socket to it."""

    def __init__(
        self, env: Mapping[str, str], roots: Sequence[str] = (), cwd: Path | None = None
    ) -> None:
        """Start one under `env` and wait until torch is imported there."""
        self._prepared = False
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        path = [*sys.path, str(Path.cwd())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(path), str(theirs.fileno()), *roots],
                cwd=cwd,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent, which then ends it
            )
        self.control.settimeout(START_S)
        try:
            ready = "ready" in self.hear()
        except BaseException:  # Ctrl-C included: it would outlive us
            self.close()
            raise
        if not ready:
            self._stderr.seek(0)
            reason = last_line(self._stderr.read())
            self.close()
            raise HarnessError(
                f"no worker can be started with {sys.executable}: {reason}",
                "is torch installed there?",
            )

    @property
    def closed(self) -> bool:
        return self._process.poll() is not None

    def fork(self, order: Order, env: Mapping[str, str], *files: int) -> int:
        """Fork a worker that answers to the first file and logs to the second; its pid."""
        request = json.dumps({"env": dict(env)}).encode() + b"\n" + encode_order(order)
        socket.send_fds(self.control, [request], files)
        reply = self.hear()
        if "pid" not in reply:
            raise HarnessError("the process that starts workers has died", "is memory exhausted?")
        return int(reply["pid"])

    def prepare(self) -> None:
        """Have it import what measuring a workload needs, if it has not yet.

        Raises:
            HarnessError: It cannot.
        """
        if not self._prepared and (problem := self.preload(())):
            self.close()
            raise HarnessError(f"no worker can be started: {problem}")

    def preload(self, modules: Sequence[str]) -> str:
        """Have it import these and what measuring needs; why it must be replaced, or nothing."""
        self._prepared = True
        try:
            self.control.send(json.dumps({"preload": modules}).encode())
        except ConnectionError:
            return "the process that starts workers has died"
        reply = self.hear()
        return str(reply.get("preloaded", "the process that starts workers died of it"))

    def hear(self) -> dict[str, Any]:
        """Its next reply; an empty one if it takes too long or is dead."""
        try:
            data = self.control.recv(MAX_REPLY_BYTES)
        except (TimeoutError, ConnectionError):
            data = b""
        reply: dict[str, Any] = json.loads(data or b"{}")
        return reply

    def end(self, grace_s: float) -> int:
        """Have every process under it ended; how many would not die."""
        try:
            self.control.send(json.dumps({"end": grace_s}).encode())
            while reply := self.hear():
                if "ended" in reply:
                    return int(reply["ended"])
        except ConnectionError:
            pass
        self.close()  # it is dead itself; the kernel has killed its worker with it
        return 0

    def close(self) -> None:
        """Let it end everything under it, and itself."""
        self.control.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()


def last_line(output: bytes) -> str:
    """The last line of a log, which for a traceback is the error."""
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
