"""What did a hang hang in? The case once more, with every launch awaited and told.

From outside nobody can ask CUDA which kernel does not end, and what hangs does not answer. So what
hung is built anew in a fresh process and run as far as it came, which takes as long as it took;
the last launch that it told of is the one. The outcome is known by then, and stands.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from harness.errors import HarnessError
from harness.execution import evidence
from harness.execution.launcher import Launcher, Worker
from harness.execution.messages import Answer, Garbled, Message, Reader, Tell
from harness.measure import launches
from harness.records import Case, Evidence, Measurement, Telemetry

REENACT_S = 4.5
"""Longest re-enactment: a hang is to be reported within its limit of silence and 5 s."""
QUIET_S = 2.0
"""Silence after which it hangs again."""
_LOOK_S = 0.05


def with_last_launch(
    hung: Measurement, case: Case, process: int, launcher: Launcher
) -> Measurement:
    """The measurement of a hang, with what a re-enactment says of its last launch."""
    found = hung.evidence or Evidence()
    runs = (found.runs or 0) + 2
    try:
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "last-launch"
            launches.create(told)
            tell = Tell(path=str(told), accuracy=found.phase == "accuracy", runs=runs)
            worker = launcher.launch(case, process, Path(folder) / "log", tell=tell)
            said = _watched(worker, told, runs=runs)
    except (OSError, HarnessError) as error:  # never worth the record of the hang
        said = f"unknown: no re-enactment: {error}"
    last = evidence.last_kernel(hung.telemetry or Telemetry(), said=said)
    return replace(hung, evidence=replace(found, last_kernel=last))


def _watched(worker: Worker, told: Path, *, runs: int) -> str:
    """See the re-enactment through, and say what it showed."""
    answers: list[Answer] = []

    def hear(message: Message) -> None:
        if isinstance(message, Answer):
            answers.append(message)

    reader = Reader(worker.answers)
    last, since = None, time.monotonic()
    try:
        while (now := time.monotonic()) - worker.launched_at < REENACT_S:
            worker.wait(seconds=_LOOK_S)
            exited = worker.exit_code is not None  # asked first: what it said is then all there
            try:
                reader.drain(hear)
            except Garbled:
                return "unknown: a re-enactment gave a garbled answer"
            if answers:
                return f"unknown: a re-enactment of {runs} runs did not hang"
            if exited:
                return "unknown: a re-enactment ended without an answer"
            if (seen := launches.read(told)) != last:
                last, since = seen, now
            elif last is not None and now - since >= QUIET_S:
                return hangs(last)
    finally:
        worker.end()
    came = "came to no operator" if last is None else f"came as far as {_where(last)}"
    return f"unknown: a re-enactment {came} in {REENACT_S:g} s"


def hangs(last: launches.Launch) -> str:
    """That it hung again, and in what."""
    after = "returned, and no other followed" if last.returned else "did not return"
    return (
        f"{_where(last)}: in a re-enactment with every launch awaited it {after} for {QUIET_S:g} s"
    )


def _where(last: launches.Launch) -> str:
    when = f"in run {last.run} (from 0)" if last.run >= 0 else "before the first run"
    return f"{last.name} {when}"
