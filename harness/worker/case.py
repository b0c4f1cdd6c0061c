"""Child side: one case, measured in this process; accuracy is checked before anything is timed."""

import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic

import torch

from harness.git import origin
from harness.measure import accuracy, attestation, digest, facts, inputs, profile, steady, timing
from harness.measure.failures import Failed
from harness.measure.profile import PROFILE_S, ProfileRequest
from harness.messages import Answer, Built, Channel, MeasureOrder, WorkerReporter
from harness.records import Accuracy, Measurement, MeasureSettings, Outcome
from harness.worker.factory import load_factory
from harness.workload import Workload


def measure(order: MeasureOrder, channel: Channel) -> Answer:
    """Measure the workload of a case; errors of the workload propagate."""
    case, log = order.case, steady.StepLog(order.launched_at)
    reporter = WorkerReporter(channel, log.take)

    reporter.phase("setup")
    workload = _built(order)
    channel.send(Built(tokens=workload.tokens, flops=workload.flops, bytes=workload.bytes))

    reporter.phase("accuracy")
    checked = Accuracy(skipped="switched off (measure.accuracy)")
    if case.settings.accuracy:
        checked = accuracy.compare(workload, reporter.alive)
    torch.cuda.empty_cache()  # so that timing starts unfragmented

    reporter.phase("warmup")
    stopwatch, first = timing.stopwatch(flush_l2=case.settings.flush_l2), digest.FirstOutput()
    run = inputs.prepare(workload, case.settings)
    deadline = order.launched_at + case.settings.timeout_s
    taken = _timed(run, workload, case.settings, stopwatch, deadline, reporter, log, first)
    peak = first.device_peak_bytes()
    accuracy.require_finite_output(taken.output, steps=taken.steps)

    reporter.phase("repeat")
    if workload.steps is None:
        taken = _repeated(run, workload, taken, first.elements, checked, deadline)
    effective, flags_read = attestation.observed(case, workload)
    effective |= {"timed_as": "graph replay"} if case.settings.graph else {}
    effective |= {"fresh_inputs": True} if workload.fresh else {}
    code = _require_code(order)
    if taken.cut:
        effective["samples_cut"] = "timeout"

    reporter.phase("profile")
    ask = ProfileRequest(
        step_s=statistics.median(taken.samples_s),
        time_left_s=deadline - monotonic(),
        profiling=case.settings.profile,
        profile_s=min(PROFILE_S, case.settings.sample_s),
        progress=reporter.alive,
        trace=order.trace,
        unreplayed=workload.unreplayed,
    )
    ran = profile.take(run, ask)
    if problem := attestation.mismatch(case, ran):
        seen: dict[str, object] = {"effective": effective, "flags_read": flags_read}
        seen |= {"counters": ran.counters, "profile": ran.profile}
        raise Failed(Outcome.PATH_MISMATCH, problem, **seen)
    measurement = Measurement(
        case_id=case.case_id,
        process=order.process,
        outcome=Outcome.OK,
        clock=stopwatch.clock,
        warmup_s=taken.warmup_s,
        samples_s=taken.samples_s,
        host_samples_s=taken.host_samples_s,
        samples_at_s=tuple(at - order.launched_at for at in taken.samples_at),
        steady=taken.steady,
        until_sampled=workload.steps is None,
        tokens=workload.tokens,
        flops=workload.flops,
        bytes=workload.bytes,
        peak_memory_bytes=None if peak is None else peak - stopwatch.own_bytes,
        accuracy=checked,
        effective=effective,
        flags_read=flags_read,
        code=code,
        output_digest=first.digest,
        counters=ran.counters,
        profile=ran.profile,
    )
    return Answer(measurement=measurement, between_s=taken.between_s)


def _built(order: MeasureOrder) -> Workload:
    """The workload of the case, from the code under test."""
    case = order.case
    if order.device == "cuda" and not torch.cuda.is_available():
        problem = "the run started on a GPU, but this worker cannot see one"
        raise Failed(Outcome.INVALID_ENVIRONMENT, problem)
    build = load_factory(case.factory)
    _require_code(order)
    workload = build(case.provider, case.axes)
    if not isinstance(workload, Workload):
        raise TypeError(f"{case.factory!r} returned a {type(workload).__name__}, not a Workload")
    return workload


def _timed(
    run: inputs.Run,
    workload: Workload,
    settings: MeasureSettings,
    stopwatch: timing.Stopwatch,
    deadline: float,
    reporter: WorkerReporter,
    log: steady.StepLog,
    first: digest.FirstOutput,
) -> timing.Timing:
    """Warm-up and samples; a timeout if a training run lacks steps at the deadline."""

    def prepare(step: int) -> None:
        if workload.fresh and step:
            workload.fresh(step)

    def inspect(reading: timing.TimedStep, step: int) -> None:
        if workload.recorded:
            reporter.last_step = step + 1
            numbers = {name: float(value) for name, value in workload.recorded().items()}
            log.add(step + 1, reading.time_s, reading.began_at + reading.host_s, numbers)
        reporter.ran(reading.host_s)
        accuracy.require_finite_step(reading.output, step, own=reporter.last_step)
        if step == 0:
            first.inspect(reading.output)

    facts.start_peak()
    try:
        taken = timing.take(
            run,
            settings,
            stopwatch,
            deadline=deadline,
            sampling=lambda at: reporter.phase("sampling", at),
            prepare=prepare,
            inspect=inspect,
            steps=workload.steps,
        )
    finally:
        reporter.alive()  # with the steps that no report has yet
    if taken.cut and workload.steps is not None:
        problem = f"took {taken.steps:,} of {workload.steps:,} steps before the time limit"
        raise Failed(Outcome.TIMEOUT, problem)
    return taken


def _repeated(
    run: inputs.Run,
    workload: Workload,
    taken: timing.Timing,
    first: digest.Elements,
    checked: Accuracy,
    deadline: float,
) -> timing.Timing:
    """The readings without the last output, which is compared with the first one; with inputs of
    its own it must differ, and a step with the first inputs is compared."""
    step, output = taken.steps - 1, taken.output
    taken = replace(taken, output=None)  # only one output is alive at a time
    if workload.fresh and step:
        digest.require_change(output, step, first, checked)
        workload.fresh(0)
    if workload.stateful is not False:
        return taken
    if workload.fresh and step:
        if deadline - monotonic() < 2 * statistics.median(taken.samples_s):
            return taken
        del output
        step, output = step + 1, run()
    digest.require_same(output, step, first, checked)
    return taken


def _require_code(order: MeasureOrder) -> Mapping[str, str]:
    """Files that the code under test was loaded from; a path mismatch if a wrong file was loaded,
    or the workload's package from outside of the roots."""
    folders = order.first or [str(Path.cwd())]
    if wrong := origin.misplaced(origin.loaded(), folders, order.elsewhere):
        raise Failed(Outcome.PATH_MISMATCH, wrong)
    package = order.case.factory.partition(":")[0].partition(".")[0]
    place, roots = origin.place_of(package), [Path(root).resolve() for root in order.roots]
    inside = place and any(map(Path(place).resolve().is_relative_to, roots))
    if roots and package != origin.OURS and not inside:
        known = place or "an unknown place"
        problem = f"{package} was loaded from {known}, not from {roots[0]}"
        raise Failed(Outcome.PATH_MISMATCH, problem)
    shipped = {n: origin.place_of(n) for n in origin.packages_in(order.roots) & sys.modules.keys()}
    return {package: place, **shipped, **origin.own_packages()}
