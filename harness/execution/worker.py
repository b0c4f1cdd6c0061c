"""Child side: one case, measured by one fresh process.

Correctness comes before timing, and every way to end is one of the closed list of outcomes. The
worker answers exactly once, with a Measurement that the parent completes.
"""

import errno
import gc
import importlib
import inspect
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from harness.analysis.targets import Work
from harness.execution import command, provenance
from harness.execution.messages import (
    Answer,
    Built,
    Channel,
    Checked,
    Facts,
    Order,
    PhaseBegan,
    Preliminary,
    Progress,
    Proved,
    Refusal,
    Tell,
)
from harness.execution.pace import EXACT_RUNS
from harness.execution.process import refusal
from harness.measure import (
    accuracy,
    arrange,
    attestation,
    diagnosis,
    digest,
    memory,
    path,
    reenact,
    selfproof,
    timing,
)
from harness.records import (
    Accuracy,
    Case,
    Evidence,
    Measurement,
    NonFiniteOrigin,
    Outcome,
)
from harness.workload import COUNTS, PREFLIGHT, Factory, Unsupported, Workload

PROGRESS_INTERVAL_S = 0.02
"""At most so often is progress reported; a run that is reported late was finished earlier."""

# What allocators say where torch has no exception type of its own.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


# What CUDA says once and from then on: the context is beyond repair, a fresh process is not.
_CONTEXT_LOST = (
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "misaligned address",
    "unspecified launch failure",
    "an illegal instruction was encountered",
)


class DeviceMissing(Exception):
    """The run was begun on a GPU, and this worker sees none."""


def work(order: Order, channel: Channel) -> None:
    """Carry out an order and answer it."""
    cause: accuracy.NonFinite | None = None
    try:
        channel.send(_answer(order, channel))
    except Exception as error:  # noqa: BLE001 - whatever a workload raises is its outcome, logged
        if order.case is not None:  # first: on a full disk the traceback cannot be logged
            failure = _failure(order.case, order.process, error)
            if isinstance(error, accuracy.NonFinite):
                cause = error
                channel.send(Preliminary(measurement=failure))
            else:
                channel.send(Answer(measurement=failure))
        traceback.print_exception(error)
    if cause is not None and order.case is not None:
        cause.__traceback__ = None  # it holds the workload, which is to be built anew
        channel.send(Answer(measurement=_with_origins(failure, order.case, cause, channel)))


def _with_origins(
    failure: Measurement, case: Case, cause: accuracy.NonFinite, channel: Channel
) -> Measurement:
    """The failure, and where its NaN or Inf came from, as far as a second run shows it."""
    reporter = _Reporter(channel)
    reporter.phase("diagnosis")
    gc.collect()
    memory.release_cached()

    def build() -> Workload:
        torch.manual_seed(torch.initial_seed())  # as it was when it was built first
        return load_factory(case.factory)(case.provider, case.axes)

    try:
        origins = diagnosis.find(build, cause, runs=cause.runs, progress=reporter.alive)
    except Exception as error:  # noqa: BLE001 - the outcome stands; this failure is noted beside it
        why = traceback.format_exception_only(error)[-1].strip()
        note = f"not found: the second run ended in {why}"
        origins = (NonFiniteOrigin(computation=cause.computation, precision="", note=note),)
        traceback.print_exception(error)
    evidence = failure.evidence or Evidence()
    return replace(failure, evidence=replace(evidence, origins=origins))


class NoFactory(LookupError):
    """What a suite names as a factory is none."""

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        super().__init__(f"factory {name!r}: {problem}")
        self.remedy = remedy


def load_factory(name: str) -> Factory:
    """Import `package.module:function`.

    Raises:
        NoFactory: There is no such module or function; with the nearest name there is.
    """
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; what it imports does not
        if _hides(error):
            raise
        raise NoFactory(
            name,
            f"no module {error.name!r} is installed, or in the current folder",
            "If it is spelt right: install it, put its folder on PYTHONPATH, or run where it lies.",
        ) from error
    try:
        factory: Factory = getattr(module, function)
    except AttributeError as error:
        if instead := provenance.hidden([str(Path.cwd())]):
            raise path.PathMismatch("; ".join((*instead, provenance.HIDDEN_REMEDY))) from error
        said = f"{module_name} has no {function!r}"
        raise NoFactory(name, said, _instead(function, module)) from error
    if not callable(factory):
        raise NoFactory(
            name,
            f"it is of type {type(factory).__name__}, not a function",
            "Name a function that returns a harness.workload.Workload.",
        )
    return factory


def _instead(function: str, module: ModuleType) -> str:
    """What to name in place of a function that a module does not have."""
    if near := get_close_matches(function, vars(module), n=1):
        return f"Did you mean {near[0]!r}?"
    own = [
        repr(name)
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    return f"Its functions: {', '.join(own)}." if own else f"{module.__name__} has no function."


def _answer(order: Order, channel: Channel) -> Answer | Checked | Facts | Proved:
    if order.prove:
        return Proved(readings=selfproof.prove(_Reporter(channel).phase))
    if order.check:
        refusals = tuple(filter(None, (_refusal(case, order.roots) for case in order.check)))
        return Checked(refusals=refusals, work={} if refusals else _work(order.check))
    if order.case is not None and order.case.program is not None:
        return Answer(measurement=command.measure(order.case, order, channel, _Reporter(channel)))
    if order.case is not None and order.tell is not None:
        return Answer(measurement=_reenact(order.case, order, order.tell, channel))
    if order.case is None:
        return Facts(facts=importlib.import_module("harness.measure.facts").describe())
    return Answer(measurement=_measure(order.case, order, channel))


def _reenact(case: Case, order: Order, tell: Tell, channel: Channel) -> Measurement:
    """Do again what hung, telling of every launch. An answer says that it did not hang again."""
    reenact.reenact(
        load_factory(case.factory),
        case,
        Path(tell.path),
        runs=tell.runs,
        comparing=tell.accuracy,
        alive=_Reporter(channel).alive,
    )
    return Measurement(case_id=case.case_id, process=order.process, outcome=Outcome.OK)


def _refusal(case: Case, roots: Sequence[str]) -> Refusal | None:
    """Why a case cannot run, as far as its factory's module can tell without building it."""
    if case.program is not None:
        problem = refusal(case, case.program, roots)
        return Refusal(case_id=case.case_id, problem=problem) if problem else None
    module, _, function = case.factory.partition(":")
    try:
        load_factory(case.factory)
        preflight = getattr(sys.modules[module], PREFLIGHT, None)
        if preflight is not None:
            preflight(function, case.provider, case.axes, {**os.environ, **case.env})
    except (ImportError, path.PathMismatch) as error:
        if isinstance(error, ImportError) and not _hides(error):
            raise
        return None  # the case ends as a path mismatch
    except NoFactory as error:
        return Refusal(
            case_id=case.case_id, problem=str(error), remedy=error.remedy, of_factory=True
        )
    except (LookupError, ValueError) as error:
        return Refusal(case_id=case.case_id, problem=str(error))
    return None


def _work(cases: Sequence[Case]) -> Mapping[str, Work]:
    """What one run of each case will do, of those whose module can tell without building it."""
    found = {}
    for case in cases:
        if case.program is not None:
            found[case.case_id] = Work(tokens=case.program.tokens, flops=case.program.flops)
            continue
        module, _, function = case.factory.partition(":")
        counts = getattr(sys.modules.get(module), COUNTS, None)
        if counts is not None:
            told = counts(function, case.provider, case.axes, {**os.environ, **case.env})
            found[case.case_id] = Work(tokens=told.tokens, flops=told.flops)
    return found


def _failure(case: Case, process: int, error: Exception) -> Measurement:
    outcome, detail = Outcome.CRASH, traceback.format_exception_only(error)[-1].strip()
    checked: Accuracy | None = None
    evidence = Evidence()
    seen: dict[str, Any] = {}
    match error:
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            outcome = Outcome.INVALID_ENVIRONMENT
        case DeviceMissing():
            outcome, detail = Outcome.INVALID_ENVIRONMENT, str(error)
        case path.PathMismatch():
            outcome, detail, seen = Outcome.PATH_MISMATCH, str(error), error.seen
        case ImportError() if instead := _hides(error):
            outcome, detail = Outcome.PATH_MISMATCH, instead
        case Unsupported():
            outcome, detail = Outcome.UNSUPPORTED, str(error)
        case accuracy.Incorrect():
            outcome, detail, checked = Outcome.INCORRECT, str(error), error.accuracy
        case accuracy.NonFinite():
            outcome, detail = Outcome.NON_FINITE, str(error)
            if error.computation == "run":
                evidence = Evidence(phase="run", runs=error.runs, runs_exact=error.step is not None)
        case _ if _is_out_of_memory(error):
            outcome, detail = Outcome.OUT_OF_MEMORY, f"{detail} [{memory.describe_peak()}]"
            evidence = Evidence(
                peak_host_bytes=memory.host_peak_bytes(),
                peak_device_bytes=memory.device_peak_bytes(),
            )
        case RuntimeError() if any(text in str(error) for text in _CONTEXT_LOST):
            detail = f"{detail} [the CUDA context is lost, and ends with this process]"
    return Measurement(
        case_id=case.case_id,
        process=process,
        outcome=outcome,
        detail=detail,
        accuracy=checked,
        evidence=evidence,
        **seen,
    )


def _measure(case: Case, order: Order, channel: Channel) -> Measurement:
    reporter = _Reporter(channel)

    reporter.phase("setup")
    if order.device == "cuda" and not torch.cuda.is_available():
        raise DeviceMissing("the run was begun on a GPU, and this worker sees none")
    build = load_factory(case.factory)
    _require_code(case, order)
    workload = build(case.provider, case.axes)
    if not isinstance(workload, Workload):
        raise TypeError(
            f"factory {case.factory!r} returned a {type(workload).__name__}, not a Workload"
        )
    channel.send(Built(tokens=workload.tokens, flops=workload.flops, bytes=workload.bytes))

    reporter.phase("accuracy")
    if case.settings.accuracy:
        checked = accuracy.compare(workload, reporter.alive)
    else:
        checked = Accuracy(skipped="switched off (measure.accuracy)")
    memory.release_cached()

    reporter.phase("warmup")
    stopwatch = digest.OfFirst(timing.stopwatch(flush_l2=case.settings.flush_l2))
    arranged = arrange.arrange(workload, case.settings)
    memory.start_peak()
    taken = timing.take(
        arranged.run,
        case.settings,
        stopwatch,
        deadline=order.launched_at + case.settings.timeout_s,
        progress=reporter.ran,
        sampling=lambda at: reporter.phase("sampling", at),
        inspect=accuracy.require_finite_step,
    )
    peak = stopwatch.device_peak_bytes()
    accuracy.require_finite_output(taken.output, runs=len(taken.warmup_s) + len(taken.samples_s))
    effective, flags_read = path.effective(workload), path.flags_read(workload)
    path.require(case, effective, flags_read)
    effective |= arranged.how
    code = _require_code(case, order)
    if taken.cut:
        effective["samples_cut"] = "timeout"
    reporter.phase("census")
    ran = attestation.attest(
        case,
        arranged.run,
        step_s=statistics.median(taken.samples_s),
        time_left_s=order.launched_at + case.settings.timeout_s - time.monotonic(),
        progress=reporter.alive,
        effective=effective,
        flags_read=flags_read,
    )
    return Measurement(
        case_id=case.case_id,
        process=order.process,
        outcome=Outcome.OK,
        clock=stopwatch.clock,
        warmup_s=taken.warmup_s,
        samples_s=taken.samples_s,
        host_samples_s=taken.host_samples_s,
        samples_at_s=tuple(at - order.launched_at for at in taken.samples_at),
        steady=taken.steady,
        tokens=workload.tokens,
        flops=workload.flops,
        bytes=workload.bytes,
        peak_memory_bytes=None if peak is None else peak - stopwatch.own_bytes - arranged.own_bytes,
        accuracy=checked,
        effective=effective,
        flags_read=flags_read,
        code=code,
        output_digest=stopwatch.digest,
        counters=ran.counters,
        census=ran.census,
    )


def _require_code(case: Case, order: Order) -> Mapping[str, str]:
    """Where the code under test was loaded from; PathMismatch if from elsewhere than asked."""
    module = case.factory.partition(":")[0]
    code, strangers = provenance.loaded(module, order.roots, order.elsewhere)
    if strangers:
        first, *others = strangers
        more = f", and so {'are' if len(others) > 1 else 'is'} {len(others)} more" if others else ""
        raise path.PathMismatch(f"not from the tree under test: {first}{more}; {provenance.REMEDY}")
    if instead := provenance.hidden(order.roots or [str(Path.cwd())]):
        raise path.PathMismatch(f"{'; '.join(instead)}; {provenance.HIDDEN_REMEDY}")
    return code


def _hides(error: ImportError) -> str:
    """What was imported in place of the module that is missing, and what to do; else empty."""
    instead = provenance.hides(str(error), [str(Path.cwd()), *sys.path])
    return f"{instead}; {provenance.HIDDEN_REMEDY}" if instead else ""


class _Reporter:
    """Tells the parent where the worker is, without flooding it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._runs = 0
        self._spent_s = 0.0
        self._shortest_s = math.inf
        self._sent_at = -PROGRESS_INTERVAL_S

    def phase(self, name: str, at: float | None = None) -> None:
        self._sent_at = -PROGRESS_INTERVAL_S  # the first run of a phase is always reported
        self._channel.send(PhaseBegan(name=name, at=time.monotonic() if at is None else at))

    def ran(self, seconds: float) -> None:
        self._runs += 1
        self._spent_s += seconds
        self._shortest_s = min(self._shortest_s, seconds)
        if self._runs <= EXACT_RUNS or time.monotonic() - self._sent_at >= PROGRESS_INTERVAL_S:
            self.alive()

    def alive(self) -> None:
        self._sent_at = time.monotonic()
        self._channel.send(
            Progress(
                runs=self._runs,
                spent_s=self._spent_s,
                shortest_s=self._shortest_s if self._runs else 0.0,
            )
        )


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
