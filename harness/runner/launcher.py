"""Parent side: starts workers, and ends them with all their descendants.

The parent never imports torch. The forkserver (see harness.worker.forkserver) imports it once and
forks one worker per case and process (a warm start). A case that sets environment variables gets
a forkserver of its own (a cold start), because torch, CUDA and OpenMP read some when they load.
The exception is NSA_*, which our code reads when it is called.
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
from typing import IO, Any, Self, TypeVar

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
"""Prefix of the variables that may be set after torch is loaded."""
START_S = 120.0
"""Longest time to import torch; a cold network disk needs half of it."""
DESCRIBE_S = 120.0
GRACE_S = 1.0
"""Time between SIGTERM and SIGKILL."""
CLOSE_S = 10.0
"""Longest time for a forkserver to end its descendants."""
MAX_REPLY_BYTES = 2**12
CASES_PER_CHECK = 64
"""Cases in one order to check; the size of an order is limited."""

Reply = TypeVar("Reply", Facts, Checked)

# The forkserver loads the parent's copy of the harness. Then the roots go first on the path: the
# measured code comes from there.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from harness.worker import forkserver; sys.path[:0] = sys.argv[3:]; "
    "forkserver.main(int(sys.argv[2]))"
)


class Worker:
    """A process that carries out one order, as the parent sees it."""

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
        """time.monotonic at the fork, after the start of the forkserver."""
        self.cold = cold
        self.roots = roots
        self.answers = answers
        """File descriptor of its messages; non-blocking."""
        self.exit_code: int | None = None
        """As subprocess.Popen.returncode: minus the number of the signal that killed it."""
        self._forkserver = forkserver

    def wait(self, *, seconds: float) -> None:
        """Sleep until the worker sends a message or exits, at most this long."""
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
        """End the worker and its descendants; the number of processes that survived SIGKILL."""
        os.close(self.answers)
        left = self._forkserver.end(GRACE_S)
        if self.cold or left:
            self._forkserver.close()
        return left


class Launcher:
    """Starts workers, one at a time. A context: on exit all its processes are gone."""

    def __init__(
        self,
        roots: Sequence[Path] = (),
        *,
        elsewhere: Sequence[Path] = (),
        device: str = "any",
        around: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            roots: The measured code must come from these folders, else it is a path mismatch.
            elsewhere: Other working trees of the repository; code from there is a mismatch too.
            device: Of the suite; workers of `cpu` see no GPU.
            around: Environment variables of all workers; a case's own variables win.
            cwd: Working directory of workers; by default the first of the roots.
        """
        self._roots = tuple(str(root) for root in roots)
        self._cwd = cwd or (roots[0] if roots else None)
        self._elsewhere = tuple(str(tree) for tree in elsewhere)
        self._host: Launcher | None = None  # owns the forkserver, see `at`
        self._around = dict(around or {})
        self._hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        self._warm: _ForkserverHandle | None = None
        self._device = ""  # unknown until described
        self.not_preloaded = ""
        """Why the workloads' modules were not imported in advance; empty if they were."""

    @classmethod
    def of(cls, suite: Suite) -> Self:
        """One for a suite; workers of a shipped suite import the code that ships with it."""
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
        """End the forkserver and its descendants."""
        if self._warm is not None:
            self._warm.close()
            self._warm = None

    def at(self, roots: Sequence[Path]) -> "Launcher":
        """A launcher for the code in these folders that shares this one's forkserver.

        A search measures many trees this way and imports torch once. This launcher must have no
        roots and must not preload, so that its forkserver has loaded none of the code. Close this
        one, not the guest.
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
            process: Index of the case's process.
            log: Its stdout and stderr are appended to this file.

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
        """The answer of harness.measure.facts.describe() in a fresh worker.

        Raises:
            HarnessError: It failed or took too long. The message has the last line of its log.
        """
        facts = self._ask(DescribeOrder(roots=self._roots), Facts).facts
        self._device = str(facts["torch_settings"]["device"])
        return facts

    def preflight(self, suite: Suite) -> Mapping[str, Work]:
        """Check that every case can run, and import the workloads' modules in the forkserver.

        Returns:
            Case id -> the work of one step, if its workload states it.

        Raises:
            SuiteError: A factory does not exist, or a workload refuses its axes, provider or flags.
            HarnessError: No worker answers.
        """
        work = self.check(suite)
        modules = (case.factory.partition(":")[0] for case in suite.cases if case.factory)
        if names := dict.fromkeys(modules):
            self._preload(names)
        return work

    def check(self, suite: Suite) -> Mapping[str, Work]:
        """`preflight` without the import in the forkserver."""
        answers = [
            self._ask(
                CheckOrder(cases=suite.cases[i : i + CASES_PER_CHECK], roots=self._roots), Checked
            )
            for i in range(0, len(suite.cases), CASES_PER_CHECK)
        ]
        refusals = [refusal for answer in answers for refusal in answer.refusals]
        if refusals:
            first, others = refusals[0], len(refusals) - 1
            more = ["1 more case fails the same check."] if others == 1 else []
            more = [f"{others} more cases fail the same check."] if others > 1 else more
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
        """Import the workloads' modules in the warm forkserver. If it can then not fork safely, a
        new one replaces it, and each worker imports them itself."""
        forkserver = self._warmed()
        if problem := forkserver.preload(list(modules)):
            self.not_preloaded = problem
            forkserver.close()

    def _ask(self, order: CheckOrder | DescribeOrder, answer: type[Reply]) -> Reply:
        """The answer of a worker that does not measure."""
        received: list[Message] = []
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            worker = self._start(order, log)
            try:
                reader = MessageReader(worker.answers)
                deadline = time.monotonic() + DESCRIBE_S
                while not reader.at_end and time.monotonic() < deadline:
                    worker.wait(seconds=deadline - time.monotonic())
                    reader.drain(received.append)
            finally:
                worker.end()
            answers = [message for message in received if isinstance(message, answer)]
            if not answers:
                what = "check the cases" if answer is Checked else "describe its environment"
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


def start_forkserver(
    path: Sequence[str],
    roots: Sequence[str],
    control: socket.socket,
    output: IO[bytes],
    *,
    env: Mapping[str, str],
    cwd: Path | None,
) -> "subprocess.Popen[bytes]":
    """Start an interpreter that serves orders from the other end of `control`."""
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, json.dumps(path), str(control.fileno()), *roots],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[control.fileno()],
        start_new_session=True,  # Ctrl-C is for the parent, which then ends it
    )


class _ForkserverHandle:
    """The process of a forkserver and the socket to it."""

    def __init__(
        self, env: Mapping[str, str], roots: Sequence[str] = (), cwd: Path | None = None
    ) -> None:
        """Start one under `env` and wait until torch is imported there."""
        self._prepared = False
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        path = [*sys.path, str(Path.cwd())]
        with theirs:
            self._process = start_forkserver(
                path, roots, theirs, self._stderr, env={**os.environ, **env}, cwd=cwd
            )
        self.control.settimeout(START_S)
        try:
            ready = "ready" in self.hear()
        except BaseException:  # also Ctrl-C: the process would outlive us
            self.close()
            raise
        if not ready:
            self._stderr.seek(0)
            reason = last_line(self._stderr.read())
            self.close()
            raise HarnessError(
                f"no worker can be started with {sys.executable}: {reason}",
                "Is torch installed there?",
            )

    @property
    def closed(self) -> bool:
        return self._process.poll() is not None

    def fork(self, order: Order, env: Mapping[str, str], *files: int) -> int:
        """Fork a worker that answers to the first file and logs to the second; returns its pid."""
        request = json.dumps({"env": dict(env)}).encode() + b"\n" + encode_order(order)
        socket.send_fds(self.control, [request], files)
        reply = self.hear()
        if "pid" not in reply:
            raise HarnessError("the forkserver died", "Is memory exhausted?")
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
            return "the forkserver died"
        reply = self.hear()
        return str(reply.get("preloaded", "the forkserver died during the import"))

    def hear(self) -> dict[str, Any]:
        """The next reply; empty if it takes too long or the forkserver is dead."""
        try:
            data = self.control.recv(MAX_REPLY_BYTES)
        except (TimeoutError, ConnectionError):
            data = b""
        reply: dict[str, Any] = json.loads(data or b"{}")
        return reply

    def end(self, grace_s: float) -> int:
        """End its descendants; the number that survived SIGKILL."""
        try:
            self.control.send(json.dumps({"end": grace_s}).encode())
            while reply := self.hear():
                if "ended" in reply:
                    return int(reply["ended"])
        except ConnectionError:
            pass
        self.close()  # it is dead, and the kernel killed its worker with it
        return 0

    def close(self) -> None:
        """Closing the socket makes it end its descendants and itself."""
        self.control.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()


def last_line(output: bytes) -> str:
    """The last line of a log; of a traceback, that is the error."""
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "its log is empty"
