"""Child side: one order in, one answer out. Every error of a case becomes an outcome."""

import gc
import traceback
from dataclasses import replace
from typing import Any

import torch

from harness.measure import diagnosis, facts, self_test
from harness.measure.failures import Failed, NonFinite, outcome_of
from harness.messages import (
    Answer,
    Channel,
    CheckOrder,
    Described,
    DescribeOrder,
    MeasureOrder,
    Order,
    SelfTested,
    SelfTestOrder,
    WorkerReporter,
)
from harness.program import command
from harness.records import Case, Evidence, Measurement, NonFiniteOrigin, Outcome, bounded
from harness.worker import case as worker_case
from harness.worker import factory
from harness.workload import Unsupported, Workload


def work(order: Order, channel: Channel) -> None:
    """Carry out an order and answer it."""
    if isinstance(order, MeasureOrder):
        _measure_case(order, channel)
        return
    try:
        match order:
            case CheckOrder():
                channel.send(factory.check(order, WorkerReporter(channel).phase))
            case SelfTestOrder():
                channel.send(SelfTested(readings=self_test.run(WorkerReporter(channel).phase)))
            case DescribeOrder():
                channel.send(Described(facts=facts.describe()))
    except BaseException as error:  # noqa: BLE001 - the parent reads the log if there is no answer
        traceback.print_exception(error)


def _measure_case(order: MeasureOrder, channel: Channel) -> None:
    cause: NonFinite | None = None
    program = order.case.program
    try:
        if program is not None:
            channel.send(Answer(measurement=command.measure(order, program, channel)))
        else:
            channel.send(worker_case.measure(order, channel))
    except BaseException as error:  # noqa: BLE001 - logged; it decides the outcome. Also sys.exit
        failure = _failure(order.case, order.process, error)
        cause = error if isinstance(error, NonFinite) else None
        channel.send(Answer(measurement=failure, final=cause is None))
        traceback.print_exception(error)  # last: it raises if the disk is full
    if cause is not None:
        cause.__traceback__ = None  # it references the workload, which is built again
        channel.send(Answer(measurement=_with_origin(failure, order.case, cause, channel)))


def _failure(case: Case, process: int, error: BaseException) -> Measurement:
    lines = traceback.format_exception_only(error)
    detail, outcome = lines[-1].strip(), outcome_of("".join(lines))  # notes are lines, too
    fields: dict[str, Any] = {"evidence": Evidence()}
    match error:
        case Failed():
            outcome, detail = error.outcome, str(error)
            fields |= error.seen
        case ImportError() if instead := factory.hides(error):
            outcome, detail = Outcome.PATH_MISMATCH, instead
        case Unsupported():
            outcome, detail = Outcome.UNSUPPORTED, str(error)
        case _ if outcome is Outcome.OUT_OF_MEMORY:
            detail = f"{detail} [{facts.describe_peak()}]"
    return Measurement(
        case_id=case.case_id, process=process, outcome=outcome, detail=detail, **fields
    )


def _with_origin(
    failure: Measurement, case: Case, cause: NonFinite, channel: Channel
) -> Measurement:
    """The failure with the origin of its NaN or Inf, as far as running it again shows."""
    reporter = WorkerReporter(channel)
    reporter.phase("diagnosis")
    gc.collect()
    torch.cuda.empty_cache()

    def build() -> Workload:
        torch.manual_seed(torch.initial_seed())  # as for the first build
        return factory.load_factory(case.factory)(case.provider, case.axes)

    try:
        origin = diagnosis.find(build, cause, progress=reporter.alive)
    except BaseException as error:  # noqa: BLE001 - noted; the outcome remains
        why = bounded(traceback.format_exception_only(error)[-1].strip())
        note = f"not found: the second run failed: {why}"
        origin = NonFiniteOrigin(computation=cause.source, precision="", note=note)
        traceback.print_exception(error)
    evidence = failure.evidence or Evidence()
    return replace(failure, evidence=replace(evidence, origins=(origin,)))
