"""Runs a program once more to count what its steps do, where it is Python with torch.

Never the process that is timed: this one has a hook on its PYTHONPATH (harness.program.startup),
which waits for torch and then counts and profiles a few steps (harness.program.step_hook). It
ends as soon as the hook has answered. Its times enter nothing.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from harness.git import origin
from harness.measure import attestation
from harness.measure.profile import MAX_STEP_S, PROFILE_S, WhatRan
from harness.messages import signal_name
from harness.program import process
from harness.program.output import Log
from harness.program.process import Tail
from harness.program.startup import sitecustomize
from harness.program.step_hook import ANSWER, CLAIM, SKIPPED_STEPS, UNHEARD, HookOrder
from harness.records import (
    COUNTERS,
    OPTIMIZER,
    Case,
    Counters,
    Measurement,
    Outcome,
    Profile,
    Program,
    Scalar,
)

POLL_S = 0.05
COUNTED_STEPS = 4
"""So many steps are made under the hook, at least."""
SLOWER = 4.0
"""What is counted may take so many times its time."""
GRACE_S = 30.0
"""Time for torch and the program to start, beyond what the timed process took for its setup."""
SAID = "\n[the harness runs the program once more, and counts what a step does]\n"
LAST_BYTES = 200

OTHERS = {origin.OURS, *sys.stdlib_module_names}
"""Packages whose place is not asked."""

_what_ran: TypeAdapter[WhatRan] = TypeAdapter(WhatRan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What is known of the program from the process that was timed."""

    setup_s: float
    """From its start to its first step after setup."""
    step_s: float
    steps: int
    """How many it made, setup included."""
    setup_steps: int
    by_lines: bool | None
    """Whether each line of progress is one step; None where steps were told in no line."""


class _Unknown(Exception):
    """Nothing can be counted, and why."""


def attested(
    measured: Measurement,
    case: Case,
    *,
    timed: Timed | str,
    ends_at: float,
    roots: tuple[str, ...],
    elsewhere: tuple[str, ...] = (),
    alive: Callable[[], None],
) -> Measurement:
    """The measurement with what ran, or with a reason why that is unknown.

    Args:
        measured: Of the timed process, which ended ok.
        case: A program's.
        timed: Or why there are no steps to count.
        ends_at: time.monotonic by which this must be over.
        roots: The tree under test.
        elsewhere: Other working trees of its repository.
        alive: To be called now and then.

    Returns:
        A PATH_MISMATCH, where other kernels or operators ran than the suite states, or a module
        came from elsewhere than from the tree under test.
    """
    program = case.program
    try:
        if program is None or not case.settings.census:
            raise _Unknown("switched off (measure.census)")
        if isinstance(timed, str):
            raise _Unknown(timed)
        answer = _Attempt(case, program, timed, ends_at, roots, elsewhere).answer(alive)
    except _Unknown as unknown:
        why = str(unknown)
        return replace(
            measured,
            counters=Counters(unknown=dict.fromkeys(COUNTERS, why)),
            census=Profile(skipped=why),
        )
    ran = _what_ran.validate_python(answer["ran"])
    found: dict[str, Scalar] = {
        "counted_by": answer["by"],
        "torch": answer["torch"],
        "device": answer["device"],
    }
    measured = replace(
        measured,
        counters=ran.counters,
        census=ran.census,
        effective={**measured.effective, **found},
    )
    wrong = [attestation.breach(case, ran)]
    if strangers := _strangers(answer["places"], roots, elsewhere):
        listed = "; ".join(strangers)
        wrong.append(f"not from the tree under test: {listed}; {origin.REMEDY}")
    if breach := "; ".join(filter(None, wrong)):
        return _mismatch(measured, breach)
    return measured


def _strangers(
    places: Mapping[str, str], roots: Sequence[str], elsewhere: Sequence[str]
) -> tuple[str, ...]:
    """One sentence per module that came from elsewhere than asked."""
    tested = _tested(roots) if roots else set()
    found = [item for item in places.items() if item[0].partition(".")[0] in tested]
    others = [item for item in places.items() if item not in found]
    return (*origin.outside(found, roots), *origin.from_other_trees(others, roots, elsewhere))


def _tested(roots: Sequence[str]) -> set[str]:
    """The packages that must come from the roots."""
    return origin.packages_in(roots) - OTHERS


def _mismatch(measured: Measurement, detail: str) -> Measurement:
    """Without samples: they are of something else than was asked for."""
    return replace(
        measured,
        outcome=Outcome.PATH_MISMATCH,
        detail=detail,
        clock=None,
        warmup_s=(),
        samples_s=(),
        host_samples_s=(),
        samples_at_s=(),
        steady=None,
        peak_memory_bytes=None,
        readings={},
    )


class _Attempt:
    """One more life of a program, with the hook."""

    def __init__(
        self,
        case: Case,
        program: Program,
        timed: Timed,
        ends_at: float,
        roots: tuple[str, ...],
        elsewhere: tuple[str, ...],
    ) -> None:
        self._case = case
        self._program = program
        self._timed = timed
        self._roots = roots
        self._elsewhere = elsewhere
        self._skip = max(1, timed.setup_steps) + SKIPPED_STEPS
        self._began = began = time.monotonic()
        if timed.step_s > MAX_STEP_S:
            raise _Unknown(f"one step takes {timed.step_s:.3g} s, over {MAX_STEP_S:g} s")
        steps_s = (self._skip + SLOWER * COUNTED_STEPS) * timed.step_s
        self._starts_by = began + SLOWER * timed.setup_s + GRACE_S
        self._ends_at = min(ends_at, self._starts_by + SLOWER * steps_s)
        longest_s = min(PROFILE_S, case.settings.sample_s)
        spare = timed.steps - self._skip - COUNTED_STEPS
        self._profile_s = max(0.0, min(longest_s, spare * timed.step_s))
        needed_s = timed.setup_s + steps_s
        if needed_s > ends_at - began:
            left_s = max(0.0, ends_at - began)
            raise _Unknown(
                f"it may take {needed_s:.3g} s, and {left_s:.3g} s are left until timeout_s"
            )

    def answer(self, alive: Callable[[], None]) -> Mapping[str, Any]:
        """What the hook answers.

        Raises:
            _Unknown: It does not.
        """
        with tempfile.TemporaryDirectory(prefix="harness-counts-") as name:
            folder = Path(name)
            asked = HookOrder(
                step=self._program.steps.step if self._program.steps else "",
                by_lines=bool(self._timed.by_lines),
                skip=self._skip,
                step_s=self._timed.step_s,
                profile_s=self._profile_s,
                ends_at=self._ends_at,
                packages=tuple(sorted(_tested(self._roots))),
                folders=self._elsewhere,
            )
            order = folder / sitecustomize.ORDER
            order.write_text(json.dumps(asdict(asked)), encoding="utf-8")
            how = self._run(folder, alive)
            try:
                answer: Mapping[str, Any] = json.loads((folder / ANSWER).read_text("utf-8"))
            except FileNotFoundError:
                raise _Unknown(self._why(_notes(folder), how)) from None
            return answer

    def _run(self, folder: Path, alive: Callable[[], None]) -> str:
        """See the program on until the hook has answered, or will not; how it ended by itself."""
        env = process.environment(self._case, self._roots)
        env[sitecustomize.VARIABLE] = str(folder)
        path = (str(sitecustomize.HERE), env.get("PYTHONPATH", ""))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        log, tail = Log(1), Tail()
        log.write(SAID.encode())
        step = re.compile(self._program.steps.step) if self._program.steps else None
        heard = 0
        child = process.start(self._program, process.folder(self._program, self._roots), env)
        try:
            process.abort_when_asked(child)
            for read in process.OutputReader(child).reads(POLL_S):
                alive()
                log.write(read.data)
                tail.add(read)
                heard += sum(bool(step and step.search(line)) for line in read.lines)
                if (folder / ANSWER).exists() or self._is_over(folder, read.at):
                    return ""
                if heard > self._skip and not (folder / CLAIM).exists():
                    (folder / UNHEARD).touch()
            code = child.poll()
        finally:
            process.kill(child)
        if not code:
            return ""
        how = f"killed by {signal_name(code)}" if code < 0 else f"exited with {code}"
        return f"{how}: {tail.last.strip()[:LAST_BYTES]}"

    def _is_over(self, folder: Path, now: float) -> bool:
        """Whether no answer is to be waited for.

        Raises:
            _Unknown: Its time is up.
        """
        begun = (folder / CLAIM).exists()
        if now > self._ends_at and begun:
            raise _Unknown(f"counting was not done in {now - self._began:.3g} s")
        failed = any("failed" in said for said in _notes(folder))
        return failed or now > self._ends_at or (now > self._starts_by and not begun)

    def _why(self, notes: list[Mapping[str, Any]], how: str) -> str:
        """Why there is no answer."""
        failed = [said["failed"] for said in notes if "failed" in said]
        steps = [said["steps"] for said in notes if "steps" in said]
        if failed:
            return str(failed[0])
        if how:
            return f"the process that counts {how}"
        if steps:
            needed = self._skip + COUNTED_STEPS
            return f"it makes {steps[0]} steps, and {needed} are needed to count two"
        if not notes:
            return "no Python of the program started with the hook (python -I, -E and -S do not)"
        if not any(said.get("at") == "torch" for said in notes):
            return "the program is not Python with torch"
        if self._timed.by_lines:
            return "neither a line of progress that Python wrote nor an optimizer's step was seen"
        return f"not counted by lines, which speak of several steps, and no {OPTIMIZER} were seen"


def _notes(folder: Path) -> list[Mapping[str, Any]]:
    try:
        text = (folder / sitecustomize.NOTES).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines()]
