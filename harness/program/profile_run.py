"""Runs a program once more, with a hook, to count and profile its steps if it is Python with torch.

The process that is timed has no hook. This one has the hook's folder on its PYTHONPATH
(harness.program.startup) and ends once the hook (harness.program.step_hook) has answered.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from harness.measure import attestation
from harness.measure.profile import (
    MORE_STEPS,
    PROFILE_S,
    SLOWER,
    SWITCHED_OFF,
    StepProfile,
    too_long,
    without_profile,
)
from harness.messages import MeasureOrder
from harness.program import process, ranks
from harness.program.process import LAST_BYTES, Read, Tail
from harness.program.startup import sitecustomize
from harness.program.step_hook import ANSWER, SKIPPED_STEPS, HookOrder
from harness.records import OPTIMIZER, VARIABLE_PREFIXES, Measurement, Outcome, Program

POLL_S = 0.05
COUNTED_STEPS = 4
"""Fewest steps that run with the hook."""
GRACE_S = 30.0
"""Time for torch and the program to start, beyond SLOWER times the setup of the timed process."""
HEADER = "\n[the harness runs the program once more and counts what a step does]\n"
NATIVE = re.compile(
    r"(CU(BLAS|DA|DNN)|G?OMP_|HOME|KMP_|LANG|LC_|LD_|MALLOC_|MKL_|N(CCL|VIDIA|VTE)_|OPENBLAS_|PATH"
    r"|PY(THON|TORCH)|RAYON_|TMP|TOKENIZERS_|TORCH|TRITON_|TZ|UCX_)"
)
"""Beginnings of variables that compiled code reads too, unseen."""

_answered: TypeAdapter[StepProfile] = TypeAdapter(StepProfile)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedProgram:
    """Times and number of steps of the process that was timed."""

    setup_s: float
    step_s: float
    steps: int
    """Including those of setup."""
    setup_steps: int
    by_lines: bool
    """Whether each step is one line of progress."""


class _Unknown(Exception):
    """Nothing can be counted, for this reason."""


def attested(
    measured: Measurement,
    order: MeasureOrder,
    *,
    timed: TimedProgram | str,
    ends_at: float,
    alive: Callable[[], None],
) -> Measurement:
    """The measurement, which is ok, with counters and profile, or with the reason why they are
    unknown; a PATH_MISMATCH if what ran breaks a rule of the case, or if a module came from another
    tree. `timed`: its steps, or why they cannot be counted. All is over at `ends_at`."""
    case, program = order.case, order.case.program
    try:
        if program is None or not case.settings.profile:
            raise _Unknown(SWITCHED_OFF)
        if isinstance(timed, str):
            raise _Unknown(timed)
        answer = _HookedRun(order, program, timed, ends_at).answer(alive)
    except _Unknown as unknown:
        nothing = without_profile(str(unknown))
        return replace(measured, counters=nothing.counters, profile=nothing.profile)
    ran = _answered.validate_python(answer["ran"])
    found = {"counted_by": answer["by"], "torch": answer["torch"], "device": answer["device"]}
    measured = replace(
        measured,
        counters=ran.counters,
        profile=ran.profile,
        effective={**measured.effective, **found},
        code={**measured.code, **answer["code"]},
        flags_read=answer["flags_read"],
    )
    if problem := "; ".join(filter(None, (attestation.mismatch(case, ran), answer["misplaced"]))):
        bare = measured.without_samples(Outcome.PATH_MISMATCH, problem)
        bare = replace(bare, clock=None, warmup_s=(), steady=None)
        return replace(bare, peak_memory_bytes=None, readings={})
    return measured


class _HookedRun:
    """One more process of a program, with the hook."""

    def __init__(
        self, order: MeasureOrder, program: Program, timed: TimedProgram, must_end_at: float
    ) -> None:
        """Plan it; _Unknown if a step is too long, or the time left is too short."""
        self.order, self.program, self.timed = order, program, timed
        self.began = time.monotonic()
        self.skip = max(1, timed.setup_steps) + SKIPPED_STEPS
        steps_s = (self.skip + SLOWER * COUNTED_STEPS) * timed.step_s
        needed_s, left_s = timed.setup_s + steps_s, must_end_at - self.began
        if why := too_long(timed.step_s, needed_s, left_s):
            raise _Unknown(why)
        self.ends_at = min(must_end_at, self.began + SLOWER * (timed.setup_s + steps_s) + GRACE_S)

    def answer(self, alive: Callable[[], None]) -> Mapping[str, Any]:
        """The hook's answer; _Unknown if there is none."""
        with tempfile.TemporaryDirectory(prefix="harness-counts-") as name:
            folder = Path(name)
            first = (str(sitecustomize.HERE), *self.order.first)
            env = process.environment(self.order.case, first)
            asked = self._hook_order(env)
            (folder / sitecustomize.ORDER).write_text(json.dumps(asdict(asked)), "utf-8")
            how = self._run(folder, {**env, sitecustomize.VARIABLE: name}, alive)
            notes = _notes(folder)
            if not (folder / ANSWER).exists():
                raise _Unknown(self._why(notes, how))
            answer: Mapping[str, Any] = json.loads((folder / ANSWER).read_text("utf-8"))
            words = self.program.argv[1:]
            return {**answer, "flags_read": _reads(notes, answer["pid"], asked, words)}

    def _hook_order(self, env: Mapping[str, str]) -> HookOrder:
        timed, case = self.timed, self.order.case
        spare = max(0, timed.steps - self.skip - COUNTED_STEPS)
        more_steps = min(MORE_STEPS, spare)
        spare_s = (spare - more_steps) * timed.step_s
        named = {*case.env, *(n for n in env if n.startswith(VARIABLE_PREFIXES))}
        return HookOrder(
            step=self.program.steps.step if self.program.steps else "",
            by_lines=timed.by_lines,
            skip=self.skip,
            profile={
                "step_s": timed.step_s,
                "profile_s": min(PROFILE_S, case.settings.sample_s, spare_s),
                "more_steps": more_steps,
                "trace": self.order.trace,
            },
            ends_at=self.ends_at,
            folders=self.order.first,
            elsewhere=self.order.elsewhere,
            variables=tuple(name for name in sorted(named) if not NATIVE.match(name)),
            options=tuple(self.program.carried.values()),
        )

    def _run(self, folder: Path, env: Mapping[str, str], alive: Callable[[], None]) -> str:
        """Run until the hook answers or cannot; returns how the program failed, or nothing."""
        os.write(1, HEADER.encode())
        where = process.folder(self.program, self.order.roots)
        children = process.start(self.program, where, env)
        tails, failed = [Tail() for _ in children], list[Read]()
        try:
            process.abort_when_asked(children)
            for read in process.reads(children, POLL_S):
                alive()
                tails[read.rank].add(read)
                failed += [read] if read.code else []
                if failed and read.at - failed[0].at > process.DRAIN_S:
                    break  # the other ranks would wait for it
                noted = any("failed" in note for note in _notes(folder))
                if noted or (folder / ANSWER).exists() or read.at > self.ends_at:
                    return ""
        finally:
            process.kill(children)
        if not failed:
            return ""
        code, tail = failed[0].code or 0, tails[failed[0].rank]
        return f"{ranks.how_ended(code)}: {tail.cause(code)[:LAST_BYTES]}"

    def _why(self, notes: list[Mapping[str, Any]], how: str) -> str:
        failed = [note["failed"] for note in notes if "failed" in note]
        steps = [note["steps"] for note in notes if "steps" in note]
        reached = {note.get("at") for note in notes}
        if failed:
            return str(failed[0])
        if how:
            return f"the process that counts {how}"
        if steps:
            needed = self.skip + COUNTED_STEPS
            return f"it makes {max(steps)} steps; {needed} are needed to count two"
        if "steps" in reached:
            return f"counting did not end within {self.ends_at - self.began:.3g} s"
        if not notes:
            return "no Python of the program started with the hook (python -I, -E and -S do not)"
        if "torch" not in reached:
            return "the program is not Python with torch"
        unseen = "line of progress in what Python writes" if self.timed.by_lines else OPTIMIZER
        return f"the hook saw no {unseen}"


def _reads(
    notes: Sequence[Mapping[str, Any]], pid: int, asked: HookOrder, words: Sequence[str]
) -> dict[str, bool]:
    """Variables and options -> whether they were read, if that is known: not of what the process
    that counts copied as a whole, nor of variables if the suite starts a shell, not Python with
    these words."""
    own = [n for n in notes if n["pid"] == pid]
    copied, parsed, dropped = ({n.get(k) for n in own} for k in ("copied", "parsed", "dropped"))
    direct = any(note["argv"][-len(words) :] == [*words] for note in notes if "argv" in note)
    known: set[Any] = {*asked.variables} if direct and "variables" not in copied else set()
    known |= parsed if "options" not in copied else set()
    known |= dropped - parsed if "rest" not in copied else set()
    read = {note.get("read") for note in notes}
    names = (*asked.variables, *asked.options)
    return {name: name in read for name in names if name in read | known}


def _notes(folder: Path) -> list[Mapping[str, Any]]:
    notes = folder / sitecustomize.NOTES
    lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    return [json.loads(line) for line in lines]
