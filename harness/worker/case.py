"""Child side: one case, measured in this process. Accuracy is checked before anything is timed."""

import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from harness.git import origin
from harness.measure import accuracy, attestation, digest, inputs, memory, timing
from harness.messages import Built, Channel, MeasureOrder, WorkerReporter
from harness.records import Accuracy, Measurement, Outcome
from harness.worker.factory import load_factory
from harness.workload import Workload


class DeviceMissing(Exception):
    """The run started on a GPU, but this worker cannot see one."""


def measure(order: MeasureOrder, channel: Channel) -> Measurement:
    """Measure the workload of a case; errors of the workload propagate."""
    case, reporter = order.case, WorkerReporter(channel)

    reporter.phase("setup")
    if order.device == "cuda" and not torch.cuda.is_available():
        raise DeviceMissing("the run started on a GPU, but this worker cannot see one")
    build = load_factory(case.factory)
    _require_code(order)
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
    stopwatch, first = timing.stopwatch(flush_l2=case.settings.flush_l2), digest.FirstOutput()
    timed = inputs.prepare(workload, case.settings)

    def inspect(output: object, step: int) -> None:
        accuracy.require_finite_step(output, step)
        if step == 0:
            first.inspect(output)

    memory.start_peak()
    taken = timing.take(
        timed.run,
        case.settings,
        stopwatch,
        deadline=order.launched_at + case.settings.timeout_s,
        progress=reporter.ran,
        sampling=lambda at: reporter.phase("sampling", at),
        inspect=inspect,
    )
    peak = first.device_peak_bytes()
    accuracy.require_finite_output(taken.output, steps=len(taken.warmup_s) + len(taken.samples_s))
    effective, flags_read = attestation.observed(case, workload)
    effective |= timed.effective
    code = _require_code(order)
    if taken.cut:
        effective["samples_cut"] = "timeout"
    reporter.phase("profile")
    ran = attestation.attest(
        case,
        timed.run,
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
        peak_memory_bytes=None if peak is None else peak - stopwatch.own_bytes - timed.own_bytes,
        accuracy=checked,
        effective=effective,
        flags_read=flags_read,
        code=code,
        output_digest=first.digest,
        counters=ran.counters,
        profile=ran.profile,
    )


def _require_code(order: MeasureOrder) -> Mapping[str, str]:
    """Files that the code under test was loaded from; PathMismatch if a wrong file was loaded."""
    module = order.case.factory.partition(":")[0]
    code, strangers = origin.loaded(module, order.roots, order.elsewhere)
    if strangers:
        first, *others = strangers
        more = f" and {len(others)} more" if others else ""
        problem = f"not from the tree under test: {first}{more}; {origin.REMEDY}"
        raise attestation.PathMismatch(problem)
    if instead := origin.shadowed(order.roots or [str(Path.cwd())]):
        raise attestation.PathMismatch("; ".join((*instead, origin.SHADOW_REMEDY)))
    return code
